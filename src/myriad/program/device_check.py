"""The second proof: no deadlock on GPUs, where NCCL's messages are kernels that wait for one another.

The checker (`myriad.program.checker`) lets every rank post without waiting. A program that it accepts may
still hang on a GPU. This proof therefore uses the operations that ranks issue to their devices
(`myriad.program.device_operations`), and the rules of CUDA and NCCL:

    stream         its operations run one after the other
    queue          streams share the device's queues to the host (CUDA_DEVICE_MAX_CONNECTIONS): the head of a
                   queue that cannot begin blocks everything behind it, also of other streams
    communicator   created at its first use, for which the host waits until the other members use it
    kernel         loaded at its first launch, for which the host waits until the device has finished its work

An operation has four events: the host reaches it, issues it, it begins, it is done. Each event waits for some
others and happens when all of them have happened. There are no choices, so timing does not change the result:
a program deadlocks in every run or in none. It deadlocks if the events that wait for each other form a cycle.
The proof is a topological sort, in time linear in the number of operations.

Not covered: multiprocessors that waiting kernels take from each other, memory that is allocated or freed in
the middle (cudaFree waits for the device), and failures.

Sources: https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/lazy-loading.html (potential
hazards), https://github.com/NVIDIA/nccl/issues/783 (streams and connections), pytorch PR 160210
(communicators)."""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from myriad.program.actions import ORTHOGONALIZATION, Kind
from myriad.program.device_operations import DeviceOperation, streams_of

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
"""Map from the number of a rank's stream, in the order of creation, to its queue."""


def own_queue(stream: int) -> int:
    """Give each stream its own queue."""
    return stream


def single_queue(stream: int) -> int:
    """Give all streams one queue. A program that is deadlock-free here is so for every assignment of streams
    to any number of queues, because each of them blocks fewer operations."""
    return 0


def deal_in_turn(num_queues: int, stride: int = 1) -> Queues:
    """Give streams queues in the order of their creation. ``stride``: streams created per stream that is
    used."""
    return lambda stream: stream * stride % num_queues


@dataclass(frozen=True, slots=True)
class Device:
    """The assumptions about GPUs and NCCL."""

    communicators: Moment = "at start"
    """When the communicators of pairs are created and connected."""
    kernels: Moment = "at start"
    """When kernels are loaded. Those of the optimizer and of tied gradients are always loaded at their first
    launch, because the warm-up does not run them (`myriad.program.warm_up`)."""
    queues: Queues = own_queue


class Wait(NamedTuple):
    """One step of a cycle: an operation of a rank that waits for another operation."""

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


def find_deadlock(operations: Sequence[DeviceOperation], device: Device) -> Deadlock | None:
    """Return a shortest cycle of operations that wait for each other; ``None``: the program is
    deadlock-free."""
    stuck = _stuck(4 * len(operations), _edges(operations, device))
    if not stuck:
        return None
    waits: defaultdict[int, list[tuple[int, str]]] = defaultdict(list)
    for before, after, reason in _edges(operations, device):
        if before in stuck and after in stuck:
            waits[after].append((before, reason))
    return Deadlock(_waits_of_cycle(operations, _shortest_cycle(waits)))


# The events of operation n are 4 n plus one of these: the host has reached it, the host has issued it and
# continues, it has left its queue, it is done.
_REACHED, _GIVEN, _BEGUN, _DONE = range(4)

_NOT_WARMED = frozenset({Kind.UPDATE, Kind.STEP, Kind.SYNC_TIED, *ORTHOGONALIZATION})
"""Actions whose kernels the warm-up does not launch before the first step."""
_Edge = tuple[int, int, str]
"""An event, an event that waits for it, and the reason."""
_SELF, _HOST = "", "it comes earlier"
_FREE = (_SELF, _HOST)
"""Reasons that do not lengthen a cycle: both events belong to one operation, or the host reaches one after
the other."""


def _edges(operations: Sequence[DeviceOperation], device: Device) -> Iterator[_Edge]:
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
    operations: Sequence[DeviceOperation], key: Callable[[DeviceOperation], Hashable]
) -> dict[Hashable, list[int]]:
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for number, one in enumerate(operations):
        if (name := key(one)) is not None:
            groups[name].append(number)
    return groups


def _first_uses(operations: Sequence[DeviceOperation], device: Device) -> Iterator[list[int]]:
    """Yield the first operations with which the members of each communicator use it. NCCL connects the
    members of a collective then, even if its communicator exists."""
    firsts: dict[tuple[int, Hashable], int] = {}
    for number, one in enumerate(operations):
        is_made = one.is_transfer and device.communicators == "at start"
        if one.connects is not None and not is_made:
            firsts.setdefault((one.rank, one.connects), number)
    members: defaultdict[Hashable, list[int]] = defaultdict(list)
    for (_, communicator), number in firsts.items():
        members[communicator].append(number)
    yield from members.values()


def _in_a_rank(operations: Sequence[DeviceOperation], device: Device) -> Iterator[_Edge]:
    """Yield the waits that the host's order, streams, queues and loading cause within each rank."""
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


def _loads_late(one: DeviceOperation, device: Device) -> bool:
    return device.kernels == "lazily" or one.action.kind in _NOT_WARMED


def _stuck(num_events: int, edges: Iterator[_Edge]) -> set[int]:
    """Return the events that never happen."""
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
"""Number of events from which a shorter cycle is searched; each search takes as long as the proof."""
_Waits = dict[int, list[tuple[int, str]]]
"""Map from an event to the events that it waits for, with reasons."""
_Step = tuple[int, int, str]
"""An event, an event that it waits for, and the reason."""


def _shortest_cycle(waits: _Waits) -> list[_Step]:
    """Return the shortest cycle through some events of the cycle that is found first."""
    around = _any_cycle(waits)
    stride = -(-len(around) // _MOST_STARTS)
    return min((_cycle_through(event, waits) for event in around[::stride]), key=_length)


def _any_cycle(waits: _Waits) -> list[int]:
    """Return a cycle: every event waits for another one, so following the waits repeats an event."""
    way = [min(waits)]
    places = {way[0]: 0}
    while True:
        event = waits[way[-1]][0][0]
        if event in places:
            return way[places[event] :]
        places[event] = len(way)
        way.append(event)


def _cycle_through(start: int, waits: _Waits) -> list[_Step]:
    """Return the cycle through ``start`` with the fewest steps that count."""
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


def _waits_of_cycle(operations: Sequence[DeviceOperation], cycle: list[_Step]) -> tuple[Wait, ...]:
    """Return the cycle as waits between operations, starting between two ranks at the lowest. Events within
    an operation are left out, and several steps of a rank for the same reason are merged."""
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
