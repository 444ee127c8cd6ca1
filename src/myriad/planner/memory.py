"""Memory of a rank at its highest moment, and how likely it fits: for any number of layouts at once.

    memory = worst_stage_memory(model, practice, dp=..., tp=..., ...)      numbers, or arrays of equal length
    fits_probability(memory, 80 * 2**30)

The pipeline's first rank holds the most micro-batches, its last the head: the worse of the two is given. How
many micro-batches a rank holds, by schedule (`myriad.program.schedules`; p ranks, rank r, v stages each, m
micro-batches; a stage counts 1/v):

    1f1b                p - r                     interleaved      (v - 1)/v n + (2 (p - r - 1) + 1)/v
    eager-1f1b          2 (p - r) - 1             zero-bubble      as 1f1b, and products of r more that wait
    zero-bubble-v       p, as such or as products        n: micro-batches of a round, p or a few more

Parameters, gradients and optimizer by ZeRO stage are the table of `docs/memory.md`. For one layout, exactly,
from its program: `myriad.planner.rank_memory`.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import erf, sqrt

import numpy as np
import numpy.typing as npt

from myriad.model.config import ModelConfig
from myriad.planner.activations import is_ours
from myriad.planner.layer_memory import LayerMemory, layer_memory
from myriad.planner.operators import Number
from myriad.planner.work import Practice

__all__ = ["Memory", "count_groups", "expected_margin", "fits_probability", "worst_stage_memory"]

_MOST_CHUNKS = 8
"""Of a stage (`myriad.program.build`)."""
_AHEAD = 2
"""Chunks that are whole ahead of the one in use with ZeRO 3, and receives posted ahead
(`myriad.program.passes`, ``overlap.receive_ahead``)."""
_WAITING_IN_V = 0.7
"""Of the p micro-batches that rank 0 of zero-bubble-v holds, those that wait as products at most."""
_FRAGMENTED = 0.05
"""Share of what comes and goes that an allocator holds without use: 0.049 on a CPU (fitted to the table of
`docs/memory.md`). On GPUs others found 0.15 on average with recomputation and offloading, 0.33 at most
(GMLake, arXiv 2401.08156): two deviations and more from this one."""
_PROCESS = 164 * 2**20
"""Of a CPU's rank, beside its tensors: threads, sockets and Python (fitted to the same table)."""
_CONTEXT, _GROUP, _PAIR = 0.3 * 2**30, 0.6 * 2**30, 0.125 * 2**30
"""Bytes of a rank on a GPU: the CUDA context (since 11.7; github.com/pytorch/pytorch/issues/107667); the
buffers of a group's communicator (544 to 688 MiB on A100; github.com/NVIDIA/nccl/issues/964), and of one in
which a pair of ranks sends one way: 32 channels of NCCL_BUFFSIZE = 4 MiB."""
_STAYING, _COMING, _BESIDE = 0.01, 0.05, 0.2
"""Standard deviations, as shares: of what stays (formula and measurement agree within 0.5 %), of what comes
and goes, and of the margin (0.15 on a CPU)."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank at its highest moment; numbers or arrays."""

    weights: Number
    """Values that are computed with, and float32 master values."""
    gradients: Number
    optimizer: Number
    activations: Number
    """Of all micro-batches in flight, and what the layer that runs holds on its way."""
    logits: Number
    """What the head holds more: logits, and gradients that are made with the loss."""
    buffers: Number
    """Messages between stages, and of data parallelism."""
    margin: Number
    """What the allocator is expected to hold without use, and what is there besides tensors."""

    @property
    def total(self) -> Number:
        """All of it."""
        return sum((getattr(self, one.name) for one in fields(self)), start=0.0)

    @property
    def deviation(self) -> Number:
        """Standard deviation of the total."""
        staying = self.weights + self.gradients + self.optimizer
        coming = self.activations + self.logits + self.buffers
        return np.sqrt((_STAYING * staying) ** 2 + (_COMING * coming) ** 2 + (_BESIDE * self.margin) ** 2)

    def where(self, condition: npt.NDArray[np.bool_], other: "Memory") -> "Memory":
        """This one where the condition is true, else the other."""
        pairs = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return Memory(*(np.where(condition, *pair) for pair in pairs))


def fits_probability(memory: Memory, capacity_bytes: Number) -> Number:
    """That a rank with so much memory of its own does not run out of it: the total is taken as normal."""
    room = np.asarray(capacity_bytes) - memory.total
    share = np.asarray(room / np.maximum(memory.deviation, 1.0))
    values = [0.5 * (1 + erf(x / sqrt(2))) for x in share.ravel()]
    return np.array(values).reshape(share.shape)


