"""Causal attention, with or without a sliding window, by the implementation that
`myriad.kernels.attention_choice` selects for the device and the shape.

If no kernel supports a window of W, the sequence is cut into blocks of W queries for the library: each block
sees only its own keys and those of the previous block, so that the work grows with S * 2W, not with S^2:

    keys      | block 0 | block 1 | block 2 | ...
    queries 2            [ .  x x | x x .  ]           W + W keys for W queries, masked to the band

Legend: B batch, S sequence, N query heads, K key/value heads, D head size, W window.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from myriad.kernels.attention_blocks import Heads, attention_in_blocks, runs_in_blocks
from myriad.kernels.attention_choice import (
    AttentionPath,
    AttentionShape,
    FastestAttention,
    Scores,
    choose_attention,
    choose_inside_documents,
    read_times,
)
from myriad.kernels.choice import in_interpreter, runs_triton
from myriad.kernels.config import Kernels
from myriad.kernels.constant_tensors import constant_tensor
from myriad.kernels.documents import Documents
from myriad.kernels.rotary import turned

__all__ = [
    "attention",
    "attention_by",
    "attention_reference",
    "path_of",
    "split_heads",
    "times",
    "times_path",
]


def _expand(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Expand ``[B, K, S, D]`` to ``[B, N, S, D]``: neighbouring query heads share a key/value head."""
    repeats = num_heads // x.shape[1]
    return x if repeats == 1 else x.repeat_interleave(repeats, 1)


@constant_tensor
def _band(queries: int, keys: int, window: int, blocks: int, device: torch.device) -> torch.Tensor:
    """Return which of ``keys`` keys each of ``queries`` queries sees, if both end at the same position:
    ``[queries, keys]`` or ``[blocks, 1, queries, keys]``. In the first of several blocks the keys before the
    sequence are masked."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    band = (key <= query) & (key > query - window)
    if blocks == 1:
        return band
    bands = band.repeat(blocks, 1, 1, 1)
    bands[0] &= key >= keys - queries
    return bands


def _in_windows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float) -> torch.Tensor:
    """Attend ``[B, N, S, D]`` with a window that divides S: each block of queries to its own and the previous
    block."""
    batch, _, sequence, _ = q.shape
    blocks = sequence // window

    def with_previous(x: torch.Tensor) -> torch.Tensor:  # [B, N, S, D] -> [B * blocks, N, 2 W, D]
        cut = x.unflatten(2, (blocks, window)).transpose(1, 2)
        previous = torch.cat([torch.zeros_like(cut[:, :1]), cut[:, :-1]], 1)
        return torch.cat([previous, cut], 3).flatten(0, 1)

    queries = q.unflatten(2, (blocks, window)).transpose(1, 2).flatten(0, 1)
    bands = _band(window, 2 * window, window, blocks, q.device).repeat(batch, 1, 1, 1)
    keys, values = with_previous(k), with_previous(v)
    out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=bands, scale=scale)
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)


class _InScores(torch.autograd.Function):
    """`attention_reference`, which the backward computes again instead of keeping all scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        window: int | None,
        how: Scores,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.window, ctx.how, ctx.sinks = window, how, sinks
        return attention_reference(q, k, v, window, how, sinks)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        sinks = None if ctx.sinks is None else ctx.sinks.detach().requires_grad_()
        q, k, v = inputs
        with torch.enable_grad():
            out = attention_reference(q, k, v, ctx.window, ctx.how, sinks)
        inputs += [] if sinks is None else [sinks]
        found = torch.autograd.grad(out, inputs, grads[0])
        return *found[:3], None, None, None if sinks is None else found[3]


