"""Seconds of one layer for one micro-batch on one rank: forward, and the two halves of the backward.

    block     norm | gather | QKV | attention | output | scatter | residual
              norm | gather | up | act | down | scatter | residual
    parallel  norm | gather | QKV, up | attention, act | output + down | scatter | residual

A residual sum makes three passes over memory, or two together with the norm that follows
(`FrameworkProfile.fused_add_norm`). Its gradient then makes one pass instead of two.

A matrix product has three passes of equal FLOPs: forward, gradient of its input, gradient of its weight
(which is added to a float32 buffer). Tensor-parallel communication is an all-gather and a reduce-scatter for
each entry into the parallel region, in each direction (Megatron-LM, arXiv 2205.05198, section 4.2). Cut in
parts, all but one overlap with the products around them (MegaScale, arXiv 2402.15627, section 3.2), and slow
these. In slices (``overlap.tensor = "slices"``) each overlaps with its own product alone, in the backward
also with a weight's gradient. Without overlap.tensor, `FrameworkProfile.hides_input_grad_comm` decides
whether the backward's reductions overlap with the weights' gradients.

`block_streams` has what the operators between products move, `expert_costs` what travels between the ranks
that share experts.

Legend: t tokens of a micro-batch, s sequence, h hidden, f inner width of the MLP, V vocabulary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from myriad.model.config import ModelConfig
from myriad.model.overlap_parts import num_parts, num_slices
from myriad.planner.cost.block_streams import BlockStreams, block_streams
from myriad.planner.cost.collective_costs import (
    all_gather_seconds,
    all_reduce_seconds,
    startup_seconds,
    tensor_group,
)
from myriad.planner.cost.context_costs import ContextBlock
from myriad.planner.cost.expert_costs import PairedCompute, expert_exchange, score_gather_seconds
from myriad.planner.cost.host_costs import host_waits
from myriad.planner.cost.operator_costs import (
    Number,
    TimeBreakdown,
    flash_seconds,
    plain_flops,
    stream_seconds,
)
from myriad.planner.cost.product_costs import (
    OVERLAP_MODES,
    LayerContext,
    block_products,
    block_shapes,
    entry_rows,
    expert_products,
    product_passes,
    recomputed_products,
)
from myriad.planner.cost.quantization_costs import form_bytes

__all__ = [
    "LayerTimes",
    "block_times",
    "context_block",
]


_FLASH_SPEED = {"flash": 0.55, "flash-triton": 0.55, "flash2": 1.0, "flash3": 1.4}
"""Speed relative to FlashAttention-2: the first version is 1.7 to 2 times slower (arXiv 2307.08691, figure
4), the third on H100 1.5 to 1.75 times faster in the backward (arXiv 2407.08608, figure 6). The first version
in Triton is 1.3 to 2.5 times slower (arXiv 2307.08691, section 4.1)."""
_PLAIN_FORWARD, _PLAIN_BACKWARD = 13.0, 19.0
"""Bytes moved for each score without a flash kernel: written by the product (2), softmax fused with scale and
mask (4), dropout (5, its mask has one), read by the next product (2); in the backward read again for the
values' gradient (2), written by the product (2), dropout (5), softmax (6), read by two products (4)."""
_SCORE_BYTES, _SCORE_OPERATORS = 16.0, 8.0
"""Bytes moved for each score in which the largest is searched: written by the product (4), masked (8), read
by the maximum (4); and operators of each block of queries (`myriad.kernels.score_maxima`)."""
_SCORES_AT_ONCE = 2**23
"""Scores of a block."""
_FULL_WIDTH = 128
"""Width of heads below which FlashAttention-2 is slower. In Triton heads of 64 lose nothing against 128,
whose backward runs out of registers (flash_attn/flash_attn_triton.py; openai/triton issue 1975)."""
_FIRST_FLASH_HALF = 8.0
"""Sequences x heads of a rank at which the first FlashAttention, which gives each pair of them one
multiprocessor, reaches half of its speed (arXiv 2307.08691, section 3.2)."""


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer for one micro-batch."""

    forward: TimeBreakdown
    backward_input: TimeBreakdown
    backward_weight: TimeBreakdown
    selective_recompute: TimeBreakdown
    """What selective recomputation adds to the backward."""

    def __add__(self, other: "LayerTimes") -> "LayerTimes":
        return LayerTimes(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
            self.selective_recompute + other.selective_recompute,
        )

    def times(self, factor: Number) -> "LayerTimes":
        """Return the seconds of so many layers."""
        return LayerTimes(
            self.forward.times(factor),
            self.backward_input.times(factor),
            self.backward_weight.times(factor),
            self.selective_recompute.times(factor),
        )


def context_block(model: ModelConfig, context: LayerContext, window: int | None) -> ContextBlock:
    """Return what attention of a block with this window exchanges."""
    tokens = context.micro_batch * model.sequence
    return ContextBlock(
        model,
        context.cluster,
        context.context,
        context.tp,
        tokens,
        context.value_bytes,
        window,
        context.profile.gathers_sequences,
    )


def block_times(
    model: ModelConfig, context: LayerContext, pairs: float, window: int | None = None
) -> LayerTimes:
    """Return the seconds of a block of a model whose blocks are alike (`ModelConfig.of_block`). ``pairs``:
    query-key pairs that a rank computes of each sequence in this block, if that is one document.
    ``window``: that of the block; it matters where ranks share sequences, and for packed documents."""
    pairs = pairs * context.attended.of(window)
    tokens, profile = context.micro_batch * model.sequence, context.profile
    products = block_products(model, context, tokens)
    moved = block_streams(model, context, tokens)
    stream, back = (
        stream_seconds(context.accelerator, num_bytes, moved.operators)
        for num_bytes in (moved.forward, moved.backward)
    )
    attend, attend_back = _attention(model, context, pairs)
    comm = _tensor(model, context, tokens)
    again = _repeated(model, context, tokens, moved, attend, comm)
    if context.qk_clip:
        attend = attend + TimeBreakdown(attention=_largest_scores(model, context, pairs))
    computed = products[0] + attend.attention, products[1] + attend_back.attention
    exposed, exposed_back = _exposed_comm(model, context, tokens, comm, computed, products[2])
    rooms: tuple[Number, Number] = (
        np.maximum(0.0, computed[0] - comm.forward),
        np.maximum(0.0, computed[1] - comm.backward),
    )
    if context.hides_expert_comm:
        half = (sum(computed) + products[2] + stream + back) / 2
        rooms = half, half
    # Other frameworks cut tensor-parallel products only.
    parts = _parts(model, context) if profile.tensor_parts is None else 1.0
    paired = _paired(model, context, tokens, moved, (computed[0] + stream, computed[1] + back + products[2]))
    travel, travel_back = expert_exchange(model, context, tokens, rooms, parts, paired)
    attending = attend.attention, attend_back.attention
    shared, shared_back = context_block(model, context, window).exposed(attending)
    sums = _norm_sums(model, context, tokens) + score_gather_seconds(model, context, tokens)
    forward = attend + TimeBreakdown(
        products[0], memory=stream, tensor=exposed + sums, experts=travel, context=shared
    )
    backward = attend_back + TimeBreakdown(
        products[1],
        memory=back,
        tensor=exposed_back + comm.rest + sums,
        experts=travel_back,
        context=shared_back,
    )
    if profile.selective_blocks:
        again = forward.times(profile.selective_blocks)
    weights = TimeBreakdown(products[2])
    held = (model.experts or 0) / context.experts.ep
    wait, wait_back = host_waits(context, "block", forward.total, backward.total + weights.total, held)
    return LayerTimes(
        forward + TimeBreakdown(tensor=wait), backward + TimeBreakdown(tensor=wait_back), weights, again
    )


def _paired(
    model: ModelConfig,
    context: LayerContext,
    tokens: Number,
    moved: BlockStreams,
    computed: tuple[Number, Number],
) -> PairedCompute:
    """Return the compute of a block between its exchanges of tokens. ``computed``: seconds of all compute in
    the forward and in the backward."""
    if model.experts is None:
        return PairedCompute(0.0, 0.0, 0.0, 0.0, 0.0)
    forward, inputs, weights = expert_products(model, context, tokens)
    experts, experts_back = (
        one + stream_seconds(context.accelerator, num_bytes)
        for one, num_bytes in ((forward, moved.experts), (inputs, moved.experts_back))
    )
    entry, entry_back = computed[0] - experts, computed[1] - experts_back - weights
    return PairedCompute(entry, entry_back, experts, experts_back, weights)


def _repeated(
    model: ModelConfig,
    context: LayerContext,
    tokens: Number,
    moved: BlockStreams,
    attend: TimeBreakdown,
    comm: "_TensorComm",
) -> TimeBreakdown:
    """Return the seconds of what selective recomputation repeats: attention in Megatron-LM, outputs of norms
    and activations in Myriad, and products in torchtitan."""
    if context.profile.attention == "plain" or context.profile.selective_attention:
        return attend
    remade = stream_seconds(context.accelerator, moved.repeated, model.num_branch_norms + 1)
    return TimeBreakdown(recomputed_products(model, context, tokens), memory=remade, tensor=comm.gathers)


def _exposed_comm(
    model: ModelConfig,
    context: LayerContext,
    tokens: Number,
    comm: "_TensorComm",
    computed: tuple[Number, Number],
    weights: Number,
) -> tuple[Number, Number]:
    """Return the exposed seconds of tensor-parallel communication, forward and backward. ``computed``:
    seconds of products and attention of each; ``weights``: those of the weights' gradients."""
    in_turns = (
        _exposed(model, context, comm.forward, computed[0]),
        _exposed(model, context, comm.backward, computed[1]),
    )
    in_slices = _in_slices(model, context, tokens, comm.forward)
    exposed, exposed_back = _quicker(context, in_turns, in_slices, (comm.forward, comm.backward))
    if context.profile.hides_input_grad_comm:
        behind = _behind_weights(model, context, comm.backward, weights)
        exposed_back = np.where(context.overlap_mode, exposed_back, behind)
    return exposed, exposed_back


