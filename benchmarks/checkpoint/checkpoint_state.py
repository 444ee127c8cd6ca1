"""What the contenders of `checkpoint.py` save: a transformer's parameters and Adam's two moments, and where.

sharded       rank r holds rows r n .. (r + 1) n of every tensor: no byte is held twice
replicated    every rank holds all of every tensor, as data-parallel replicas do
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import Protocol

import torch
import xxhash

__all__ = ["Contender", "Place", "State", "balanced", "digest", "local_shapes", "make_state", "update"]

_LAYERS, _KINDS = 5, ("parameter", "moment", "variance")
_SHRINK = 0.999
"""Every step multiplies all of the state by this: no byte of it stays as it was."""


@dataclass(frozen=True)
class Place:
    """Where one rank runs and writes."""

    rank: int
    world: int
    root: str
    """A folder or a URL; each checkpoint is one below it."""
    memory: str
    """A folder of this machine's memory, for what outlives a rank's process."""

    def of_step(self, step: int) -> str:
        """The checkpoint after ``step`` steps, for contenders that do not name it themselves."""
        return f"{self.root}/step-{step}"


@dataclass(frozen=True)
class State:
    """One rank's part of the state."""

    sharing: str
    rank: int
    world: int
    tensors: dict[str, torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """Held by this rank."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def full_bytes(self) -> int:
        """That a checkpoint of all ranks must hold."""
        return self.num_bytes * (self.world if self.sharing == "sharded" else 1)

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor."""
        first, *rest = self.tensors[name].shape
        return (first * (self.world if self.sharing == "sharded" else 1), *rest)

    def offsets(self, name: str) -> tuple[int, ...]:
        """Return the offsets of this rank's part in the full tensor."""
        first, *rest = self.tensors[name].shape
        return (first * self.rank if self.sharing == "sharded" else 0, *(0 for _ in rest))


class Contender(Protocol):
    """One way to save and load; one object for each rank."""

    def setup(self, state: State) -> None:
        """Once, before the first step."""

    def save(self, step: int) -> None:
        """Called right after the state was changed; training waits for it."""

    def before_update(self) -> None:
        """Called right before the state is changed; training waits for it."""

    def is_durable(self) -> bool:
        """Whether the last save is done, one way or the other. Does not wait."""

    def wait_durable(self) -> float:
        """Waits for the last save; the monotonic time at which it was durable. Raises if it failed."""

    def load(self, state: State, step: int) -> None:
        """Fills a state, in processes other than those that saved."""

    def close(self) -> None:
        """Once, at the end."""


def local_shapes(megabytes: float) -> dict[str, tuple[int, ...]]:
    """Shapes that come to about ``megabytes`` (1e6 bytes) in float32 with both moments, by name."""
    per_square = 12 * _LAYERS + 16
    hidden = max(8, 8 * round(sqrt(megabytes * 1e6 / (4 * len(_KINDS) * per_square)) / 8))
    shapes: dict[str, tuple[int, ...]] = {"embedding": (8 * hidden, hidden)}
    for layer in range(_LAYERS):
        blocks = {"norm": (hidden,), "qkv": (3 * hidden, hidden), "out": (hidden, hidden)}
        blocks |= {"norm_mlp": (hidden,), "up": (4 * hidden, hidden), "down": (hidden, 4 * hidden)}
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in blocks.items()}
    shapes |= {"norm": (hidden,), "head": (8 * hidden, hidden)}
    return {f"{kind}.{name}": shape for kind in _KINDS for name, shape in shapes.items()}


def make_state(megabytes: float, sharing: str, place: Place, *, empty: bool = False) -> State:
    """Random values, equal on all ranks if replicated; ``empty``: zeros, to be loaded into."""
    generator = torch.Generator().manual_seed(1 + (place.rank if sharing == "sharded" else 0))
    tensors = {
        name: torch.zeros(shape) if empty else torch.rand(shape, generator=generator)
        for name, shape in local_shapes(megabytes).items()
    }
    return State(sharing, place.rank, place.world, tensors)


def update(state: State) -> None:
    """Changes every byte, in place, as an optimizer does."""
    for tensor in state.tensors.values():
        tensor.mul_(_SHRINK)


def digest(state: State) -> str:
    """Return a digest of all bits of a rank's part."""
    found = xxhash.xxh3_128()
    for name, tensor in sorted(state.tensors.items()):
        found.update(name)
        found.update(memoryview(tensor.view(-1).numpy().data))
    return found.hexdigest()


def balanced(sizes: Mapping[str, Sequence[int]], world: int) -> dict[str, int]:
    """A rank for each name, so that all have about as many elements: the largest first, to the rank that has
    the fewest."""
    loads, owner = [0] * world, {}
    for name in sorted(sizes, key=lambda name: (-prod(sizes[name]), name)):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += prod(sizes[name])
    return owner
