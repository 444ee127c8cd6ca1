"""In what form the cuts of a buffer travel: as they are, or encoded with the loss kept for the next time.

    exact        straight from memory to memory
    gradients    contributions and sums encoded; what each lost is added to the same place's next ones
    parameters   the change since the last gather encoded; everybody, the owner too, adds what it decodes, so
                 all have the same values, and the loss is part of the next change

Legend: n ranks, P elements of a slice.
"""

from abc import ABC, abstractmethod

import torch

from myriad.comm.codec import Codec

__all__ = ["Cargo", "EncodedChanges", "EncodedSums", "Exact"]


class Cargo(ABC):
    """Cuts of ``slices [n, P]`` on their way; a cut is a slice's number and a range of its elements."""

    is_exact = False
    """Gathered cuts arrive in place and need no `put`."""

    def __init__(self, whole: torch.Tensor, num_slices: int) -> None:
        self.slices = whole.view(num_slices, -1)

    @abstractmethod
    def part(self, slice_: int, cut: slice) -> torch.Tensor:
        """What to send of this rank's contribution to a sum."""

    @abstractmethod
    def room_for_part(self, slice_: int, cut: slice) -> torch.Tensor:
        """Where such a message may arrive."""

    @abstractmethod
    def read_part(self, arrived: torch.Tensor, cut: slice) -> torch.Tensor:
        """The numbers in it; may be written to."""

    @abstractmethod
    def whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """What the owner sends of its slice in a gather; from now on it has what the others will have."""

    @abstractmethod
    def room_for_whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """Where such a message may arrive."""

    @abstractmethod
    def put(self, slice_: int, cut: slice, arrived: torch.Tensor) -> None:
        """Brings it into its slice."""


class Exact(Cargo):
    """As they are."""

    is_exact = True

    def part(self, slice_: int, cut: slice) -> torch.Tensor:
        """A view."""
        return self.slices[slice_, cut]

    def room_for_part(self, slice_: int, cut: slice) -> torch.Tensor:
        """Memory of its own."""
        return torch.empty_like(self.slices[slice_, cut])

    def read_part(self, arrived: torch.Tensor, cut: slice) -> torch.Tensor:
        """As it is."""
        return arrived

    def whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """A view."""
        return self.slices[slice_, cut]

    def room_for_whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """A view."""
        return self.slices[slice_, cut]

    def put(self, slice_: int, cut: slice, arrived: torch.Tensor) -> None:
        """It is there."""


class _Encoded(Cargo):
    def __init__(self, whole: torch.Tensor, num_slices: int, codec: Codec) -> None:
        super().__init__(whole, num_slices)
        self._codec = codec

    def room_for_part(self, slice_: int, cut: slice) -> torch.Tensor:
        """Bytes."""
        num_bytes = self._codec.num_bytes(cut.stop - cut.start)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.slices.device)

    def read_part(self, arrived: torch.Tensor, cut: slice) -> torch.Tensor:
        """Decoded."""
        return self._codec.decode(arrived, cut.stop - cut.start)

    room_for_whole = room_for_part


class EncodedSums(_Encoded):
    """Gradients."""

    def __init__(self, whole: torch.Tensor, codec: Codec, lost: torch.Tensor) -> None:
        """``lost [n, P]``: what earlier messages lost."""
        super().__init__(whole, len(lost), codec)
        self._lost = lost

    def part(self, slice_: int, cut: slice) -> torch.Tensor:
        """Encoded with what the last one lost."""
        return self._encode(slice_, cut)[0]

    def whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """Encoded with what the last one lost."""
        data, kept = self._encode(slice_, cut)
        self.slices[slice_, cut] = kept
        return data

    def put(self, slice_: int, cut: slice, arrived: torch.Tensor) -> None:
        """In place of what was there."""
        self.slices[slice_, cut] = self.read_part(arrived, cut)

    def _encode(self, slice_: int, cut: slice) -> tuple[torch.Tensor, torch.Tensor]:
        exact = self._lost[slice_, cut].add_(self.slices[slice_, cut])
        data = self._codec.encode(exact)
        kept = self.read_part(data, cut)
        exact.sub_(kept)
        return data, kept


class EncodedChanges(_Encoded):
    """Parameters. A gather only."""

    def __init__(self, values: torch.Tensor, num_slices: int, codec: Codec, own: torch.Tensor) -> None:
        """``own [P]``, float32: what this rank's slice should become."""
        super().__init__(values, num_slices, codec)
        self._own = own

    def part(self, slice_: int, cut: slice) -> torch.Tensor:
        """Parameters are never summed."""
        raise NotImplementedError

    def whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """The change."""
        data = self._codec.encode(self._own[cut] - self.slices[slice_, cut])
        self.put(slice_, cut, data)
        return data

    def put(self, slice_: int, cut: slice, arrived: torch.Tensor) -> None:
        """Added."""
        self.slices[slice_, cut] += self.read_part(arrived, cut)
