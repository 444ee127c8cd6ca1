"""Rotary positions as one Triton kernel: each pair is read once, turned in float32, and written once, from
wherever the heads stand to memory of their own. Backward is the same with the opposite turn.

Legend: B batch, S sequence, N heads, D head size.
"""

# mypy: disable-error-code="untyped-decorator"
from typing import Any

import torch
import triton
import triton.language as tl

from myriad.kernels.triton.launch import block_of, launch

__all__ = ["turned"]

_TILE_VALUES = 2048
"""That a program turns at a time."""


@triton.jit
def turn_kernel(
    x: tl.tensor,
    turns: tl.tensor,
    y: tl.tensor,
    batch_stride: tl.tensor,
    position_stride: tl.tensor,
    head_stride: tl.tensor,
    turns_stride: tl.tensor,
    sequence: tl.tensor,
    num_heads: tl.tensor,
    num_pairs: tl.tensor,
    BACK: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    position = row % sequence
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None, None]
    pair = tl.arange(0, PAIRS)[None, :, None]
    half = tl.arange(0, 2)[None, None, :]
    start = row // sequence * batch_stride + position * position_stride
    inside = (head < num_heads) & (pair < num_pairs) & (half < 2)
    values = tl.load(x + start + head * head_stride + 2 * pair + half, mask=inside, other=0.0)
    turn = tl.load(turns + position * turns_stride + 2 * pair + half, mask=pair < num_pairs, other=0.0)
    even, odd = tl.split(values.to(tl.float32))
    cosine, sine = tl.split(turn)
    if BACK:
        sine = -sine
    out = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    at = (row * num_heads + head) * 2 * num_pairs + 2 * pair + half
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


def _turn(x: torch.Tensor, turns: torch.Tensor, *, back: bool) -> torch.Tensor:
    x = x if x.stride(3) == 1 else x.contiguous()
    batch, sequence, num_heads, width = x.shape
    pairs = torch.view_as_real(turns)  # [S, D/2, 2]
    y = x.new_empty(x.shape)
    tile = block_of(width // 2)
    heads = min(block_of(num_heads), max(1, _TILE_VALUES // (2 * tile)))
    launch(
        turn_kernel,
        (batch * sequence, triton.cdiv(num_heads, heads)),
        x,
        pairs,
        y,
        *x.stride()[:3],
        pairs.stride(0),
        sequence,
        num_heads,
        width // 2,
        BACK=back,
        HEADS=heads,
        PAIRS=tile,
        num_warps=max(1, min(4, heads * tile // 128)),
    )
    return y


class _Turned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        ctx.turns = turns
        return _turn(x, turns, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _turn(grads[0], ctx.turns, back=True), None


def turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """``x`` ``[B, S, N, D]``, each pair turned by ``turns`` (`rotary_turns`, ``[S, D/2]`` complex)."""
    y: torch.Tensor = _Turned.apply(x, turns)
    return y
