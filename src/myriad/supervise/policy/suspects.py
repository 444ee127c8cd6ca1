"""Finds the rank that holds up the others in a hang, from all rows of the progress pages. No clock is used.

A rank inside communication has entered more operations than it has left. It waits for the rank that has begun
the fewest operations of its group. That rank may wait for another, and so on, until the chain ends:

    rank 0   waits for dp 7                rank 1 has begun dp 6: rank 0 waits for it
    rank 1   waits for tp 40               rank 3 has begun tp 39: rank 1 waits for it
    rank 3   in "backward", tp 39          outside all communication: it holds them up

    a rank outside                         it is the suspect: its host hangs, or its GPU
    an operation that all have begun       the suspects are the ranks still in it, or a link between them
    a rank that is in the chain already    a cycle: the ranks issue operations in different orders

On GPUs the rows show what the devices have begun, not their hosts, which run ahead. Counts are compared only
within a group, because pipeline stages have different programs. If the layout or the counts are unknown, all
ranks are one group.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Literal

from myriad.supervise.observations import RankStatus
from myriad.telemetry.progress.operation_counters import COLLECTIVES, COUNTERS

__all__ = ["Seat", "Suspects", "find_suspects"]

Seat = tuple[int, int, int]
"""Replica, pipeline stage and tensor-parallel index of a rank."""
_SEVERAL = len(COLLECTIVES), (len(COUNTERS) + len(COLLECTIVES)) // 2
"""The first counter of messages sent, and the first of messages received."""


@dataclass(frozen=True)
class Suspects:
    """The suspect ranks, and the reason."""

    ranks: tuple[int, ...]
    why: str
    is_of_the_program: bool = False
    """Whether the program, and no node, is the cause."""


@dataclass(frozen=True)
class _End:
    """The end of a chain of waiting ranks."""

    kind: Literal["outside", "operation", "circle"]
    ranks: tuple[int, ...]
    """outside: one rank. operation: the ranks that are in the operation. circle: each rank waits for the next
    one."""
    counter: int = 0
    """Counter of the operation; -1: unknown."""
    number: int = 0


def find_suspects(seen: Sequence[RankStatus], seats: Mapping[int, Seat] | None = None) -> Suspects:
    """Return the suspect ranks of a hang. These are stopped ranks, if there are any. Else it is the rank
    outside communication for which most ranks inside wait. Else they are the ranks of the operation for which
    most ranks wait; their link is then as suspect as they are."""
    stopped = tuple(one.rank for one in seen if one.state == "T")
    if stopped:
        return Suspects(stopped, "stopped (SIGSTOP)")
    inside = [one for one in seen if one.entered > one.left]
    outside = [one for one in seen if one.entered <= one.left]
    if outside and not inside:
        behind = min(outside, key=_position)
        together = tuple(one.rank for one in outside if _position(one) == _position(behind))
        return Suspects(together, f"{_place(behind)}; no rank communicates")
    waits = _Waits(seen, seats or {})
    ends = Counter(waits.end_of(one) for one in inside)
    if outside:
        held_up = {end.ranks[0]: count for end, count in ends.items() if end.kind == "outside"}
        behind = min(outside, key=lambda one: (-held_up.get(one.rank, 0), _position(one), one.rank))
        number = behind.entered + 1
        why = f"{_place(behind)}, has not entered communication {number}; {len(inside)} waiting"
        alike = tuple(one.rank for one in outside if waits.are_alike(one, behind))
        if len(alike) > 1:
            why += "; its tensor-parallel peers are there too: one of them or a link between them"
        return Suspects(alike, why)
    end = min(ends, key=lambda end: (-ends[end], end.ranks))
    return Suspects(end.ranks, waits.words(end), end.kind == "circle")


def _position(one: RankStatus) -> tuple[int, int]:
    return one.step, one.entered


def _place(one: RankStatus) -> str:
    where = "its GPU is " if one.comm is not None and one.comm.on_device else ""
    return f'{where}in "{one.activity or one.phase}" of step {one.step}'


class _Waits:
    """The waits-for graph of all ranks."""

    def __init__(self, seen: Sequence[RankStatus], seats: Mapping[int, Seat]) -> None:
        self._rows = {one.rank: one for one in seen}
        self._is_known = all(one.comm is not None and one.rank in seats for one in seen)
        self._seats = seats
        self._ranks = {seat: rank for rank, seat in seats.items()}
        self._length = 1 + max((stage for _, stage, _ in seats.values()), default=0)
        self._groups: dict[tuple[int, tuple[int, ...]], list[RankStatus]] = {}
        self._behind: dict[tuple[int, tuple[int, ...]], RankStatus] = {}
        """Rank of each group that has begun the fewest operations."""
        for one in seen:
            for counter in range(len(COLLECTIVES)):
                if self._takes_part(one.rank, counter):
                    self._groups.setdefault((counter, self._group(one.rank, counter)), []).append(one)
        for key, members in self._groups.items():
            self._behind[key] = min(members, key=partial(self._order, key[0]))
        self._ends: dict[int, _End] = {}

    def _group(self, rank: int, counter: int) -> tuple[int, ...]:
        """Return the key that the members of a rank's group share."""
        if not self._is_known:
            return ()
        replica, stage, tensor = self._seats[rank]
        groups = {"world": (), "dp": (stage, tensor), "tp": (replica, stage), "tied": (replica, tensor)}
        return groups[COLLECTIVES[counter]]

    def _takes_part(self, rank: int, counter: int) -> bool:
        """Return whether a rank does the operations of a counter: only the first and the last stage share
        tied parameters."""
        if not self._is_known or COLLECTIVES[counter] != "tied":
            return True
        return self._seats[rank][1] in (0, self._length - 1)

    def are_alike(self, one: RankStatus, other: RankStatus) -> bool:
        """Return whether the rows of two ranks outside communication show no difference. One tensor-parallel
        peer may wait for another inside a captured graph or a fused operator, which counts nothing."""
        if not self._is_known or one.comm is None or other.comm is None:
            return one.rank == other.rank
        tensor = COLLECTIVES.index("tp")
        same_group = self._group(one.rank, tensor) == self._group(other.rank, tensor)
        return same_group and (one.activity, one.comm) == (other.activity, other.comm)

    def _order(self, counter: int, one: RankStatus) -> tuple[int, int, int]:
        return 0 if self._is_known else one.step, self._count(one, counter), one.rank

    def _count(self, one: RankStatus, counter: int) -> int:
        return one.comm.counters[counter] if self._is_known and one.comm is not None else one.entered

    def _counters(self, one: RankStatus) -> Iterator[int]:
        """Yield the counters of the operations that a rank waits for."""
        if not self._is_known or one.comm is None:
            yield 0
            return
        yield from (counter for counter in range(len(COUNTERS)) if one.comm.waits >> counter & 1)

    def _peer(self, rank: int, counter: int) -> tuple[RankStatus | None, int]:
        """Return the rank at the other end of a message, and its counter there."""
        sent, received = _SEVERAL
        sends, up = counter < received, COUNTERS[counter].split()[1] == "up"
        replica, stage, tensor = self._seats[rank]
        stage = (stage + (1 if sends == up else -1)) % self._length
        peer = self._rows.get(self._ranks.get((replica, stage, tensor), -1))
        return peer, counter + (received - sent) * (1 if sends else -1)

    def _awaited(self, one: RankStatus, counter: int) -> RankStatus | None:
        """Return the rank that has not begun the operation; ``None``: all ranks have begun it."""
        if counter < _SEVERAL[0]:
            other: RankStatus | None = self._behind[counter, self._group(one.rank, counter)]
            its = counter
        else:
            other, its = self._peer(one.rank, counter)
        return other if other is not None and self._count(other, its) < self._count(one, counter) else None

    def end_of(self, one: RankStatus) -> _End:
        """Follow the chain of waiting ranks to its end."""
        way: list[int] = []
        while one.rank not in self._ends:
            if one.rank in way:
                circle = tuple(way[way.index(one.rank) :])
                first = circle.index(min(circle))
                end = _End("circle", circle[first:] + circle[:first])
                break
            way.append(one.rank)
            if one.entered <= one.left:
                end = _End("outside", (one.rank,))
                break
            awaited = [self._awaited(one, counter) for counter in self._counters(one)]
            following = next((other for other in awaited if other is not None), None)
            if following is None:
                end = self._operation(one)
                break
            one = following
        else:
            end = self._ends[one.rank]
        self._ends.update(dict.fromkeys(way, end))
        return end

    def _operation(self, one: RankStatus) -> _End:
        """Return the end of a chain whose operation all ranks have begun."""
        counter = next(self._counters(one), None)
        if counter is None:
            return _End("operation", (one.rank,), -1, one.entered)
        number = self._count(one, counter)
        if counter < _SEVERAL[0]:
            members = self._groups[counter, self._group(one.rank, counter)]
            stuck = [
                other
                for other in members
                if other.entered > other.left
                and counter in self._counters(other)
                and self._count(other, counter) == number
            ]
        else:
            peer, _ = self._peer(one.rank, counter)
            stuck = [one] if peer is None else [one, peer]
        return _End("operation", tuple(sorted(other.rank for other in stuck)), counter, number)

    def words(self, end: _End) -> str:
        """Explain why these ranks are suspects if no rank is outside communication."""
        one = self._rows[end.ranks[0]]
        if end.kind == "circle":
            ranks = pairwise([*end.ranks, end.ranks[0]])
            each = (f'rank {rank} in "{self._rows[rank].activity}" for rank {other}' for rank, other in ranks)
            return f"each waits for another: {', '.join(each)}; their operations are in different orders"
        is_counted = self._is_known and end.counter >= 0
        of = f" of {COUNTERS[end.counter]}" if is_counted else ""
        what = f'"{one.activity}", number {end.number}{of}'
        if end.counter < _SEVERAL[0]:
            why = f"all wait in communication; these in the earliest, {what}"
        else:
            why = f"all wait in communication; these for a message that is under way, {what}"
        return f"{why}: one of them or a link between them"
