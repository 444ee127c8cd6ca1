"""Rules that span the sections of a job, each a function, in the order in which they are checked.

A rule raises `BadInputError` with the key, its value and what is allowed, before anything starts. Types check
each value alone. Rules about the model are in `myriad.job.model_rules`.
"""

import re
from collections.abc import Callable

from myriad.alerts.config import check_alert_values
from myriad.comm.hierarchy import check_hierarchy
from myriad.comm.layout import check_layout, lacks_for_graphs, lacks_for_offload
from myriad.comm.node_order import check_node_order
from myriad.comm.rendezvous.redis_address import check_package, check_store
from myriad.data.config import DataConfig
from myriad.data.text_names import is_streamed
from myriad.errors import BadInputError, need
from myriad.job.job_steps import JobSteps
from myriad.job.job_values import SPIKE_STEPS_BEFORE, JobValues, work_of
from myriad.job.model_rules import MODEL_RULES
from myriad.job.phase_values import PHASE_KEYS
from myriad.kernels.choice import check_kernels
from myriad.model.config import ModelConfig
from myriad.optim.config import LossScaleConfig, OptimizerConfig, check_loss_scale, float8_scaling
from myriad.program.partition import partition_layers
from myriad.telemetry.config import is_address
from myriad.telemetry.shipping.page_trust import is_trust

__all__ = ["PLANNING_RULES", "RULES"]


def _check_layout(job: JobValues) -> None:
    check_layout(job.layout)


_MUON_KEYS = (
    "muon_momentum",
    "muon_nesterov",
    "muon_iterations",
    "muon_precision",
    "muon_scaling",
    "qk_clip",
)


def _check_muon(job: JobValues) -> None:
    optimizer = job.optimizer
    for key in _MUON_KEYS if not optimizer.orthogonalizes else ():
        value, default = getattr(optimizer, key), OptimizerConfig.model_fields[key].default
        allowed = f"only with optimizer.name = muon, which is {optimizer.name}"
        need(value == default, f"optimizer.{key}", value, allowed)


def _check_qk_clip(job: JobValues) -> None:
    limit, model = job.optimizer.qk_clip, job.model
    copies = model.kv_lora_rank is None and job.layout.tp > model.num_kv_heads
    for wrong, needs in (
        (model.qk_norm != "none", "model.qk_norm = none: norms of queries and keys undo the scaling"),
        (
            model.attention_softcap is not None,
            "model.attention_softcap = off, which bounds the scores already",
        ),
        (job.comm.sync_every > 1, "comm.sync_every = 1: with DiLoCo replicas have scores of their own"),
        (job.train.cuda_graphs, "train.cuda_graphs = false: captures do not record scores"),
        (copies, f"layout.tp of at most {model.num_kv_heads}: ranks share key and value heads"),
    ):
        need(limit is None or not wrong, "optimizer.qk_clip", limit, f"needs {needs}")


def _check_average(job: JobValues) -> None:
    optimizer, comm = job.optimizer, job.comm
    decay, every, validates = optimizer.ema_decay, optimizer.ema_every, job.train.validate_ema
    need(decay is not None or every == 1, "optimizer.ema_every", every, "only with optimizer.ema_decay")
    allowed = "needs comm.sync_every = 1: with DiLoCo replicas have different parameters between agreements"
    need(decay is None or comm.sync_every == 1, "optimizer.ema_decay", decay, allowed)
    need(decay is not None or not validates, "train.validate_ema", validates, "needs optimizer.ema_decay")
    allowed = "needs comm.compress_parameters = off: only changes of the trained parameters are sent"
    need(not validates or comm.compress_parameters is None, "train.validate_ema", validates, allowed)


def _check_statistics(job: JobValues) -> None:
    telemetry, layout, comm = job.telemetry, job.layout, job.comm
    alone = comm.sync_every > 1
    every, decay = telemetry.layer_norms_every, telemetry.noise_scale_decay
    allowed = "needs comm.sync_every = 1: with DiLoCo replicas have different parameters"
    need(not (every and alone), "telemetry.layer_norms_every", every, allowed)
    if not telemetry.noise_scale:
        need(decay == 0.99, "telemetry.noise_scale_decay", decay, "only with telemetry.noise_scale = true")
        return
    copies = job.model.kv_lora_rank is None and layout.tp > job.model.num_kv_heads
    for wrong, needs in (
        (layout.dp == 1, "layout.dp of at least 2: the small batches are those of the replicas"),
        (layout.reduce == "each", "layout.reduce = last: a replica's whole gradient is not in memory"),
        (alone, "comm.sync_every = 1: with DiLoCo replicas send no gradients"),
        (comm.compress_gradients is not None, "comm.compress_gradients = off: sums of gradients are rounded"),
        (copies, f"layout.tp of at most {job.model.num_kv_heads}: ranks share key and value heads"),
    ):
        need(not wrong, "telemetry.noise_scale", True, f"needs {needs}")


