"""Construction of the program for a layout: schedule, lowering, passes, checker.

The runtime and the simulator both use this module, so a prediction describes the program that will run.

A replica may have fewer micro-batches than another. Data-parallel replicas meet in gathers and reductions:
each pipeline rank must issue the same ones in the same order, however many micro-batches its replica has.
So the shorter program (`shorten`) is the longest one without the compute actions and transfers of the last
micro-batches:

    4 micro-batches    GATHER  F0 F1 F2 F3  B0 B1 B2 B3  REDUCE  STEP
    3 micro-batches    GATHER  F0 F1 F2     B0 B1 B2     REDUCE  STEP

It is deadlock-free: the remaining actions run in an order in which all replicas could have run the longest
program together. A reduction without a waiting action is issued as soon as its stage's gradients are
complete here and all reductions before it are issued.

With early updates (`update_early`), each stage is updated inside the last backward, as soon as its
gradients are reduced:

    behind the norm   B s1 START_REDUCE s1 B s0 START_REDUCE s0 AWAIT s1 s0 CLIP UPDATE s0 s1
    in the backward   B s1 START_REDUCE s1 B s0 START_REDUCE s0 AWAIT s1 UPDATE s1 AWAIT s0 UPDATE s0 CLIP

CLIP then only computes the norm: the caller must ensure that the norm scales nothing. A rank with
gradients left to send sends them first, because another rank computes with them. A reduction overlaps with
some compute actions before the rank waits for it. Parameters that two stages of a rank share are updated
with the first of these stages, when both have added their gradients; neither stage is gathered before.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from myriad.program.actions import (
    COMPUTE,
    MAKES_WEIGHT_GRADIENT,
    SEMANTICS,
    Action,
    Collective,
    Kind,
    Program,
    kinds_where,
)
from myriad.program.checker import check
from myriad.program.config import OverlapConfig
from myriad.program.lower import lower
from myriad.program.offload_passes import offload_activations, offload_state
from myriad.program.pairs import pair_computes
from myriad.program.passes import (
    orthogonalize,
    overlap_chunks,
    overlap_optimizer,
    overlap_pipeline,
    reduce_across,
    split_at_computes,
    stages_ahead,
)
from myriad.program.schedules import schedule

__all__ = ["DATA_PARALLEL", "Lowered", "Shape", "build_program", "count_chunks", "shorten", "update_early"]

Lowered = dict[tuple[object, ...], Program]
"""Programs before passes, and between two of them, by the values that they depend on. Jobs that differ only
in later passes share one."""

_MOST_CHUNKS = 8
"""Default number of chunks of a stage: finer ones cost more than they hide."""


class Shape(Protocol):
    """The values of a layout that a program depends on."""

    @property
    def schedule_name(self) -> str: ...
    @property
    def dp(self) -> int: ...
    @property
    def pp(self) -> int: ...
    @property
    def virtual_stages(self) -> int: ...
    @property
    def zero(self) -> int: ...
    @property
    def reduce(self) -> Literal["last", "each"]: ...
    @property
    def reduces_across(self) -> bool: ...
    @property
    def offload_activations(self) -> float: ...
    @property
    def offload_optimizer(self) -> bool: ...
    @property
    def offload_optimizer_ratio(self) -> float: ...
    @property
    def offloads(self) -> bool: ...
    @property
    def num_matrix_sharers(self) -> int: ...


def build_program(
    shape: Shape,
    overlap: OverlapConfig,
    num_micro_batches: int,
    *,
    tied: bool,
    training: bool,
    num_chunks: int = 1,
    most_micro_batches: int = 0,
    orthogonalizes: bool = False,
    lowered: Lowered | None = None,
    checks: bool = True,
) -> Program:
    """Return the program for one iteration or, without ``training``, for one validation.

    Each stage of the layout is ``num_chunks`` stages of the program. ``most_micro_batches``: the largest
    number of any replica, where numbers differ. ``orthogonalizes``: the optimizer orthogonalizes matrices.
    ``lowered``: a cache of programs between passes, kept between calls. ``checks=False``: without the proof,
    which takes a third of the time; for programs that are compared and do not run.
    """
    most = max(num_micro_batches, most_micro_batches)
    pairs = training and overlap.pairs
    kept = {} if lowered is None else lowered
    program = _overlapped(shape, overlap, most, kept, tied=tied, training=training, num_chunks=num_chunks)
    if overlap.optimizer:
        program = overlap_optimizer(program)
    if training and overlap.updates_early:
        program = update_early(program, travels=shape.dp > 1)
    if training and orthogonalizes:
        ahead = stages_ahead(shape.num_matrix_sharers, offloads_state=shape.offload_optimizer)
        program = orthogonalize(program, ahead)
    if training and shape.offload_activations:
        ratio, ahead = shape.offload_activations, overlap.offload_ahead
        program = offload_activations(program, ratio, num_chunks, ahead)
    if training and shape.offload_optimizer:
        ratio, overlaps = shape.offload_optimizer_ratio, overlap.offload_ahead > 0
        program = offload_state(program, ratio, num_chunks, overlaps=overlaps)
    if pairs:
        program = pair_computes(program, num_chunks)
    across = training and shape.reduces_across
    whole = _finish(program, across=across, checks=checks)
    if num_micro_batches == most:
        return whole
    return _finish(shorten(program, num_micro_batches), across=across, checks=checks)


def _finish(program: Program, *, across: bool, checks: bool) -> Program:
    """Return the program, with sums across groups of replicas if there are several, proved if ``checks``."""
    program = reduce_across(program) if across else program
    if checks:
        check(program)
    return program


def _overlapped(
    shape: Shape,
    overlap: OverlapConfig,
    num_micro_batches: int,
    kept: Lowered,
    *,
    tied: bool,
    training: bool,
    num_chunks: int,
) -> Program:
    """Return the lowered program with the overlaps of messages between stages and of data parallelism."""
    pairs = training and overlap.pairs
    of = (shape.schedule_name, shape.pp, shape.virtual_stages, num_micro_batches)
    plain = (*of, shape.zero, shape.reduce, tied, training, pairs)
    decoupled = (*plain, overlap.receive_ahead if overlap.pipeline else None)
    chunks = (*decoupled, num_chunks, overlap.data)
    if plain not in kept:
        computes = schedule(*of, pairs=pairs)
        kept[plain] = lower(computes, zero=shape.zero, reduce=shape.reduce, tied=tied, training=training)
    if decoupled not in kept:
        kept[decoupled] = overlap_pipeline(kept[plain], overlap)
    if chunks not in kept:
        kept[chunks] = overlap_chunks(kept[decoupled], overlap, num_chunks)
    return kept[chunks]


def count_chunks(shape: Shape, overlap: OverlapConfig, layers_of_stage: Sequence[range]) -> int:
    """Return the number of chunks of each stage. Every chunk has a layer; without communication or copies to
    overlap there is one chunk."""
    if not (overlap.updates_early or shape.offloads) and (shape.dp == 1 or not overlap.data):
        return 1
    return min(overlap.chunks or _MOST_CHUNKS, *(len(own) for own in layers_of_stage))


DATA_PARALLEL = kinds_where(lambda does: does.starts is not None)
"""Actions that all replicas issue together."""


def shorten(program: Program, num_micro_batches: int) -> Program:
    """Return a lowered program without the actions of its last micro-batches."""
    lowering = program.lowering
    assert lowering is not None and 0 < num_micro_batches <= program.num_micro_batches
    ranks = (tuple(_kept(actions, num_micro_batches)) for actions in program.ranks)
    if lowering.reduce == "last":
        ranks = (_reduced_early(actions) for actions in ranks)
    return replace(
        program,
        num_micro_batches=num_micro_batches,
        ranks=tuple(ranks),
        lowering=replace(lowering, most_micro_batches=program.num_micro_batches),
    )


def _kept(actions: Sequence[Action], num_micro_batches: int) -> Iterator[Action]:
    for action in actions:
        transfers = tuple(t for t in action.transfers if t.micro_batch < num_micro_batches)
        if action.micro_batch < num_micro_batches and (transfers or not action.transfers):
            yield Action(action.kind, action.stage, action.micro_batch, transfers)


def _reduced_early(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Move each START_REDUCE directly after the last action that adds to its stage's gradients."""
    kept: list[Action] = []
    complete: dict[int, int] = {}
    """Index after the last action that added to a stage's gradients."""
    posted = 0
    """Index after the last action that replicas issue together."""
    for action in actions:
        if action.kind is Kind.START_REDUCE:
            place = max(posted, complete.get(action.stage, 0))
            complete = {stage: at + (at > place) for stage, at in complete.items()}
            kept.insert(place, action)
            posted = place + 1
            continue
        kept.append(action)
        if action.kind in MAKES_WEIGHT_GRADIENT or action.kind is Kind.SYNC_TIED:
            complete[action.stage] = len(kept)
        elif action.kind in DATA_PARALLEL:
            posted = len(kept)
    return tuple(kept)


