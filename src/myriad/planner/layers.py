"""Seconds of one layer for one micro-batch on one rank: forward, and the two halves of the backward.

    block     norm | gather | QKV | attention | output | scatter | residual
              norm | gather | up | act | down | scatter | residual
    parallel  norm | gather | QKV, up | attention, act | output + down | scatter | residual

A residual sum goes over memory three times, over two of it together with the norm that follows
(`Practice.sums_in_norms`), and its gradient once instead of twice.

A matrix product has three turns of equal FLOPs: forward, gradient of its input, gradient of its weight (which
is added to a float32 sum). Tensor-parallel communication is a gather and a scatter for each entry into the
parallel part, in each direction (Megatron-LM, arXiv 2205.05198, section 4.2); cut in parts, all but one
travel behind the products around them (MegaScale, arXiv 2402.15627, section 3.2), which they slow. In slices
(``overlap.tensor = "slices"``) each travels behind its own product alone, in the backward behind a weight's
gradient too. Without
that, `Practice.sums_hide` says whether the backward's sums travel behind the weights' gradients.

Legend: t tokens of a micro-batch, s sequence, h hidden, f inner width of the MLP, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from myriad.model.config import ModelConfig
from myriad.model.parts import num_parts, num_slices
from myriad.planner.cluster import Accelerator, Cluster
from myriad.planner.collectives import begin_seconds, half_sum_seconds, sum_seconds, tensor_group
from myriad.planner.float8 import moved_by_float8
from myriad.planner.operators import (
    Number,
    flash_seconds,
    matmul_seconds,
    peak_flops,
    stream_seconds,
    weights_seconds,
)
from myriad.planner.parts import Parts
from myriad.planner.work import Practice
from myriad.program.config import OverlapConfig

__all__ = ["HIDES", "LayerTimes", "Slice", "block_shares", "block_times", "embedding_times", "head_times"]

HIDES = {None: 0.0, "turns": 1.0, "slices": 2.0, "auto": 3.0}
"""`Slice.hides`, by the value of overlap.tensor."""

_FLASH_SPEED = {"flash": 0.55, "flash2": 1.0, "flash3": 1.4}
"""Against FlashAttention-2: the first is 1.7 to 2 times slower (arXiv 2307.08691, figure 4), the third on
H100 1.5 to 1.75 times quicker in the backward (arXiv 2407.08608, figure 6)."""
_PLAIN_FORWARD, _PLAIN_BACKWARD = 13.0, 19.0
"""Bytes moved for each score without a flash kernel: written by the product (2), softmax fused with scale and
mask (4), dropout (5, its mask has one), read by the next product (2); in the backward read again for the
values' gradient (2), written by the product (2), dropout (5), softmax (6), read by two products (4)."""
_PLAIN_RATIO = 0.5
"""Share of the peak of the batched products of scores, whose inner or outer length is a head's width."""
_FIRST_FLASH_HALF = 8.0
"""Sequences x heads of a rank at which the first FlashAttention, which gives each pair of them one
multiprocessor, reaches half of its speed (arXiv 2307.08691, section 3.2)."""
_LOSS_FORWARD, _LOSS_BACKWARD = {True: 8.0, False: 30.0}, {True: 6.0, False: 14.0}
"""Bytes moved for each logit, by whether the loss is one operator: else they are made float32, and maximum,
difference, exponential, sum and quotient each go over them (Megatron-LM's vocab_parallel_cross_entropy)."""
_UNFUSED = 2.2
"""Passes over memory of the plain norm, activation and dropout for each of the fused ones."""


@dataclass(frozen=True)
class Slice:
    """What a layer's times depend on besides the model; numbers or arrays of them."""

    cluster: Cluster
    practice: Practice
    tp: Number
    micro_batch: Number
    value_bytes: int
    overlap: OverlapConfig
    hides: Number
    """Behind what tensor-parallel communication travels: a value of `HIDES`; 0: nothing."""

    @property
    def accelerator(self) -> Accelerator:
        accelerator = self.cluster.accelerator.of(self.value_bytes)
        captured = self.practice.cuda_graphs and not self.cluster.on_cpu
        return accelerator.captured() if captured else accelerator


