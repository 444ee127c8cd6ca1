"""Numbers in fewer bits, for links that are too slow: never unless asked for.

    bfloat16   2 bytes a number, rounded to nearest
    int8       1 byte a number and a float32 scale for each block of 256, rounded to nearest (as 8-bit
               optimizers do: Dettmers et al., arXiv 2110.02861)

What rounding loses must not be lost for good: whoever encodes keeps it and adds it to what is sent next
(error feedback, Seide et al., Interspeech 2014). A block with a number that is not finite decodes to nothing
finite.
"""

from abc import ABC, abstractmethod
from typing import Literal

import torch
import torch.nn.functional as F

__all__ = ["Codec", "make_codec"]

_BLOCK = 256
_LARGEST = 127
_TINY = 1e-38


class Codec(ABC):
    """Flat float32 to bytes and back."""

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Of ``count`` encoded numbers."""

    @abstractmethod
    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """``values [count]`` as uint8 in memory of its own."""

    @abstractmethod
    def decode(self, data: torch.Tensor, count: int) -> torch.Tensor:
        """The numbers again, as near as they were encoded, in memory of their own."""


def make_codec(name: Literal["bfloat16", "int8"]) -> Codec:
    """By its name in a job."""
    return _BFloat16() if name == "bfloat16" else _Int8()


class _BFloat16(Codec):
    def num_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(torch.bfloat16).view(torch.uint8)

    def decode(self, data: torch.Tensor, count: int) -> torch.Tensor:
        return data.view(torch.bfloat16).to(torch.float32)


class _Int8(Codec):
    """All scales, then all numbers, padded to whole blocks."""

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
