"""The second proof: no deadlock on GPUs, where NCCL's messages are kernels that wait for one another.

The checker (`myriad.program.checker`) lets every rank post without waiting. On a GPU a program that it
accepts may still hang. So this proof takes what ranks give their devices
(`myriad.program.device_operations`), and what CUDA and NCCL make of it:

    stream         its operations run one after the other
    queue          streams share the device's queues to the host (CUDA_DEVICE_MAX_CONNECTIONS): what is at the
                   head of one and cannot begin holds back what is behind it, of other streams too
    communicator   made at its first use, for which the host waits until the other members come to theirs
    kernel         loaded at its first launch, for which the host waits until the device has done all before

An operation is four events: the host comes to it, gives it, it begins, it is done. Each event waits for some
others and happens when all of them have: nothing is chosen, so the order in which things happen in time
changes nothing. A program deadlocks in every run or in none, and it does where the events that wait for each
other form a cycle. To sort them once, in time linear in the number of operations, is the proof.

Not part of it: multiprocessors that waiting kernels take from each other, memory that is allocated or freed
in the middle (cudaFree waits for the device), and what goes wrong.

Sources: https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/lazy-loading.html (potential
hazards), https://github.com/NVIDIA/nccl/issues/783 (streams and connections), pytorch PR 160210
(communicators)."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from myriad.program.actions import Kind
from myriad.program.device_operations import Operation, streams_of

__all__ = [
    "Deadlock",
    "Device",
    "Moment",
    "Queues",
    "Wait",
    "deal_in_turn",
    "find_deadlock",
    "own_queue",
    "single_queue",
]

Moment = Literal["at start", "lazily"]
"""Before the first iteration, or at the first use."""
Queues = Callable[[int], int]
"""Number of a rank's stream, in the order in which they are made, to the queue that it uses."""


def own_queue(stream: int) -> int:
    """Each stream has a queue of its own."""
    return stream


def single_queue(stream: int) -> int:
    """All streams share one queue. What is free of deadlock here is so for every assignment of streams to any
    number of queues: each of them lets fewer operations hold back others."""
    return 0


def deal_in_turn(num_queues: int, stride: int = 1) -> Queues:
    """Streams get queues in the order in which they are made. ``stride``: streams that are made for each one
    that is used."""
    return lambda stream: stream * stride % num_queues


@dataclass(frozen=True, slots=True)
class Device:
    """What is assumed of GPUs and NCCL."""

    communicators: Moment = "at start"
    """When those of pairs are made and connected."""
    kernels: Moment = "at start"
    """When they are loaded. Those of the optimizer and of tied gradients always are at their first launch, as
    ranks warm up without them (`myriad.program.warm_up`)."""
    queues: Queues = own_queue


class Wait(NamedTuple):
    """One step of a cycle: an operation of a rank that waits for another."""

    rank: int
    operation: str
    for_rank: int
    for_operation: str
    reason: str

    def __str__(self) -> str:
        other = "its" if self.rank == self.for_rank else f"rank {self.for_rank}'s"
        return f"rank {self.rank}'s {self.operation} waits for {other} {self.for_operation} ({self.reason})"


@dataclass(frozen=True, slots=True)
class Deadlock:
    """Operations that wait for each other in a cycle; the last one waits for the first."""

    waits: tuple[Wait, ...]

    def __str__(self) -> str:
        return "; ".join(map(str, self.waits))


def find_deadlock(operations: Sequence[Operation], device: Device) -> Deadlock | None:
    """Return a shortest cycle of operations that wait for each other; ``None``: proved free of deadlock."""
    stuck = _stuck(4 * len(operations), _edges(operations, device))
    if not stuck:
        return None
    waits: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for before, after, reason in _edges(operations, device):
        if before in stuck and after in stuck:
            waits[after].append((before, reason))
    return Deadlock(_told(operations, _shortest_cycle(waits)))


# Events of operation n are 4 n + one of these: the host has come to it, the device has it and the host goes
# on, it has left its queue, it is done.
_REACHED, _GIVEN, _BEGUN, _DONE = range(4)

_NOT_WARMED = frozenset({Kind.UPDATE, Kind.STEP, Kind.SYNC_TIED})
"""Actions whose kernels no rank has launched before its first step."""
_Edge = tuple[int, int, str]
"""An event, one that waits for it, and why."""
_SELF, _HOST = "", "it comes earlier"
_FREE = (_SELF, _HOST)
"""Reasons that do not make a cycle longer: both events are of one operation, or the host comes to one after
the other."""


def _edges(operations: Sequence[Operation], device: Device) -> Iterator[_Edge]:
    yield from _in_a_rank(operations, device)
    for events in _groups(operations, lambda one: one.meets).values():
        for one in events:
            yield from (
                (4 * other + _BEGUN, 4 * one + _DONE, "both ends of one transfer")
                for other in events
                if other != one
            )
    for members in _first_uses(operations, device):
        for one in members:
            yield from (
                (4 * other + _REACHED, 4 * one + _GIVEN, "makes their communicator")
                for other in members
                if other != one
            )


def _groups(
    operations: Sequence[Operation], key: Callable[[Operation], Hashable]
) -> dict[Hashable, list[int]]:
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, one in enumerate(operations):
        if (name := key(one)) is not None:
            groups[name].append(number)
    return groups