_BEHIND = 2
"""Compute actions between issuing a reduction and waiting for it. By then the links carry the next
reduction."""
_POSTS = kinds_where(lambda does: does.starts is Collective.REDUCE)
_ENDS = kinds_where(lambda does: does.ends is Collective.REDUCE)
_WAITS = COMPUTE | {Kind.WAIT} | kinds_where(lambda does: does.ends is Collective.GATHER)


def update_early(program: Program, *, travels: bool) -> Program:
    """Move the updates of a training program that ends with CLIP and UPDATEs. ``travels``: gradients are
    reduced between ranks, so reductions need compute actions to overlap with."""
    assert program.lowering is not None and program.lowering.training
    ranks = (tuple(_moved(program, rank, _BEHIND if travels else 0)) for rank in range(program.num_ranks))
    lowering = replace(program.lowering, updates_early=True)
    return replace(program, ranks=tuple(ranks), lowering=lowering)


@dataclass(frozen=True, order=True)
class _Place:
    """The position at which a stage's gradients are waited for, or at which the stage is updated."""

    gap: int
    turn: int
    """The stage's index in the order of reductions."""
    updates: bool = False
    after_both: bool = False
    """Whether the place is after another stage's update at the same position."""


def _moved(program: Program, rank: int, behind: int) -> Iterator[Action]:
    actions = program.ranks[rank]
    clip = next(at for at, action in enumerate(actions) if action.kind is Kind.CLIP)
    gaps, updates = split_at_computes(actions[:clip]), _updates(actions[clip + 1 :])
    waits, places = _places(gaps, behind)
    last = program.num_stages - 1
    assert program.lowering is not None
    if program.lowering.tied and last != 0 and {0, last} <= places.keys():
        places[0] = replace(max(places[0], places[last]), after_both=True)
        updates[0] += updates[last][1:]
        del updates[last][1:]
    moved = {place: [Action(Kind.AWAIT_REDUCE, stage)] for stage, place in waits.items()}
    moved |= {place: updates[stage] for stage, place in places.items()}
    for index, gap in enumerate(gaps):
        middle = _start_of_waiting(gap)
        yield from gap[:middle]
        yield from (one for place in sorted(moved) if place.gap == index for one in moved[place])
        yield from gap[middle:]
    yield actions[clip]


