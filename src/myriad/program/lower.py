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
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import attrgetter
from typing import Literal

from myriad.program.actions import (
    COMPUTE,
    MAKES_WEIGHT_GRADIENT,
    Action,
    Kind,
    Lowering,
    Payload,
    PipelineTransfer,
    Program,
)
from myriad.program.timeline import ProgramError, needed_transfer

__all__ = ["lower"]

_SENDS = attrgetter("sends")
_SECONDS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1, Kind.BACKWARD_WEIGHT: 1}
"""Seconds of a compute action while placements are compared: whole numbers, so that sums are exact."""


def lower(
    program: Program, *, zero: int, reduce: Literal["last", "each"], tied: bool, training: bool = True
) -> Program:
    """Return the program of a schedule with all its communication. ``training=False`` keeps the forwards
    only.

    Of all placements of transfers the fastest is used, the first of equal ones (`_SECONDS`, transfers take no
    time).
    """
    computes = _computes(program, training)
    lowering = Lowering(zero, reduce, tied, training)
    links = _links(computes)
    unblocked = _Unblocked(computes, links)
    best, least = None, math.inf
    for placement in _placements(computes):
        try:
            gaps = placement(computes, links, unblocked)
            makespan = _CoupledRun(computes, gaps).makespan()
        except ProgramError:
            continue
        if makespan < least:
            best, least = gaps, makespan
        if least <= unblocked.makespan:
            break
    assert best is not None, "the ordered placement never blocks for ever"
    return _lowered(computes, lowering, best)


def _computes(program: Program, training: bool) -> Program:
    wanted = COMPUTE if training else {Kind.FORWARD}
    ranks = (tuple(a for a in actions if a.kind in wanted) for actions in program.ranks)
    return replace(program, ranks=tuple(ranks), lowering=None)


_Gaps = list[list[list[PipelineTransfer]]]
"""``gaps[rank][i]``: transfers of the exchange before the rank's i-th compute."""


def _lowered(computes: Program, lowering: Lowering, gaps: _Gaps) -> Program:
    marked = replace(computes, lowering=lowering)
    ranks = (_Rank(marked, rank, gaps[rank]).actions() for rank in range(computes.num_ranks))
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

    def actions(self) -> tuple[Action, ...]:
        found = [Action(Kind.LOAD)]
        for index, compute in enumerate(self.computes):
            self._add_gap(found, index)
            found.append(compute)
        self._add_gap(found, len(self.computes))
        if self.tied_stage is not None:
            found += Action(Kind.SYNC_TIED, self.tied_stage), Action(Kind.REDUCE, self.tied_stage)
        if self.lowering.training:
            found.append(Action(Kind.STEP))
        return tuple(found)

    def _add_gap(self, found: list[Action], index: int) -> None:
        """Add everything between compute action ``index - 1`` and compute action ``index``."""
        # Receives are posted first: some transports lose half their bandwidth otherwise.
        transfers = tuple(sorted(self.gaps[index], key=_SENDS))
        sends = bool(transfers) and transfers[-1].sends
        if self.lowering.zero == 3 and index - 1 in self.block_ends:
            found.append(Action(Kind.RELEASE, self.computes[index - 1].stage))
        if sends:
            found.append(Action(Kind.EXCHANGE, transfers=transfers))
        if self._reduces(index - 1):
            found.append(Action(Kind.REDUCE, self.computes[index - 1].stage))
        if self.lowering.zero >= 1 and index in self.blocks:
            found.append(Action(Kind.GATHER, self.computes[index].stage))
        if transfers and not sends:
            found.append(Action(Kind.EXCHANGE, transfers=transfers))

    def _reduces(self, index: int) -> bool:
        """Return whether a stage's gradients are reduced after a compute action."""
        if index < 0 or self.computes[index].kind not in MAKES_WEIGHT_GRADIENT:
            return False
        stage = self.computes[index].stage
        is_last = index == self.last_backward[stage]
        if is_last and stage == self.tied_stage:
            return False
        return is_last or self.lowering.reduce == "each"


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


