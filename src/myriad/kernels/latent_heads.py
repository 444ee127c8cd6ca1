"""Queries, keys and values of multi-head latent attention in the memory layout of other attention, so that
every implementation of attention computes it.

    queries    [plain | rotated]  of each head          q, its last values rotated
    keys       [plain | rotated]                        kv's first values; the shared part, rotated once
    values     [value | zeros]                          kv's last values, padded to the width of a key

Legend: B batch, S sequence, N heads of this rank, P plain, R rotated, V value, D = P + R head size.
"""

from typing import Any

import torch

from myriad.kernels.memory_order import as_rows_lie, empty_in_order
from myriad.kernels.rotary import turn

__all__ = ["join_latent_heads", "without_padding"]


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, kv: torch.Tensor, shared: torch.Tensor, turns: torch.Tensor, num_heads: int
    ) -> torch.Tensor:
        queries, keys_values = (x.unflatten(-1, (num_heads, -1)) for x in (q, kv))
        width, rotated = queries.shape[-1], shared.shape[-1]
        plain, value = width - rotated, keys_values.shape[-1] - (width - rotated)
        joined = empty_in_order(q, *q.shape[:2], 3 * num_heads * width)
        out_q, out_k, out_v = joined.unflatten(-1, (3, num_heads, width)).unbind(2)
        out_q[..., :plain] = queries[..., :plain]
        out_q[..., plain:] = turn(queries[..., plain:], turns)
        out_k[..., :plain] = keys_values[..., :plain]
        out_k[..., plain:] = turn(shared.unsqueeze(2), turns)
        out_v[..., :value] = keys_values[..., plain:]
        out_v[..., value:] = 0
        ctx.turns, ctx.sizes = turns, (num_heads, width, plain, value)
        return joined

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        num_heads, width, plain, value = ctx.sizes
        turns, sizes = ctx.turns.conj(), grads[0].shape[:2]
        of_q, of_k, of_v = grads[0].unflatten(-1, (3, num_heads, width)).unbind(2)
        grad_q = empty_in_order(grads[0], *sizes, num_heads * width)
        grad_kv = empty_in_order(grads[0], *sizes, num_heads * (plain + value))
        queries, keys_values = (x.unflatten(-1, (num_heads, -1)) for x in (grad_q, grad_kv))
        queries[..., :plain] = of_q[..., :plain]
        queries[..., plain:] = turn(of_q[..., plain:], turns)
        keys_values[..., :plain] = of_k[..., :plain]
        keys_values[..., plain:] = of_v[..., :value]
        shared = of_k[..., plain:].sum(2, keepdim=True, dtype=torch.float32)
        return grad_q, grad_kv, turn(shared, turns).squeeze(2).to(grad_q.dtype), None, None


def join_latent_heads(
    q: torch.Tensor, kv: torch.Tensor, shared: torch.Tensor, turns: torch.Tensor, num_heads: int
) -> torch.Tensor:
    """Return ``[B, S, 3 N D]`` from queries ``[B, S, N D]``, keys and values ``[B, S, N (P + V)]`` and the
    shared part of the keys ``[B, S, R]``. ``turns``: rotations of the last R values (`rotary_turns`)."""
    joined: torch.Tensor = _Joined.apply(q, kv, shared, turns, num_heads)
    return joined


def without_padding(mixed: torch.Tensor, num_heads: int, value: int) -> torch.Tensor:
    """Return the first ``value`` values of each head of ``[B, S, N D]``: ``[B, S, N V]``."""
    if mixed.shape[-1] == num_heads * value:
        return mixed
    return as_rows_lie(lambda rows: rows.unflatten(-1, (num_heads, -1))[..., :value].flatten(-2), mixed)