def _places(gaps: list[list[Action]], behind: int) -> tuple[dict[int, _Place], dict[int, _Place]]:
    """Return two maps by stage: the place of its last AWAIT_REDUCE, which is removed from the gaps, and the
    place of its update."""
    posted, ended, released = _last(gaps, _POSTS), _last(gaps, _ENDS), _last(gaps, {Kind.RELEASE})
    sent = max((index for index, gap in enumerate(gaps) if any(map(_sends, gap))), default=0)
    waits, updates = {}, {}
    for turn, stage in enumerate(sorted(posted, key=posted.__getitem__)):
        here = min(ended[stage][0], max(posted[stage][0] + behind, sent))
        latest = max(here, sent, released.get(stage, (0, 0))[0])
        updates[stage] = _Place(latest, turn, updates=True)
        gap, at = ended[stage]
        if gaps[gap][at].kind is Kind.AWAIT_REDUCE:
            waits[stage] = _Place(here, turn)
    for gap, at in sorted((ended[stage] for stage in waits), reverse=True):
        del gaps[gap][at]
    return waits, updates


def _updates(actions: Sequence[Action]) -> dict[int, list[Action]]:
    """Return each stage's UPDATE and the gather that follows it."""
    found: dict[int, list[Action]] = {}
    for action in actions:
        found.setdefault(action.stage, []).append(action)
    return found


def _last(gaps: Sequence[Sequence[Action]], kinds: Collection[Kind]) -> dict[int, tuple[int, int]]:
    """Return the gap, and the index in it, of each stage's last action of these kinds."""
    return {
        action.stage: (index, at)
        for index, gap in enumerate(gaps)
        for at, action in enumerate(gap)
        if action.kind in kinds
    }


def _sends(action: Action) -> bool:
    return SEMANTICS[action.kind].posts and any(one.sends for one in action.transfers)


def _start_of_waiting(gap: Sequence[Action]) -> int:
    """Return the index of the first action at the end of a gap in which the rank waits or computes."""
    at = len(gap)
    while at and (
        gap[at - 1].kind in _WAITS or (gap[at - 1].kind is Kind.EXCHANGE and not _sends(gap[at - 1]))
    ):
        at -= 1
    return at
