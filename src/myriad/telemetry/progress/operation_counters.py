"""Number the communication operations of a rank, so that rows of different ranks can be compared.

A rank counts the operations of each of its groups, and the messages that it sends and receives each way along
the pipeline. Ranks of a group run its operations in the same order, so equal numbers are the same operation:

    rank 0   tp 17, waits for tp        rank 0 waits in the 17th operation of its tensor-parallel group,
    rank 1   tp 16                      which rank 1 has not reached

Numbers of different groups say nothing about each other: pipeline stages have different programs.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

__all__ = ["COLLECTIVES", "COUNTERS", "Operation", "collective", "counter_of_message", "messages"]

COLLECTIVES = ("world", "dp", "tp", "tied")
"""Groups whose operations are counted: all ranks, two axes of the grid, and the stages that share a chunk."""
_MESSAGES = ("activation up", "activation down", "gradient up", "gradient down")
"""Kinds of messages. Up means to the next pipeline rank, and from the last to the first."""
COUNTERS = (*COLLECTIVES, *(f"{name} {way}" for way in ("sent", "received") for name in _MESSAGES))
"""Names of a rank's counters, in the order of a row."""


@dataclass(frozen=True)
class Operation:
    """The counters that a span increments, and those that it waits for."""

    counters: tuple[int, ...]
    """Counters that increase by one when the span begins."""
    waits: int
    """A bit for each counter whose newest operation the span waits for; 0 if it only issues operations."""


def collective(group: Literal["world", "dp", "tp", "tied"]) -> Operation:
    """Return an operation that waits for a collective of the group."""
    counter = COLLECTIVES.index(group)
    return Operation((counter,), 1 << counter)


def counter_of_message(payload: str, *, up: bool, sends: bool) -> int:
    """Return the index of the counter for a payload, a direction, and sending or receiving."""
    name = f"{payload} {'up' if up else 'down'} {'sent' if sends else 'received'}"
    return COUNTERS.index(name)


def messages(counters: Iterable[int], *, waits: bool) -> Operation:
    """Return an operation that posts messages or waits for them."""
    moved = tuple(counters)
    return Operation(moved, sum(1 << counter for counter in set(moved)) if waits else 0)