@dataclass(frozen=True)
class LayerTimes:
    """Of one layer and micro-batch."""

    forward: Parts
    backward_input: Parts
    backward_weight: Parts
    again_selective: Parts
    """What selective recomputation adds to the backward."""

    def __add__(self, other: "LayerTimes") -> "LayerTimes":
        return LayerTimes(
            self.forward + other.forward,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
            self.again_selective + other.again_selective,
        )

    def times(self, factor: Number) -> "LayerTimes":
        """So many layers."""
        return LayerTimes(
            self.forward.times(factor),
            self.backward_input.times(factor),
            self.backward_weight.times(factor),
            self.again_selective.times(factor),
        )


def block_times(model: ModelConfig, where: Slice, pairs: float) -> LayerTimes:
    """``pairs``: query-key pairs that each sequence computes in this block."""
    tokens = where.micro_batch * model.sequence
    share = tokens / where.tp if where.practice.sequence_parallel else tokens
    entries = _entries(model)
    products = _products(model, where, tokens)
    passes = _UNFUSED if not where.practice.fused else 1.0
    value, inner = where.value_bytes, tokens * model.ffn_width / where.tp
    ups = 2 if model.activation == "swiglu" else 1
    qkv = tokens * (model.heads + 2 * model.num_kv_heads) * model.head_width / where.tp
    turned = qkv * 2 * value if model.position == "rotary" else 0.0
    norms = residuals = entries * share * model.hidden
    joined = where.practice.sums_in_norms and not where.cluster.on_cpu
    added, added_back = (2, 1) if joined else (3, 2)
    streamed = passes * value * (2 * norms + (ups + 1) * inner) + added * value * residuals + turned
    backwards = passes * value * (3 * norms + (2 * ups + 1) * inner) + added_back * value * residuals + turned
    operators = (3 if joined else entries + 3) * (3 if not where.practice.fused else 1)
    stream, back = (stream_seconds(where.accelerator, x, operators) for x in (streamed, backwards))
    attend, attend_back = _attention(model, where, pairs)
    comm, rest, gathers = _tensor(model, where, tokens, entries)
    again = attend  # Megatron-LM's selective recomputation: scores
    if where.practice.attention != "plain":  # Myriad's: outputs of norms and of the activation
        remade = stream_seconds(where.accelerator, value * (2 * norms + (ups + 1) * inner), entries + 1)
        again = Parts(memory=remade, tensor=gathers)
    in_turns = (
        _exposed(model, where, comm, products[0] + attend.attention),
        _exposed(model, where, comm, products[1] + attend_back.attention),
    )
    exposed, exposed_back = _quicker(where, in_turns, _in_slices(model, where, tokens, comm), comm)
    if where.practice.sums_hide:
        behind = _behind_weights(model, where, comm, products[2])
        exposed_back = np.where(where.hides, exposed_back, behind)
    return LayerTimes(
        Parts(products[0], memory=stream, tensor=exposed) + attend,
        Parts(products[1], memory=back, tensor=exposed_back + rest) + attend_back,
        Parts(products[2]),
        again,
    )


def _entries(model: ModelConfig) -> int:
    """Into the part of a block that is cut among tensor-parallel ranks."""
    return 1 if model.block == "parallel" else 2


def _products(model: ModelConfig, where: Slice, tokens: Number) -> tuple[Number, Number, Number]:
    """Forward, gradients of the inputs, of the weights."""
    return _turns_of(where, tokens, _shapes(model, where))


def _turns_of(
    where: Slice, tokens: Number, shapes: Sequence[tuple[Number, Number]]
) -> tuple[Number, Number, Number]:
    """The same of these matrices ``[out, in]`` alone."""
    if where.practice.float8 and where.accelerator.float8_flops_per_second:
        return _in_float8(where, tokens, shapes)
    return _three_turns(where, tokens, shapes)