def count_groups(dp: Number, tp: Number, pp: Number, *, syncs_tied: Number) -> Number:
    """NCCL communicators of a rank for collectives: the world's, of tensor and of data parallelism where that
    is not the world, and (``syncs_tied``, 0 or 1) of the two ranks that share tied parameters."""
    axes = np.where(np.asarray(dp) > 1, 1.0, 0.0) + np.where(np.asarray(tp) > 1, 1.0, 0.0)
    world = np.where((np.asarray(pp) > 1) | (axes > 1), 1.0, 0.0)
    return axes + world + syncs_tied


def expected_margin(coming: Number, groups: Number, pairs: Number, *, on_cpu: bool) -> Number:
    """For ``coming`` bytes that come and go on a rank with so many communicators of groups and of pairs."""
    beside = _PROCESS if on_cpu else _CONTEXT + _GROUP * groups + _PAIR * pairs
    return _FRAGMENTED * coming + beside


@dataclass(frozen=True)
class _Layouts:
    """As `worst_stage_memory` takes them; ``last``: the pipeline's last rank instead of its first."""

    model: ModelConfig
    practice: Practice
    layers: LayerMemory
    value_bytes: int
    dp: Number
    tp: Number
    pp: Number
    virtual_stages: Number
    num_micro_batches: Number
    zero: Number
    reduce_each: Number
    eager: Number
    zero_bubble: Number
    gpipe: Number
    on_cpu: bool
    last: bool = False

    @cached_property
    def blocks(self) -> Number:
        """Of this rank: earlier stages have the larger shares."""
        stages = self.pp * self.virtual_stages
        share = np.floor(self.model.layers / stages)
        extra = self.model.layers - share * stages
        longer = np.floor(extra / self.pp) if self.last else np.ceil(extra / self.pp)
        return share * self.virtual_stages + np.minimum(longer, self.virtual_stages)

    @property
    def in_flight(self) -> Number:
        """Micro-batches whose activations this rank holds at once."""
        p, v, m = self.pp, self.virtual_stages, self.num_micro_batches
        behind = 0.0 * p if self.last else p - 1
        single = np.where(self.eager > 0, 2 * behind, behind) + 1
        round_ = np.ceil(m / np.maximum(1, np.floor(m / p)))
        interleaved = ((v - 1) * round_ + 2 * behind + 1) / v
        several = np.where(self.zero_bubble > 0, p, interleaved)
        return np.where(self.gpipe > 0, m, np.minimum(np.where(v > 1, several, single), m))

    @property
    def waiting(self) -> tuple[Number, Number]:
        """With split backwards, micro-batches of which only the products for weights are left: beside those
        in flight, and instead of them."""
        v, m = self.virtual_stages, self.num_micro_batches
        split = np.where(self.zero_bubble > 0, 1.0, 0.0)
        share = 1.0 if self.last else _WAITING_IN_V
        instead = split * np.where(v > 1, share * np.minimum(self.pp, m), 1.0)
        if not self.last:
            return 0.0 * split, instead
        back = (self.pp - 1) * np.where(self.eager > 0, 2, 1)
        return split * np.where(v > 1, 0.0, np.minimum(back, m - 1)), instead


def worst_stage_memory(
    model: ModelConfig,
    practice: Practice,
    *,
    dp: Number,
    tp: Number,
    pp: Number,
    virtual_stages: Number,
    micro_batch: Number,
    num_micro_batches: Number,
    zero: Number,
    reduce_each: Number,
    recompute: Number,
    eager: Number,
    zero_bubble: Number,
    value_bytes: int,
    gpipe: Number = 0.0,
    on_cpu: bool = False,
) -> Memory:
    """Of the rank that needs the most, with the default overlaps. ``recompute``: 0 none, 1 selective, 2 full;
    ``reduce_each``, ``eager``, ``zero_bubble`` and ``gpipe``: 0 or 1."""
    first = _Layouts(
        model,
        practice,
        layer_memory(
            model, practice, _floats(tp), _floats(micro_batch), _floats(recompute), (value_bytes, on_cpu)
        ),
        value_bytes,
        dp=_floats(dp),
        tp=_floats(tp),
        pp=_floats(pp),
        virtual_stages=_floats(virtual_stages),
        num_micro_batches=_floats(num_micro_batches),
        zero=_floats(zero),
        reduce_each=_floats(reduce_each),
        eager=_floats(eager),
        zero_bubble=_floats(zero_bubble),
        gpipe=_floats(gpipe),
        on_cpu=on_cpu,
    )
    one, other = _rank_memory(first), _rank_memory(replace(first, last=True))
    return one.where(np.asarray(one.total >= other.total), other)


