"""From a layout's words to a proved program: schedule, lowering, passes, checker, in that order."""

from collections.abc import Iterable
from typing import Literal

from myriad.program.actions import Program
from myriad.program.checker import check
from myriad.program.lower import lower
from myriad.program.passes import apply_passes
from myriad.program.schedules import schedule

__all__ = ["build_program"]


def build_program(
    name: str,
    num_ranks: int,
    virtual_stages: int,
    num_micro_batches: int,
    *,
    zero: int,
    reduce: Literal["last", "each"],
    tied: bool,
    passes: Iterable[str] = ("decouple",),
    training: bool = True,
) -> Program:
    """The program of one iteration, checked. `BadInputError` for a shape the schedule does not admit."""
    computes = schedule(name, num_ranks, virtual_stages, num_micro_batches)
    lowered = lower(computes, zero=zero, reduce=reduce, tied=tied, training=training)
    program = apply_passes(lowered, passes)
    check(program)
    return program
