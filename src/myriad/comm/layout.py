"""A parallel layout: how many ranks share which dimension of the work. This module does not import torch.

The rank grid is one array with axes ``dp pp cp tp``, the last one varying fastest. Neighbours in rank
number are tensor-parallel peers (they communicate most and should share a node), then context-parallel
ranks, pipeline neighbours and data-parallel replicas. Experts see the same ranks as a second grid
(`myriad.comm.grid`): ``etp`` neighbours in rank number share the width of each, and ``ep`` such groups hold
different ones.
"""

import math
from typing import Literal

from pydantic import Field

from myriad.comm.config import CommConfig
from myriad.config import Config
from myriad.errors import BadInputError
from myriad.program.config import OverlapConfig
from myriad.program.schedules import check_virtual_stages

__all__ = [
    "AXES",
    "MOST_RANKS",
    "ExpertDispatch",
    "Layout",
    "check_layout",
    "lacks_for_graphs",
    "lacks_for_offload",
    "lacks_for_pairs",
    "offloads_master",
    "trains_alone",
]

ScheduleName = Literal[
    "gpipe",
    "1f1b",
    "eager-1f1b",
    "interleaved",
    "zero-bubble",
    "zero-bubble-v",
    "eager-zero-bubble",
    "dualpipe-v",
]

ExpertDispatch = Literal["expert", "rank", "node"]

AXES = ("dp", "pp", "cp", "tp")
"""Axes of the rank grid, slowest first."""

MOST_RANKS = 2**20
"""The largest world: rank tables and searches hold an entry for each rank."""


