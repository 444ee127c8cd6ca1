"""Payload codecs: how the cuts of a buffer are sent, exact or encoded with error feedback.

    exact        straight from memory to memory
    gradients    contributions and sums encoded; the error of each is added to the same place's next ones
    parameters   the change since the last gather encoded; all ranks, the owner too, add what they decode, so
                 all have the same values, and the error is part of the next change

A `Codec` is a lossy number format for slow links; it is used only if the job asks for it.

    bfloat16   2 bytes a number, rounded to nearest
    int8       1 byte a number and a float32 scale for each block of 256, rounded to nearest (as 8-bit
               optimizers do: Dettmers et al., arXiv 2110.02861)

Rounding errors must not be lost: the encoder keeps each error and adds it to what is sent next (error
feedback, Seide et al., Interspeech 2014). A block with a non-finite number decodes to non-finite numbers.

Legend: n ranks, P elements of a slice.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F

__all__ = ["Codec", "EncodedGradients", "EncodedUpdates", "ExactPayload", "PayloadCodec", "make_codec"]

_BLOCK = 256
_LARGEST = 127
_TINY = 1e-38


class Codec(ABC):
    """Convert flat float32 tensors to bytes and back."""

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Return the size of ``count`` encoded numbers."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values [count]`` encoded as uint8 in new memory."""

    @abstractmethod
    def decode(self, data: torch.Tensor, count: int) -> torch.Tensor:
        """Return the decoded numbers in new memory."""


def make_codec(name: Literal["bfloat16", "int8"]) -> Codec:
    """Return the codec with this name in a job."""
    return _BFloat16() if name == "bfloat16" else _Int8()


class _BFloat16(Codec):
    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: torch.Tensor, count: int) -> torch.Tensor:
        return data.view(torch.bfloat16).to(torch.float32)


class _Int8(Codec):
    """Encode all scales, then all numbers, padded to whole blocks."""

    def num_bytes(self, count: int) -> int:
        return _num_blocks(count) * (4 + _BLOCK)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        blocks = F.pad(values, (0, -len(values) % _BLOCK)).view(-1, _BLOCK)
        scales = blocks.abs().amax(1, keepdim=True) / _LARGEST
        # a block of zeros, or of numbers so small that their scale has no inverse, is sent as zeros
        factors = torch.where(scales > _TINY, scales.reciprocal(), 0.0).where(scales.isfinite(), scales)
        whole = (blocks * factors).round_().to(torch.int8)
        return torch.cat([scales.view(-1).view(torch.uint8), whole.view(-1).view(torch.uint8)])

    def decode(self, data: torch.Tensor, count: int) -> torch.Tensor:
        num_blocks = _num_blocks(count)
        scales = data[: 4 * num_blocks].view(torch.float32)
        whole = data[4 * num_blocks :].view(torch.int8).view(num_blocks, _BLOCK)
        return (whole.to(torch.float32) * scales.unsqueeze(1)).view(-1)[:count]