def _first_uses(operations: Sequence[Operation], device: Device) -> Iterator[list[int]]:
    """Operations with which the members of each communicator use it for the first time. NCCL connects the
    members of a collective then, also where its communicator has been made."""
    firsts: dict[tuple[int, Hashable], int] = {}
    for number, one in enumerate(operations):
        is_made = one.is_transfer and device.communicators == "at start"
        if one.connects is not None and not is_made:
            firsts.setdefault((one.rank, one.connects), number)
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for (_, communicator), number in firsts.items():
        members[communicator].append(number)
    yield from members.values()


def _in_a_rank(operations: Sequence[Operation], device: Device) -> Iterator[_Edge]:
    """What the host's order, streams, queues and loading make wait."""
    queues = [
        {name: device.queues(number) for number, name in enumerate(names)} for names in streams_of(operations)
    ]
    rank = -1
    for number, one in enumerate(operations):
        if one.rank != rank:
            rank = one.rank
            of_stream: dict[str, int] = {}
            of_queue: dict[int, int] = {}
            loaded: set[Hashable] = set()
        else:
            held = operations[number - 1].holds_host
            last = 4 * (number - 1)
            yield last + _GIVEN, 4 * number + _REACHED, _HOST
            if held:
                yield last + _DONE, 4 * number + _REACHED, "the host waits for it"
        event = 4 * number
        yield event + _REACHED, event + _GIVEN, _SELF
        yield event + _GIVEN, event + _BEGUN, _SELF
        yield event + _BEGUN, event + _DONE, _SELF
        if one.loads is not None and one.loads not in loaded and _loads_late(one, device):
            for other in of_stream.values():
                yield 4 * other + _DONE, event + _GIVEN, "loads its kernels when all before is done"
        loaded.add(one.loads)
        if one.stream in of_stream:
            yield 4 * of_stream[one.stream] + _DONE, event + _BEGUN, "behind it in a stream"
        for other in one.after:
            yield 4 * other + _DONE, event + _BEGUN, "needs it"
        queue = queues[rank][one.stream]
        if queue in of_queue:
            yield 4 * of_queue[queue] + _BEGUN, event + _BEGUN, "behind it in a queue"
        of_stream[one.stream] = of_queue[queue] = number


def _loads_late(one: Operation, device: Device) -> bool:
    return device.kernels == "lazily" or one.action.kind in _NOT_WARMED


def _stuck(num_events: int, edges: Iterator[_Edge]) -> set[int]:
    """Events that never happen."""
    waiting = [0] * num_events
    followers: list[list[int]] = [[] for _ in range(num_events)]
    for before, after, _ in edges:
        followers[before].append(after)
        waiting[after] += 1
    ready = [event for event in range(num_events) if not waiting[event]]
    happened = 0
    while ready:
        happened += 1
        for after in followers[ready.pop()]:
            waiting[after] -= 1
            if not waiting[after]:
                ready.append(after)
    return {event for event in range(num_events) if waiting[event]} if happened < num_events else set()


_MOST_STARTS = 16
"""Events from which a shorter cycle is looked for: each takes as long as the proof."""
_Waits = dict[int, list[tuple[int, str]]]
"""An event to those that it waits for, and why."""
_Step = tuple[int, int, str]
"""An event, one that it waits for, and why."""


def _shortest_cycle(waits: _Waits) -> list[_Step]:
    """Return the shortest cycle through some events of the cycle that is found first."""
    around = _any_cycle(waits)
    stride = -(-len(around) // _MOST_STARTS)
    return min((_cycle_through(event, waits) for event in around[::stride]), key=_length)


def _any_cycle(waits: _Waits) -> list[int]:
    """Each event waits for another one: sooner or later one comes again."""
    way = [min(waits)]
    places = {way[0]: 0}
    while True:
        event = waits[way[-1]][0][0]
        if event in places:
            return way[places[event] :]
        places[event] = len(way)
        way.append(event)


def _cycle_through(start: int, waits: _Waits) -> list[_Step]:
    """The one with the fewest steps that count."""
    costs, front = {start: 0}, deque([start])
    came: dict[int, _Step] = {}
    while front:
        event = front.popleft()
        for other, reason in waits[event]:
            cost = costs[event] + (reason not in _FREE)
            if other == start:
                if start not in came or cost < costs[came[start][0]] + (came[start][2] not in _FREE):
                    came[start] = event, other, reason
            elif other not in costs or cost < costs[other]:
                costs[other], came[other] = cost, (event, other, reason)
                front.append(other) if cost > costs[event] else front.appendleft(other)
    steps = [came[start]]
    while steps[-1][0] != start:
        steps.append(came[steps[-1][0]])
    return steps[::-1]


def _length(cycle: list[_Step]) -> int:
    return sum(reason not in _FREE for _, _, reason in cycle)


def _told(operations: Sequence[Operation], cycle: list[_Step]) -> tuple[Wait, ...]:
    """Without the events inside of an operation, and several steps of one rank for the same reason as one;
    begins between two ranks, with the lowest."""
    between = [
        (operations[event // 4].rank, index)
        for index, (event, other, _) in enumerate(cycle)
        if operations[event // 4].rank != operations[other // 4].rank
    ]
    first = min(between)[1] if between else 0
    waits: list[Wait] = []
    for event, other, reason in cycle[first:] + cycle[:first]:
        one, another = operations[event // 4], operations[other // 4]
        last = waits[-1] if waits else None
        if last is not None and last.reason == reason and one.rank == another.rank == last.for_rank:
            waits[-1] = last._replace(for_operation=str(another.action))
        elif reason != _SELF:
            waits.append(Wait(one.rank, str(one.action), another.rank, str(another.action), reason))
    return tuple(waits)
