"""Attention by the library's kernels that only a GPU has: cuDNN's, FlashAttention-2 with a window, and
FlexAttention. None has been run yet, for want of a GPU; FlexAttention's mask is tested on a CPU.

Legend: B batch, S sequence, N query heads, K key/value heads, D head size.
"""

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

__all__ = ["cudnn_attention", "flex_attention_in", "sdpa_attention", "varlen_attention"]

_LIBRARYS_ORDER: list[int] = torch._C._get_sdp_priority_order()
_CUDNN_FIRST = sorted(_LIBRARYS_ORDER, key=lambda backend: backend != SDPBackend.CUDNN_ATTENTION.value)


def sdpa_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """``[B, S, N, D]`` and twice ``[B, S, K, D]`` to ``[B, S, N, D]``: one causal call; heads that share
    keys read the same ones."""
    return _attend(q, k, v, _LIBRARYS_ORDER)


def cudnn_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same by cuDNN, if it takes the shape."""
    return _attend(q, k, v, _CUDNN_FIRST)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, order: list[int]) -> torch.Tensor:
    """The order stays set: a layer that finds it so sets nothing (`torch.nn.attention.sdpa_kernel` sets and
    restores it, and seven switches, at each call)."""
    if torch._C._get_sdp_priority_order() != order:
        torch._C._set_sdp_priority_order(order)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped).transpose(1, 2)


@lru_cache(maxsize=16)
def _ends(batch: int, sequence: int, device: torch.device) -> torch.Tensor:
    """Where sequences of one length begin and end, laid one after the other."""
    return torch.arange(0, batch * sequence + 1, sequence, dtype=torch.int32, device=device)


def varlen_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """FlashAttention-2; its window counts the keys to the left of the query's own."""
    from torch.nn.attention.varlen import varlen_attn

    batch, sequence = q.shape[:2]
    ends = _ends(batch, sequence, q.device)
    queries, keys, values = (x.flatten(0, 1) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    sides = (window - 1, 0)
    out = varlen_attn(
        queries, keys, values, ends, ends, sequence, sequence, window_size=sides, enable_gqa=grouped
    )
    assert isinstance(out, torch.Tensor), "nothing else was asked for"
    return out.unflatten(0, (batch, sequence))


@lru_cache(maxsize=16)
def _blocks_in(window: int, sequence: int, device: torch.device) -> Any:
    """Which blocks of keys each block of queries meets."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - window)

    return create_block_mask(sees, None, None, sequence, sequence, device=device.type)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex_attention_in(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> torch.Tensor:
    """FlexAttention over the blocks that the window leaves; compiled on a GPU, and only there does it skip
    the others."""
    from torch.nn.attention.flex_attention import flex_attention

    mask = _blocks_in(window, q.shape[1], q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    function = _compiled() if q.is_cuda else flex_attention
    out: torch.Tensor = function(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out.transpose(1, 2)
