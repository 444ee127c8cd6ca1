"""From a layout to the program that its ranks run: schedule, lowering, passes, checker."""

from myriad.comm.layout import Layout
from myriad.program.actions import Program
from myriad.program.checker import check
from myriad.program.config import OverlapConfig
from myriad.program.lower import lower
from myriad.program.passes import apply_passes
from myriad.program.schedules import schedule

__all__ = ["build_program"]


def build_program(
    layout: Layout,
    overlap: OverlapConfig,
    num_micro_batches: int,
    *,
    tied: bool,
    training: bool,
    num_chunks: int = 1,
) -> Program:
    """A checked program for one iteration, or (not ``training``) for one validation. Each stage of the layout
    is ``num_chunks`` stages of the program."""
    program = schedule(layout.schedule_name, layout.pp, layout.virtual_stages, num_micro_batches)
    program = lower(program, zero=layout.zero, reduce=layout.reduce, tied=tied, training=training)
    program = apply_passes(program, overlap, num_chunks)
    check(program)
    return program
