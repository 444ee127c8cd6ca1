"""Memory in which a tensor of each part of a micro-batch is adjacent to the same tensor of the next part.

Parts of a micro-batch alternate (`myriad.model.interleave`), so each has its own activations, while a
weight's gradient is a product of all their tokens. If the parts' operands are adjacent, it is one product
that reads and writes the float32 gradient once (`myriad.kernels.gradient.apply_deferred`):

    part 0      [  first rows   |               ]       x of one layer: each part writes its slot
    part 1      [               |  other rows   ]
    gradient    g^T x of all rows, as one

Every part requests its slots in the same order, so the n-th slots of all parts share one piece of memory.
"""

from collections.abc import Sequence
from math import prod

import torch

__all__ = ["PartSlots", "Slot", "places_of"]


class _Memory:
    """Memory for one tensor of every part."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._left = sizes, len(sizes)
        self._memory: torch.Tensor | None = None

    def take(self, part: int, like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        unit, rest = divmod(prod(shape), self._sizes[part])
        assert not rest, "a part's tensors are multiples of its size"
        if self._memory is None:
            self._memory = like.new_empty(unit * sum(self._sizes))
        start = unit * sum(self._sizes[:part])
        # autograd must not see one part's write as a change of another's saved tensor: `data` has its own
        # version
        own = self._memory.data[start : start + prod(shape)].view(*shape)
        self._left -= 1
        if self._left == 0:
            self._memory = None
        return own


class Slot:
    """One part's slice of the memory; it can be taken once."""

    def __init__(self, memory: _Memory, part: int) -> None:
        self._memory, self._part = memory, part

    def take(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return memory for a tensor of this shape, with the type and device of ``like``."""
        return self._memory.take(self._part, like, shape)


class PartSlots:
    """One part of a micro-batch. While it runs, operators get their slots from it."""

    def __init__(self, part: int, sizes: Sequence[int], shared: dict[int, _Memory]) -> None:
        self.num_parts = len(sizes)
        self._part, self._sizes, self._shared, self._count = part, sizes, shared, 0

    def slot(self) -> Slot:
        """Return the next slot of this part."""
        memory = self._shared.setdefault(self._count, _Memory(self._sizes))
        self._count += 1
        return Slot(memory, self._part)


def places_of(sizes: Sequence[int]) -> list[PartSlots]:
    """Return a place for each part. ``sizes``: the size of each part in any unit, such as tokens, to which
    the size of each tensor is proportional."""
    shared: dict[int, _Memory] = {}
    return [PartSlots(part, sizes, shared) for part in range(len(sizes))]
