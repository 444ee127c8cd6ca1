"""Seconds of a block's matrix products on one rank: forward, gradient of the input, gradient of the weight.

A matrix product has three passes of equal FLOPs; the weight's gradient is added to a float32 buffer. With
experts, the router is in float32, and each expert multiplies its tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import inf

import numpy as np

from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Accelerator, Cluster
from myriad.planner.cost.context_costs import ONE_RANK_OF_CONTEXT, ContextGrid
from myriad.planner.cost.expert_ranks import ONE_RANK, ExpertGrid
from myriad.planner.cost.operator_costs import (
    Number,
    matmul_seconds,
    stream_seconds,
    weights_seconds,
)
from myriad.planner.cost.quantization_costs import (
    Gathered,
    QuantizationLibrary,
    QuantizationTraffic,
    float8_traffic,
    library_traffic,
)
from myriad.planner.workload import FULL_WINDOWS, AttendedShares, FrameworkProfile
from myriad.program.config import OverlapConfig

__all__ = [
    "OVERLAP_MODES",
    "LayerContext",
    "attention_products",
    "block_products",
    "block_shapes",
    "block_shares",
    "entry_rows",
    "expert_products",
    "product_passes",
    "qkv_width",
    "recomputed_products",
    "shared_products",
    "three_passes",
]

OVERLAP_MODES = {None: 0.0, "turns": 1.0, "slices": 2.0, "auto": 3.0}
"""Value of `LayerContext.overlap_mode` for each value of overlap.tensor."""


@dataclass(frozen=True)
class LayerContext:
    """Everything except the model that a layer's seconds depend on; numbers or arrays."""

    cluster: Cluster
    profile: FrameworkProfile
    tp: Number
    micro_batch: Number
    value_bytes: int
    overlap: OverlapConfig
    overlap_mode: Number
    """How tensor-parallel communication overlaps with compute: a value of `OVERLAP_MODES`; 0: no overlap."""
    quantized_kept_over: int = 1
    """Micro-batches for which a weight is converted once, as in `myriad.planner.workload.Workload`;
    the search's closed form has 1."""
    qk_clip: bool = False
    """Whether forwards find the largest attention scores."""
    experts: ExpertGrid = ONE_RANK
    """The ranks of a stage as experts see them."""
    context: ContextGrid = ONE_RANK_OF_CONTEXT
    """The ranks that share a sequence; a model has as many positions as each of them has."""
    in_pairs: bool = False
    """Whether forwards are paired with backwards of other micro-batches (``overlap.pairs``)."""
    attended: AttendedShares = FULL_WINDOWS
    """What packed documents leave of attention."""
    repeats_norms: bool = False
    """Whether backwards repeat norms and residual sums before them; the search's closed form has False."""
    blocks_per_chunk: float = inf
    """Blocks of a chunk, which share `FrameworkProfile.host_chunk_seconds`; the search's closed form has no
    limit."""

    @property
    def accelerator(self) -> Accelerator:
        accelerator = self.cluster.accelerator.of(self.value_bytes)
        if self.profile.products_ratio != 1:
            accelerator = accelerator.slowed(self.profile.products_ratio)
        captured = self.profile.cuda_graphs and not self.cluster.on_cpu
        return accelerator.captured() if captured else accelerator

    @property
    def hides_expert_comm(self) -> bool:
        """Whether tokens travel behind another micro-batch in the other direction."""
        return self.in_pairs or self.profile.hides_expert_comm

    @property
    def gathers_arrived(self) -> bool:
        """Whether tensor-parallel ranks gather the tokens that arrive for the experts that they share."""
        return self.profile.gathers_arrived and self.experts.ep > 1 and self.experts.expert_tp > 1

    @property
    def gathers_quantized(self) -> bool:
        """Whether tensor-parallel ranks gather converted inputs. Of float8 with scales for blocks, only
        Blackwell's form can be gathered (Transformer Engine v2.4, layernorm_linear.py:
        force_hp_blockwise_ln_out_gather)."""
        profile = self.profile
        whole = profile.quantization != "blocks" or self.accelerator.float8_any_order
        return profile.quantization is not None and profile.gathers_quantized and whole

    def routed(self, tokens: Number) -> Number:
        """Return the tokens that this rank routes to experts, of so many in a micro-batch."""
        return tokens / (self.tp if self.gathers_arrived else self.experts.etp_groups)

    def gathers_mlp(self, model: ModelConfig) -> bool:
        """Return whether tensor-parallel ranks gather the sequence for the MLP of a block, or for its shared
        experts."""
        routes_part = self.experts.etp_groups > 1 or self.gathers_arrived
        return model.experts is None or model.shared_experts > 0 or not routes_part

    def gathers_part(self, model: ModelConfig) -> bool:
        """Return whether fewer than all tensor-parallel ranks gather their part of the sequence for routed
        experts, and no more is gathered."""
        return not self.gathers_mlp(model) and not self.gathers_arrived and self.experts.expert_tp > 1


