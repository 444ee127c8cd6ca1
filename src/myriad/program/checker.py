"""The checker: proves that a program is complete, in order and deadlock-free, and computes its bubble.

Two proofs, each linear in the number of actions:

1. Each rank alone (`rank_check.py`): every compute action runs once, every input is there before its use and
   is sent after it is computed, parameters are whole when used, gradients are reduced after their backwards.
2. All ranks together (`timeline.py`): the program is simulated. Sends and receives must match in the same
   order on both sides, and every rank must reach its end.

The bubble of a rank is the time in which it computes nothing, in units of a whole rank's forward. With p
ranks and at least p micro-batches, GPipe and 1F1B have 3 (p - 1), interleaving 3 (p - 1) / v, zero-bubble
(ZB-H1) p - 1.
"""

from dataclasses import dataclass

from myriad.program.actions import Kind, Program
from myriad.program.rank_check import check_rank
from myriad.program.timeline import ProgramError, timeline

__all__ = ["ProgramCost", "check"]


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """The cost of a checked program. Times are in units of a whole rank's forward (backward 2, each half 1,
    transfers 0)."""

    makespan: float
    """Time from the first action to the last."""
    bubble: tuple[float, ...]
    """Time of each rank without compute."""
    bubble_ratio: float
    """The bubbles' share of all ranks' time."""
    peak_in_flight: tuple[float, ...]
    """Largest number of micro-batches whose activations each rank holds at once (1 of v stages counts
    1/v)."""


def check(program: Program) -> ProgramCost:
    """Prove a program and return its costs. Raises `ProgramError` with the rank and the action."""
    _check_form(program)
    for rank in range(program.num_ranks):
        check_rank(program, rank)
    spans = timeline(program)
    makespan = spans.makespan
    bubble = tuple(makespan - spans.busy(rank) for rank in range(program.num_ranks))
    ratio = sum(bubble) / (makespan * program.num_ranks) if makespan else 0.0
    peaks = tuple(_peak(program, rank) for rank in range(program.num_ranks))
    return ProgramCost(makespan, bubble, ratio, peaks)


def _check_form(program: Program) -> None:
    owners = set(program.stage_rank)
    if program.num_micro_batches < 1 or not program.stage_rank or owners != set(range(program.num_ranks)):
        raise ProgramError("every rank needs at least one stage, and there must be at least one micro-batch")
    per_rank = program.num_stages / program.num_ranks
    if any(program.stage_rank.count(rank) != per_rank for rank in owners):
        raise ProgramError(f"ranks own different numbers of stages: {program.stage_rank}")


def _peak(program: Program, rank: int) -> float:
    held = peak = 0
    for action in program.ranks[rank]:
        if action.kind is Kind.FORWARD:
            held += 1
            peak = max(peak, held)
        elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            held -= 1
    forward_only = program.lowering is not None and not program.lowering.training
    return (1 if forward_only else peak) / program.virtual_stages