def _shapes(model: ModelConfig, where: Slice) -> tuple[tuple[Number, Number], ...]:
    """Matrices ``[out, in]`` of a rank: queries, keys and values; attention's output; up; down."""
    tp, hidden, width = where.tp, model.hidden, model.heads * model.head_width
    qkv = (model.heads + 2 * model.num_kv_heads) * model.head_width / tp
    ups = 2 if model.activation == "swiglu" else 1
    return (
        (qkv, hidden),
        (hidden, width / tp),
        (ups * model.ffn_width / tp, hidden),
        (hidden, model.ffn_width / tp),
    )


def block_shares(model: ModelConfig) -> dict[str, tuple[float, float]]:
    """Return the elements of each matrix of a block, and its share of the block's products."""
    width, ups = model.heads * model.head_width, 2 if model.activation == "swiglu" else 1
    elements = {
        "qkv": float((model.heads + 2 * model.num_kv_heads) * model.head_width * model.hidden),
        "output": float(width * model.hidden),
        "up": float(ups * model.ffn_width * model.hidden),
        "down": float(model.ffn_width * model.hidden),
    }
    whole = sum(elements.values())
    return {name: (count, count / whole) for name, count in elements.items()}


def _in_float8(
    where: Slice, tokens: Number, shapes: Sequence[tuple[Number, Number]]
) -> tuple[Number, Number, Number]:
    """Products at float8's rate, and what else they move."""
    scaling, accelerator, value = where.practice.float8, where.accelerator, where.value_bytes
    assert scaling is not None
    quick = {"peak_flops_per_second": accelerator.float8_flops_per_second}
    changed = where.cluster.model_copy(update={"accelerator": accelerator.model_copy(update=quick)})
    sum_bytes = where.practice.gradient_bytes
    written = None if scaling == "blocks" else float(value)
    products = _three_turns(replace(where, cluster=changed), tokens, shapes, written)

    found = list(products)
    for n, k in shapes:
        for turn, moved in enumerate(
            moved_by_float8(scaling, value, tokens * k, tokens * n, n * k, sum_bytes)
        ):
            found[turn] = found[turn] + stream_seconds(accelerator, *moved)
    forward, inputs, weights = found
    return forward, inputs, weights


def _three_turns(
    where: Slice, tokens: Number, shapes: Sequence[tuple[Number, Number]], written: float | None = None
) -> tuple[Number, Number, Number]:
    """Of matrices ``[out, in]``; ``written``: bytes moved by the product itself for each value of a weight's
    gradient, if it does not read and write the sum."""
    accelerator, value = where.accelerator, where.value_bytes
    summed = 2.0 * where.practice.gradient_bytes if written is None else written
    forward = sum(matmul_seconds(accelerator, tokens, n, k, value_bytes=value) for n, k in shapes)
    inputs = sum(matmul_seconds(accelerator, tokens, k, n, value_bytes=value) for n, k in shapes)
    weights = sum(
        matmul_seconds(accelerator, n, k, tokens, value_bytes=value, out_bytes=summed) for n, k in shapes
    )
    matrices = sum(n * k for n, k in shapes)
    fetch, add = (weights_seconds(accelerator, each * matrices) for each in (float(value), summed))
    return forward + fetch, inputs + fetch, weights + add


def _attention(model: ModelConfig, where: Slice, pairs: float) -> tuple[Parts, Parts]:
    """Forward and backward, without the products around the scores."""
    heads, width = model.heads / where.tp, model.head_width
    accelerator, value = where.accelerator, where.value_bytes
    flops = 4.0 * where.micro_batch * pairs * heads * width
    if where.practice.attention != "plain":
        speed: Number = _FLASH_SPEED[where.practice.attention]
        if where.practice.attention == "flash":
            pairs_of_heads = where.micro_batch * heads
            speed = speed * pairs_of_heads / (pairs_of_heads + _FIRST_FLASH_HALF)
        one = flash_seconds(accelerator, flops, model.sequence, width, value) / speed
        return Parts(attention=one), Parts(attention=one * accelerator.flash_backward)
    elements = where.micro_batch * heads * float(model.sequence) ** 2
    product = 4.0 * elements * width / (peak_flops(accelerator, value) * _PLAIN_RATIO)
    forward = product + stream_seconds(accelerator, _PLAIN_FORWARD * elements, 4)
    backward = 2 * product + stream_seconds(accelerator, _PLAIN_BACKWARD * elements, 6)
    return Parts(attention=forward), Parts(attention=backward)


