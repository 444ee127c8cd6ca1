"""Shapes that the schedules admit, for hypothesis."""

from hypothesis import strategies as st

from myriad.program.actions import Program
from myriad.program.build import update_early
from myriad.program.config import OverlapConfig
from myriad.program.lower import lower
from myriad.program.offload_passes import offload_activations, offload_state
from myriad.program.pairs import pair_computes
from myriad.program.passes import apply_passes, orthogonalize
from myriad.program.schedules import IN_A_V, schedule

KINDS_OF_SCHEDULES = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("zero-bubble", 1),
    ("interleaved", 2),
    ("zero-bubble-v", 2),
    ("dualpipe-v", 2),
)
"""Schedules of each kind, and the stages of a rank."""
ONE_STAGE_ONLY = ("1f1b", "eager-1f1b", "zero-bubble", "eager-zero-bubble")


@st.composite
def computes(draw: st.DrawFn, most_ranks: int = 6, most_micro_batches: int = 14) -> Program:
    name = draw(st.sampled_from(["gpipe", *ONE_STAGE_ONLY, "interleaved", *sorted(IN_A_V)]))
    virtual_stages = 1 if name in ONE_STAGE_ONLY else 2 if name in IN_A_V else draw(st.integers(1, 4))
    return schedule(
        name, draw(st.integers(1, most_ranks)), virtual_stages, draw(st.integers(1, most_micro_batches))
    )


@st.composite
def lowered(draw: st.DrawFn, most_ranks: int = 6, most_micro_batches: int = 14) -> Program:
    program = lower(
        draw(computes(most_ranks, most_micro_batches)),
        zero=draw(st.integers(0, 3)),
        reduce=draw(st.sampled_from(["last", "each"])),
        tied=draw(st.booleans()),
        training=draw(st.booleans()),
    )
    overlap = OverlapConfig(
        pipeline=draw(st.booleans()),
        receive_ahead=draw(st.integers(1, 5)),
        data=draw(st.booleans()),
        optimizer=draw(st.booleans()),
    )
    num_chunks = draw(st.integers(1, 3))
    program = apply_passes(program, overlap, num_chunks)
    end = (
        draw(st.sampled_from(["plain", "early", "orthogonalized"])) if program.lowering.training else "plain"
    )
    if end == "early" and overlap.optimizer:
        program = update_early(program, travels=draw(st.booleans()))
    program = orthogonalize(program) if end == "orthogonalized" else program
    if program.lowering.training and draw(st.booleans()):
        ratio, ahead = draw(st.sampled_from([0.5, 1.0])), draw(st.integers(0, 3))
        program = offload_activations(program, ratio, num_chunks, ahead)
    if program.lowering.training and overlap.optimizer and draw(st.booleans()):
        ratio, overlaps = draw(st.sampled_from([0.5, 1.0])), draw(st.booleans())
        program = offload_state(program, ratio, num_chunks, overlaps=overlaps)
    return program


@st.composite
def paired(draw: st.DrawFn, most_ranks: int = 4, most_micro_batches: int = 9) -> Program:
    """Programs of jobs with ``overlap.pairs``."""
    num_ranks = draw(st.integers(1, most_ranks))
    alternating = [("eager-1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("dualpipe-v", 2)]
    name, virtual_stages = draw(st.sampled_from(alternating + ([] if num_ranks > 1 else [("1f1b", 1)])))
    num_micro_batches = draw(st.integers(2, most_micro_batches))
    program = lower(
        schedule(name, num_ranks, virtual_stages, num_micro_batches, pairs=True),
        zero=draw(st.integers(0, 3)),
        reduce=draw(st.sampled_from(["last", "each"])),
        tied=draw(st.booleans()),
    )
    overlap = OverlapConfig(
        receive_ahead=draw(st.integers(1, 5)), data=draw(st.booleans()), optimizer=draw(st.booleans())
    )
    num_chunks = draw(st.integers(1, 3))
    program = apply_passes(program, overlap, num_chunks)
    if overlap.optimizer and draw(st.booleans()):
        program = update_early(program, travels=draw(st.booleans()))
    return pair_computes(program, num_chunks)
