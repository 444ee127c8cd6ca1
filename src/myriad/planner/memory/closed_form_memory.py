"""Peak memory of a rank, and the probability that it fits: for any number of layouts at once.

    memory = worst_stage_memory(model, profile, dp=..., tp=..., ...)      numbers, or arrays of equal length
    fits_probability(memory, 80 * 2**30)

The pipeline's first rank holds the most micro-batches, its last the head: the result is the larger of the
two. The number of micro-batches that a rank holds depends on the schedule (`myriad.program.schedules`; p
ranks, rank r, v stages each, n micro-batches of a round, which are p or a few more; a stage counts 1/v):

    1f1b                p - r                     interleaved      (v - 1)/v n + (2 (p - r - 1) + 1)/v
    eager-1f1b          2 (p - r) - 1             zero-bubble      as 1f1b, and products of r more that wait
    zero-bubble-v       p, as such or as products        dualpipe-v       p + 1/2

Parameters, gradients and optimizer by ZeRO stage follow the table of `docs/concepts/memory.md`.
`myriad.planner.memory.rank_memory` computes one layout exactly, from its program.
"""

from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import erf, sqrt

import numpy as np
import numpy.typing as npt

from myriad.model.config import ModelConfig
from myriad.optim.config import OptimizerName
from myriad.planner.cost.operator_costs import Number
from myriad.planner.cost.quantization_costs import kept_form_bytes
from myriad.planner.memory.framework_memory import FrameworkMemory
from myriad.planner.memory.generation_memory import GenerationBytes, generation_bytes, whole_model
from myriad.planner.memory.layer_memory import is_myriad
from myriad.planner.memory.micro_batch_shard import MicroBatchShard
from myriad.planner.memory.rank_layers import LayerMemory, layer_memory
from myriad.planner.workload import FrameworkProfile

__all__ = [
    "PeakMemory",
    "count_context_groups",
    "count_groups",
    "expected_outside",
    "fits_probability",
    "probability_within",
    "worst_stage_memory",
]

_MOST_CHUNKS = 8
"""Largest number of chunks of a stage (`myriad.program.build`)."""
_AHEAD = 2
"""Chunks gathered ahead of the one in use with ZeRO 3, receives posted ahead, and sent gradients that are not
known to have arrived (`rank_memory` has 1 to 3 at the peak)."""
_WAITING_IN_V = 0.7
"""Largest share of the p micro-batches on rank 0 of zero-bubble-v that only wait for weight products."""
_PROCESS = 164 * 2**20
"""Bytes of a CPU rank in addition to its tensors: threads, sockets and Python (fitted to the same table)."""
_STAYING, _COMING, _BESIDE = 0.01, 0.05, 0.2
"""Standard deviations, as shares: of persistent memory (formula and measurement agree within 0.5 %), of
temporary memory, and of the margin (0.15 on a CPU)."""

_APART = frozenset({"host", "outside"})
"""Fields of `PeakMemory` that are not parts of the total."""


@dataclass(frozen=True)
class PeakMemory:
    """Bytes of one rank at its peak; numbers or arrays."""

    weights: Number
    """Values in the compute type, and float32 master values."""
    gradients: Number
    optimizer: Number
    activations: Number
    """Activations of all micro-batches in flight, and temporary memory of the running layer."""
    logits: Number
    """Additional bytes of the head: logits, and gradients that are computed with the loss."""
    buffers: Number
    """Messages between stages, buffers of data parallelism, and workspace of libraries."""
    margin: Number
    """Memory that the allocator is expected to hold without use, and memory outside of tensors."""
    host: Number = 0.0
    """Pinned host memory for offloaded activations and optimizer state, not part of the total."""
    outside: Number = 0.0
    """The part of the margin that is outside of the allocator: the driver's context, and communicators."""

    @property
    def total(self) -> Number:
        """Sum of all parts on the device."""
        return sum((getattr(self, one.name) for one in fields(self) if one.name not in _APART), start=0.0)

    @property
    def allocated(self) -> Number:
        """Bytes of tensors, as an allocator counts them."""
        return self.total - self.margin

    @property
    def reserved(self) -> Number:
        """Bytes that the allocator holds."""
        return self.total - self.outside

    @property
    def deviation(self) -> Number:
        """Standard deviation of the total."""
        staying = self.weights + self.gradients + self.optimizer
        coming = self.activations + self.logits + self.buffers
        return np.sqrt((_STAYING * staying) ** 2 + (_COMING * coming) ** 2 + (_BESIDE * self.margin) ** 2)

    def where(self, condition: npt.NDArray[np.bool_], other: "PeakMemory") -> "PeakMemory":
        """Return this memory where the condition is true, else the other."""
        pairs = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return PeakMemory(*(np.where(condition, *pair) for pair in pairs))