def _tensor(model: ModelConfig, where: Slice, tokens: Number, entries: int) -> tuple[Number, Number, Number]:
    """Seconds of the gathers and scatters of one direction; of the backward's gather of the inputs for the
    weights' gradients, which always travels behind a product; and of that when nothing hides it."""
    group = tensor_group(where.cluster, where.tp)
    num_bytes = tokens * model.hidden * where.value_bytes
    if not where.practice.sequence_parallel:
        return entries * sum_seconds(group, num_bytes), 0.0, 0.0
    one = half_sum_seconds(group, num_bytes)
    return 2 * entries * one, entries * one * group.busy_ratio, entries * one


def _exposed(model: ModelConfig, where: Slice, comm: Number, behind: Number) -> Number:
    """Of communication cut in parts behind compute: the first part, what is longer than the compute, and
    what it takes from the compute. Each of Myriad's parts begins anew; those of others are steps of a ring
    inside the product's own operator (`Practice.tensor_parts`)."""
    group, parts, cut = tensor_group(where.cluster, where.tp), _parts(model, where), comm
    if where.practice.tensor_parts is None:
        crossings = _entries(model) * (2 if where.practice.sequence_parallel else 1)
        again = np.where(np.asarray(where.tp) > 1, crossings * begin_seconds(group), 0.0)
        cut = comm + (parts - 1) * again
    hidden = np.minimum(cut * (1 - 1 / parts), behind)
    return np.where(where.hides, cut - hidden + group.busy_ratio * hidden, comm)


def _quicker(
    where: Slice, in_turns: tuple[Number, Number], in_slices: tuple[Number, Number] | None, off: Number
) -> tuple[Number, Number]:
    """What is exposed of the forward's and the backward's communication, by `Slice.hides`."""
    if in_slices is None:
        return in_turns
    hides, two = np.asarray(where.hides), (in_turns, in_slices)
    auto, slices = hides == HIDES["auto"], hides == HIDES["slices"]
    by_slices = np.where(auto, sum(in_slices) < sum(in_turns), slices)
    forward, backward = (np.where(by_slices, cut, turns) for turns, cut in zip(*two, strict=True))
    waits = auto & (2 * off < forward + backward)
    return np.where(waits, off, forward), np.where(waits, off, backward)


def _in_slices(
    model: ModelConfig, where: Slice, tokens: Number, comm: Number
) -> tuple[Number, Number] | None:
    """Exposed in the forward and the backward where slices travel behind their own products; ``None`` where
    none do."""
    if where.practice.tensor_parts is not None or not np.any(np.asarray(where.hides) >= HIDES["slices"]):
        return None
    group, shapes = tensor_group(where.cluster, where.tp), _shapes(model, where)
    crossings = (shapes[::2], shapes[1::2]) if model.block == "parallel" else [(own,) for own in shapes]
    turns = [_turns_of(where, tokens, own) for own in crossings]
    slices = _num_slices(model, where)
    again = (slices - 1) * np.where(np.asarray(where.tp) > 1, begin_seconds(group), 0.0)
    one, remote = comm / len(turns) + again, 1 - 1 / np.asarray(where.tp)
    messages = np.maximum(1.0, slices * (np.asarray(where.tp) - 1))
    forward: Number = 0.0
    backward: Number = 0.0
    for number, (product, back, _) in enumerate(turns):
        weight = turns[(number + 1) % len(turns)][2]  # left for this one by the node before in the backward
        forward = forward + _behind_slices(one, product, 0.0, remote, messages, group.busy_ratio)
        backward = backward + _behind_slices(one, back, weight, remote, messages, group.busy_ratio)
    reaches = where.cluster.on_cpu | (np.asarray(where.tp) <= where.cluster.accelerators_per_node)
    return np.where(reaches, forward, comm), np.where(reaches, backward, comm)