def _natural_gaps(program: Program, links: list[_Link], unblocked: "_Unblocked") -> _Gaps:
    """Place sends after the producer and receives before the user, or earlier if a later payload of the
    channel is used earlier."""
    gaps = _empty(program)
    for channel in _by_channel(links):
        gap = len(program.ranks[channel[0].receiver])
        places = []
        for link in reversed(channel):
            gap = min(gap, link.receive_gap)
            places.append(gap)
        for link, place in zip(channel, reversed(places), strict=True):
            gaps[link.sender][link.send_gap].append(link.sent)
            gaps[link.receiver][place].append(link.received)
    return gaps


def _paired_gaps(program: Program, links: list[_Link], unblocked: "_Unblocked") -> _Gaps:
    """Place transfers in one global order, with a forward and the backward after it as one unit. Raises
    `ProgramError` if that deadlocks."""
    open_gaps = [_outside_pairs(actions) for actions in program.ranks]
    moved = [_moved(link, open_gaps) for link in links]
    return _by_one_order(program, moved, open_gaps, _Unblocked(program, moved))


def _ordered_gaps(program: Program, links: list[_Link], unblocked: "_Unblocked") -> _Gaps:
    """Place transfers in one global order, in any gap."""
    open_gaps = [list(range(len(actions) + 1)) for actions in program.ranks]
    return _by_one_order(program, links, open_gaps, unblocked)


def _outside_pairs(actions: tuple[Action, ...]) -> list[int]:
    pairs = (a.kind is Kind.FORWARD and b.kind is not Kind.FORWARD for a, b in pairwise(actions))
    inside = {index for index, is_pair in enumerate(pairs, 1) if is_pair}
    return [gap for gap in range(len(actions) + 1) if gap not in inside]


def _by_one_order(
    program: Program, links: list[_Link], open_gaps: list[list[int]], run: "_Unblocked"
) -> _Gaps:
    """Place transfers in the order in which they would be ready if no send blocked. The receive comes before
    the compute action that would then start."""
    starts, ends = run.starts, run.ends
    gaps = _empty(program)
    turns = [0] * program.num_ranks
    for link in sorted(links, key=lambda link: (ends[link.sender][link.send_gap - 1], link.sender)):
        gaps[link.sender][link.send_gap].append(link.sent)
        to, gaps_of_receiver = link.receiver, open_gaps[link.receiver]
        ready = ends[link.sender][link.send_gap - 1]
        while (gap := gaps_of_receiver[turns[to]]) < link.receive_gap and starts[to][gap] < ready:
            turns[to] += 1
        gaps[to][gap].append(link.received)
    return gaps


def _moved(link: _Link, open_gaps: list[list[int]]) -> _Link:
    """Move a transfer to the next open gap of the sender and the last possible one of the receiver."""
    sends, receives = open_gaps[link.sender], open_gaps[link.receiver]
    send_gap = sends[bisect_left(sends, link.send_gap)]
    receive_gap = receives[bisect_right(receives, link.receive_gap) - 1]
    return _Link(link.received, link.sent, send_gap, receive_gap)


class _Unblocked:
    """When each compute action starts and ends if every receive is posted at the start, and sends and waits
    are in the transfers' gaps. Raises `ProgramError` if ranks wait forever."""

    def __init__(self, program: Program, links: list[_Link]) -> None:
        self.program = program
        self.starts: list[list[int]] = [[] for _ in program.ranks]
        self.ends: list[list[int]] = [[] for _ in program.ranks]
        self.waits: list[defaultdict[int, list[_Link]]] = [defaultdict(list) for _ in program.ranks]
        for link in links:
            self.waits[link.receiver][link.receive_gap].append(link)
        self.blocked: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
        """Ranks that wait until another one, by its number, has reached a gap."""
        self.movable = deque(range(program.num_ranks))
        while self.movable:
            self._advance(self.movable.popleft())
        for rank, actions in enumerate(program.ranks):
            if (index := len(self.ends[rank])) < len(actions):
                raise ProgramError("waits for ever", rank, index, actions[index])

    @property
    def makespan(self) -> int:
        """End of the last compute action."""
        return max((row[-1] for row in self.ends if row), default=0)

    def _advance(self, rank: int) -> None:
        starts, ends, waits = self.starts[rank], self.ends[rank], self.waits[rank]
        for action in self.program.ranks[rank][len(ends) :]:
            start = ends[-1] if ends else 0
            for link in waits.get(len(ends), ()):
                sent = self.ends[link.sender]
                if len(sent) < link.send_gap:
                    self.blocked[link.sender, link.send_gap].append(rank)
                    return
                start = max(start, sent[link.send_gap - 1])
            starts.append(start)
            ends.append(start + _SECONDS[action.kind])
            self.movable.extend(self.blocked.pop((rank, len(ends)), ()))