class Layout(Config):
    """How one iteration is spread over ranks."""

    dp: int = Field(1, ge=1, le=MOST_RANKS)
    """Number of data-parallel replicas of the model."""
    tp: int = Field(1, ge=1, le=MOST_RANKS)
    """Ranks that share each weight matrix (tensor and sequence parallelism)."""
    pp: int = Field(1, ge=1, le=MOST_RANKS)
    """Number of ranks that the layers are divided among (pipeline parallelism)."""
    cp: int = Field(1, ge=1, le=MOST_RANKS)
    """Ranks that share each sequence (context parallelism): every one holds 1/cp of the positions, and of the
    activations. They hold the same parameters, which ZeRO shards over layout.dp x layout.cp ranks."""
    ulysses: int = Field(1, ge=1, le=MOST_RANKS)
    """How many neighbouring ranks of layout.cp exchange positions for heads in attention (Ulysses, two
    all-to-alls), so that each has some heads of all their positions. Between the others keys and values
    travel around a ring. It must divide layout.cp and the query heads of a rank. 1: ring only."""
    whole_documents: bool = False
    """Whether packed documents lie whole on one rank of the ring, where that leaves no rank more than 5 %
    above the mean work; only the others are cut into a part for each rank (dynamic context parallelism).
    Needs a ring (layout.cp above layout.ulysses) and data.documents = "packed"."""
    ep: int = Field(1, ge=1, le=MOST_RANKS)
    """Ranks that share the experts of each block: every one holds 1/ep of them, and tokens travel to their
    experts and back. It must divide layout.dp x layout.cp x layout.tp / layout.etp and model.experts, and
    does not multiply the number of ranks. 1: each replica holds all experts."""
    etp: int | None = Field(None, ge=1, le=MOST_RANKS)
    """Neighbouring tensor-parallel ranks that share the width of each expert; it must divide layout.tp. Each
    group of so many ranks sends the tokens of its own part of the sequence only, and layout.ep also counts
    these groups. 1: experts are whole. off: layout.tp."""
    expert_dispatch: ExpertDispatch = "expert"
    """How often a token travels with layout.ep > 1. expert: once for each of its experts. rank: once for each
    rank that holds some of them. node: once for each node (comm.node_size), and from there to the ranks of
    that node, which suits slow links between nodes and many experts for each token. With rank and node the
    sums of a token's experts are added in another order."""
    expert_load: float = Field(1.0, ge=1, le=MOST_RANKS)
    """Tokens that the busiest of the layout.ep ranks gets for its experts, over those of the mean rank.
    Plans, predictions and train.memory_budget count on it; training is the same for any value. The
    expert_loads in a run's metrics.jsonl show it. 1: all ranks get equally many."""
    virtual_stages: int = Field(1, ge=1, le=2**14)
    """Model pieces (stages) per pipeline rank."""
    zero: int = Field(0, ge=0, le=3)
    """State that data-parallel ranks shard: 0 nothing, 1 optimizer state, 2 also gradients, 3 also
    parameters."""
    shard_group: int | None = Field(None, ge=2, le=MOST_RANKS)
    """Number of neighbouring replicas over which layout.zero = 1, 2 or 3 shards state; it must divide
    layout.dp x layout.cp (each of the layout.cp ranks counts), and with layout.ep hold every expert equally
    often. Gradients are also summed across groups, and
    nothing else crosses between them. Set it to the replicas of a node where links between nodes are slow and
    memory allows. off: all replicas."""
    reduce: Literal["last", "each"] = "last"
    """When gradients are reduced: last, after a chunk's last backward; each, after every backward, which
    needs the least memory and layout.zero = 2 or 3."""
    micro_batch: int = Field(1, ge=1, le=2**24)
    """Sequences in one micro-batch."""
    shares: tuple[int, ...] | None = None
    """Micro-batches of each data-parallel replica per iteration, e.g. [5, 3]: fewer for slower replicas.
    Results do not change. off: equal numbers."""
    schedule: ScheduleName | None = None
    """Pipeline schedule; off: interleaved if layout.virtual_stages > 1, else 1f1b. On slow links the eager
    schedules hide transfers that others wait for, and hold more activations. zero-bubble-v and dualpipe-v
    (layout.virtual_stages = 2) idle least; dualpipe-v hides all but its first and last transfers, takes
    overlap.pairs, and is meant for at least 2 x layout.pp micro-batches."""
    partition: str = "uniform"
    """How layers are divided among stages: uniform, parameters, profile, type:REGEX (spread matching layers
    evenly) or manual:B1,B2,..."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations that the backward recomputes instead of keeping. none: nothing. selective: outputs of
    norms and of the MLP's activation function. full: everything but each layer's input. Results are the
    same to the bit."""
    recompute_ratio: float = Field(1.0, gt=0, le=1)
    """Share of a stage's layers, from the first, that layout.recompute = full applies to; the others keep
    all activations."""
    offload_activations: float = Field(0.0, ge=0, le=1)
    """Share of a stage's chunks (overlap.chunks), from the first, whose activations are copied to host memory
    after the forward and back before the backward. Results are the same to the bit. 0: keep all on the
    device."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory, and copy that of each chunk to the device for its update:
    the moments, and with train.precision = bfloat16 or float16 the float32 master weights. The master weights
    stay on the device with comm.compress_parameters and comm.sync_every > 1, which use them between updates.
    Results are the same to the bit."""
    offload_optimizer_ratio: float = Field(1.0, gt=0, le=1)
    """Share of a stage's chunks (overlap.chunks), from the first, that layout.offload_optimizer applies to;
    the state of the others stays on the device."""

    @property
    def world(self) -> int:
        """Number of ranks in the layout."""
        return self.dp * self.pp * self.cp * self.tp

    @property
    def num_holders(self) -> int:
        """Ranks that hold the same parameters: those of all replicas, and in each replica those that share
        its sequences."""
        return self.dp * self.cp

    @property
    def num_matrix_sharers(self) -> int:
        """Ranks that share the orthogonalization of the matrices of a pipeline rank."""
        return self.num_holders * self.tp

    @property
    def ring(self) -> int:
        """Ranks, or groups of ``ulysses`` ranks, between which keys and values travel around a ring."""
        return self.cp // self.ulysses

    @property
    def sequence_multiple(self) -> int:
        """Number that divides the length of a sequence that the ranks share: equally many positions for each,
        and for each place of a ring two equal chunks."""
        return math.lcm(self.cp * self.tp, 2 * self.ring if self.ring > 1 else 1)

    @property
    def num_shards(self) -> int:
        """Ranks that the state is sharded over; 1 with ZeRO 0."""
        return (self.shard_group or self.num_holders) if self.zero else 1

    @property
    def num_shard_groups(self) -> int:
        """Groups of replicas that each hold the whole state, sharded inside the group; with ZeRO 0 each
        replica is one."""
        return self.num_holders // self.num_shards

    def num_snapshot_holders(self, wanted: int | None, copies_every: int) -> int:
        """Return the number of nodes whose snapshots may hold each part of the state, of those whose ranks
        hold the same (`CheckpointConfig.holders`)."""
        default = 2 if self.shard_group is not None and copies_every else 1
        return 1 if self.folds_experts else min(wanted or default, self.num_shard_groups)

    @property
    def expert_tp(self) -> int:
        """Tensor-parallel ranks that share the width of each expert."""
        return self.etp or self.tp

    @property
    def num_etp_groups(self) -> int:
        """Groups of tensor-parallel ranks of which each shares the width of experts, and has its own part of
        a sequence."""
        return self.tp // self.expert_tp

    @property
    def busiest_load(self) -> float:
        """Tokens of the busiest rank that shares experts over those of the mean one: at most all tokens."""
        return min(self.expert_load, float(self.ep))

    @property
    def num_expert_replicas(self) -> int:
        """Ranks that hold the same part of the same experts."""
        return self.num_holders * self.num_etp_groups // self.ep

    @property
    def num_expert_shards(self) -> int:
        """Ranks that the state of experts is sharded over; 1 with ZeRO 0."""
        return self.num_expert_replicas // self.num_shard_groups if self.zero else 1

    @property
    def folds_experts(self) -> bool:
        """Whether experts lie on other ranks than the other parameters of their block."""
        return self.ep > 1 or self.num_etp_groups > 1

    @property
    def reduces_across(self) -> bool:
        """Whether gradients are reduced inside groups first, and their shards then summed across groups."""
        return self.zero > 0 and self.num_shard_groups > 1

    @property
    def offloads(self) -> bool:
        """Whether a rank copies data to host memory in each iteration."""
        return self.offload_activations > 0 or self.offload_optimizer

    @property
    def num_stages(self) -> int:
        """Model pieces over the whole pipeline."""
        return self.pp * self.virtual_stages

    @property
    def schedule_name(self) -> str:
        """The schedule, with the default filled in."""
        return self.schedule or ("interleaved" if self.virtual_stages > 1 else "1f1b")

    def shares_of(self, global_batch: int, key: str = "train.global_batch") -> tuple[int, ...]:
        """Return the micro-batches of each replica. Raises `BadInputError` for ``key`` if the batch is not
        divisible."""
        if self.shares is not None:
            if sum(self.shares) * self.micro_batch != global_batch:
                wanted = f"{key} / layout.micro_batch = {global_batch} / {self.micro_batch}"
                raise BadInputError("layout.shares", list(self.shares), f"must add up to {wanted}")
            return self.shares
        unit = self.dp * self.micro_batch
        if global_batch % unit:
            below, above = global_batch // unit * unit, (global_batch // unit + 1) * unit
            near = f"{below} or {above}" if below else f"{above}"
            allowed = f"must be a multiple of layout.dp x layout.micro_batch = {unit}, such as {near}"
            raise BadInputError(key, global_batch, allowed)
        return (global_batch // unit,) * self.dp


def check_layout(layout: Layout) -> None:
    """Check every rule that spans several fields of a layout. Raises `BadInputError`."""
    if layout.world > MOST_RANKS:
        key = "layout.dp x layout.tp x layout.pp x layout.cp"
        raise BadInputError(key, layout.world, f"at most {MOST_RANKS:,} ranks: tables hold an entry for each")
    check_virtual_stages(layout.schedule_name, layout.virtual_stages)
    shares = layout.shares
    if shares is not None and (len(shares) != layout.dp or min(shares) < 1):
        allowed = f"{layout.dp} numbers of at least 1, one for each replica (layout.dp), or off"
        raise BadInputError("layout.shares", list(shares), allowed)
    if layout.cp % layout.ulysses:
        raise BadInputError("layout.ulysses", layout.ulysses, f"must divide layout.cp = {layout.cp}")
    _check_experts(layout)
    group = layout.shard_group
    if group is not None and layout.zero == 0:
        raise BadInputError("layout.shard_group", group, "needs layout.zero = 1, 2 or 3, or off")
    if group is not None and layout.num_holders % group:
        of_cp = f" x layout.cp = {layout.num_holders}" if layout.cp > 1 else f" = {layout.dp}"
        allowed = f"must divide layout.dp{of_cp}, or off"
        raise BadInputError("layout.shard_group", group, allowed)
    if layout.reduce == "each" and layout.zero < 2:
        allowed = "needs layout.zero = 2 or 3, where a reduced gradient is kept apart from the sum; or last"
        raise BadInputError("layout.reduce", layout.reduce, allowed)


def _check_experts(layout: Layout) -> None:
    """Check the ranks that share experts: they exchange tokens in every micro-batch."""
    ep, shares, parts = layout.ep, layout.shares, layout.num_etp_groups
    if layout.tp % layout.expert_tp:
        raise BadInputError("layout.etp", layout.etp, f"must divide layout.tp = {layout.tp}, or off")
    of_tp = "layout.tp" if layout.expert_tp == 1 else "layout.tp / layout.etp"
    if layout.num_holders * parts % ep:
        axes = {"layout.dp": layout.dp, "layout.cp": layout.cp, of_tp: parts}
        sharers = " x ".join(axis for axis, size in axes.items() if axis == "layout.dp" or size > 1)
        raise BadInputError("layout.ep", ep, f"must divide {sharers} = {math.prod(axes.values())}")
    group = layout.shard_group
    if group is not None and group * parts % ep:
        of_tp = f"times {of_tp} = {parts} " if parts > 1 else ""
        allowed = f"must {of_tp}be a multiple of layout.ep = {ep}: a group holds every expert equally often"
        raise BadInputError("layout.shard_group", group, allowed)
    if layout.folds_experts and shares is not None and len({*shares}) > 1:
        allowed = (
            "equal numbers, or off, with layout.ep > 1 or layout.etp < layout.tp: tokens travel in each "
            "micro-batch"
        )
        raise BadInputError("layout.shares", list(shares), allowed)


def lacks_for_graphs(layout: Layout, overlap: OverlapConfig) -> str:
    """Return what a job still needs for CUDA graphs (`myriad.parallel.cuda_graphs`), with the reason; empty
    if it needs nothing."""
    slices = layout.tp > 1 and overlap.tensor in ("slices", "auto")
    needs = (
        (
            not slices,
            "overlap.tensor = turns or off: products in slices set up symmetric memory and its streams while "
            "they run, which a capture forbids, and auto may choose them",
        ),
        (
            not overlap.updates_early,
            "overlap.optimizer_in_backward = false: a chunk's gradient sums are freed there",
        ),
        (
            layout.offload_activations == 0,
            "layout.offload_activations = 0: captured stages keep activations at fixed addresses",
        ),
    )
    return next((need for there, need in needs if not there), "")


def lacks_for_pairs(layout: Layout, overlap: OverlapConfig) -> str:
    """Return what a job still needs to pair forwards with backwards (`myriad.program.pairs`), with the
    reason; empty if it needs nothing."""
    several = layout.pp > 1
    ahead = layout.schedule_name == "eager-1f1b" or layout.virtual_stages > 1
    needs = (
        (layout.ep > 1, "layout.ep above 1: what travels behind a pair is tokens to their experts, and back"),
        (
            layout.schedule_name in ("1f1b", "eager-1f1b", "interleaved", "dualpipe-v"),
            "layout.schedule = 1f1b, eager-1f1b, interleaved or dualpipe-v: forwards alternate with whole "
            "backwards",
        ),
        (
            ahead or not several,
            "layout.schedule = eager-1f1b, or layout.virtual_stages above 1, where layout.pp is above 1: in "
            "1f1b each rank would wait for every other pair",
        ),
        (
            overlap.pipeline or not several,
            "overlap.pipeline = true: a rank in a pair does not wait for a transfer between its two halves",
        ),
        (
            layout.recompute != "full",
            "layout.recompute = none or selective: recomputed layers exchange tokens again",
        ),
        (
            layout.offload_activations == 0,
            "layout.offload_activations = 0: copies follow one forward or one backward at a time",
        ),
    )
    return next((need for there, need in needs if not there), "")


def lacks_for_offload(layout: Layout, overlap: OverlapConfig, optimizer: str) -> str:
    """Return what a job still needs to keep optimizer state in host memory, with the reason; empty if it
    needs nothing. ``optimizer``: its name."""
    needs = (
        (
            optimizer != "lamb",
            "optimizer.name = adamw or muon: LAMB begins the updates of all chunks at once",
        ),
        (overlap.optimizer, "overlap.optimizer = true, which updates chunk by chunk"),
    )
    return next((need for there, need in needs if layout.offload_optimizer and not there), "")


def offloads_master(layout: Layout, comm: CommConfig, value_bytes: int) -> bool:
    """Return whether the float32 master values are part of the optimizer state in host memory, as they are
    where no action but the update needs them. ``value_bytes``: bytes of one element of the compute type."""
    # agreements of replicas change the master values, and compressed parameters are changes to them
    needs_them = value_bytes == 4 or comm.compress_parameters is not None or trains_alone(layout, comm)
    return layout.offload_optimizer and not needs_them


def trains_alone(layout: Layout, comm: CommConfig) -> bool:
    """Return whether replicas train alone between agreements (DiLoCo)."""
    return comm.sync_every > 1 and layout.dp > 1