def _check_tensor_parallel(job: JobValues) -> None:
    model, tp = job.model, job.layout.tp
    degrees = ", ".join(map(str, model.head_degrees))
    allowed = (
        f"must divide model.heads = {model.heads}, and divide model.kv_heads = {model.num_kv_heads} "
        f"or be a multiple of it: one of {degrees}"
    )
    need(tp in model.head_degrees, "layout.tp", tp, allowed)
    need(model.ffn_width % tp == 0, "layout.tp", tp, f"must divide model.ffn_hidden = {model.ffn_width}")
    need(model.sequence % tp == 0, "layout.tp", tp, f"must divide model.sequence = {model.sequence}")


def _check_stages(job: JobValues) -> None:
    layout, pieces = job.layout, job.model.layers + 2
    allowed = f"at most {pieces} stages for {job.model.layers} blocks, embedding and head"
    stages = layout.num_stages
    need(stages <= pieces, "layout.pp x layout.virtual_stages", stages, allowed)


def _check_partition(job: JobValues) -> None:
    kinds = job.model.layer_kinds
    partition_layers(job.layout.partition, job.layout.num_stages, kinds, [1.0] * len(kinds))


def _check_batch(job: JobValues) -> None:
    shares = job.layout.shares_of(job.train.global_batch)
    alone = job.comm.sync_every > 1 and len(set(shares)) > 1
    allowed = "needs comm.sync_every = 1: with DiLoCo every replica has the same number of micro-batches"
    need(not alone, "layout.shares", list(shares), allowed)


def _check_vocabulary(job: JobValues) -> None:
    embedded = job.data.corpus == "embedded" and not job.data.mixture
    trained, vocabulary = job.data.vocabulary, job.model.vocabulary
    allowed = f"at most model.vocabulary = {vocabulary}"
    need(not embedded or trained <= vocabulary, "data.vocabulary", trained, allowed)


_STREAM_KEYS = (
    "tokenizer",
    "text_key",
    "held_out",
    "shuffle_bytes",
    "tokenizer_threads",
    "on_bad_record",
)


def _check_streams(job: JobValues) -> None:
    data = job.data
    names = [
        *([share.path for share in data.mixture] or [data.corpus]),
        *(one.path for one in data.validation_sets),
    ]
    for key in () if any(map(is_streamed, names)) else _STREAM_KEYS:
        value, default = getattr(data, key), DataConfig.model_fields[key].default
        allowed = f"only with a corpus of text: a file, a glob or raw:PATH; data.corpus is {data.corpus}"
        need(value == default, f"data.{key}", value, allowed)


def _check_evaluation(job: JobValues) -> None:
    every = job.eval.every
    need(not every or bool(job.eval.tasks), "eval.every", every, "0, or set eval.tasks, which it evaluates")


def _check_in_flight(job: JobValues) -> None:
    message, in_flight = job.overlap.message_bytes, job.overlap.max_in_flight_bytes
    allowed = f"at least overlap.message_bytes = {message} bytes"
    need(in_flight >= message, "overlap.max_in_flight_bytes", in_flight, allowed)


def _check_lossy(job: JobValues) -> None:
    comm, layout = job.comm, job.layout
    need(
        comm.compress_parameters is None or layout.zero in (1, 2),
        "comm.compress_parameters",
        comm.compress_parameters,
        "needs layout.zero = 1 or 2: only these send parameter updates to ranks that keep the parameters",
    )
    need(
        comm.sync_every == 1 or layout.zero == 0,
        "comm.sync_every",
        comm.sync_every,
        "needs layout.zero = 0: with DiLoCo each replica keeps its whole state",
    )
    need(
        comm.sync_every == 1 or comm.compress_gradients is None,
        "comm.compress_gradients",
        comm.compress_gradients,
        "needs comm.sync_every = 1: with DiLoCo replicas send no gradients",
    )