def _norm_sums(model: ModelConfig, context: LayerContext, tokens: Number) -> Number:
    """Return the seconds for the sums of a norm over all heads: two float32 of each token and rank."""
    if model.qk_norm != "all":
        return 0.0
    return all_gather_seconds(tensor_group(context.cluster, context.tp), 8.0 * tokens * context.tp)


def _attention(
    model: ModelConfig, context: LayerContext, pairs: float
) -> tuple[TimeBreakdown, TimeBreakdown]:
    """Return the seconds of attention, forward and backward, without the projections around it."""
    heads, width = model.heads / context.tp, model.head_width
    accelerator, value = context.accelerator, context.value_bytes
    flops = 4.0 * context.micro_batch * pairs * heads * width
    if context.profile.attention != "plain":
        speed: Number = _FLASH_SPEED[context.profile.attention]
        if context.profile.attention == "flash3" and accelerator.flash3_ratio:
            speed = accelerator.flash3_ratio / accelerator.flash_ratio
        if context.profile.attention == "flash":
            pairs_of_heads = context.micro_batch * heads
            speed = speed * pairs_of_heads / (pairs_of_heads + _FIRST_FLASH_HALF)
        if context.context.num_ranks > 1:
            speed = speed / context.profile.shared_attention_ratio
        full = max(width, _FULL_WIDTH) if context.profile.attention == "flash-triton" else width
        one = flash_seconds(accelerator, flops, model.sequence, full, value) / speed
        return TimeBreakdown(attention=one), TimeBreakdown(attention=one * accelerator.flash_backward)
    elements = context.micro_batch * heads * float(model.sequence) ** 2
    product = 4.0 * elements * width / plain_flops(accelerator, value, width)
    forward = product + stream_seconds(accelerator, _PLAIN_FORWARD * elements, 4)
    backward = 2 * product + stream_seconds(accelerator, _PLAIN_BACKWARD * elements, 6)
    return TimeBreakdown(attention=forward), TimeBreakdown(attention=backward)


