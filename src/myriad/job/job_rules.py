"""Rules that span the sections of a job, each a function, in the order in which they are checked.

A rule raises `BadInputError` with the key, its value and what is allowed, before anything starts. Types check
each value alone. Rules about the model are in `myriad.job.model_rules`, those about the optimizer and the
precision in `myriad.job.optimizer_rules`.
"""

import re
from collections.abc import Callable

from myriad.alerts.config import check_alert_values
from myriad.comm.hierarchy import check_hierarchy
from myriad.comm.layout import check_layout, lacks_for_graphs, lacks_for_pairs
from myriad.comm.node_order import check_node_order
from myriad.comm.rendezvous.redis_address import check_package, check_store
from myriad.data.config import DataConfig
from myriad.data.text_names import is_streamed
from myriad.errors import BadInputError, need
from myriad.job.job_steps import JobSteps
from myriad.job.job_values import SPIKE_STEPS_BEFORE, JobValues
from myriad.job.memory_rules import MEMORY_RULES, check_offload
from myriad.job.model_rules import MODEL_RULES
from myriad.job.optimizer_rules import OPTIMIZER_RULES, PRECISION_RULES, check_precision
from myriad.job.phase_values import PHASE_KEYS
from myriad.kernels.choice import check_kernels
from myriad.program.partition import partition_layers
from myriad.telemetry.config import is_address
from myriad.telemetry.shipping.page_trust import is_trust

__all__ = ["PLANNING_RULES", "RULES", "check_model_in_layout", "lacks_for_context"]


def _check_layout(job: JobValues) -> None:
    check_layout(job.layout)


def _check_tensor_parallel(job: JobValues) -> None:
    model, tp = job.model, job.layout.tp
    degrees = ", ".join(map(str, model.head_degrees))
    allowed = (
        f"must divide model.heads = {model.heads}, and divide model.kv_heads = {model.num_kv_heads} "
        f"or be a multiple of it: one of {degrees}"
    )
    need(tp in model.head_degrees, "layout.tp", tp, allowed)
    for width in model.mlp_widths:
        key = "expert_hidden" if width == model.expert_hidden else "ffn_hidden"
        need(width % tp == 0, "layout.tp", tp, f"must divide model.{key} = {width}")
    need(model.sequence % tp == 0, "layout.tp", tp, f"must divide model.sequence = {model.sequence}")


def _check_context_parallel(job: JobValues) -> None:
    model, layout = job.model, job.layout
    multiple = layout.sequence_multiple
    allowed = (
        f"a multiple of {multiple}, for the ranks that share it: layout.cp, layout.ulysses and layout.tp"
    )
    need(layout.cp == 1 or model.sequence % multiple == 0, "model.sequence", model.sequence, allowed)
    heads, kv_heads, rows = model.heads // layout.tp, model.kv_heads_of_rank(layout.tp), layout.ulysses
    fits = heads % rows == 0 and (kv_heads % rows == 0 or rows % kv_heads == 0)
    allowed = (
        f"must divide the {heads} query heads of a rank, and divide its {kv_heads} key/value heads or be a "
        "multiple of them"
    )
    need(fits, "layout.ulysses", rows, allowed)
    lacks = lacks_for_context(job)
    need(layout.cp == 1 or not lacks, "layout.cp", layout.cp, f"more than 1 needs {lacks}")
    has_ring = layout.ring > 1 and job.data.documents == "packed"
    allowed = 'needs layout.cp above layout.ulysses, and data.documents = "packed"'
    need(has_ring or not layout.whole_documents, "layout.whole_documents", layout.whole_documents, allowed)


def lacks_for_context(job: JobValues) -> str:
    """Return what a job still needs for ranks that share sequences, with the reason; empty if it needs
    nothing."""
    needs = (
        (
            job.telemetry.noise_scale,
            "telemetry.noise_scale = false: a rank's gradient is of parts of sequences, and no sample",
        ),
        (job.train.cuda_graphs, "train.cuda_graphs = false: keys travel while attention computes"),
    )
    return next((need for wrong, need in needs if wrong), "")


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