def _behind_slices(
    comm: Number, product: Number, more: Number, remote: Number, messages: Number, busy_ratio: Number
) -> Number:
    """What a gather adds to its product, of which the share ``remote`` waits for so many messages, and to
    ``more`` compute that does not; a scatter is the same backwards."""
    waiting = product * remote
    whole = np.maximum(comm / messages + waiting, comm + waiting / messages)
    added = np.maximum(whole - product - more, 0.0)
    return added + busy_ratio * (comm - added)


def _num_slices(model: ModelConfig, where: Slice) -> Number:
    """Return the slices of a rank's share: one on GPUs, where PyTorch's operators cut by rank alone."""
    if not where.cluster.on_cpu:
        return 1.0
    rows, row_bytes = where.micro_batch * model.sequence / where.tp, model.hidden * where.value_bytes
    chunks, message_bytes = where.overlap.tensor_chunks, where.overlap.tensor_message
    return num_slices(rows, row_bytes, chunks=chunks, message_bytes=message_bytes)


def _parts(model: ModelConfig, where: Slice) -> Number:
    if where.practice.tensor_parts is not None:
        return where.practice.tensor_parts
    chunks, message_bytes = where.overlap.tensor_chunks, where.overlap.tensor_message
    positions, position_bytes = model.sequence / where.tp, model.hidden * where.value_bytes
    return num_parts(
        where.micro_batch,
        positions,
        position_bytes,
        chunks=chunks,
        message_bytes=message_bytes,
        on_cpu=where.cluster.on_cpu,
    )


def _behind_weights(model: ModelConfig, where: Slice, comm: Number, weights: Number) -> Number:
    """Of the backward's communication, when that of each entry's input gradient (without sequence
    parallelism all of it, with it the scatters) travels behind the gradient of the same entry's weight."""
    sums = comm / 2 if where.practice.sequence_parallel else comm
    ups = 2 if model.activation == "swiglu" else 1
    entering = (model.heads + 2 * model.num_kv_heads) * model.head_width + ups * model.ffn_width
    leaving = model.heads * model.head_width + model.ffn_width
    behind = np.minimum(sums, weights * entering / (entering + leaving))
    return comm - behind + tensor_group(where.cluster, where.tp).busy_ratio * behind


def embedding_times(model: ModelConfig, where: Slice) -> LayerTimes:
    """Rows looked up, partial sums scattered."""
    tokens = where.micro_batch * model.sequence
    moved = tokens * model.hidden * where.value_bytes
    group = tensor_group(where.cluster, where.tp)
    comm = half_sum_seconds(group, moved)
    look = stream_seconds(where.accelerator, 4 * moved / where.tp + 2 * moved, 3)
    back = stream_seconds(where.accelerator, 4 * moved / where.tp + tokens * model.hidden * 8, 3)
    return LayerTimes(Parts(memory=look, tensor=comm), Parts(tensor=comm), Parts(memory=back), Parts())


def head_times(model: ModelConfig, where: Slice) -> LayerTimes:
    """Norm, logits, and the loss, which is computed in float32 where they are."""
    tokens = where.micro_batch * model.sequence
    share = tokens / where.tp if where.practice.sequence_parallel else tokens
    rows = model.padded_vocabulary() / where.tp
    products = _three_turns(where, tokens, ((rows, float(model.hidden)),))
    value = where.value_bytes
    norm = 2 * share * model.hidden * value
    fused = where.practice.fused_loss
    scores, back = tokens * rows * _LOSS_FORWARD[fused], tokens * rows * _LOSS_BACKWARD[fused]
    group = tensor_group(where.cluster, where.tp)
    comm = half_sum_seconds(group, tokens * model.hidden * value)
    return LayerTimes(
        Parts(products[0], memory=_loss_seconds(where.accelerator, norm, scores, 6), tensor=comm),
        Parts(products[1], memory=_loss_seconds(where.accelerator, 1.5 * norm, back, 4), tensor=comm),
        Parts(products[2]),
        Parts(),
    )


def _loss_seconds(accelerator: Accelerator, norm: Number, scores: Number, num_operators: float) -> Number:
    """Of going over a norm's values and the logits."""
    rate = accelerator.loss_bytes_per_second
    if rate is None:
        return stream_seconds(accelerator, norm + scores, num_operators)
    return stream_seconds(accelerator, norm, num_operators) + scores / rate
