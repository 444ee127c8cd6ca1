"""Lowering: adds the communication that a schedule's compute actions need, coupled and in the plainest place.

Between two compute actions of a rank come, in this order and only where needed:

    compute s   RELEASE s   EXCHANGE   REDUCE s   GATHER t   compute t

LOAD comes first, SYNC_TIED and the REDUCE that waits for it come near the end, and STEP comes last. An
exchange that only receives comes after GATHER: it would wait for a peer while the parameters could already be
gathered. Passes (`passes.py`) speed up this program; it is the baseline that they are measured against.

- GATHER: with ZeRO 1 and 2 once, before a stage's first forward (the optimizer has updated only this rank's
  part). With ZeRO 3 before each run of consecutive compute actions of one stage, with RELEASE after it.
- SYNC_TIED is at the end of both ranks: earlier, the last stage's rank would wait for the first stage's last
  backward, which may need gradients of other stages of that same rank.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from myriad.program.actions import (
    COMPUTE,
    MAKES_WEIGHT_GRADIENT,
    Action,
    Kind,
    Lowering,
    PipelineTransfer,
    Program,
)
from myriad.program.timeline import ProgramError, timeline
from myriad.program.transfers import Gaps, placements

__all__ = ["lower"]

_TOLERANCE = 1e-6


def lower(
    program: Program, *, zero: int, reduce: Literal["last", "each"], tied: bool, training: bool = True
) -> Program:
    """Return the program of a schedule with all its communication. ``training=False`` keeps the forwards
    only.

    Of all placements of transfers the fastest is used, the first of equal ones (unit costs, transfers take no
    time).
    """
    computes = _computes(program, training)
    lowering = Lowering(zero, reduce, tied, training)
    unblocked = timeline(computes).makespan
    best, least = None, math.inf
    for placement in placements(computes):
        try:
            candidate = _lowered(computes, lowering, placement(computes))
            makespan = timeline(candidate).makespan
        except ProgramError:
            continue
        if makespan < least - _TOLERANCE:
            best, least = candidate, makespan
        if least <= unblocked + _TOLERANCE:
            break
    assert best is not None, "the ordered placement never blocks for ever"
    return best


def _computes(program: Program, training: bool) -> Program:
    wanted = COMPUTE if training else {Kind.FORWARD}
    ranks = (tuple(a for a in actions if a.kind in wanted) for actions in program.ranks)
    return replace(program, ranks=tuple(ranks), lowering=None)


def _lowered(computes: Program, lowering: Lowering, gaps: Gaps) -> Program:
    marked = replace(computes, lowering=lowering)
    ranks = (tuple(_Rank(marked, rank, gaps[rank]).actions()) for rank in range(computes.num_ranks))
    return replace(marked, ranks=tuple(ranks))


class _Rank:
    """Writes the lowered list of one rank."""

    def __init__(self, program: Program, rank: int, gaps: list[list[PipelineTransfer]]) -> None:
        assert program.lowering is not None
        self.lowering = program.lowering
        self.computes, self.gaps = program.ranks[rank], gaps
        self.blocks = _blocks(self.computes) if self.lowering.zero == 3 else _first_to_last(self.computes)
        self.block_ends = frozenset(self.blocks.values())
        ends = {(0, program.stage_rank[0]), (program.num_stages - 1, program.stage_rank[-1])}
        self.tied_stage = next((s for s, r in ends if r == rank), None) if program.syncs_tied else None
        self.last_backward = {
            action.stage: index
            for index, action in enumerate(self.computes)
            if action.kind in MAKES_WEIGHT_GRADIENT
        }

    def actions(self) -> Iterator[Action]:
        yield Action(Kind.LOAD)
        for index, compute in enumerate(self.computes):
            yield from self._gap(index)
            yield compute
        yield from self._gap(len(self.computes))
        if self.tied_stage is not None:
            yield Action(Kind.SYNC_TIED, self.tied_stage)
            yield Action(Kind.REDUCE, self.tied_stage)
        if self.lowering.training:
            yield Action(Kind.STEP)

    def _gap(self, index: int) -> Iterator[Action]:
        """Yield everything between compute action ``index - 1`` and compute action ``index``."""
        # Receives are posted first: some transports lose half their bandwidth otherwise.
        transfers = tuple(sorted(self.gaps[index], key=lambda transfer: transfer.sends))
        exchange = [Action(Kind.EXCHANGE, transfers=transfers)] if transfers else []
        sends = any(transfer.sends for transfer in transfers)
        yield from self._release(index - 1)
        if sends:
            yield from exchange
        yield from self._reduce(index - 1)
        yield from self._gather(index)
        if not sends:
            yield from exchange

    def _gather(self, index: int) -> Iterator[Action]:
        if self.lowering.zero >= 1 and index in self.blocks:
            yield Action(Kind.GATHER, self.computes[index].stage)

    def _release(self, index: int) -> Iterator[Action]:
        if self.lowering.zero == 3 and index in self.block_ends:
            yield Action(Kind.RELEASE, self.computes[index].stage)

    def _reduce(self, index: int) -> Iterator[Action]:
        if index < 0 or self.computes[index].kind not in MAKES_WEIGHT_GRADIENT:
            return
        stage = self.computes[index].stage
        is_last = index == self.last_backward[stage]
        if is_last and stage == self.tied_stage:
            return
        if is_last or self.lowering.reduce == "each":
            yield Action(Kind.REDUCE, stage)


def _blocks(computes: tuple[Action, ...]) -> dict[int, int]:
    """Map the first to the last compute action of every run of consecutive compute actions of one stage."""
    changes = [i for i, (a, b) in enumerate(pairwise(computes), 1) if a.stage != b.stage]
    starts = [0, *changes]
    return dict(zip(starts, [*(change - 1 for change in changes), len(computes) - 1], strict=True))


def _first_to_last(computes: tuple[Action, ...]) -> dict[int, int]:
    """Map the first to the last compute action of every stage."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for index, action in enumerate(computes):
        first.setdefault(action.stage, index)
        last[action.stage] = index
    return {first[stage]: last[stage] for stage in first}