def attention(
    fused: torch.Tensor,
    heads: Heads,
    window: int | None = None,
    turns: torch.Tensor | None = None,
    kernels: Kernels = "auto",
    how: Scores = Scores(),
    sinks: torch.Tensor | None = None,
    documents: Documents | None = None,
) -> torch.Tensor:
    """Attend from queries, keys and values ``[B, S, (N + 2 K) D]`` to ``[B, S, N D]``. Each position attends
    to itself and the positions before it, at most the last ``window``. ``turns``: rotations (`rotary_turns`)
    of queries and keys. ``sinks``: score of each head's attention sink, ``[N]``: it takes a share of the
    softmax and has no value (GPT-OSS, arXiv 2508.10925). With ``documents``, positions attend inside their
    document only, and rotations begin with it."""
    capped = how.softcap is not None or sinks is not None
    if documents is not None:
        return _inside_documents(fused, heads, window, turns, kernels, how, sinks, documents)
    path = path_of(fused, heads, window, kernels, capped=capped)
    if path == "blocks":
        return attention_in_blocks(fused, heads, window, turns, how, sinks)
    q, k, v = split_heads(fused, heads, turns, kernels)
    if turns is not None and (path == "scores" or heads.num_heads == heads.num_kv_heads):
        v = v.contiguous()  # saved for the backward: a view would also keep the unrotated queries and keys
    return attention_by(path, q, k, v, window, how, sinks).flatten(2)


def _inside_documents(
    fused: torch.Tensor,
    heads: Heads,
    window: int | None,
    turns: torch.Tensor | None,
    kernels: Kernels,
    how: Scores,
    sinks: torch.Tensor | None,
    documents: Documents,
) -> torch.Tensor:
    """Attend inside documents: by one call for sequences of any lengths where there is one, else in batches
    of documents of about the same length."""
    capped = how.softcap is not None or sinks is not None
    path = choose_inside_documents(_shape_of(fused, heads, window, capped=capped), kernels)
    if path:
        # scores depend on differences of positions alone, so that rotations need not begin with a document
        q, k, v = split_heads(fused, heads, turns, kernels)
        span = min(window or documents.longest, documents.longest)
        if path == "triton":
            from myriad.kernels.attention_flash import flash_attention

            return flash_attention(q, k, v, span, how, sinks, documents).flatten(2)
        from myriad.kernels.attention_library import varlen_attention

        return varlen_attention(q, k, v, span, how.factor(heads.width), documents).flatten(2)

    def attend(part: torch.Tensor) -> torch.Tensor:
        of_part = None if turns is None else turns[: part.shape[1]]
        return attention(part, heads, window, of_part, kernels, how, sinks)

    return documents.attend(attend, fused)