def fits_probability(memory: PeakMemory, capacity_bytes: Number) -> Number:
    """Return the probability that the memory is within the capacity."""
    return probability_within(capacity_bytes, memory.total, memory.deviation)


def probability_within(capacity_bytes: Number, total: Number, deviation: Number) -> npt.NDArray[np.float64]:
    """Return the probability that a normally distributed total is within the capacity."""
    share = np.asarray((np.asarray(capacity_bytes) - total) / np.maximum(deviation, 1.0))
    values = [0.5 * (1 + erf(x / sqrt(2))) for x in share.ravel()]
    return np.array(values).reshape(share.shape)


def count_groups(
    dp: Number,
    tp: Number,
    pp: Number,
    *,
    kv_heads: int,
    syncs_tied: Number,
    levels: Number,
    lamb_over_zero: Number,
    matrices: Number = 0.0,
    across: Number = 0.0,
    ep: int = 1,
    etp: int | None = None,
) -> Number:
    """Return the number of NCCL communicators of a rank for collectives: the world's, those of tensor and
    data parallelism where they differ from the world's, and that of the two ranks with tied parameters
    (``syncs_tied``, 0 or 1).

    The ranks that hold the same of ``kv_heads`` heads have one where they are not all tensor-parallel ranks.
    Each of the ``levels`` of a hierarchy adds one. LAMB's norms with ZeRO (``lamb_over_zero``, 0 or 1) add
    one where their ranks are neither an axis nor the world. Muon's ``matrices`` (0 or 1) have one. Groups of
    ``layout.shard_group`` (``across``, 0 or 1) have two instead of that of data parallelism. ``ep`` ranks
    that share experts have one for tokens; those that hold the same have another one (and ``across``), and
    more for LAMB's norms and Muon's matrices. ``etp`` ranks that share the width of experts have one, and so
    have those with other parts of a sequence, unless these are all tensor-parallel ranks, or one."""
    axes = np.where(np.asarray(dp) > 1, 1.0, 0.0) + np.where(np.asarray(tp) > 1, 1.0, 0.0)
    apart = (np.asarray(pp) > 1) | (np.asarray(across) > 0)
    world = np.where(apart | (axes > 1), 1.0, 0.0)
    norms = np.where((axes > 1) & apart, lamb_over_zero, 0.0)
    copies = np.where((np.asarray(tp) > kv_heads) & (kv_heads > 1), 1.0, 0.0)
    found = axes + across + world + syncs_tied + levels + norms + copies + np.where(axes > 0, matrices, 0.0)
    width = np.asarray(tp) if etp is None else np.full_like(np.asarray(tp), etp)
    parts = np.asarray(tp) / width
    folds = (parts > 1) | (ep > 1)
    several, sharded = np.asarray(dp) * parts > ep, width > 1
    found = found + np.where((parts > 1) & sharded, 2.0, 0.0) + np.where(folds, across + several, 0.0)
    if ep == 1:
        return found
    # where experts are whole and ep is tp, the ranks that hold the same ones are replicas, which have a group
    norms = np.where(sharded, 1.0, (parts > 1) & (parts != ep)) * lamb_over_zero
    return found + 1 + np.where(several | sharded, matrices, 0.0) + np.where(several, norms, 0.0)


def count_context_groups(ring: int, ulysses: int) -> int:
    """Return the number of NCCL communicators of a rank that shares sequences: of its ring, of its row, and
    of all ranks if there are both."""
    return (ring > 1) + (ulysses > 1) + (ring > 1 and ulysses > 1)


def expected_outside(memory: FrameworkMemory, groups: Number, pairs: Number, *, on_cpu: bool) -> Number:
    """Return the expected bytes outside of the allocator, with so many communicators of groups and pairs."""
    if on_cpu:
        return _PROCESS + 0.0 * groups
    return memory.context_bytes + memory.group_bytes * groups + memory.pair_bytes * pairs