class _CoupledRun:
    """Execution of compute actions with one exchange in each gap that has transfers. An exchange ends when
    all of its transfers are posted on both sides."""

    def __init__(self, program: Program, gaps: _Gaps) -> None:
        self.program, self.gaps = program, gaps
        self.clock = [0] * program.num_ranks
        self.gap = [0] * program.num_ranks
        self.posted = [False] * program.num_ranks
        self.open: defaultdict[tuple[int, int, bool], deque[tuple[PipelineTransfer, int]]]
        self.open = defaultdict(deque)
        """Transfers that one side has posted, with the time, by sender, receiver and whether it sends."""
        self.arrived: dict[tuple[Payload, int, int], int] = {}
        self.movable = deque(range(program.num_ranks))

    def makespan(self) -> int:
        """Return the end of the last action. Raises `ProgramError` if ranks wait forever."""
        while self.movable:
            self._advance(self.movable.popleft())
        for rank, actions in enumerate(self.program.ranks):
            if self.gap[rank] <= len(actions):
                raise ProgramError("its exchange waits for ever", rank)
        return max(self.clock)

    def _advance(self, rank: int) -> None:
        actions, gaps = self.program.ranks[rank], self.gaps[rank]
        for gap in range(self.gap[rank], len(gaps)):
            if gaps[gap] and not self._exchange(rank, gaps[gap]):
                self.gap[rank] = gap
                return
            if gap < len(actions):
                self.clock[rank] += _SECONDS[actions[gap].kind]
        self.gap[rank] = len(gaps)

    def _exchange(self, rank: int, transfers: list[PipelineTransfer]) -> bool:
        """Post the transfers, and return whether all of them have arrived."""
        if not self.posted[rank]:
            self.posted[rank] = True
            for one in transfers:
                self._post(rank, one)
        latest = self.clock[rank]
        for one in transfers:
            time = self.arrived.get((one.payload, one.stage, one.micro_batch))
            if time is None:
                return False
            latest = max(latest, time)
        self.clock[rank], self.posted[rank] = latest, False
        return True

    def _post(self, rank: int, transfer: PipelineTransfer) -> None:
        sends, now = transfer.sends, self.clock[rank]
        ends = (rank, transfer.peer) if sends else (transfer.peer, rank)
        others = self.open[*ends, not sends]
        if not others:
            self.open[*ends, sends].append((transfer, now))
            return
        other, then = others.popleft()
        key = transfer.payload, transfer.stage, transfer.micro_batch
        if key != (other.payload, other.stage, other.micro_batch):
            raise ProgramError("receives in another order than its peer sends", rank)
        self.arrived[key] = max(now, then)
        self.movable.append(transfer.peer)


_Placement = Callable[[Program, list[_Link], _Unblocked], _Gaps]
"""Called with the compute actions, their transfers, and the run in which no send blocks."""


def _placements(program: Program) -> tuple[_Placement, ...]:
    """Return the placements to try, plainest first; the last one never deadlocks. With one stage per rank,
    the paired placement cannot help and is left out."""
    if program.virtual_stages == 1:
        return _natural_gaps, _ordered_gaps
    return _natural_gaps, _paired_gaps, _ordered_gaps
