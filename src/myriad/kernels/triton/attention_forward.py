"""Causal attention with a sliding window as Triton kernels: FlashAttention-2 (arXiv 2307.08691, algorithms 1
and 2) whose loops begin and end at the window, so that time grows with S * W, not with S^2.

    keys       0 . . . . . . . S          a tile of queries attends to blocks of keys from its window's
    queries    . L m m m D . . .          start to the diagonal: those at either edge (L, D) with a mask,
                                          those between (m) without one

The same kernels compute whole sequences and pieces of them (`myriad.kernels.attention_pieces`): a tile
attends to one range of keys after the other, which its entry in a table names (`attention_tiles`), and can
continue from the results of earlier ranges, whose keys were elsewhere.

The scores are never in memory. The backward (`attention_backward`) recomputes them from the logarithms of the
softmax's sums.

Legend: B batch, S sequence, N query heads, K key/value heads, D head size, W window; M and C positions of a
tile of queries and of keys.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201, ANN202
import triton
import triton.language as tl

from myriad.kernels.triton.attention_tiles import (
    LN_2,
    bounded,
    load,
    range_at,
    sees,
    store,
    tile_at,
    whole_blocks,
)

__all__ = ["forward"]


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
    places,
    begin,
    end,
    stop,
    window,
    scale,
    gain,
    width: tl.constexpr,
    padded: tl.constexpr,
    size: tl.constexpr,
    masked: tl.constexpr,
    capped: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
):
    """Process the blocks of keys from ``begin`` to ``end``, one after the other; there are none from ``stop``
    on. ``places``: of the queries among the keys. A row that has seen no key yet has minus infinity as
    ``top``."""
    columns = tl.arange(0, padded)
    for start in range(begin, end, size):
        keys = start + tl.arange(0, size)
        k = load(k_base, keys, k_stride, columns, stop, width, padded, masked, upcast)
        scores = bounded(tl.dot(q, tl.trans(k), input_precision=precision), scale, capped)
        if masked:
            seen = sees(places[:, None] - keys[None, :], window) & (keys < stop)[None, :]
            scores = tl.where(seen, scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * gain)
        least = tl.where(higher == -float("inf"), 0.0, higher) if masked else higher
        shares = tl.exp2(scores * gain - least[:, None])
        fading = tl.exp2(top - least)
        total = total * fading + tl.sum(shares, 1)
        v = load(v_base, keys, v_stride, columns, stop, width, padded, masked, upcast)
        mixed = tl.dot(shares.to(v.dtype), v, mixed * fading[:, None], input_precision=precision)
        top = higher
    return total, top, mixed


@triton.jit
def forward(
    q_pointer,
    k_pointer,
    v_pointer,
    sinks_pointer,
    out_pointer,
    logs_pointer,
    tiles_pointer,
    ranges_pointer,
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
    gain,
    repeats: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    query_size: tl.constexpr,
    key_size: tl.constexpr,
    capped: tl.constexpr,
    has_sinks: tl.constexpr,
    adds: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute ``[B, S, N, D]`` and the logarithms ``[B, N, S]``, with one program per tile of queries and
    head; zeros and minus infinity for a query without keys. If ``adds``, join them to what is there.

    A score is ``gain`` times the product of query and key, or, if ``capped``, times the tanh of ``ln(2) / 2 *
    scale`` times the product. ``gain`` includes the factor that turns base e into base 2."""
    batch, first, end, range_begin, range_end = tile_at(tiles_pointer)
    head = tl.program_id(1).to(tl.int64)
    queries, columns = first + tl.arange(0, query_size), tl.arange(0, padded)
    k_base = k_pointer + batch * k_batch + (head // repeats) * k_head
    v_base = v_pointer + batch * v_batch + (head // repeats) * v_head
    q_base = q_pointer + batch * q_batch + head * q_head
    q = load(q_base, queries, q_row, columns, end, width, padded, True, upcast)
    out_base = out_pointer + batch * out_batch + head * width
    logs_base, inside = logs_pointer + (batch * num_heads + head) * num_rows, queries < end
    if adds:
        top = tl.load(logs_base + queries, mask=inside, other=0.0) / LN_2
        total = tl.where(top == -float("inf"), 0.0, 1.0)
        mixed = load(out_base, queries, out_row, columns, end, width, padded, True, True)
    else:
        top = tl.full([query_size], -float("inf"), tl.float32)
        total = tl.zeros([query_size], tl.float32)
        mixed = tl.zeros([query_size, padded], tl.float32)
        if has_sinks:  # keys that every query sees, whose values are zeros
            top = tl.zeros([query_size], tl.float32) + tl.load(sinks_pointer + head).to(tl.float32) / LN_2
            total += 1.0
    for number in range(range_begin, range_end):
        start, stop, shift = range_at(ranges_pointer, number)
        # keys that some query sees, and keys that all queries see
        begin = tl.maximum(start, first + shift - window + 1)
        last = tl.minimum(stop, end + shift)
        all_begin = tl.maximum(start, end + shift - window)
        all_begin, all_end = whole_blocks(
            begin, all_begin, tl.minimum(stop, first + shift + 1), last, key_size
        )
        places = queries + shift
        total, top, mixed = _meet(
            total, top, mixed, q, k_base, v_base, k_row, v_row, places, begin, all_begin, stop, window,
            scale, gain, width, padded, key_size, True, capped, upcast, precision,
        )  # fmt: skip
        total, top, mixed = _meet(
            total, top, mixed, q, k_base, v_base, k_row, v_row, places, all_begin, all_end, stop, window,
            scale, gain, width, padded, key_size, False, capped, upcast, precision,
        )  # fmt: skip
        total, top, mixed = _meet(
            total, top, mixed, q, k_base, v_base, k_row, v_row, places, all_end, last, stop, window,
            scale, gain, width, padded, key_size, True, capped, upcast, precision,
        )  # fmt: skip
    mixed = mixed / tl.where(total == 0.0, 1.0, total)[:, None]
    store(out_base, mixed, queries, out_row, columns, end, width, False)
    tl.store(logs_base + queries, (top + tl.log2(total)) * LN_2, mask=inside)
