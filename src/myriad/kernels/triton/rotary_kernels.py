"""Rotary positions in Triton: each pair is read once, rotated in float32, and written once. The input heads
have any position in memory; the output is new memory.

    forward     queries and keys, adjacent in the projection's output, in one kernel; values stay in it
    backward    the gradients of queries, keys and values to that of the projection's output, in one kernel:
                queries' and keys' are rotated back, values' are copied

Legend: B batch, S sequence, N query heads, K key/value heads, D head size.
"""

# mypy: disable-error-code="untyped-decorator"
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from myriad.kernels.memory_order import empty_in_order
from myriad.kernels.triton.launch import block_of, launch

__all__ = ["split_turned"]

_TILE_VALUES = 2048
"""Number of values that a program rotates at a time."""


@triton.jit
def turn_kernel(
    x: tl.tensor,
    turns: tl.tensor,
    y: tl.tensor,
    batch_stride: tl.tensor,
    position_stride: tl.tensor,
    head_stride: tl.tensor,
    y_batch: tl.tensor,
    y_position: tl.tensor,
    turns_stride: tl.tensor,
    sequence: tl.tensor,
    num_heads: tl.tensor,
    num_pairs: tl.tensor,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    batch, position = row // sequence, row % sequence
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None, None]
    pair = tl.arange(0, PAIRS)[None, :, None]
    half = tl.arange(0, 2)[None, None, :]
    start = batch * batch_stride + position * position_stride
    inside = (head < num_heads) & (pair < num_pairs) & (half < 2)
    values = tl.load(x + start + head * head_stride + 2 * pair + half, mask=inside, other=0.0)
    turn = tl.load(turns + position * turns_stride + 2 * pair + half, mask=pair < num_pairs, other=0.0)
    even, odd = tl.split(values.to(tl.float32))
    cosine, sine = tl.split(turn)
    out = tl.join(even * cosine - odd * sine, even * sine + odd * cosine)
    at = batch * y_batch + position * y_position + head * 2 * num_pairs + 2 * pair + half
    tl.store(y + at, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def join_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    turns: tl.tensor,
    fused: tl.tensor,
    q_batch: tl.tensor,
    q_position: tl.tensor,
    q_head: tl.tensor,
    k_batch: tl.tensor,
    k_position: tl.tensor,
    k_head: tl.tensor,
    v_batch: tl.tensor,
    v_position: tl.tensor,
    v_head: tl.tensor,
    fused_batch: tl.tensor,
    fused_position: tl.tensor,
    turns_stride: tl.tensor,
    sequence: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    num_pairs: tl.tensor,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    batch, position = row // sequence, row % sequence
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None, None]
    pair = tl.arange(0, PAIRS)[None, :, None]
    half = tl.arange(0, 2)[None, None, :]
    inside = (pair < num_pairs) & (half < 2)
    at = 2 * pair + half
    num_turning = num_heads + num_kv_heads
    is_q, turns_back = head < num_heads, head < num_turning
    is_k, is_v = turns_back & (head >= num_heads), (head >= num_turning) & (head < num_turning + num_kv_heads)
    from_q = q + batch * q_batch + position * q_position + head * q_head + at
    from_k = k + batch * k_batch + position * k_position + (head - num_heads) * k_head + at
    from_v = v + batch * v_batch + position * v_position + (head - num_turning) * v_head + at
    values = tl.load(from_q, mask=inside & is_q, other=0.0)
    values = tl.where(is_k, tl.load(from_k, mask=inside & is_k, other=0.0), values)
    values = tl.where(is_v, tl.load(from_v, mask=inside & is_v, other=0.0), values)
    turn = tl.load(turns + position * turns_stride + at, mask=pair < num_pairs, other=0.0)
    even, odd = tl.split(values.to(tl.float32))
    cosine, sine = tl.split(turn)
    turned_back = tl.join(even * cosine + odd * sine, odd * cosine - even * sine)
    out = tl.where(turns_back, turned_back.to(fused.dtype.element_ty), values)
    to = fused + batch * fused_batch + position * fused_position + head * 2 * num_pairs + at
    tl.store(to, out, mask=inside & (turns_back | is_v))


def _tile(num_heads: int, width: int) -> tuple[int, int]:
    """Return the numbers of heads and pairs that a program rotates."""
    pairs = block_of(width // 2)
    return min(block_of(num_heads), max(1, _TILE_VALUES // (2 * pairs))), pairs


def _turn(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    x = _with_rows(x)
    batch, sequence, num_heads, width = x.shape
    pairs = torch.view_as_real(turns)  # [S, D/2, 2]
    y = empty_in_order(x, *x.shape)
    heads, tile = _tile(num_heads, width)
    launch(
        turn_kernel,
        (batch * sequence, triton.cdiv(num_heads, heads)),
        x,
        pairs,
        y,
        *x.stride()[:3],
        *y.stride()[:2],
        pairs.stride(0),
        sequence,
        num_heads,
        width // 2,
        HEADS=heads,
        PAIRS=tile,
        num_warps=max(1, min(4, heads * tile // 128)),
    )
    return y


def _with_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with each head's values contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def _join(grads: Sequence[torch.Tensor], turns: torch.Tensor) -> torch.Tensor:
    """Join the gradients of rotated queries and keys, and of values, to that of all heads
    ``[B, S, N + 2 K, D]``."""
    q, k, v = map(_with_rows, grads)
    batch, sequence, num_heads, width = q.shape
    pairs = torch.view_as_real(turns)
    fused = empty_in_order(q, batch, sequence, num_heads + 2 * k.shape[2], width)
    heads, tile = _tile(fused.shape[2], width)
    launch(
        join_kernel,
        (batch * sequence, triton.cdiv(fused.shape[2], heads)),
        q,
        k,
        v,
        pairs,
        fused,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *fused.stride()[:2],
        pairs.stride(0),
        sequence,
        num_heads,
        k.shape[2],
        width // 2,
        HEADS=heads,
        PAIRS=tile,
        num_warps=max(1, min(4, heads * tile // 128)),
    )
    return fused


class _SplitTurned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, fused: torch.Tensor, num_kv_heads: int, turns: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.turns = turns
        num_turning = fused.shape[2] - num_kv_heads
        turning = _turn(fused[:, :, :num_turning], turns)
        q, k = turning.split([num_turning - num_kv_heads, num_kv_heads], 2)
        return q, k, fused[:, :, num_turning:]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _join(grads, ctx.turns), None, None


def split_turned(
    fused: torch.Tensor, num_kv_heads: int, turns: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split ``fused`` ``[B, S, N + 2 K, D]`` into queries ``[B, S, N, D]`` and keys ``[B, S, K, D]``, rotated
    by ``turns``, and values."""
    q, k, v = _SplitTurned.apply(fused, num_kv_heads, turns)
    return q, k, v