def _num_blocks(count: int) -> int:
    return -(-count // _BLOCK)


class PayloadCodec(ABC):
    """Encode and decode cuts of ``slices [n, P]``; a cut is a slice's number and a range of its elements."""

    is_exact = False
    """Whether gathered cuts arrive in place and need no `store_whole`."""

    def __init__(self, whole: torch.Tensor, num_slices: int) -> None:
        self.slices = whole.view(num_slices, -1)

    @abstractmethod
    def part(self, slice_: int, cut: slice) -> torch.Tensor:
        """Return the message with this rank's contribution to a sum."""

    @abstractmethod
    def part_buffer(self, slice_: int, cut: slice) -> torch.Tensor:
        """Return a buffer in which such a message can arrive."""

    @abstractmethod
    def decode_part(self, arrived: torch.Tensor, cut: slice) -> torch.Tensor:
        """Return the numbers of a message, in memory that may be overwritten."""

    @abstractmethod
    def whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """Return the message with the owner's slice for a gather, and update the slice to what the other
        ranks decode."""

    @abstractmethod
    def whole_buffer(self, slice_: int, cut: slice) -> torch.Tensor:
        """Return a buffer in which such a message can arrive."""

    @abstractmethod
    def store_whole(self, slice_: int, cut: slice, arrived: torch.Tensor) -> None:
        """Write a gathered message into its slice."""


class ExactPayload(PayloadCodec):
    """Send cuts as they are."""

    is_exact = True

    def part(self, slice_: int, cut: slice) -> torch.Tensor:
        """Return a view of the slice."""
        return self.slices[slice_, cut]

    def part_buffer(self, slice_: int, cut: slice) -> torch.Tensor:
        """Return a new buffer."""
        return torch.empty_like(self.slices[slice_, cut])

    def decode_part(self, arrived: torch.Tensor, cut: slice) -> torch.Tensor:
        """Return the message itself."""
        return arrived

    def whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """Return a view of the slice."""
        return self.slices[slice_, cut]

    def whole_buffer(self, slice_: int, cut: slice) -> torch.Tensor:
        """Return a view of the slice, so that the message arrives in place."""
        return self.slices[slice_, cut]

    def store_whole(self, slice_: int, cut: slice, arrived: torch.Tensor) -> None:
        """Do nothing: the message arrived in place."""


class _Encoded(PayloadCodec):
    def __init__(self, whole: torch.Tensor, num_slices: int, codec: Codec) -> None:
        super().__init__(whole, num_slices)
        self._codec = codec

    def part_buffer(self, slice_: int, cut: slice) -> torch.Tensor:
        """Return a buffer of encoded bytes."""
        num_bytes = self._codec.num_bytes(cut.stop - cut.start)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.slices.device)

    def decode_part(self, arrived: torch.Tensor, cut: slice) -> torch.Tensor:
        """Return the decoded numbers of the message."""
        return self._codec.decode(arrived, cut.stop - cut.start)

    whole_buffer = part_buffer


class EncodedGradients(_Encoded):
    """Encode gradients, with error feedback."""

    def __init__(self, whole: torch.Tensor, codec: Codec, errors: torch.Tensor) -> None:
        """``errors [n, P]`` holds the encoding errors of earlier messages."""
        super().__init__(whole, len(errors), codec)
        self._errors = errors

    def part(self, slice_: int, cut: slice) -> torch.Tensor:
        """Encode the contribution plus the last message's error."""
        return self._encode(slice_, cut)[0]

    def whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """Encode the sum plus the last message's error."""
        data, kept = self._encode(slice_, cut)
        self.slices[slice_, cut] = kept
        return data

    def store_whole(self, slice_: int, cut: slice, arrived: torch.Tensor) -> None:
        """Overwrite the slice with the decoded sum."""
        self.slices[slice_, cut] = self.decode_part(arrived, cut)

    def _encode(self, slice_: int, cut: slice) -> tuple[torch.Tensor, torch.Tensor]:
        exact = self._errors[slice_, cut].add_(self.slices[slice_, cut])
        data = self._codec.encode(exact)
        kept = self.decode_part(data, cut)
        exact.sub_(kept)
        return data, kept


class EncodedUpdates(_Encoded):
    """Encode changes of parameters; it supports only gathers."""

    def __init__(self, values: torch.Tensor, num_slices: int, codec: Codec, own: torch.Tensor) -> None:
        """``own [P]``, float32, holds the new values of this rank's slice."""
        super().__init__(values, num_slices, codec)
        self._own = own

    def part(self, slice_: int, cut: slice) -> torch.Tensor:
        """Raise NotImplementedError: parameters are never summed."""
        raise NotImplementedError

    def whole(self, slice_: int, cut: slice) -> torch.Tensor:
        """Encode the change of the slice."""
        data = self._codec.encode(self._own[cut] - self.slices[slice_, cut])
        self.store_whole(slice_, cut, data)
        return data

    def store_whole(self, slice_: int, cut: slice, arrived: torch.Tensor) -> None:
        """Add the decoded change to the slice."""
        self.slices[slice_, cut] += self.decode_part(arrived, cut)
