"""Rotary positions (Su et al. 2021): neighbouring pairs of a head's values are complex numbers, turned by an
angle that grows with the position. One complex multiplication forward, one with the conjugate backward.

Legend: B batch, S sequence, N heads, D head size.
"""

from functools import lru_cache
from typing import Any

import torch

__all__ = ["rotary", "rotary_reference"]


@lru_cache(maxsize=16)
def _table(length: int, width: int, base: float, device: torch.device) -> torch.Tensor:
    """Unit complex numbers ``[S, D/2]``."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
    angles = torch.arange(length, dtype=torch.float64, device="cpu")[:, None] * base**-exponents
    return torch.polar(torch.ones_like(angles), angles).to(device, torch.complex64)


def _turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        ctx.turns = turns
        return _turn(x, turns)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _turn(grads[0], ctx.turns.conj()), None


def rotary(x: torch.Tensor, base: float, first_position: int = 0) -> torch.Tensor:
    """``x`` ``[B, S, N, D]`` with the values of position ``first_position + s`` turned."""
    sequence, width = x.shape[1], x.shape[3]
    if x.is_meta:
        return torch.empty_like(x)
    end = first_position + sequence
    length = sequence if first_position == 0 else 1 << (end - 1).bit_length()
    turns = _table(length, width, base, x.device)[first_position:end, None]
    y: torch.Tensor = _Rotary.apply(x, turns)
    return y


def rotary_reference(x: torch.Tensor, base: float, first_position: int = 0) -> torch.Tensor:
    """The rotation of each pair, written out."""
    sequence, width = x.shape[1], x.shape[3]
    positions = torch.arange(first_position, first_position + sequence, dtype=torch.float64)
    angles = positions[:, None] * base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    cosine, sine = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., 0::2].double(), x[..., 1::2].double()
    turned = torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1)
    return turned.flatten(-2).to(x.dtype)
