"""Causal attention with a sliding window as Triton kernels: FlashAttention-2 (arXiv 2307.08691, algorithms 1
and 2) whose loops begin and end at the window, so that time grows with S * W, not with S^2.

    keys       0 . . . . . . . S          a block of queries attends to blocks of keys from its window's
    queries    . L m m m D . . .          start to the diagonal: those at either edge (L, D) with a mask,
                                          those between (m) without one

The scores are never in memory. The backward (`attention_backward`) recomputes them from the kept logarithms
of the softmax's sums.

Legend: B batch, S sequence, N query heads, K key/value heads, D head size, W window; M and C positions of a
block of queries and of keys.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201, ANN202
import triton
import triton.language as tl

from myriad.kernels.triton.attention_tiles import load, sees, store

__all__ = ["forward"]

_HIDDEN = tl.constexpr(-1.0e30)
"""The score of a masked pair. It is finite, so that a block in which a row sees no key yet gives no NaN; the
first key that the row sees cancels the sums so far."""


@triton.jit
def _meet(
    total,
    top,
    mixed,
    q,
    k_base,
    v_base,
    k_stride,
    v_stride,
    queries,
    begin,
    end,
    window,
    num_rows,
    scale,
    width: tl.constexpr,
    padded: tl.constexpr,
    size: tl.constexpr,
    masked: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
):
    """Process the blocks of keys from ``begin`` to ``end``, one after the other."""
    columns = tl.arange(0, padded)
    for start in range(begin, end, size):
        keys = start + tl.arange(0, size)
        k = load(k_base, keys, k_stride, columns, num_rows, width, padded, masked, upcast)
        scores = tl.dot(q, tl.trans(k), input_precision=precision)
        if masked:
            scores = tl.where(sees(queries[:, None], keys[None, :], window, num_rows), scores, _HIDDEN)
        higher = tl.maximum(top, tl.max(scores, 1) * scale)
        shares = tl.exp2(scores * scale - higher[:, None])
        fading = tl.exp2(top - higher)
        total = total * fading + tl.sum(shares, 1)
        v = load(v_base, keys, v_stride, columns, num_rows, width, padded, masked, upcast)
        mixed = tl.dot(shares.to(v.dtype), v, mixed * fading[:, None], input_precision=precision)
        top = higher
    return total, top, mixed


@triton.jit
def forward(
    q_pointer,
    k_pointer,
    v_pointer,
    out_pointer,
    logs_pointer,
    q_batch,
    q_row,
    q_head,
    k_batch,
    k_row,
    k_head,
    v_batch,
    v_row,
    v_head,
    out_batch,
    out_row,
    num_rows,
    num_heads,
    window,
    scale,
    repeats: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    query_size: tl.constexpr,
    key_size: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute ``[B, S, N, D]`` and the logarithms ``[B, N, S]`` (to base 2), with one program per block of
    queries and head. ``scale`` includes the factor that turns base e into base 2."""
    # without a window late blocks have the most keys: started first, none is left over at the end
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    batch, head = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    first = block * query_size
    queries, columns = first + tl.arange(0, query_size), tl.arange(0, padded)
    q_base = q_pointer + batch * q_batch + head * q_head
    k_base = k_pointer + batch * k_batch + (head // repeats) * k_head
    v_base = v_pointer + batch * v_batch + (head // repeats) * v_head
    q = load(q_base, queries, q_row, columns, num_rows, width, padded, True, upcast)
    top = tl.full([query_size], _HIDDEN, tl.float32)
    total = tl.zeros([query_size], tl.float32)
    mixed = tl.zeros([query_size, padded], tl.float32)
    # keys that some query sees, and keys that all queries see
    begin = tl.maximum(0, first - window + 1) // key_size * key_size
    end = tl.minimum(first + query_size, num_rows)
    all_begin = tl.cdiv(tl.maximum(0, first + query_size - window), key_size) * key_size
    all_begin = tl.minimum(tl.maximum(begin, all_begin), end)
    all_end = tl.maximum(all_begin, first // key_size * key_size)
    total, top, mixed = _meet(
        total, top, mixed, q, k_base, v_base, k_row, v_row, queries, begin, all_begin, window, num_rows,
        scale, width, padded, key_size, True, upcast, precision,
    )  # fmt: skip
    total, top, mixed = _meet(
        total, top, mixed, q, k_base, v_base, k_row, v_row, queries, all_begin, all_end, window, num_rows,
        scale, width, padded, key_size, False, upcast, precision,
    )  # fmt: skip
    total, top, mixed = _meet(
        total, top, mixed, q, k_base, v_base, k_row, v_row, queries, all_end, end, window, num_rows,
        scale, width, padded, key_size, True, upcast, precision,
    )  # fmt: skip
    flat = tl.program_id(1).to(tl.int64)
    out_base = out_pointer + batch * out_batch + head * width
    store(out_base, mixed / total[:, None], queries, out_row, columns, num_rows, width)
    tl.store(logs_pointer + flat * num_rows + queries, top + tl.log2(total), mask=queries < num_rows)
