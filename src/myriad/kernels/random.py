"""Random numbers that depend on their use only, not on the rank or the time at which they are drawn.

Dropout of a value must not depend on how the batch is cut into micro-batches, on how the sequence is cut over
ranks, or on a restart. So a mask is a hash of (seed, layer, place in the layer, sample, position, hidden
index): the finalizer of SplitMix64 (Steele, Lea & Flood 2014), in integer arithmetic that is the same on
every device. One hash of 64 bits serves four neighbouring hidden indices with 16 bits each.
"""

import hashlib
from collections.abc import Sequence

import torch

from myriad.kernels.memory_order import is_sequence_first

__all__ = ["dropout", "hashed_uniform", "hashed_words", "key_of", "seeded_normal"]

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def _signed(value: int) -> int:
    """Convert a 64-bit pattern to the int64 that torch takes."""
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    return (x >> bits) & (2 ** (64 - bits) - 1)


def key_of(*parts: int | str) -> int:
    """Return a 64-bit key derived from seeds, names and numbers."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return _signed(int.from_bytes(digest, "little"))


def mix(x: torch.Tensor) -> torch.Tensor:
    """Map each int64 to a random-looking int64, in place."""
    for bits, factor in _MIX:
        x ^= _shift_right(x, bits)
        x *= _signed(factor)
    x ^= _shift_right(x, 31)
    return x


def hashed_words(key: int, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a random int64 for each combination of the (broadcast) int64 indices."""
    words = torch.full((), key, dtype=torch.int64, device=indices[0].device)  # without a copy from the host
    for index in indices:
        words = mix(words + (index + 1) * _signed(_GOLDEN))
    return words


def hashed_uniform(key: int, indices: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a float32 in [0, 1) for each combination of the indices."""
    return _shift_right(hashed_words(key, indices), 40).float() * 2.0**-24


def seeded_normal(key: int, shape: Sequence[int], deviation: float) -> torch.Tensor:
    """Return float32 normal values of a whole tensor on the CPU, equal on every rank."""
    generator = torch.Generator(device="cpu").manual_seed(key)
    values = torch.empty(tuple(shape), device="cpu")
    return values.normal_(0.0, deviation, generator=generator)


def dropout(
    x: torch.Tensor, ratio: float, key: int, samples: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """Return ``x`` ``[B, S, H]`` with a fraction ``ratio`` of its values set to zero and the others scaled
    up.

    ``samples``: ``[B]``, the sequences' indices in the whole run. ``positions``: those of ``x`` in their
    sequence, int64 ``[S]`` or ``[B, S]``.
    """
    hidden = x.shape[2]
    columns = torch.arange(-(-hidden // 4), device=x.device)
    if is_sequence_first(x):
        at = positions[:, None] if positions.dim() == 1 else positions.t()
        words = hashed_words(key, (samples[:, None], at[..., None], columns)).transpose(0, 1)
    else:
        words = hashed_words(key, (samples[:, None, None], positions[..., None], columns))
    bits = words.view(torch.int16)[..., :hidden]
    kept = bits >= round(ratio * 2**16) - 2**15
    return x * kept.to(x.dtype).mul_(1 / (1 - ratio))