def _largest_scores(model: ModelConfig, context: LayerContext, pairs: float) -> Number:
    """Return the seconds in which a forward finds the largest scores: another product of queries and keys, in
    float32, a block of queries at a time. A block computes its keys for all its queries."""
    heads, accelerator, sequence = model.heads / context.tp, context.accelerator, float(model.sequence)
    queries = np.clip(np.floor(_SCORES_AT_ONCE / (context.micro_batch * heads * sequence)), 1.0, sequence)
    computed = np.minimum(pairs + sequence * (queries - 1) / 2, sequence**2)
    scores = context.micro_batch * heads * computed
    product = 2.0 * scores * model.head_width / plain_flops(accelerator, 4, model.head_width)
    operators = _SCORE_OPERATORS * np.ceil(sequence / queries)
    return product + stream_seconds(accelerator, _SCORE_BYTES * scores, operators)


class _TensorComm(NamedTuple):
    """Seconds of a block's tensor-parallel communication."""

    forward: Number
    """All-gathers and reduce-scatters of the forward."""
    backward: Number
    rest: Number
    """Exposed part of the backward's all-gather of inputs for the weights' gradients, which always overlaps
    with a product."""
    gathers: Number
    """That all-gather without overlap."""


def _tensor(model: ModelConfig, context: LayerContext, tokens: Number) -> _TensorComm:
    """Return the seconds of tensor-parallel communication."""
    group, profile = tensor_group(context.cluster, context.tp), context.profile
    num_bytes = tokens * model.hidden * context.value_bytes
    gathers, scatters = _crossings(model, context)
    if not profile.sequence_parallel:
        both = scatters * all_reduce_seconds(group, num_bytes)
        return _TensorComm(both, both, 0.0, 0.0)
    one, inputs, grads = all_gather_seconds(group, num_bytes), num_bytes, num_bytes
    if context.gathers_quantized:
        assert profile.quantization is not None
        inputs = num_bytes / context.value_bytes * form_bytes(profile.quantization)
        grads = inputs if profile.quantization == "tensor" else 2 * inputs
    entering, leaving = gathers * all_gather_seconds(group, inputs), scatters * one
    entering_back, leaving_back = scatters * all_gather_seconds(group, grads), gathers * one
    part = 2 * _part_gather_seconds(model, context, num_bytes)
    forward, backward = entering + leaving + part, entering_back + leaving_back + part
    again = entering + part / 2
    return _TensorComm(forward, backward, again * group.busy_ratio, again)