@dataclass(frozen=True)
class _Layouts:
    """The arguments of `worst_stage_memory`; ``last``: of the pipeline's last rank, not its first."""

    model: ModelConfig
    profile: FrameworkProfile
    layers: LayerMemory
    value_bytes: int
    dp: Number
    num_shards: Number
    tp: Number
    pp: Number
    virtual_stages: Number
    num_micro_batches: Number
    zero: Number
    reduce_each: Number
    eager: Number
    zero_bubble: Number
    dual_pipe: Number
    gpipe: Number
    levels: Number
    optimizer: OptimizerName
    averages: bool
    trains_alone: bool
    on_cpu: bool
    ep: int
    etp: int | None
    context: tuple[int, int]
    generation: GenerationBytes | None
    last: bool = False

    @property
    def num_expert_shards(self) -> Number:
        parts = 1.0 if self.etp is None else self.tp / self.etp
        return np.where(self.zero > 0, self.num_shards * parts / self.ep, 1.0)

    @cached_property
    def blocks(self) -> Number:
        """Number of blocks on this rank: earlier stages have more."""
        stages = self.pp * self.virtual_stages
        share = np.floor(self.model.layers / stages)
        extra = self.model.layers - share * stages
        longer = np.floor(extra / self.pp) if self.last else np.ceil(extra / self.pp)
        return share * self.virtual_stages + np.minimum(longer, self.virtual_stages)

    @cached_property
    def in_flight(self) -> Number:
        """Number of micro-batches whose activations this rank holds at once."""
        p, v, m = self.pp, self.virtual_stages, self.num_micro_batches
        behind = 0.0 * p if self.last else p - 1
        single = np.where(self.eager > 0, 2 * behind, behind) + 1
        round_ = np.ceil(m / np.maximum(1, np.floor(m / p)))
        interleaved = ((v - 1) * round_ + 2 * behind + 1) / v
        several = np.where(self.zero_bubble + self.dual_pipe > 0, p + self.dual_pipe / 2, interleaved)
        return np.where(self.gpipe > 0, m, np.minimum(np.where(v > 1, several, single), m))

    @property
    def waiting(self) -> tuple[Number, Number]:
        """Numbers of micro-batches of which only the weight products are left, with split backwards: in
        addition to those in flight, and instead of them."""
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
    profile: FrameworkProfile,
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
    dual_pipe: Number = 0.0,
    gpipe: Number = 0.0,
    levels: Number = 0.0,
    optimizer: OptimizerName = "adamw",
    averages: bool = False,
    trains_alone: bool = False,
    on_cpu: bool = False,
    shard_group: Number = 0.0,
    ep: int = 1,
    etp: int | None = None,
    expert_load: float = 1.0,
    context: tuple[int, int] = (1, 1),
    generates: bool = False,
) -> PeakMemory:
    """Return the memory of the rank that needs the most, with the default overlaps. ``recompute``: 0 none, 1
    selective, 2 full. ``reduce_each``, and ``eager`` to ``gpipe`` for the schedule: 0 or 1. ``levels``: from
    `myriad.comm.hierarchy.count_shard_levels`. ``shard_group``: 0 means all replicas. ``averages``: keep a
    moving average of the parameters. ``trains_alone``: replicas agree every few steps. ``ep``: ranks that
    share experts; ``etp`` and ``expert_load``: of `Layout`. ``dp``: ranks that hold the same
    parameters. ``context``: of `MicroBatchShard`. ``generates``: generate texts between steps."""
    where = value_bytes, on_cpu, ep, etp, min(expert_load, float(ep)), context
    part = MicroBatchShard(_floats(tp), _floats(micro_batch), *where)
    first = _Layouts(
        model,
        profile,
        layer_memory(model, profile, _floats(tp), _floats(micro_batch), _floats(recompute), where),
        value_bytes,
        dp=_floats(dp),
        num_shards=np.where(_floats(zero) > 0, np.where(_floats(shard_group) > 0, shard_group, dp), 1.0),
        tp=_floats(tp),
        pp=_floats(pp),
        virtual_stages=_floats(virtual_stages),
        num_micro_batches=_floats(num_micro_batches),
        zero=_floats(zero),
        reduce_each=_floats(reduce_each),
        eager=_floats(eager),
        zero_bubble=_floats(zero_bubble),
        dual_pipe=_floats(dual_pipe),
        gpipe=_floats(gpipe),
        levels=_floats(levels),
        optimizer=optimizer,
        averages=averages,
        trains_alone=trains_alone,
        on_cpu=on_cpu,
        ep=ep,
        etp=etp,
        context=context,
        generation=generation_bytes(whole_model(model, context), profile, part) if generates else None,
    )
    one, other = _rank_memory(first), _rank_memory(replace(first, last=True))
    return one.where(np.asarray(one.total >= other.total), other)


