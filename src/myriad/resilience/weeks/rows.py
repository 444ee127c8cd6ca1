"""What the one rank shows that stands for all of a node, in each state that the decisions tell apart."""

from dataclasses import replace

from myriad.resilience.facts import Digest, RankSeen

__all__ = ["hung_row", "starting_row", "training_row"]

_ENTERED = 7
"""Communication: any number."""


def training_row(
    rank: int,
    step: int,
    step_seconds: float,
    idle_seconds: float,
    busy_seconds: float = 0.0,
    digests: tuple[Digest, ...] = (),
) -> RankSeen:
    """``step_seconds``: 0 in an attempt's first step; ``idle_seconds``: since a node was lost, if one was."""
    busy = busy_seconds if step_seconds else 0.0
    counts = (step, _ENTERED, _ENTERED - 1)
    return RankSeen(rank, 1, "S", "step", "reduce", *counts, idle_seconds, step_seconds, busy, digests)


def starting_row(rank: int, idle_seconds: float) -> RankSeen:
    """Since the attempt began: the worst case, as nothing is written on the page until the rank is up."""
    return _row(rank, "starting", -1, idle_seconds=idle_seconds)


def hung_row(
    rank: int, step: int, phase: str, step_seconds: float, idle_seconds: float, named: bool
) -> RankSeen:
    """``named``: this one has not entered the communication in which the others wait."""
    entered = _ENTERED - named
    row = _row(rank, phase, step, step_seconds=step_seconds, idle_seconds=idle_seconds)
    return replace(row, entered=entered)


def _row(rank: int, phase: str, step: int, *, idle_seconds: float, step_seconds: float = 0.0) -> RankSeen:
    left = _ENTERED - 1
    return RankSeen(rank, 1, "S", phase, "reduce", step, _ENTERED, left, idle_seconds, step_seconds)
