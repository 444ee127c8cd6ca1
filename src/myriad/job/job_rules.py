"""Rules that span the sections of a job, each a function, in the order in which they are checked.

A rule raises `BadInputError` with the key, its value and what is allowed, before anything starts. Types check
each value alone.
"""

import re
from collections.abc import Callable

from myriad.alerts.config import check_alert_values
from myriad.comm.hierarchy import check_hierarchy
from myriad.comm.layout import check_layout, lacks_for_graphs
from myriad.comm.node_order import check_node_order
from myriad.comm.rendezvous.redis_address import check_package, check_store
from myriad.errors import BadInputError
from myriad.job.job_values import SPIKE_STEPS_BEFORE, JobValues, work_of
from myriad.kernels.choice import check_kernels
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.config import ModelConfig
from myriad.optim.config import LossScaleConfig, OptimizerConfig, check_loss_scale, float8_scaling
from myriad.program.partition import partition_layers
from myriad.telemetry.config import is_address
from myriad.telemetry.shipping.page_trust import is_trust

__all__ = ["PLANNING_RULES", "RULES", "need"]


def need(condition: bool, key: str, value: object, allowed: str) -> None:
    """Raise `BadInputError` unless the condition holds."""
    if not condition:
        raise BadInputError(key, "off" if value is None else value, allowed)


def _check_layout(job: JobValues) -> None:
    check_layout(job.layout)


def _check_heads(job: JobValues) -> None:
    model, kv_heads, width = job.model, job.model.num_kv_heads, job.model.head_width
    allowed = f"must be divisible by model.heads = {model.heads}; or set model.head_dim"
    sized = model.head_dim is not None or model.latent is not None
    need(sized or model.hidden % model.heads == 0, "model.hidden", model.hidden, allowed)
    allowed = f"must be divisible by model.kv_heads = {kv_heads}"
    need(model.heads % kv_heads == 0, "model.heads", model.heads, allowed)
    allowed = "must be even with model.position = rotary (off: model.hidden / model.heads)"
    need(model.position != "rotary" or width % 2 == 0, "model.head_dim", width, allowed)


_LATENT_KEYS = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_NOT_LATENT_KEYS = (
    *("kv_heads", "head_dim", "block", "window", "qk_norm", "attention_softcap", "attention_sinks"),
    *("position", "rotary_fraction", "rotary_pattern", "bias", "attention_bias", "norm_zero_centered"),
    "mup_base_width",
)
"""Keys that have their default with latent attention."""


def _check_latent(job: JobValues) -> None:
    model, plain = job.model, ModelConfig.model_fields
    if model.latent is None:
        for key in _LATENT_KEYS:
            value = getattr(model, key)
            need(value == plain[key].default, f"model.{key}", value, "only with model.kv_lora_rank")
        scale = model.rotary_scaling.mscale_all_dim if model.rotary_scaling.mscale is None else None
        needs = "only with model.kv_lora_rank, or with rotary_scaling.mscale"
        need(scale is None, "model.rotary_scaling.mscale_all_dim", scale, needs)
        return
    for key in _NOT_LATENT_KEYS:
        value, default = getattr(model, key), plain[key].default
        shown = "off" if default is None or default is False else default
        need(value == default, f"model.{key}", value, f"{shown} with model.kv_lora_rank (latent attention)")
    rotated, value = model.qk_rope_head_dim, model.v_head_dim
    need(rotated % 2 == 0, "model.qk_rope_head_dim", rotated, "an even number: pairs of values are rotated")
    allowed = f"at most model.qk_nope_head_dim + model.qk_rope_head_dim = {model.head_width}"
    need(value <= model.head_width, "model.v_head_dim", value, allowed)


def _check_norms(job: JobValues) -> None:
    model = job.model
    serial, placement = model.block == "serial", model.norm_placement
    need(
        serial or placement == "before",
        "model.norm_placement",
        placement,
        "before with model.block = parallel",
    )
    need(not serial or model.parallel_norms == 1, "model.parallel_norms", 2, "1 with model.block = serial")
    zero_centered = model.norm_zero_centered and model.norm != "rms"
    need(not zero_centered, "model.norm_zero_centered", True, "needs model.norm = rms")
    bias = model.norm_bias and model.norm != "layer"
    need(not bias, "model.norm_bias", True, "needs model.norm = layer: RMSNorm has no bias")
    _check_query_key_norm(model)


def _check_query_key_norm(model: ModelConfig) -> None:
    layer = model.qk_norm_kind == "layer"
    allowed = f"rms with model.qk_norm = {model.qk_norm}: a LayerNorm is over each head"
    need(not layer or model.qk_norm in ("head", "heads"), "model.qk_norm_kind", "layer", allowed)
    allowed = "needs model.qk_norm_kind = layer: RMSNorm has no bias"
    need(not model.qk_norm_bias or layer, "model.qk_norm_bias", True, allowed)
    rotated = model.position == "rotary" and all(model.rotary_pattern)
    allowed = "false unless every layer has rotary positions: elsewhere softmax cancels biases of keys"
    need(not model.qk_norm_bias or rotated, "model.qk_norm_bias", True, allowed)