def _check_spikes(job: JobValues) -> None:
    how, kept = job.resilience.on_spike, job.checkpoint
    allowed = "needs comm.sync_every = 1: with DiLoCo each replica has its own gradient norm"
    need(how == "report" or job.comm.sync_every == 1, "resilience.on_spike", how, allowed)
    reaches = (kept.keep - 1) * kept.every >= SPIKE_STEPS_BEFORE
    allowed = f"needs checkpoint.every x (checkpoint.keep - 1) of at least {SPIKE_STEPS_BEFORE} steps"
    need(how != "rollback" or reaches, "resilience.on_spike", how, allowed)


def _check_updates_in_backward(job: JobValues) -> None:
    if not job.overlap.optimizer_in_backward:
        return
    clips = job.optimizer.clip_norm is not None
    for wrong, needs in (
        (clips, "optimizer.clip_norm = off: clipping needs the norm of all gradients first"),
        (
            job.optimizer.name != "adamw",
            "optimizer.name = adamw: LAMB and Muon update with all gradients at hand",
        ),
        (job.resilience.on_spike != "report", "resilience.on_spike = report: an update cannot be undone"),
        (not job.overlap.optimizer, "overlap.optimizer = true, which updates chunk by chunk"),
    ):
        need(not wrong, "overlap.optimizer_in_backward", True, f"needs {needs}")


def _check_offload(job: JobValues) -> None:
    lacks = lacks_for_offload(job.layout, job.overlap, job.optimizer.name)
    need(not lacks, "layout.offload_optimizer", True, f"needs {lacks}")


def _check_cuda_graphs(job: JobValues) -> None:
    if not job.train.cuda_graphs:
        return
    lacks = lacks_for_graphs(job.layout, job.overlap)
    for wrong, needs in (
        (bool(lacks), lacks),
        (job.train.memory_budget is not None, "train.memory_budget = off: set layout.recompute instead"),
        (job.data.documents == "packed", "data.documents = joined: lengths differ between micro-batches"),
    ):
        need(not wrong, "train.cuda_graphs", True, f"needs {needs}")


def _check_validation_sets(job: JobValues) -> None:
    names = [one.name for one in job.data.validation_sets]
    for name in names:
        allowed = "names of up to 64 letters, digits, _, . and -"
        need(re.fullmatch(r"[\w.-]{1,64}", name, re.ASCII) is not None, "data.validation_sets", name, allowed)
    twice = next((name for name in names if names.count(name) > 1), None)
    need(twice is None, "data.validation_sets", twice, "names of their own")


def _check_agreement(job: JobValues) -> None:
    """DiLoCo replicas save, validate and finish only at steps where they synchronize."""
    every = job.comm.sync_every
    for key, steps in (
        ("train.steps", job.train.steps),
        ("train.validate_every", job.train.validate_every),
        ("checkpoint.every", job.checkpoint.every),
    ):
        need(steps % every == 0, key, steps, f"must be a multiple of comm.sync_every = {every}")


def _check_nodes(job: JobValues) -> None:
    comm, world = job.comm, job.layout.world
    check_node_order(comm.node_order, world)
    node = comm.node_size
    need(node is None or world % node == 0, "comm.node_size", node, f"must divide the {world} ranks")
    island = comm.island_size
    if island is not None and node is not None:
        need(node % island == 0, "comm.island_size", island, f"must divide comm.node_size = {node}")
    switch = comm.switch_size
    if switch is not None:
        need(node is not None, "comm.switch_size", switch, "needs comm.node_size")
        nodes = world // (node or 1)
        need(nodes % switch == 0, "comm.switch_size", switch, f"must divide the {nodes} nodes")
    need(
        comm.hierarchy != "switch" or switch is not None,
        "comm.hierarchy",
        comm.hierarchy,
        "needs comm.switch_size",
    )
    check_hierarchy(job.layout, comm)


def _check_store(job: JobValues) -> None:
    check_store(job.comm)
    check_package(job.resilience.journal, "resilience.journal", "file")