def block_products(
    model: ModelConfig, context: LayerContext, tokens: Number
) -> tuple[Number, Number, Number]:
    """Return the seconds of the three passes of all matrix products of a block, without attention's own."""
    cut, ups = block_shapes(model, context), _up_shapes(model, context)
    products = product_passes(context, tokens, (*cut, *ups), num_cut=len(cut))
    if model.experts is None:
        return products
    own, wide = expert_products(model, context, tokens), replace(context, value_bytes=4)
    router = three_passes(wide, context.routed(tokens), ((float(model.router_rows), model.hidden),))
    forward, inputs, weights = map(sum, zip(products, own, router, strict=True))
    return forward, inputs, weights


def expert_products(
    model: ModelConfig, context: LayerContext, tokens: Number
) -> tuple[Number, Number, Number]:
    """Return the seconds of the three passes of the routed experts of the busiest rank, each of which has
    equally many tokens of all ranks that share experts."""
    assert model.experts is not None
    experts = context.experts
    cut = context.tp / experts.etp_groups
    arriving = experts.load * experts.ep * tokens * model.experts_per_token
    each = arriving / model.experts / experts.etp_groups
    held = model.experts / experts.ep
    num_in_kernel = held if context.profile.grouped_experts else 1.0
    shapes = _mlp_shapes(model, model.expert_width / cut)
    one = product_passes(context, each, shapes, num_in_kernel)
    return held * one[0], held * one[1], held * one[2]


def shared_products(
    model: ModelConfig, context: LayerContext, tokens: Number
) -> tuple[Number, Number, Number]:
    """Return the seconds of the three passes of the shared experts."""
    if not model.shared_experts:
        return 0.0, 0.0, 0.0
    width = model.shared_experts * model.expert_width / context.tp
    return product_passes(context, tokens, _mlp_shapes(model, width), num_cut=2)


def attention_products(
    model: ModelConfig, context: LayerContext, tokens: Number
) -> tuple[Number, Number, Number]:
    """Return the seconds of the three passes of the matrices before and after attention."""
    shapes = (*block_shapes(model, context)[:2], *_up_shapes(model, context))
    return product_passes(context, tokens, shapes, num_cut=2)


def recomputed_products(model: ModelConfig, context: LayerContext, tokens: Number) -> Number:
    """Return the seconds of the products that selective recomputation repeats, if any. With
    `FrameworkProfile.selective_products` it keeps every second one of queries, keys, values, output, the
    MLP's two up and down, but none in float8. The last one is needed by no backward."""
    if not context.profile.selective_products:
        return 0.0
    entry, leaving, *mlp = block_shapes(model, context)
    own = [entry, leaving, *mlp[:1]]
    if not context.profile.quantization:
        width = max(1, model.up_matrices)
        own = [(entry[0] * model.num_kv_heads / (model.heads + 2 * model.num_kv_heads), entry[1]), leaving]
        own += [(rows / width, columns) for rows, columns in mlp[:1] if width > 1]
    seconds = product_passes(context, tokens, own)[0]
    return seconds if model.experts is None else seconds + expert_products(model, context, tokens)[0]


