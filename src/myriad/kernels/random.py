"""Random numbers that depend on what they are for, not on who draws them or when.

Dropout of a value must be the same however the batch is cut into micro-batches and the sequence over ranks,
and when a step is run again after a restart. So a mask is a hash of (seed, layer, place in the layer, sample,
position, hidden index): the finalizer of SplitMix64 (Steele, Lea & Flood 2014), in integer arithmetic that is
the same on every device. One hash of 64 bits serves four neighbouring hidden indices with 16 bits each.
"""

import hashlib
from collections.abc import Sequence

import torch

__all__ = ["dropout", "hashed_uniform", "hashed_words", "key_of", "seeded_normal"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 torch takes."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)


def key_of(*parts: int | str) -> int:
    """64 bits from seeds, names and numbers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"))


def mix(x: torch.Tensor) -> torch.Tensor:
    """Each int64 to a random-looking int64; in place."""
    for bits, factor in _MIX:
        x ^= _shift_right(x, bits)
        x *= _signed(factor)
    x ^= _shift_right(x, 31)
    return x


def hashed_words(key: int, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """A random int64 for each combination of the (broadcast) int64 indices."""
    words = torch.full((), key, dtype=torch.int64, device=indices[0].device)  # not copied from the host
    for index in indices:
        words = mix(words + (index + 1) * _signed(_GOLDEN))
    return words


def hashed_uniform(key: int, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Float32 in [0, 1) for each combination of the indices."""
    return _shift_right(hashed_words(key, indices), 40).float() * 2.0**-24


def seeded_normal(key: int, shape: Sequence[int], deviation: float) -> torch.Tensor:
    """Float32 normal values of a whole tensor on the CPU, the same on every rank."""
    generator = torch.Generator(device="cpu").manual_seed(key)
    values = torch.empty(tuple(shape), device="cpu")
    return values.normal_(0.0, deviation, generator=generator)


def dropout(
    x: torch.Tensor, ratio: float, key: int, samples: torch.Tensor, first_position: int
) -> torch.Tensor:
    """``x`` ``[B, S, H]`` with a share ``ratio`` of its values set to zero and the others scaled up.

    ``samples`` ``[B]`` are the sequences' indices in the whole run, ``first_position`` that of ``x[:, 0]``.
    """
    sequence, hidden = x.shape[1:]
    positions = torch.arange(first_position, first_position + sequence, device=x.device)
    columns = torch.arange(-(-hidden // 4), device=x.device)
    words = hashed_words(key, (samples[:, None, None], positions[:, None], columns))
    bits = words.view(torch.int16)[..., :hidden]
    kept = bits >= round(ratio * 2**16) - 2**15
    return x * kept.to(x.dtype).mul_(1 / (1 - ratio))
