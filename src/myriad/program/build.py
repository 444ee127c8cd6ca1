"""Construction of the program for a layout: schedule, lowering, passes, checker.

The runtime and the simulator both use this module, so a prediction describes the program that will run.

A replica may have fewer micro-batches than another. Data-parallel replicas meet in gathers and reductions:
each pipeline rank must issue the same ones in the same order, however many micro-batches its replica has. So
the shorter program (`shorten`) is the longest one without the compute actions and transfers of the last
micro-batches:

    4 micro-batches    GATHER  F0 F1 F2 F3  B0 B1 B2 B3  REDUCE  STEP
    3 micro-batches    GATHER  F0 F1 F2     B0 B1 B2     REDUCE  STEP

It is deadlock-free: the remaining actions run in an order in which all replicas could have run the longest
program together. A reduction without a waiting action is issued as soon as its stage's gradients are complete
here and all reductions before it are issued.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from myriad.program.actions import MAKES_WEIGHT_GRADIENT, Action, Kind, Program, kinds_where
from myriad.program.checker import check
from myriad.program.config import OverlapConfig
from myriad.program.early_updates import update_early
from myriad.program.lower import lower
from myriad.program.passes import apply_passes
from myriad.program.schedules import schedule

__all__ = ["DATA_PARALLEL", "Lowered", "Shape", "build_program", "count_chunks", "shorten"]

Lowered = dict[tuple[object, ...], Program]
"""Programs before passes, by the values that they depend on. Jobs that differ only in overlaps and chunks
share one."""

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


def build_program(
    shape: Shape,
    overlap: OverlapConfig,
    num_micro_batches: int,
    *,
    tied: bool,
    training: bool,
    num_chunks: int = 1,
    most_micro_batches: int = 0,
    lowered: Lowered | None = None,
) -> Program:
    """Return a checked program for one iteration or, without ``training``, for one validation.

    Each stage of the layout is ``num_chunks`` stages of the program. ``most_micro_batches``: the largest
    number of any replica, where numbers differ. ``lowered``: a cache of lowered programs, kept between calls.
    """
    most = max(num_micro_batches, most_micro_batches)
    program = _lowered(shape, most, tied, training, {} if lowered is None else lowered)
    program = apply_passes(program, overlap, num_chunks)
    if training and overlap.updates_early:
        program = update_early(program, travels=shape.dp > 1)
    check(program)
    if num_micro_batches < most:
        program = shorten(program, num_micro_batches)
        check(program)
    return program


def _lowered(shape: Shape, num_micro_batches: int, tied: bool, training: bool, kept: Lowered) -> Program:
    of = (shape.schedule_name, shape.pp, shape.virtual_stages, num_micro_batches)
    key = (*of, shape.zero, shape.reduce, tied, training)
    if key not in kept:
        computes = schedule(*of)
        kept[key] = lower(computes, zero=shape.zero, reduce=shape.reduce, tied=tied, training=training)
    return kept[key]


def count_chunks(shape: Shape, overlap: OverlapConfig, layers_of_stage: Sequence[range]) -> int:
    """Return the number of chunks of each stage. Every chunk has a layer; without communication to overlap
    there is one chunk."""
    if not overlap.updates_early and (shape.dp == 1 or not overlap.data):
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
            yield replace(action, transfers=transfers)


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