def product_passes(
    context: LayerContext,
    tokens: Number,
    shapes: Sequence[tuple[Number, Number]],
    num_in_kernel: Number = 1.0,
    num_cut: int = 0,
) -> tuple[Number, Number, Number]:
    """Return the seconds of the three passes for the matrices ``[out, in]`` given. ``num_in_kernel``: as for
    `matmul_seconds`. ``num_cut``: number of the first of them that tensor-parallel ranks cut, the first along
    its outputs, the next along its inputs, and so on in turn."""
    if quick := _quantized_rate(context):
        return _quantized(context, quick, tokens, shapes, num_in_kernel, num_cut)
    return three_passes(context, tokens, shapes, num_in_kernel=num_in_kernel)


def block_shapes(model: ModelConfig, context: LayerContext) -> tuple[tuple[Number, Number], ...]:
    """Return the matrices ``[out, in]`` of a rank: queries, keys and values, or their latents; attention's
    output; up; down. With experts, up and down are those of the shared experts, if there are any."""
    tp, hidden = context.tp, model.hidden
    every = model.ffn_width if model.experts is None else model.shared_experts * model.expert_width
    mlp = _mlp_shapes(model, every / tp) if every else ()
    return (entry_rows(model, context), hidden), (hidden, model.mixed_width / tp), *mlp


def _mlp_shapes(model: ModelConfig, width: Number) -> tuple[tuple[Number, Number], ...]:
    """Return the matrices ``[out, in]`` of an MLP whose inner width on a rank is ``width``."""
    return (model.up_matrices * width, model.hidden), (model.hidden, width)


def qkv_width(model: ModelConfig, context: LayerContext) -> Number:
    """Return the width of queries, keys and values on all ranks, with the keys and values that several ranks
    hold."""
    copies = np.maximum(1.0, np.asarray(context.tp) / model.num_kv_heads)
    return model.qkv_width + (copies - 1) * 2 * model.num_kv_heads * model.head_width


def entry_rows(model: ModelConfig, context: LayerContext) -> Number:
    """Return the rows of a rank's first product in attention. Every rank computes the latents."""
    if model.latent is None:
        return qkv_width(model, context) / context.tp
    queries = 0 if model.latent.query_rank else model.heads * model.head_width
    return model.latent.down_rows + queries / context.tp


def _up_shapes(model: ModelConfig, context: LayerContext) -> tuple[tuple[Number, Number], ...]:
    """Return the matrices ``[out, in]`` of a rank that compute queries, keys and values from latents."""
    latent, heads = model.latent, model.heads / context.tp
    if latent is None:
        return ()
    keys = heads * (latent.plain + latent.value), latent.key_value_rank
    return (keys,) if latent.query_rank is None else ((heads * latent.head, latent.query_rank), keys)


def block_shares(model: ModelConfig) -> dict[str, tuple[float, float]]:
    """Return the elements of each matrix of a block, and its share of the block's products."""
    width, latent = model.mixed_width, model.latent
    qkv = model.qkv_width * model.hidden
    if latent is not None:
        qkv = latent.down_rows * model.hidden + model.heads * latent.head_elements(model.hidden)
    elements = {
        "qkv": float(qkv),
        "output": float(width * model.hidden),
        "up": float(model.up_matrices * model.stored_width * model.hidden),
        "down": float(model.stored_width * model.hidden),
    }
    active = model.active_width / model.stored_width
    products = {name: count * (active if name in ("up", "down") else 1.0) for name, count in elements.items()}
    whole = sum(products.values())
    return {name: (count, products[name] / whole) for name, count in elements.items()}


def _quantized_rate(context: LayerContext) -> dict[str, float] | None:
    """Return the rate of products in the profile's format, as keys of `Accelerator`; off: it has none, or the
    accelerator no such instructions."""
    accelerator, quantization = context.accelerator, context.profile.quantization
    peak, share = accelerator.quantized_peak(quantization), accelerator.float8_achievable_ratio
    if peak is None:
        return None
    if quantization == "nvfp4":
        share = accelerator.float4_achievable_ratio or share
    return {"peak_flops_per_second": peak, "achievable_ratio": share or accelerator.achievable_ratio}