def _check_collector(job: JobValues) -> None:
    address = job.telemetry.collector
    allowed = "off, or http://HOST:PORT or https://HOST:PORT of a `myriad watch`"
    need(address is None or is_address(address), "telemetry.collector", address, allowed)
    trust = job.telemetry.collector_ca
    allowed = "off, a file of certificates, or sha256: and 64 digits from 0 to f"
    need(trust is None or is_trust(trust), "telemetry.collector_ca", trust, allowed)


def _check_alerts(job: JobValues) -> None:
    check_alert_values(job.alerts)


def _check_precision(job: JobValues) -> None:
    """Float8 matrix products need dimensions that are multiples of 16."""
    if float8_scaling(job.train.precision) is None:
        return
    model, tp = job.model, job.layout.tp
    up = model.ffn_width * model.up_matrices
    lengths = {
        "model.hidden": model.hidden,
        "model.ffn_hidden / layout.tp": up // tp,
        "model.heads x model.head_dim / layout.tp": model.heads * model.head_width // tp,
        "model.kv_heads x model.head_dim / layout.tp": model.kv_heads_of_rank(tp) * model.head_width,
        **_latent_lengths(model, tp),
        "layout.micro_batch x model.sequence": job.layout.micro_batch * model.sequence,
    }
    for key, length in lengths.items():
        allowed = f"a multiple of 16, for train.precision = {job.train.precision}"
        need(length % 16 == 0, key, length, allowed)


def _latent_lengths(model: ModelConfig, tp: int) -> dict[str, int]:
    """Return the dimensions of the products of latent attention."""
    if model.latent is None:
        return {}
    latent, heads = model.latent, model.heads // tp
    return {
        "model.kv_lora_rank": latent.key_value_rank,
        "model.q_lora_rank": latent.query_rank or 0,
        "model.qk_rope_head_dim": latent.rotated,
        "model.heads x (model.qk_nope_head_dim + model.v_head_dim) / layout.tp": heads
        * (latent.plain + latent.value),
        "model.heads x model.v_head_dim / layout.tp": heads * latent.value,
    }


def _check_float16(job: JobValues) -> None:
    precision, unused = job.train.precision, LossScaleConfig()
    check_loss_scale(job.loss_scale)
    for key in LossScaleConfig.model_fields if precision not in ("auto", "float16") else ():
        value = getattr(job.loss_scale, key)
        allowed = f"only with train.precision = float16: {precision} has no loss scale"
        need(value == getattr(unused, key), f"loss_scale.{key}", value, allowed)
    early = job.overlap.optimizer_in_backward and precision == "float16"
    allowed = "needs overlap.optimizer_in_backward = false: a step whose gradients overflow cannot be undone"
    need(not early, "train.precision", precision, allowed)


def _check_slices(job: JobValues) -> None:
    precision = job.train.precision
    has_slices = float8_scaling(precision) is None or job.overlap.tensor != "slices"
    allowed = f"turns, auto or off with train.precision = {precision}: its scales belong to whole tensors"
    need(has_slices, "overlap.tensor", "slices", allowed)


def _check_recompute_ratio(job: JobValues) -> None:
    layout, allowed = job.layout, "1.0, unless layout.recompute = full"
    needs = layout.recompute != "full" and layout.recompute_ratio != 1.0
    need(not needs, "layout.recompute_ratio", layout.recompute_ratio, allowed)


def _check_memory_budget(job: JobValues) -> None:
    budget = job.train.memory_budget
    if budget is None:
        return
    from myriad.planner.memory.recompute_budget import check_budget

    check_budget(work_of(job), budget, job.train.device, job.train.precision)


def _check_kernels(job: JobValues) -> None:
    bounded = job.model.logit_softcap is not None and job.train.kernels == "triton"
    need(not bounded, "train.kernels", "triton", "auto or plain with model.logit_softcap: no kernel has it")
    if job.train.device == "cpu":  # the ranks check other devices
        check_kernels(job.train.kernels, "cpu", "float32", job.model.kernel_widths)


def _check_warmup(job: JobValues) -> None:
    warmup, steps = job.optimizer.warmup_steps, job.train.steps
    need(warmup <= steps, "optimizer.warmup_steps", warmup, f"at most train.steps = {steps}")