def _floats(values: Number) -> npt.NDArray[np.float64]:
    return np.asarray(values, dtype=np.float64)


def _rank_memory(where: _Layouts) -> PeakMemory:
    weights, gradients, kept_gradients, optimizer = _parameters(where)
    activations, logits = _activations(where)
    buffers = _buffers(where)
    memory = where.profile.memory
    outside = expected_outside(memory, *_communicators(where), on_cpu=where.on_cpu)
    slack = np.where(where.tp > 1, memory.tensor_slack, memory.allocator_slack)
    margin = slack * (activations + logits + buffers) + outside
    training = PeakMemory(weights, gradients, optimizer, activations, logits, buffers, margin, 0.0, outside)
    if where.generation is None:
        return training
    made = where.generation.total(where.blocks)
    others = replace(training, gradients=kept_gradients, activations=made, margin=slack * made + outside)
    generating = replace(others, logits=0.0 * made, buffers=0.0 * made)
    return training.where(np.asarray(training.total >= generating.total), generating)


def _communicators(where: _Layouts) -> tuple[Number, Number]:
    """Return the numbers of communicators of groups and of pairs. A pair has one for its neighbour and
    payload, and one for each direction where a rank has several stages."""
    turns = (where.zero_bubble > 0) & (where.virtual_stages > 1)
    apart = (where.pp > 1) & ~turns & where.model.shares_embedding
    pairs = np.where(where.pp > 1, np.where(where.virtual_stages > 1, 4.0, 2.0), 0.0)
    groups = count_groups(
        where.dp,
        where.tp,
        where.pp,
        kv_heads=where.model.num_kv_heads,
        syncs_tied=np.where(apart, 1.0, 0.0),
        levels=where.levels,
        lamb_over_zero=np.where((where.optimizer == "lamb") & (where.zero > 0), 1.0, 0.0),
        matrices=1.0 if where.optimizer == "muon" else 0.0,
        across=np.where((where.zero > 0) & (where.num_shards < where.dp), 1.0, 0.0),
        ep=where.ep,
        etp=where.etp,
    )
    return groups + count_context_groups(*where.context), pairs


def _ends(where: _Layouts, first: Number, last: Number) -> Number:
    """Return the quantity of the first or last stage (``first``, ``last``) that this rank holds."""
    turns = (where.zero_bubble > 0) & (where.virtual_stages > 1)  # A V ends on its first rank.
    if where.last:
        return np.where(where.pp == 1, first + last, np.where(turns, 0.0, last))
    return np.where((where.pp == 1) | turns, first + last, first)