def _check_expert_ranks(job: JobValues) -> None:
    layout, experts, comm = job.layout, job.model.experts, job.comm
    need(layout.etp is None or experts is not None, "layout.etp", layout.etp, "needs model.experts, or off")
    need(layout.ep == 1 or experts is not None, "layout.ep", layout.ep, "needs model.experts, or 1")
    load = layout.expert_load
    need(load == 1 or experts is not None, "layout.expert_load", load, "needs model.experts, or 1")
    once = layout.expert_dispatch != "expert"
    need(
        not once or layout.ep > 1,
        "layout.expert_dispatch",
        layout.expert_dispatch,
        "expert with layout.ep = 1",
    )
    replay, telemetry = job.train.replay_routing, job.telemetry
    need(replay is None or experts is not None, "train.replay_routing", replay, "needs model.experts, or off")
    need(not telemetry.routing or experts is not None, "telemetry.routing", True, "needs model.experts")
    if not layout.folds_experts:
        return
    number = experts or 1
    need(number % layout.ep == 0, "layout.ep", layout.ep, f"must divide model.experts = {number}")
    alone = comm.sync_every > 1 and layout.ep * layout.expert_tp != layout.tp
    allowed = "1, or layout.ep x layout.etp = layout.tp: with DiLoCo replicas do not exchange tokens"
    need(not alone, "comm.sync_every", comm.sync_every, allowed)


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


def _check_cuda_graphs(job: JobValues) -> None:
    if not job.train.cuda_graphs:
        return
    lacks = lacks_for_graphs(job.layout, job.overlap)
    for wrong, needs in (
        (bool(lacks), lacks),
        (job.train.memory_budget is not None, "train.memory_budget = off: set layout.recompute instead"),
        (job.data.documents == "packed", "data.documents = joined: lengths differ between micro-batches"),
        (job.model.experts is not None, "model.experts = off: experts get other numbers of tokens each time"),
    ):
        need(not wrong, "train.cuda_graphs", True, f"needs {needs}")


def _check_pairs(job: JobValues) -> None:
    if not job.overlap.pairs:
        return
    lacks = lacks_for_pairs(job.layout, job.overlap)
    fewest = job.layout.pp + 1 if job.layout.schedule_name == "dualpipe-v" else 2
    if not lacks and job.num_micro_batches < fewest:
        lacks = (
            f"at least {fewest} micro-batches of each replica in a step: train.global_batch / layout.dp / "
        )
        lacks += "layout.micro_batch"
    if job.train.memory_budget is not None:
        lacks = lacks or "train.memory_budget = off: it recomputes whole layers"
    need(not lacks, "overlap.pairs", True, f"needs {lacks}")


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


def _check_holders(job: JobValues) -> None:
    holders, layout = job.checkpoint.holders, job.layout
    lacks = "layout.ep = 1 and no layout.etp" if layout.folds_experts else ""
    lacks = "comm.sync_every = 1" if job.comm.sync_every > 1 else lacks
    need(not lacks or holders in (None, 1), "checkpoint.holders", holders, f"more than 1 needs {lacks}")
    most = layout.num_shard_groups
    allowed = f"at most {most}: so many ranks hold the same state (layout.shard_group, or layout.zero = 0)"
    need(holders is None or holders <= most, "checkpoint.holders", holders, allowed)


def _check_started_nodes(job: JobValues) -> None:
    nodes, world = job.resilience.nodes, job.layout.world
    divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
    need(world % nodes == 0, "resilience.nodes", nodes, f"must divide the {world} ranks: one of {divisors}")


RULES: tuple[Callable[[JobValues], None], ...] = (
    _check_layout,
    _check_phase_values,
    *MODEL_RULES,
    *OPTIMIZER_RULES,
    _check_tensor_parallel,
    _check_context_parallel,
    _check_stages,
    _check_partition,
    _check_batch,
    _check_expert_ranks,
    _check_vocabulary,
    _check_streams,
    _check_evaluation,
    _check_warmup,
    _check_kernels,
    *PRECISION_RULES,
    *MEMORY_RULES,
    _check_in_flight,
    _check_lossy,
    _check_agreement,
    _check_spikes,
    _check_updates_in_backward,
    check_offload,
    _check_cuda_graphs,
    _check_pairs,
    _check_validation_sets,
    _check_nodes,
    _check_holders,
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
        _check_context_parallel,
        _check_stages,
        _check_partition,
        _check_batch,
        _check_expert_ranks,
        _check_steps,
        check_precision,
        *MEMORY_RULES,
        _check_lossy,
        _check_nodes,
        _check_holders,
        _check_started_nodes,
    }
)
PLANNING_RULES = tuple(rule for rule in RULES if rule not in _LAYOUT_RULES)
"""Rules that do not need a layout."""


def check_model_in_layout(job: JobValues) -> None:
    """Check the rules that a layout has for forward passes of a model. Raises `BadInputError`."""
    rules = (_check_layout, _check_tensor_parallel, _check_context_parallel, _check_stages, _check_partition)
    for rule in rules:
        rule(job)
