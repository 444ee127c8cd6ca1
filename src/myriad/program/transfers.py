"""Where the coupled transfers of a program go: which gap between two computes of a rank exchanges what.

Gap i of a rank precedes its i-th compute; the last gap follows them all. The natural place of a transfer is
the gap after the compute that made it (on the sender) and the gap before the compute that uses it (on the
receiver), as in Megatron-LM's batched send and receive. Two things can be wrong with that:

- order: if a sends x then y, b must receive x before y. A receive is pulled forward to where its successors
  are.
- deadlock: a coupled send blocks until its peer has reached the receive. Where natural places block each
  other, all transfers are placed by one order over the whole pipeline instead, the order in which they become
  ready when nothing blocks. It cannot deadlock: the first transfer in that order which has not happened can
  happen.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from myriad.program.actions import COMPUTE, Kind, Program, Transfer
from myriad.program.timeline import needed_transfer, timeline

__all__ = ["PLACEMENTS", "Gaps", "natural_gaps", "ordered_gaps"]

Gaps = list[list[list[Transfer]]]
"""``gaps[rank][i]``: transfers of the exchange before the rank's i-th compute."""


@dataclass(frozen=True, slots=True)
class _Link:
    """One payload on its way: from the gap after its producer to the gap before its user."""

    transfer: Transfer
    """As the receiver sees it."""
    receiver: int
    send_gap: int
    receive_gap: int

    @property
    def sender(self) -> int:
        return self.transfer.peer


def _links(program: Program) -> list[_Link]:
    """Every transfer the computes need, in no particular order."""
    made: dict[tuple[bool, int, int], int] = {}
    for actions in program.ranks:
        for index, action in enumerate(actions):
            if action.kind is not Kind.BACKWARD_WEIGHT:
                made[action.kind is Kind.FORWARD, action.stage, action.micro_batch] = index + 1
    links = []
    for rank, actions in enumerate(program.ranks):
        for index, action in enumerate(actions):
            needed = needed_transfer(program, action)
            if needed is None or needed[2] == rank:
                continue
            payload, stage, sender = needed
            transfer = Transfer(payload, stage, action.micro_batch, sender, sends=False)
            send_gap = made[action.kind is Kind.FORWARD, stage, action.micro_batch]
            links.append(_Link(transfer, rank, send_gap, index))
    return links


def _by_channel(links: list[_Link]) -> list[list[_Link]]:
    channels: defaultdict[tuple[int, int], list[_Link]] = defaultdict(list)
    for link in links:
        channels[link.sender, link.receiver].append(link)
    return [sorted(channel, key=lambda link: link.send_gap) for channel in channels.values()]


def _as_sent(link: _Link) -> Transfer:
    seen = link.transfer
    return Transfer(seen.payload, seen.stage, seen.micro_batch, link.receiver, sends=True)


def _empty(program: Program) -> Gaps:
    return [[[] for _ in range(len(actions) + 1)] for actions in program.ranks]


def natural_gaps(program: Program) -> Gaps:
    """Sends right after the compute that made them, receives right before the compute that uses them."""
    gaps = _empty(program)
    for channel in _by_channel(_links(program)):
        gap = len(program.ranks[channel[0].receiver])
        places = []
        for link in reversed(channel):
            gap = min(gap, link.receive_gap)
            places.append(gap)
        for link, place in zip(channel, reversed(places), strict=True):
            gaps[link.sender][link.send_gap].append(_as_sent(link))
            gaps[link.receiver][place].append(link.transfer)
    return gaps


def ordered_gaps(program: Program) -> Gaps:
    """Both sides of a transfer at the moment at which it is ready when nothing blocks: never stuck, but
    earlier."""
    spans = timeline(program).ranks
    starts = [[span.start for span in row if span.action.kind in COMPUTE] for row in spans]
    ends = [[span.start + span.duration for span in row if span.action.kind in COMPUTE] for row in spans]
    links = sorted(_links(program), key=lambda link: (ends[link.sender][link.send_gap - 1], link.sender))
    gaps = _empty(program)
    reached = [0] * program.num_ranks
    for link in links:
        ready = ends[link.sender][link.send_gap - 1]
        gaps[link.sender][link.send_gap].append(_as_sent(link))
        receiver = link.receiver
        while reached[receiver] < link.receive_gap and starts[receiver][reached[receiver]] < ready:
            reached[receiver] += 1
        gaps[receiver][reached[receiver]].append(link.transfer)
    return gaps


PLACEMENTS: tuple[Callable[[Program], Gaps], ...] = (natural_gaps, ordered_gaps)
"""Plainest first; the last one always works."""