def _quantized(
    context: LayerContext,
    quick: dict[str, float],
    tokens: Number,
    shapes: Sequence[tuple[Number, Number]],
    num_in_kernel: Number,
    num_cut: int,
) -> tuple[Number, Number, Number]:
    """Return the seconds of the three passes at this rate, including the memory traffic of conversions."""
    accelerator, value = context.accelerator, context.value_bytes
    changed = context.cluster.model_copy(update={"accelerator": accelerator.model_copy(update=quick)})
    apart = context.profile.quantization == "tensor" and context.profile.adds_float8_apart
    written = float(value) if apart else None
    products = three_passes(replace(context, cluster=changed), tokens, shapes, written, num_in_kernel)

    found = list(products)
    for number, (n, k) in enumerate(shapes):
        gathers: Gathered | None = None
        if number < num_cut:
            gathers = "grad" if number % 2 else "x"
        for which, moved in enumerate(_conversions(context, tokens, n, k, apart, gathers)):
            found[which] = found[which] + stream_seconds(accelerator, *moved)
    forward, inputs, weights = found
    return forward, inputs, weights


def _conversions(
    context: LayerContext, tokens: Number, n: Number, k: Number, apart: bool, gathers: Gathered | None
) -> tuple[QuantizationTraffic, QuantizationTraffic, QuantizationTraffic]:
    """Return the traffic of conversions of a matrix ``[n, k]``. ``apart``: another pass adds its gradient.
    ``gathers``: what tensor-parallel ranks gather for it."""
    profile, value = context.profile, context.value_bytes
    x, grad, weight, kept_over = tokens * k, tokens * n, n * k, context.quantized_kept_over
    assert profile.quantization is not None
    sum_bytes = 0 if profile.parameter_copy_bytes else profile.gradient_bytes
    if profile.quantization != "nvfp4" and not profile.keeps_quantized_inputs:
        return float8_traffic(profile.quantization, value, x, grad, weight, sum_bytes, kept_over, apart=apart)
    library = QuantizationLibrary(
        profile.quantization,
        value,
        profile.knows_float8_scales,
        context.accelerator.float8_any_order,
        context.tp if profile.sequence_parallel and context.gathers_quantized else 1.0,
    )
    added = float(value + 2 * sum_bytes) if apart else 0.0
    return library_traffic(library, x, grad, weight, added, kept_over, gathers)


def three_passes(
    context: LayerContext,
    tokens: Number,
    shapes: Sequence[tuple[Number, Number]],
    written: float | None = None,
    num_in_kernel: Number = 1.0,
) -> tuple[Number, Number, Number]:
    """Return the seconds of forward, input gradients and weight gradients of matrices ``[out, in]``.
    ``written``: bytes that the product itself moves for each value of a weight's gradient; off: it reads and
    writes the gradient buffer. ``num_in_kernel``: as for `matmul_seconds`."""
    accelerator, value = context.accelerator, context.value_bytes
    buffered = 2.0 * context.profile.gradient_bytes
    summed = buffered if written is None else written
    profile = context.profile
    if profile.adds_gradients_apart or profile.parameter_copy_bytes:
        summed = float(value)
    one = partial(matmul_seconds, accelerator, value_bytes=value, num_in_kernel=num_in_kernel)
    forward, inputs = sum(one(tokens, n, k) for n, k in shapes), sum(one(tokens, k, n) for n, k in shapes)
    weights = sum(one(n, k, tokens, out_bytes=summed) for n, k in shapes)
    matrices = sum(n * k for n, k in shapes)
    fetch, add = (weights_seconds(accelerator, each * matrices) for each in (float(value), summed))
    if profile.parameter_copy_bytes:
        add = add + stream_seconds(accelerator, profile.parameter_copy_bytes * matrices, float(len(shapes)))
    elif profile.adds_gradients_apart:
        moved = value + 4.0 + 12.0 if profile.casts_gradients else value + buffered
        add = add + stream_seconds(accelerator, moved * matrices, float(len(shapes)))
    return forward + fetch, inputs + fetch, weights + add