def _parameters(where: _Layouts) -> tuple[Number, Number, Number, Number]:
    """Return the bytes of weights, of gradients in an iteration and between two, and of the optimizer, by the
    table of `docs/concepts/memory.md`."""
    layers, dp, zero = where.layers, where.dp, where.zero
    ends = _ends(where, layers.embedding_elements, layers.head_elements)
    if where.model.shares_embedding:
        table = np.ceil(where.model.padded_vocabulary() / where.tp) * where.model.hidden
        both = ends > np.maximum(layers.embedding_elements, layers.head_elements)
        ends = ends - np.where(both, table, 0.0)
    experts = where.blocks * layers.block_experts + _ends(where, 0.0, layers.head_experts)
    elements = where.blocks * layers.block_elements + ends
    part = elements / where.num_shards + experts / where.num_expert_shards
    elements, ends = elements + experts, ends + _ends(where, 0.0, layers.head_experts)
    stage, block = where.blocks / where.virtual_stages, layers.block_elements + layers.block_experts
    widest = stage * block + ends
    num_chunks = np.where(dp > 1, np.clip(np.floor(stage), 1, _MOST_CHUNKS), 1)
    chunk = np.minimum(np.maximum(stage * block / num_chunks, ends), elements)
    b = where.value_bytes
    values = b * np.where(zero == 3, np.minimum(widest + _AHEAD * chunk, elements), elements)
    master = np.where((b == 4) & (zero < 3), 0.0, 4 * part)
    live = np.minimum(np.where(where.reduce_each > 0, 2 * chunk, elements), elements)
    each = where.profile.memory.gradient_buffer_bytes
    sums, kept = (each * np.where(zero >= 2, held, elements) for held in (live + part, part))
    keys = where.profile.module_gathers
    if keys is not None:  # Live parameters, and whole gradients in a bucket.
        largest = np.maximum(layers.embedding_elements, layers.head_elements)
        held = np.minimum(keys.live_elements + largest, elements)
        values = np.where(zero == 3, b * (part + held), values)
        bucket = where.profile.gradient_bytes * (2 * keys.bucket_elements + largest)
        sums = np.where(zero == 3, bucket + (where.profile.gradient_bytes + 4) * part, sums)
    forms = np.where((where.num_micro_batches > 1) & (zero < 3), kept_form_bytes(where.profile), 0.0)
    weights = values + master + forms * where.blocks * block
    sums = sums + where.profile.memory.gradient_copy_bytes * np.where(dp > 1, elements, 0.0)
    return weights, sums, kept, _moments(where, part, ends - _ends(where, 0.0, layers.head_experts))


def _moments(where: _Layouts, part: Number, ends: Number) -> Number:
    """Return the bytes of moments, of the moving average, and of anchor and momentum of replicas that train
    alone. Matrices that are orthogonalized have one moment instead of two; of the others the last
    data-parallel rank holds all vectors. ``ends``: elements of embedding and head."""
    outer = np.where(where.dp > 1, 8 * part, 0.0) if where.trains_alone else 0.0
    others = outer + (4 * part if where.averages else 0.0)
    if where.optimizer != "muon":
        return 8 * part + others
    layers = where.layers
    second = (ends - _ends(where, 0.0, layers.head_matrices)) / where.num_shards
    return others + 4 * part + 4 * (second + where.blocks * (layers.block_elements - layers.block_matrices))


def _activations(where: _Layouts) -> tuple[Number, Number]:
    """Return the bytes of blocks and embedding, and the additional bytes of the head. The head's peak and the
    blocks' peak are at different times."""
    layers = where.layers
    kept = where.in_flight * (where.blocks * layers.block_kept + _ends(where, layers.embedding_kept, 0.0))
    beside, instead = where.waiting
    more = np.maximum(layers.block_products - layers.block_kept, 0.0)
    waiting = where.blocks * (beside * layers.block_products + instead * more)
    head = _ends(where, 0.0, layers.head)
    passing = np.maximum(layers.block_passing, _own_grads(where) - kept / where.in_flight)
    return kept + waiting + passing, np.maximum(head - passing, 0.0)


def _own_grads(where: _Layouts) -> Number:
    """Return the bytes of the gradients that stay until a backward's end."""
    layers = where.layers
    ends = _ends(where, layers.embedding_elements, layers.head_elements)
    elements = where.blocks * (layers.block_elements + layers.block_experts) + ends
    return where.profile.memory.backward_gradient_bytes * elements


def _buffers(where: _Layouts) -> Number:
    """Return the bytes of messages between stages: receives posted ahead, activations until their backward,
    and gradients until they have arrived. Other frameworks hold one in each direction."""
    v, m = where.virtual_stages, where.num_micro_batches
    forwards, backwards = (v - 1, v) if where.last else (v, v - 1)
    memory, message = where.profile.memory, where.layers.message
    keeps, posted = is_myriad(where.profile) and not memory.frees_sent, np.minimum(_AHEAD, m)
    sent = where.in_flight * forwards + np.where(backwards > 0, posted, 0.0) if keeps else 2.0
    stay = memory.workspace_bytes + np.where(where.tp > 1, memory.gather_buffers * message * where.tp, 0.0)
    return np.where(where.pp > 1, (sent + posted) * message, 0.0) + stay