def _check_base_width(job: JobValues) -> None:
    """LAMB's trust ratios and Muon's scaling set the size of each matrix's step themselves."""
    base, name = job.model.mup_base_width, job.optimizer.name
    allowed = f"off with optimizer.name = {name}: rates by kind of parameter need adamw"
    need(base is None or name == "adamw", "model.mup_base_width", base, allowed)


_MUON_KEYS = ("muon_momentum", "muon_nesterov", "muon_iterations", "muon_precision", "muon_scaling")


def _check_muon(job: JobValues) -> None:
    optimizer = job.optimizer
    for key in _MUON_KEYS if not optimizer.orthogonalizes else ():
        value, default = getattr(optimizer, key), OptimizerConfig.model_fields[key].default
        allowed = f"only with optimizer.name = muon, which is {optimizer.name}"
        need(value == default, f"optimizer.{key}", value, allowed)


def _check_predictions(job: JobValues) -> None:
    further, sequence = job.model.prediction_layers, job.model.sequence
    allowed = f"below model.sequence = {sequence}: the last layer predicts so many tokens ahead"
    need(further < sequence, "model.prediction_layers", further, allowed)


def _check_rotary(job: JobValues) -> None:
    model, scaling = job.model, job.model.rotary_scaling
    need(len(model.rotary_pattern) > 0, "model.rotary_pattern", [], "at least one of true, false")
    if model.position != "rotary":
        plain = ModelConfig.model_fields
        for key in ("rotary_fraction", "rotary_pattern", "window_rotary_base", "rotary_scaling"):
            value = getattr(model, key)
            allowed = f"only with model.position = rotary, which is {model.position}"
            need(value == plain[key].default, f"model.{key}", value, allowed)
        return
    width = model.rotary_width
    allowed = f"a fraction of model.head_dim = {model.head_width} that is an even number of at least 2"
    need(width >= 2 and width % 2 == 0, "model.rotary_fraction", model.rotary_fraction, allowed)
    base = model.window_rotary_base
    need(base is None or model.window is not None, "model.window_rotary_base", base, "needs model.window")
    original, kind = scaling.original_sequence, scaling.kind
    used = kind != "none" or scaling == RotaryScaling()
    need(used, "model.rotary_scaling.kind", kind, "a kind, as other keys of rotary_scaling are set")
    needs = kind in ("none", "linear") or original is not None
    need(needs, "model.rotary_scaling.original_sequence", original, f"a length, for {kind}")
    for name in ("short_factors", "long_factors"):
        factors = getattr(scaling, name)
        fits = len(factors) == (width // 2 if kind == "longrope" else 0)
        allowed = f"{width // 2} numbers with longrope, else none"
        need(fits, f"model.rotary_scaling.{name}", list(factors), allowed)
    ramp = scaling.high_frequency_factor > scaling.low_frequency_factor
    key = "model.rotary_scaling.high_frequency_factor"
    need(ramp, key, scaling.high_frequency_factor, "above low_frequency_factor")


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


def _check_window(job: JobValues) -> None:
    window, sequence = job.model.window, job.model.sequence
    allowed = f"at most model.sequence = {sequence}; off for full attention"
    need(window is None or window <= sequence, "model.window", window, allowed)
    need(len(job.model.window_pattern) > 0, "model.window_pattern", [], "at least one of true, false")


def _check_vocabulary(job: JobValues) -> None:
    embedded = job.data.corpus == "embedded" and not job.data.mixture
    trained, vocabulary = job.data.vocabulary, job.model.vocabulary
    allowed = f"at most model.vocabulary = {vocabulary}"
    need(not embedded or trained <= vocabulary, "data.vocabulary", trained, allowed)


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


def _check_started_nodes(job: JobValues) -> None:
    nodes, world = job.resilience.nodes, job.layout.world
    divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
    need(world % nodes == 0, "resilience.nodes", nodes, f"must divide the {world} ranks: one of {divisors}")


RULES: tuple[Callable[[JobValues], None], ...] = (
    _check_layout,
    _check_latent,
    _check_heads,
    _check_norms,
    _check_base_width,
    _check_muon,
    _check_predictions,
    _check_rotary,
    _check_tensor_parallel,
    _check_stages,
    _check_partition,
    _check_batch,
    _check_window,
    _check_vocabulary,
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
    _check_cuda_graphs,
    _check_validation_sets,
    _check_nodes,
    _check_started_nodes,
    _check_store,
    _check_collector,
    _check_alerts,
)

_LAYOUT_RULES = frozenset(
    {
        _check_layout,
        _check_tensor_parallel,
        _check_stages,
        _check_partition,
        _check_batch,
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
