"""Memory of a tensor that is needed only for a part of each iteration.

    TransientBuffer   the tensor's own storage, freed and allocated by resizing: the allocator can reuse it
    SharedBuffer      a place at a fixed address that one tensor uses at a time, for captured stages
                      (`myriad.program.static_buffers` proves that no two tensors need it at once)

Views of the tensor stay views of it in either case.
"""

from dataclasses import dataclass

import torch

__all__ = ["FixedMemory", "SharedBuffer", "TransientBuffer", "make_buffer"]


class TransientBuffer:
    """A storage that belongs to one tensor."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.tensor = torch.empty(size, dtype=dtype, device=device)
        self._storage, self._num_bytes = self.tensor.untyped_storage(), size * dtype.itemsize

    def allocate(self) -> bool:
        """Allocate the memory if it is free. Return whether it was free: the tensor has no values then."""
        if self._storage.size() > 0 or self._num_bytes == 0:
            return False
        self._storage.resize_(self._num_bytes)
        return True

    def free(self) -> None:
        """Free the memory until the next `allocate`."""
        self._storage.resize_(0)


@dataclass(eq=False)
class FixedMemory:
    """Memory that several tensors use in turn."""

    storage: torch.UntypedStorage | None = None
    holder: "SharedBuffer | None" = None
    """The tensor that uses the memory now."""


class SharedBuffer(TransientBuffer):
    """A tensor's use of a place that other tensors use at other times."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, place: FixedMemory) -> None:
        """Enlarge the place if it is too small. Make all rooms of a place before anything is captured."""
        num_bytes = size * dtype.itemsize
        if place.storage is None:
            place.storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
        elif place.storage.size() < num_bytes:
            place.storage.resize_(num_bytes)
        self.tensor = torch.empty(0, dtype=dtype, device=device).set_(place.storage, 0, (size,), (1,))
        self._place = place

    def allocate(self) -> bool:
        if self._place.holder is self:
            return False
        assert self._place.holder is None, "two chunks need the same place"
        self._place.holder = self
        return True

    def free(self) -> None:
        if self._place.holder is self:
            self._place.holder = None


def make_buffer(
    size: int, dtype: torch.dtype, device: torch.device, place: FixedMemory | None
) -> TransientBuffer:
    """Return memory at ``place``, or where the allocator chooses."""
    return TransientBuffer(size, dtype, device) if place is None else SharedBuffer(size, dtype, device, place)
