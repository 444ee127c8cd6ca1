"""The bytes that a pipeline rank holds at one moment of its program, object by object."""

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

from myriad.program.actions import Payload

__all__ = ["ByteSum", "HeldBytes"]

_REDUCING = 2
"""Number of chunks in reduction at a time: earlier reductions have finished."""

_Key = TypeVar("_Key", bound=Hashable)


class ByteSum(Generic[_Key]):
    """Bytes of several objects, and their sum."""

    __slots__ = ("bytes_of", "total")

    def __init__(self) -> None:
        self.bytes_of: dict[_Key, float] = {}
        self.total = 0.0

    def put(self, key: _Key, num_bytes: float) -> None:
        self.drop(key)
        self.bytes_of[key] = num_bytes
        self.total += num_bytes

    def drop(self, key: _Key) -> None:
        """Remove an object, if it is present."""
        self.total -= self.bytes_of.pop(key, 0.0)


@dataclass
class HeldBytes:
    """The bytes that a rank holds at one time, by purpose."""

    values: ByteSum[int] = field(default_factory=ByteSum)
    grad_buffers: ByteSum[int] = field(default_factory=ByteSum)
    rooms: deque[float] = field(default_factory=deque)
    rooms_across: deque[float] = field(default_factory=deque)
    kept: ByteSum[tuple[int, int]] = field(default_factory=ByteSum)
    head_bytes: ByteSum[tuple[int, int]] = field(default_factory=ByteSum)
    products: ByteSum[tuple[int, int]] = field(default_factory=ByteSum)
    arriving: ByteSum[tuple[Payload, int, int]] = field(default_factory=ByteSum)
    leaving: ByteSum[tuple[Payload, int, int]] = field(default_factory=ByteSum)
    matrices: ByteSum[int] = field(default_factory=ByteSum)
    own_grads: ByteSum[int] = field(default_factory=ByteSum)
    """Gradients of the running backward, where they stay until its end."""
    states: ByteSum[int] = field(default_factory=ByteSum)
    """Optimizer state on the device, where it rests in host memory."""

    @property
    def buffers(self) -> float:
        """Bytes of messages, of receive buffers of reductions in flight, and of a backward's gradients."""
        rooms = 0.0
        for reducing in (self.rooms, self.rooms_across):
            if reducing:
                rooms += sum(islice(reversed(reducing), _REDUCING))
        messages = self.arriving.total + self.leaving.total + self.matrices.total
        return messages + rooms + self.own_grads.total

    @property
    def by_purpose(self) -> tuple[float, ...]:
        """The held bytes by purpose."""
        layers = self.values, self.grad_buffers, self.kept, self.head_bytes, self.products
        messages = self.arriving, self.leaving
        rooms = sum(self.rooms) + sum(self.rooms_across) + self.own_grads.total
        return *(pile.total for pile in (*layers, *messages)), rooms
