"""From a layout to the program that its ranks run: schedule, lowering, passes, checker.

The runtime and the simulator both begin here, so a prediction is of what will run.
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
"""Programs before passes, by what they depend on: those that differ only in overlaps and chunks share one."""

_MOST_CHUNKS = 8
"""Of a stage, unless told otherwise: finer ones cost more than they hide."""


class Shape(Protocol):
    """What a program depends on of a layout."""

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
    """A checked program for one iteration, or (not ``training``) for one validation. Each stage of the layout
    is ``num_chunks`` stages of the program. ``most_micro_batches``: of any replica, where they differ.
    ``lowered``: what is kept between calls."""
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
    """In how many chunks each stage is cut: none without a layer, one where there is nothing to overlap."""
    if not overlap.updates_early and (shape.dp == 1 or not overlap.data):
        return 1
    return min(overlap.chunks or _MOST_CHUNKS, *(len(own) for own in layers_of_stage))