def split_heads(
    fused: torch.Tensor, heads: Heads, turns: torch.Tensor | None, kernels: Kernels = "auto"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split into queries ``[B, S, N, D]``, and keys and values ``[B, S, K, D]``; queries and keys are
    rotated by ``turns``: ``[S, D/2]``, or ``[B, S, D/2]`` if rows have positions of their own."""
    num_turning = heads.num_heads + heads.num_kv_heads
    fused = fused.unflatten(-1, (-1, heads.width))
    if turns is not None and turns.dim() == 2 and runs_triton("rotary", fused, kernels, heads.width):
        from myriad.kernels.triton import rotary_kernels as triton_rotary

        return triton_rotary.split_turned(fused, heads.num_kv_heads, turns)
    turning, v = fused.split_with_sizes([num_turning, heads.num_kv_heads], 2)
    if turns is not None:
        turning = turned(turning, turns)
    q, k = turning.split_with_sizes([heads.num_heads, heads.num_kv_heads], 2)
    return q, k, v


def path_of(
    fused: torch.Tensor, heads: Heads, window: int | None, kernels: Kernels, *, capped: bool = False
) -> AttentionPath:
    """Return the implementation that these values use. ``capped``: scores have a bound or a sink."""
    return _chosen(_shape_of(fused, heads, window, capped=capped), kernels, fused.device)


def _shape_of(fused: torch.Tensor, heads: Heads, window: int | None, *, capped: bool) -> AttentionShape:
    on = fused.device
    return AttentionShape(
        on.type,
        str(fused.dtype).removeprefix("torch."),
        fused.shape[1],
        heads.width,
        window,
        blocks=runs_in_blocks(fused, window, capped=capped),
        deterministic=torch.are_deterministic_algorithms_enabled(),
        interpreted=in_interpreter(),
        capped=capped,
    )


@lru_cache(maxsize=64)
def _chosen(shape: AttentionShape, kernels: Kernels, device: torch.device) -> AttentionPath:
    if device.type != "cuda":
        return choose_attention(shape, kernels).path
    return choose_attention(shape, kernels, times(), torch.cuda.get_device_name(device)).path


def times_path() -> Path:
    """Return the file to which ``benchmarks/kernels/gpu.py --choose`` writes its measurements.
    MYRIAD_KERNEL_TIMES overrides the default."""
    asked = os.environ.get("MYRIAD_KERNEL_TIMES")
    home = os.environ.get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(asked) if asked else Path(home) / "myriad" / "kernel_times.json"


def times() -> tuple[FastestAttention, ...]:
    """Return the measurements of this machine, and of others that share its files."""
    return read_times(times_path())


def attention_by(
    path: AttentionPath,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    how: Scores = Scores(),
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend by any implementation but `blocks`: ``[B, S, N, D]`` and ``[B, S, K, D]`` to
    ``[B, S, N, D]``."""
    from myriad.kernels import attention_library

    sequence = q.shape[1]
    span, scale = min(window or sequence, sequence), how.factor(q.shape[3])
    if path == "triton":
        from myriad.kernels.attention_flash import flash_attention

        return flash_attention(q, k, v, span, how, sinks)
    if path == "varlen":
        return attention_library.varlen_attention(q, k, v, span, scale)
    if path == "flex":
        return attention_library.flex_attention_in(q, k, v, span, how, sinks)
    if path == "cudnn":
        return attention_library.cudnn_attention(q, k, v, scale)
    if path == "scores":
        mixed: torch.Tensor = _InScores.apply(q, k, v, window, how, sinks)
        return mixed
    if path == "sdpa" and q.is_cuda:
        return attention_library.sdpa_attention(q, k, v, scale)
    q = q.transpose(1, 2)
    k, v = (_expand(x.transpose(1, 2), q.shape[1]) for x in (k, v))
    if path == "sdpa":
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    elif path == "windows":
        out = _in_windows(q, k, v, span, scale)
    else:
        band = _band(sequence, sequence, span, 1, q.device)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=band, scale=scale)
    return out.transpose(1, 2)


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    how: Scores = Scores(),
    sinks: torch.Tensor | None = None,
    is_key: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend as `attention_by` does, with all scores in memory, in float32 or wider. If there are fewer
    queries than keys, they are the last positions. ``is_key`` ``[B, keys]``: false where a row has padding,
    which only its own query sees."""
    queries, keys = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(q.shape[2] // k.shape[2], 2) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)  # a score of 50 in bfloat16 is off by up to 0.125
    scores = torch.einsum("bqnd,bknd->bnqk", q.to(wide), k.to(wide)) * how.factor(q.shape[-1])
    if how.softcap is not None:
        scores = how.softcap * torch.tanh(scores / how.softcap)
    band = _band(queries, keys, window or keys, 1, q.device)
    if is_key is not None:
        # A query of padding sees itself: the softmax of no score at all would be NaN.
        band = band & (is_key[:, None, None] | _band(queries, keys, 1, 1, q.device))
    scores = scores.masked_fill(~band, -torch.inf)
    if sinks is not None:
        each = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        shares = torch.cat([scores, each], -1).softmax(-1)[..., :-1]
    else:
        shares = scores.softmax(-1)
    return torch.einsum("bnqk,bknd->bqnd", shares.to(v.dtype), v)
