"""Lowering: adds the communication that a schedule's compute actions need, coupled and in the plainest place.

Between two compute actions of a rank come, in this order and only where needed:

    compute s   RELEASE s   EXCHANGE   REDUCE s   GATHER t   compute t

LOAD comes first, SYNC_TIED and the REDUCE that waits for it come near the end, and STEP comes last. An
exchange that only receives comes after GATHER: it would wait for a peer while the parameters could already
be gathered. Passes (`passes.py`) speed up this program; it is the baseline that they are measured against.

- GATHER: with ZeRO 1 and 2 once, before a stage's first forward (the optimizer has updated only this rank's
  part). With ZeRO 3 before each run of consecutive compute actions of one stage, with RELEASE after it.
- SYNC_TIED is at the end of both ranks: earlier, the last stage's rank would wait for the first stage's last
  backward, which may need gradients of other stages of that same rank.

Coupled transfers are placed in the gaps between a rank's compute actions.

Gap i of a rank precedes its i-th compute action; the last gap follows them all. A coupled send blocks
until its peer has reached the receive, so a bad place costs time or deadlocks. Three placements, plainest
first:

- natural: sends follow the compute action that produced them, receives precede the one that uses them, as in
  Megatron-LM's batched send and receive in 1F1B. Deadlocks if a stage's output comes round the ring long
  before it is used.
- paired: nothing is exchanged between a forward and the backward that follows it, as in Megatron-LM's
  interleaved 1F1B. Deadlocks if a backward depends on the output of that very forward.
- ordered: each transfer happens when it would be ready if no send blocked. Never deadlocks.

The last two follow one order over the whole pipeline: the first pending transfer of that order can always
happen. In all three, a channel's receives have the order of its sends.
"""

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
from myriad.program.timeline import ProgramError, Timeline, needed_transfer, timeline

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
    for placement in _placements(computes):
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


_Gaps = list[list[list[PipelineTransfer]]]
"""``gaps[rank][i]``: transfers of the exchange before the rank's i-th compute."""


def _lowered(computes: Program, lowering: Lowering, gaps: _Gaps) -> Program:
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


@dataclass(frozen=True, slots=True)
class _Link:
    """One payload between two ranks: from the gap after its producer to the gap before its user."""

    received: PipelineTransfer
    sent: PipelineTransfer
    send_gap: int
    receive_gap: int

    @property
    def sender(self) -> int:
        return self.received.peer

    @property
    def receiver(self) -> int:
        return self.sent.peer


def _links(program: Program) -> list[_Link]:
    """Return every transfer that the compute actions need, in no particular order."""
    gap_after: dict[tuple[bool, int, int], int] = {}
    for actions in program.ranks:
        for index, action in enumerate(actions):
            if action.kind is not Kind.BACKWARD_WEIGHT:
                gap_after[action.kind is Kind.FORWARD, action.stage, action.micro_batch] = index + 1
    links = []
    for rank, actions in enumerate(program.ranks):
        for index, action in enumerate(actions):
            needed = needed_transfer(program, action)
            if needed is None or needed[2] == rank:
                continue
            payload, stage, sender = needed
            batch = action.micro_batch
            received = PipelineTransfer(payload, stage, batch, sender, sends=False)
            sent = PipelineTransfer(payload, stage, batch, rank, sends=True)
            links.append(_Link(received, sent, gap_after[action.kind is Kind.FORWARD, stage, batch], index))
    return links


def _by_channel(links: list[_Link]) -> list[list[_Link]]:
    """Group the transfers by sender and receiver, in the order of sending."""
    channels: defaultdict[tuple[int, int], list[_Link]] = defaultdict(list)
    for link in sorted(links, key=lambda link: link.send_gap):
        channels[link.sender, link.receiver].append(link)
    return list(channels.values())


def _empty(program: Program) -> _Gaps:
    return [[[] for _ in range(len(actions) + 1)] for actions in program.ranks]


