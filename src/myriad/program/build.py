"""Construction of the program for a layout: schedule, lowering, passes, checker.

The runtime and the simulator both use this module, so a prediction describes the program that will run.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

from myriad.program.actions import Program
from myriad.program.checker import check
from myriad.program.config import OverlapConfig
from myriad.program.early_updates import update_early
from myriad.program.lower import lower
from myriad.program.passes import apply_passes
from myriad.program.schedules import schedule
from myriad.program.shorten import shorten

__all__ = ["Lowered", "Shape", "build_program", "count_chunks"]

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
