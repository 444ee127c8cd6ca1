"""Digest of tensors as one number (int64), to compare the contents of two ranks without moving them.

On the host the digest is xxh3, which runs at about memory bandwidth. On a device it is a reduction that stays
there, so that only one number is transferred: the words of each row of `_ROW` are added up, then the rows
with odd weights, modulo 2^64. A flipped bit changes one sum by a power of two, and an odd multiple of that is
never 0, so every single flip is detected. Swapped words within a row are not detected, but no memory fault
swaps words.
"""

from collections.abc import Sequence

import torch
import xxhash

__all__ = ["digest_of", "reduce_bits"]

_ROW = 4096
_WEIGHT, _NEXT = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
"""Odd numbers below 2^63."""
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensors: Sequence[torch.Tensor]) -> int | torch.Tensor:
    """Return the digest of all bits, in order. For tensors on a device it is a number there; `int` waits for
    it."""
    if tensors and tensors[0].device.type != "cpu":
        return reduce_bits(tensors)
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(tensor.detach().view(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest(), signed=True)


def reduce_bits(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digest that devices compute, as an int64 scalar on the device."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device)
    for tensor in tensors:
        total = total * _NEXT + _sum_of(tensor.detach().view(-1))
    return total


def _sum_of(values: torch.Tensor) -> torch.Tensor:
    words = values.view(_WORDS[values.element_size()])
    whole = words.numel() // _ROW * _ROW
    rows = words[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    weights = torch.arange(len(rows), device=words.device) * 2 + 1
    return (rows * weights).sum() * _WEIGHT + words[whole:].sum(dtype=torch.int64) * (_WEIGHT + 2)
