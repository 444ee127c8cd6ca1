"""Rotary positions (Su et al. 2021): neighbouring pairs of a head's values are complex numbers, rotated by an
angle that grows with the position. The forward is one complex multiplication, the backward one with the
conjugate. On a GPU `myriad.kernels.triton.rotary_kernels` does the same in one pass, for any type, while it
splits the heads.

Pairs that are not rotated (`Rotary.rotated`) are multiplied by 1, which leaves their bits unchanged.

Legend: B batch, S sequence, N heads, D head size.
"""

from collections.abc import Sequence
from typing import Any

import torch

from myriad.kernels.constant_tensors import constant_tensor
from myriad.kernels.rotary_scaling import Rotary

__all__ = ["Rotary", "rotary_reference", "rotary_turns", "rotary_turns_of_rows", "turn", "turned"]


def _frequencies(rotary: Rotary, length: int) -> torch.Tensor:
    """Return radians per position of each rotated pair, float64, for a sequence of ``length``."""
    rotated = rotary.width if rotary.rotated is None else rotary.rotated
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device="cpu") / rotated
    frequencies = rotary.base**-exponents
    if rotary.scaling.kind == "none":
        return frequencies
    scaled = rotary.scaling.scaled(frequencies.tolist(), rotary.base, length)
    return torch.tensor(scaled, dtype=torch.float64, device="cpu")


@constant_tensor
def _table(start: int, stop: int, length: int, rotary: Rotary, device: torch.device) -> torch.Tensor:
    """Return complex numbers ``[stop - start, D/2]`` of these positions in a sequence of ``length``."""
    positions = torch.arange(start, stop, dtype=torch.float64, device="cpu")
    angles = positions[:, None] * _frequencies(rotary, length)
    turns = torch.polar(torch.full_like(angles, rotary.scaling.magnitude), angles)
    still = turns.new_ones(stop - start, rotary.width // 2 - turns.shape[1])
    return torch.cat([turns, still], 1).to(torch.complex64).to(device)


def rotary_turns(
    rotary: Rotary, sequence: int, device: torch.device, first_position: int = 0
) -> torch.Tensor:
    """Return the rotations of the pairs at ``sequence`` positions from ``first_position`` on: complex
    ``[S, D/2]``."""
    end = first_position + sequence
    length = rotary.scaling.decisive_length(end)
    if length == end:  # frequencies of this length alone: a table of all positions would serve only once
        return _table(first_position, end, length, rotary, device)
    rows = sequence if first_position == 0 else 1 << (end - 1).bit_length()
    return _table(0, rows, length, rotary, device)[first_position:end]


def rotary_turns_of_rows(rotary: Rotary, positions: torch.Tensor, ends: Sequence[int]) -> torch.Tensor:
    """Return the rotations of the pairs at positions ``[B, S]``: complex ``[B, S, D/2]``. ``ends``: length
    of each row's sequence, which decides its frequencies."""
    turns = torch.empty(*positions.shape, rotary.width // 2, dtype=torch.complex64, device=positions.device)
    rows_of_length: dict[int, list[int]] = {}
    for row, end in enumerate(ends):
        rows_of_length.setdefault(rotary.scaling.decisive_length(end), []).append(row)
    for length, rows in rows_of_length.items():
        stop = 1 << (max(ends[row] for row in rows) - 1).bit_length()
        turns[rows] = _table(0, stop, length, rotary, positions.device)[positions[rows]]
    return turns


def as_pairs(x: torch.Tensor) -> torch.Tensor:
    """View ``[..., D]`` float32 as complex ``[..., D/2]``, in the same memory."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[B, S, N, D]`` with each pair rotated, without a gradient. ``turns``: ``[S, D/2]`` or
    ``[B, S, D/2]``."""
    wide = x.float()
    if any(number % 2 for number in (wide.storage_offset(), *wide.stride()[:-1])):
        wide = wide.clone(memory_format=torch.contiguous_format)  # pairs begin at even places in memory
    return torch.view_as_real(as_pairs(wide) * turns.unsqueeze(-2)).flatten(-2).to(x.dtype)


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        ctx.turns = turns
        return turn(x, turns)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return turn(grads[0], ctx.turns.conj()), None


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Return ``x`` ``[B, S, N, D]`` with each pair rotated."""
    y: torch.Tensor = _Turned.apply(x, turns)
    return y


def rotary_reference(x: torch.Tensor, base: float, first_position: int = 0) -> torch.Tensor:
    """Rotate each pair of ``[B, S, N, D]``, with the formula written out."""
    sequence, width = x.shape[1], x.shape[3]
    positions = torch.arange(first_position, first_position + sequence, dtype=torch.float64)
    angles = positions[:, None] * base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., 0::2].double(), x[..., 1::2].double()
    pairs = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return pairs.flatten(-2).to(x.dtype)