def _part_gather_seconds(model: ModelConfig, context: LayerContext, num_bytes: Number) -> Number:
    """Return the seconds in which the ranks that share an expert gather their part of ``num_bytes``; 0: they
    gather all of it, or nothing."""
    if not context.gathers_part(model):
        return 0.0
    group = tensor_group(context.cluster, float(context.experts.expert_tp))
    return all_gather_seconds(group, num_bytes / context.experts.etp_groups)


def _crossings(model: ModelConfig, context: LayerContext) -> tuple[int, int]:
    """Return the numbers of times that tensor-parallel ranks gather the sequence, and sum and scatter a
    product, in a block's forward."""
    apart = not context.gathers_mlp(model)
    return model.num_gathers - apart, model.num_scatters - apart


def _exposed(model: ModelConfig, context: LayerContext, comm: Number, behind: Number) -> Number:
    """Return the exposed seconds of communication that is cut in parts and overlaps with ``behind`` seconds
    of compute: the first part, the excess over the compute, and the slowdown of the compute. Each of Myriad's
    parts pays the startup again. Parts of other frameworks are ring steps inside the product's own operator
    (`FrameworkProfile.tensor_parts`)."""
    group, parts, cut = tensor_group(context.cluster, context.tp), _parts(model, context), comm
    if context.profile.tensor_parts is None:
        gathers, scatters = (one + context.gathers_part(model) for one in _crossings(model, context))
        crossings = scatters + (gathers if context.profile.sequence_parallel else 0)
        again = np.where(np.asarray(context.tp) > 1, crossings * startup_seconds(group), 0.0)
        cut = comm + (parts - 1) * again
    hidden = np.minimum(cut * (1 - 1 / parts), behind)
    return np.where(context.overlap_mode, cut - hidden + group.busy_ratio * hidden, comm)


def _quicker(
    context: LayerContext,
    in_turns: tuple[Number, Number],
    in_slices: tuple[Number, Number] | None,
    off: tuple[Number, Number],
) -> tuple[Number, Number]:
    """Return the exposed seconds of communication in forward and backward, by `LayerContext.overlap_mode`."""
    if in_slices is None:
        return in_turns
    overlap_mode, two = np.asarray(context.overlap_mode), (in_turns, in_slices)
    auto, slices = overlap_mode == OVERLAP_MODES["auto"], overlap_mode == OVERLAP_MODES["slices"]
    by_slices = np.where(auto, sum(in_slices) < sum(in_turns), slices)
    forward, backward = (np.where(by_slices, cut, turns) for turns, cut in zip(*two, strict=True))
    waits = auto & (sum(off) < forward + backward)
    return np.where(waits, off[0], forward), np.where(waits, off[1], backward)