def _floats(values: Number) -> npt.NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _rank_memory(where: _Layouts) -> Memory:
    weights, gradients, optimizer = _parameters(where)
    activations, logits = _activations(where)
    buffers = _buffers(where)
    margin = expected_margin(activations + logits + buffers, *_communicators(where), on_cpu=where.on_cpu)
    return Memory(weights, gradients, optimizer, activations, logits, buffers, margin)


def _communicators(where: _Layouts) -> tuple[Number, Number]:
    """Count the communicators of groups and of pairs: one neighbour, two payloads, and two ways where a rank
    has several stages."""
    turns = (where.zero_bubble > 0) & (where.virtual_stages > 1)
    apart = (where.pp > 1) & ~turns & where.model.tied
    pairs = np.where(where.pp > 1, np.where(where.virtual_stages > 1, 4.0, 2.0), 0.0)
    return count_groups(where.dp, where.tp, where.pp, syncs_tied=np.where(apart, 1.0, 0.0)), pairs


def _ends(where: _Layouts, first: Number, last: Number) -> Number:
    """What is there once, on the rank of the first or of the last stage."""
    turns = (where.zero_bubble > 0) & (where.virtual_stages > 1)  # a V ends where it began
    if where.last:
        return np.where(where.pp == 1, first + last, np.where(turns, 0.0, last))
    return np.where((where.pp == 1) | turns, first + last, first)


def _parameters(where: _Layouts) -> tuple[Number, Number, Number]:
    """Weights, gradients, optimizer: the table of `docs/memory.md`."""
    layers, dp, zero = where.layers, where.dp, where.zero
    ends = _ends(where, layers.embedding_elements, layers.head_elements)
    if where.model.tied:
        table = where.model.padded_vocabulary() * where.model.hidden / where.tp
        both = ends > np.maximum(layers.embedding_elements, layers.head_elements)
        ends = ends - np.where(both, table, 0.0)
    elements = where.blocks * layers.block_elements + ends
    part = elements / np.where(zero > 0, dp, 1)
    stage = where.blocks / where.virtual_stages
    widest = stage * layers.block_elements + ends
    num_chunks = np.where(dp > 1, np.clip(np.floor(stage), 1, _MOST_CHUNKS), 1)
    chunk = np.minimum(np.maximum(stage * layers.block_elements / num_chunks, ends), elements)
    b = where.value_bytes
    values = b * np.where(zero == 3, np.minimum(widest + _AHEAD * chunk, elements), elements)
    master = np.where((b == 4) & (zero < 3), 0.0, 4 * part)
    live = np.minimum(np.where(where.reduce_each > 0, 2 * chunk, elements), elements)
    sums = 4 * np.where(zero >= 2, live + part, elements)
    keys = where.practice.module_gathers
    if keys is not None:  # parameters that are there at a time, whole gradients that wait in a bucket
        largest = np.maximum(layers.embedding_elements, layers.head_elements)
        held = np.minimum(keys.live_elements + largest, elements)
        values = np.where(zero == 3, b * (part + held), values)
        bucket = where.practice.gradient_bytes * (2 * keys.bucket_elements + largest)
        sums = np.where(zero == 3, bucket + (where.practice.gradient_bytes + 4) * part, sums)
    return values + master, sums, 8 * part


def _activations(where: _Layouts) -> tuple[Number, Number]:
    """Of the blocks and the embedding; what the head has more. Its highest moment and the blocks' are not the
    same one."""
    layers = where.layers
    kept = where.in_flight * (where.blocks * layers.block_kept + _ends(where, layers.embedding_kept, 0.0))
    beside, instead = where.waiting
    more = np.maximum(layers.block_products - layers.block_kept, 0.0)
    waiting = where.blocks * (beside * layers.block_products + instead * more)
    head = _ends(where, 0.0, layers.head)
    return kept + waiting + layers.block_passing, np.maximum(head - layers.block_passing, 0.0)


def _buffers(where: _Layouts) -> Number:
    """Messages between stages: those posted ahead, activations sent until their gradient comes, and gradients
    until the iteration ends; of other practices one each way."""
    v, m = where.virtual_stages, where.num_micro_batches
    forwards, backwards = (v - 1, v) if where.last else (v, v - 1)
    sent = where.in_flight * forwards + m * backwards if is_ours(where.practice) else 2.0
    posted = np.minimum(_AHEAD, m)
    return np.where(where.pp > 1, (sent + posted) * where.layers.message, 0.0)