def _check_phase_values(job: JobValues) -> None:
    """Check each phase alone: one place where it begins, and keys that a phase can change."""
    can = ", ".join(f"{section}.{key}" for section, keys in PHASE_KEYS.items() for key in keys)
    for number, phase in enumerate(job.phases):
        one_place = (phase.at_step is None) != (phase.at_tokens is None)
        need(one_place, f"phases.{number}.at_step", phase.at_step, "exactly one of at_step and at_tokens")
        sections = phase.sections()
        need(bool(sections), f"phases.{number}", phase.name, f"changes at least one key: {can}")
        for section, changes in sections.items():
            for key, value in changes.items():
                allowed = f"not a key that a phase can change: {can}"
                need(key in PHASE_KEYS[section], f"phases.{number}.{section}.{key}", value, allowed)
    names = [phase.name for phase in job.phases if phase.name]
    twice = next((name for name in names if names.count(name) > 1), None)
    need(twice is None, "phases", twice, "names of their own")


def _check_streams_length(job: JobValues, steps: JobSteps[JobValues]) -> None:
    """Refuse another sequence length for text that is tokenized during the run: its windows are made once."""
    lengths: dict[str, set[int]] = {}
    for changed in steps.phase_jobs:
        for path in [share.path for share in changed.data.mixture] or [changed.data.corpus]:
            lengths.setdefault(path, set()).add(changed.model.sequence)
    streamed = next((path for path, some in lengths.items() if len(some) > 1 and is_streamed(path)), None)
    allowed = "one sequence length for text that is streamed; prepare it (myriad data prepare) for several"
    need(streamed is None, "phases", streamed, allowed)


def _check_steps(job: JobValues) -> None:
    """Check that every step has valid values: each phase as a job of its own, and each batch of a ramp."""
    steps = JobSteps(job)
    if steps.is_constant:
        return
    for segment in steps.segments:
        steps.at(segment.first_step).shares  # noqa: B018 (divides the batch among the replicas)
    shapes = {(one.global_batch, one.sequence) for one in steps.segments}
    allowed = "false while train.batch_ramp or phases change the shapes of a step: graphs are captured once"
    need(len(shapes) == 1 or not job.train.cuda_graphs, "train.cuda_graphs", True, allowed)
    learned = job.model.position == "learned" and len({one.sequence for one in steps.segments}) > 1
    need(not learned, "phases", "model.sequence", "rotary positions: a learned one has a parameter for each")
    _check_streams_length(job, steps)
    for number, changed in enumerate(steps.phase_jobs):
        for rule in RULES if number else ():
            if rule is _check_warmup:  # of a schedule of its own: `JobSteps` checks it
                continue
            try:
                rule(changed)
            except BadInputError as error:
                key = f"phases.{number - 1}: {error.key}"
                raise BadInputError(key, error.value, error.allowed) from None


def _check_started_nodes(job: JobValues) -> None:
    nodes, world = job.resilience.nodes, job.layout.world
    divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
    need(world % nodes == 0, "resilience.nodes", nodes, f"must divide the {world} ranks: one of {divisors}")


RULES: tuple[Callable[[JobValues], None], ...] = (
    _check_layout,
    _check_phase_values,
    *MODEL_RULES,
    _check_muon,
    _check_qk_clip,
    _check_average,
    _check_statistics,
    _check_tensor_parallel,
    _check_stages,
    _check_partition,
    _check_batch,
    _check_vocabulary,
    _check_streams,
    _check_evaluation,
    _check_warmup,
    _check_kernels,
    _check_precision,
    _check_float16,
    _check_slices,
    _check_recompute_ratio,
    _check_memory_budget,
    _check_in_flight,
    _check_lossy,
    _check_agreement,
    _check_spikes,
    _check_updates_in_backward,
    _check_offload,
    _check_cuda_graphs,
    _check_validation_sets,
    _check_nodes,
    _check_started_nodes,
    _check_store,
    _check_collector,
    _check_alerts,
    _check_steps,
)

_LAYOUT_RULES = frozenset(
    {
        _check_layout,
        _check_tensor_parallel,
        _check_stages,
        _check_partition,
        _check_batch,
        _check_steps,
        _check_precision,
        _check_recompute_ratio,
        _check_memory_budget,
        _check_lossy,
        _check_nodes,
        _check_started_nodes,
    }
)
PLANNING_RULES = tuple(rule for rule in RULES if rule not in _LAYOUT_RULES)
"""Rules that do not need a layout."""