def _in_slices(
    model: ModelConfig, context: LayerContext, tokens: Number, comm: Number
) -> tuple[Number, Number] | None:
    """Return the exposed seconds in forward and backward where slices overlap with their own products;
    ``None`` where no layout uses slices."""
    wanted = np.any(np.asarray(context.overlap_mode) >= OVERLAP_MODES["slices"])
    if context.profile.tensor_parts is not None or model.experts is not None or not wanted:
        return None
    group, shapes = tensor_group(context.cluster, context.tp), block_shapes(model, context)
    crossings = (shapes[::2], shapes[1::2]) if model.block == "parallel" else [(own,) for own in shapes]
    turns = [product_passes(context, tokens, own) for own in crossings]
    slices = _num_slices(model, context)
    again = (slices - 1) * np.where(np.asarray(context.tp) > 1, startup_seconds(group), 0.0)
    one, remote = comm / len(turns) + again, 1 - 1 / np.asarray(context.tp)
    messages = np.maximum(1.0, slices * (np.asarray(context.tp) - 1))
    forward: Number = 0.0
    backward: Number = 0.0
    for number, (product, back, _) in enumerate(turns):
        weight = turns[(number + 1) % len(turns)][
            2
        ]  # In the backward, the previous node leaves its weight gradient for this one.
        forward = forward + _behind_slices(one, product, 0.0, remote, messages, group.busy_ratio)
        backward = backward + _behind_slices(one, back, weight, remote, messages, group.busy_ratio)
    reaches = context.cluster.on_cpu | (np.asarray(context.tp) <= context.cluster.accelerators_per_node)
    return np.where(reaches, forward, comm), np.where(reaches, backward, comm)


def _behind_slices(
    comm: Number, product: Number, more: Number, remote: Number, messages: Number, busy_ratio: Number
) -> Number:
    """Return the seconds that an all-gather adds to its product and to ``more`` compute that does not wait.
    The share ``remote`` of the product waits for so many messages. A reduce-scatter is the reverse."""
    waiting = product * remote
    whole = np.maximum(comm / messages + waiting, comm + waiting / messages)
    added = np.maximum(whole - product - more, 0.0)
    return added + busy_ratio * (comm - added)


def _num_slices(model: ModelConfig, context: LayerContext) -> Number:
    """Return the number of slices of a rank's share: one on GPUs, where PyTorch's operators slice by rank
    only."""
    if not context.cluster.on_cpu:
        return 1.0
    rows, row_bytes = context.micro_batch * model.sequence / context.tp, model.hidden * context.value_bytes
    chunks, message_bytes = context.overlap.tensor_chunks, context.overlap.tensor_message
    return num_slices(rows, row_bytes, chunks=chunks, message_bytes=message_bytes)


def _parts(model: ModelConfig, context: LayerContext) -> Number:
    if context.profile.tensor_parts is not None:
        return context.profile.tensor_parts
    chunks, message_bytes = context.overlap.tensor_chunks, context.overlap.tensor_message
    positions, position_bytes = model.sequence / context.tp, model.hidden * context.value_bytes
    return num_parts(
        context.micro_batch,
        positions,
        position_bytes,
        chunks=chunks,
        message_bytes=message_bytes,
        on_cpu=context.cluster.on_cpu,
    )


def _behind_weights(model: ModelConfig, context: LayerContext, comm: Number, weights: Number) -> Number:
    """Return the exposed seconds of the backward's communication when each entry's input-gradient
    communication overlaps with the gradient of the same entry's weight. That is all communication without
    sequence parallelism, and the reduce-scatters with it."""
    sums = comm / 2 if context.profile.sequence_parallel else comm
    width = model.active_width if context.gathers_mlp(model) else 0
    entering = entry_rows(model, context) * context.tp + model.up_matrices * width
    leaving = model.mixed_width + width
    behind = np.minimum(sums, weights * entering / (entering + leaving))
    return comm - behind + tensor_group(context.cluster, context.tp).busy_ratio * behind
