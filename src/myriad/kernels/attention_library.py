"""Attention with library kernels that only a GPU has: cuDNN, FlashAttention-2 with a window, and
FlexAttention. None has been run on a GPU yet; FlexAttention's mask is tested on a CPU.

Legend: B batch, S sequence, N query heads, K key/value heads, D head size.
"""

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from myriad.kernels.attention_choice import Scores
from myriad.kernels.constant_tensors import constant_tensor
from myriad.kernels.documents import Documents

__all__ = ["cudnn_attention", "flex_attention_in", "sdpa_attention", "varlen_attention"]

_LIBRARYS_ORDER: list[int] = torch._C._get_sdp_priority_order()
_CUDNN_FIRST = sorted(_LIBRARYS_ORDER, key=lambda backend: backend != SDPBackend.CUDNN_ATTENTION.value)


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Attend causally, in one call of the library: ``[B, S, N, D]`` and twice ``[B, S, K, D]`` to
    ``[B, S, N, D]``. Query heads that share keys read the same ones."""
    return _attend(q, k, v, scale, _LIBRARYS_ORDER)


def cudnn_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """Attend as `sdpa_attention` does, with cuDNN if it supports the shape."""
    return _attend(q, k, v, scale, _CUDNN_FIRST)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, order: list[int]
) -> torch.Tensor:
    """Attend with the backends in this order of preference. The order stays set, so that later layers need
    not set it: `torch.nn.attention.sdpa_kernel` sets and restores it, and seven switches, at each call."""
    if torch._C._get_sdp_priority_order() != order:
        torch._C._set_sdp_priority_order(order)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped, scale=scale)
    return mixed.transpose(1, 2)


@constant_tensor
def _ends(batch: int, sequence: int, device: torch.device) -> torch.Tensor:
    """Return the boundaries of equally long sequences that are stored one after the other."""
    return torch.arange(0, batch * sequence + 1, sequence, dtype=torch.int32, device=device)


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    scale: float | None = None,
    documents: Documents | None = None,
) -> torch.Tensor:
    """Attend with FlashAttention-2, inside each document if there are any. Its window counts the keys to the
    left of the query's own."""
    from torch.nn.attention.varlen import varlen_attn

    batch, sequence = q.shape[:2]
    ends = _ends(batch, sequence, q.device) if documents is None else documents.ends
    longest = sequence if documents is None else documents.longest
    queries, keys, values = (x.flatten(0, 1) for x in (q, k, v))
    grouped = q.shape[2] != k.shape[2]
    sides = (window - 1, 0)
    lengths = (ends, ends, longest, longest)
    out = varlen_attn(queries, keys, values, *lengths, scale=scale, window_size=sides, enable_gqa=grouped)
    assert isinstance(out, torch.Tensor), "nothing else was asked for"
    return out.unflatten(0, (batch, sequence))


@constant_tensor
def _blocks_in(window: int, sequence: int, device: torch.device) -> Any:
    """Return the mask of blocks of keys that each block of queries attends to."""
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key > query - window)

    return create_block_mask(sees, None, None, sequence, sequence, device=device.type)


@lru_cache(maxsize=1)
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def flex_attention_in(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int,
    how: Scores = Scores(),
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with FlexAttention over the blocks inside the window. It is compiled on a GPU, and skips the
    other blocks only there. A sink takes its share from the result: of the sums of the other scores, the
    logarithms of which FlexAttention returns."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    mask = _blocks_in(window, q.shape[1], q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    function = _compiled() if q.is_cuda else flex_attention
    arguments = {
        "score_mod": _bound(how.softcap),
        "block_mask": mask,
        "scale": how.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
    }
    if sinks is None:
        out: torch.Tensor = function(q, k, v, **arguments)
        return out.transpose(1, 2)
    out, aux = function(q, k, v, **arguments, return_aux=AuxRequest(lse=True))
    kept = torch.sigmoid(aux.lse - sinks[:, None].to(aux.lse.dtype))
    return (out * kept[..., None].to(out.dtype)).transpose(1, 2)


@lru_cache(maxsize=16)
def _bound(softcap: float | None) -> Any:
    """Return the function that bounds a score, for FlexAttention; ``None``: no bound."""
    if softcap is None:
        return None

    def bounded(score: torch.Tensor, batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return bounded