def _natural_gaps(program: Program) -> _Gaps:
    """Place sends after the producer and receives before the user, or earlier if a later payload of the
    channel is used earlier."""
    gaps = _empty(program)
    for channel in _by_channel(_links(program)):
        gap = len(program.ranks[channel[0].receiver])
        places = []
        for link in reversed(channel):
            gap = min(gap, link.receive_gap)
            places.append(gap)
        for link, place in zip(channel, reversed(places), strict=True):
            gaps[link.sender][link.send_gap].append(link.sent)
            gaps[link.receiver][place].append(link.received)
    return gaps


def _paired_gaps(program: Program) -> _Gaps:
    """Place transfers in one global order, with a forward and the backward after it as one unit. Raises
    `ProgramError` if that deadlocks."""
    return _by_one_order(program, [_outside_pairs(actions) for actions in program.ranks])


def _ordered_gaps(program: Program) -> _Gaps:
    """Place transfers in one global order, in any gap."""
    return _by_one_order(program, [list(range(len(actions) + 1)) for actions in program.ranks])


def _outside_pairs(actions: tuple[Action, ...]) -> list[int]:
    pairs = (a.kind is Kind.FORWARD and b.kind is not Kind.FORWARD for a, b in pairwise(actions))
    inside = {index for index, is_pair in enumerate(pairs, 1) if is_pair}
    return [gap for gap in range(len(actions) + 1) if gap not in inside]


def _by_one_order(program: Program, open_gaps: list[list[int]]) -> _Gaps:
    """Place transfers in the order in which they would be ready if no send blocked. The receive comes before
    the compute action that would then start."""
    links = [_moved(link, open_gaps) for link in _links(program)]
    spans = _unblocked(program, links).ranks
    computes = [[span for span in row if span.action.kind in COMPUTE] for row in spans]
    ready = {link.sent: computes[link.sender][link.send_gap - 1].end for link in links}
    links.sort(key=lambda link: (ready[link.sent], link.sender))
    gaps = _empty(program)
    turns = [0] * program.num_ranks
    for link in links:
        gaps[link.sender][link.send_gap].append(link.sent)
        to, gaps_of_receiver = link.receiver, open_gaps[link.receiver]
        while (gap := gaps_of_receiver[turns[to]]) < link.receive_gap and computes[to][gap].start < ready[
            link.sent
        ]:
            turns[to] += 1
        gaps[to][gap].append(link.received)
    return gaps


def _moved(link: _Link, open_gaps: list[list[int]]) -> _Link:
    """Move a transfer to the next open gap of the sender and the last possible one of the receiver."""
    sends, receives = open_gaps[link.sender], open_gaps[link.receiver]
    send_gap = sends[bisect_left(sends, link.send_gap)]
    return replace(
        link, send_gap=send_gap, receive_gap=receives[bisect_right(receives, link.receive_gap) - 1]
    )


def _unblocked(program: Program, links: list[_Link]) -> Timeline:
    """Return the compute actions' times with these gaps and all receives posted at the start. All times are
    whole numbers, so they are exact."""
    receives: list[list[Action]] = [[] for _ in program.ranks]
    gaps: list[defaultdict[int, list[Action]]] = [defaultdict(list) for _ in program.ranks]
    for channel in _by_channel(links):
        for link in channel:
            receives[link.receiver].append(Action(Kind.RECEIVE, transfers=(link.received,)))
            gaps[link.sender][link.send_gap].append(Action(Kind.SEND, transfers=(link.sent,)))
    for link in links:
        gaps[link.receiver][link.receive_gap].append(Action(Kind.WAIT, transfers=(link.received,)))
    ranks = []
    for rank, actions in enumerate(program.ranks):
        row = receives[rank]
        for index, action in enumerate(actions):
            row += [*gaps[rank][index], action]
        ranks.append((*row, *gaps[rank][len(actions)]))
    lowering = Lowering(zero=0, reduce="last", tied=False, training=True)
    costs = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
    marked = replace(program, ranks=tuple(ranks), lowering=lowering)
    return timeline(marked, lambda action: costs.get(action.kind, 0.0))


def _placements(program: Program) -> tuple[Callable[[Program], _Gaps], ...]:
    """Return the placements to try, plainest first; the last one never deadlocks. With one stage per rank,
    the paired placement cannot help and is left out."""
    if program.virtual_stages == 1:
        return _natural_gaps, _ordered_gaps
    return _natural_gaps, _paired_gaps, _ordered_gaps
