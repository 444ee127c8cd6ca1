"""Placement of a program's coupled transfers in the gaps between a rank's compute actions.

Gap i of a rank precedes its i-th compute action; the last gap follows them all. A coupled send blocks until
its peer has reached the receive, so a bad place costs time or deadlocks. Three placements, plainest first:

- natural: sends follow the compute action that produced them, receives precede the one that uses them, as in
  Megatron-LM's batched send and receive in 1F1B. Deadlocks if a stage's output comes round the ring long
  before it is used.
- paired: nothing is exchanged between a forward and the backward that follows it, as in Megatron-LM's
  interleaved 1F1B. Deadlocks if a backward depends on the output of that very forward.
- ordered: each transfer happens when it would be ready if no send blocked. Never deadlocks.

The last two follow one order over the whole pipeline: the first pending transfer of that order can always
happen. In all three, a channel's receives have the order of its sends.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from myriad.program.actions import COMPUTE, Action, Kind, Lowering, PipelineTransfer, Program
from myriad.program.timeline import Timeline, needed_transfer, timeline

__all__ = ["Gaps", "natural_gaps", "ordered_gaps", "paired_gaps", "placements"]

Gaps = list[list[list[PipelineTransfer]]]
"""``gaps[rank][i]``: transfers of the exchange before the rank's i-th compute."""


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


def _empty(program: Program) -> Gaps:
    return [[[] for _ in range(len(actions) + 1)] for actions in program.ranks]


def natural_gaps(program: Program) -> Gaps:
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


def paired_gaps(program: Program) -> Gaps:
    """Place transfers in one global order, with a forward and the backward after it as one unit. Raises
    `ProgramError` if that deadlocks."""
    return _by_one_order(program, [_outside_pairs(actions) for actions in program.ranks])


def ordered_gaps(program: Program) -> Gaps:
    """Place transfers in one global order, in any gap."""
    return _by_one_order(program, [list(range(len(actions) + 1)) for actions in program.ranks])


def _outside_pairs(actions: tuple[Action, ...]) -> list[int]:
    pairs = (a.kind is Kind.FORWARD and b.kind is not Kind.FORWARD for a, b in pairwise(actions))
    inside = {index for index, is_pair in enumerate(pairs, 1) if is_pair}
    return [gap for gap in range(len(actions) + 1) if gap not in inside]


def _by_one_order(program: Program, open_gaps: list[list[int]]) -> Gaps:
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


def placements(program: Program) -> tuple[Callable[[Program], Gaps], ...]:
    """Return the placements to try, plainest first; the last one never deadlocks. With one stage per rank,
    the paired placement cannot help and is left out."""
    if program.virtual_stages == 1:
        return natural_gaps, ordered_gaps
    return natural_gaps, paired_gaps, ordered_gaps
