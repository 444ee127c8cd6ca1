"""Gradients of `attention_forward`: the scores are recomputed from the kept logarithms of the softmax's sums.

The backward passes over the pairs twice. The first pass has a program for each tile of keys, with all query
heads that share it. So it needs no atomic additions and gives the same bits every time. The second pass has a
program for each tile of queries. Logarithms and output are those of the whole softmax, so pieces of it need
nothing of each other.

Legend: B batch, S sequence, N query heads, K key/value heads, D head size.
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

__all__ = ["backward_keys", "backward_queries", "row_products"]


@triton.jit
def row_products(
    out_pointer,
    grad_pointer,
    products_pointer,
    out_batch,
    out_row,
    grad_batch,
    grad_row,
    grad_head,
    num_rows,
    num_heads,
    width: tl.constexpr,
    padded: tl.constexpr,
    size: tl.constexpr,
):
    """Compute ``sum(out * grad)`` of each row, which the softmax's backward subtracts."""
    rows, columns = tl.program_id(0) * size + tl.arange(0, size), tl.arange(0, padded)
    batch, head = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    out_base = out_pointer + batch * out_batch + head * width
    grad_base = grad_pointer + batch * grad_batch + head * grad_head
    out = load(out_base, rows, out_row, columns, num_rows, width, padded, True, True)
    grad = load(grad_base, rows, grad_row, columns, num_rows, width, padded, True, True)
    flat = tl.program_id(1).to(tl.int64)
    tl.store(products_pointer + flat * num_rows + rows, tl.sum(out * grad, 1), mask=rows < num_rows)


@triton.jit
def _meet_queries(
    grad_k,
    grad_v,
    k,
    v,
    q_base,
    grad_base,
    logs_base,
    products_base,
    q_row,
    grad_row,
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
    """Process the blocks of queries of one head from ``begin`` to ``end``; there are none from ``stop`` on.
    ``places``: of the keys among the queries. Scores are keys by queries."""
    columns = tl.arange(0, padded)
    for start in range(begin, end, size):
        queries = start + tl.arange(0, size)
        q = load(q_base, queries, q_row, columns, stop, width, padded, masked, upcast)
        if masked:
            inside = queries < stop
            logs = tl.load(logs_base + queries, mask=inside, other=0.0) / LN_2
            products = tl.load(products_base + queries, mask=inside, other=0.0)
        else:
            logs = tl.load(logs_base + queries) / LN_2
            products = tl.load(products_base + queries)
        scores = bounded(tl.dot(k, tl.trans(q), input_precision=precision), scale, capped)
        shares = tl.exp2(scores * gain - logs[None, :])
        if masked:
            seen = sees(queries[None, :] - places[:, None], window) & (queries < stop)[None, :]
            shares = tl.where(seen, shares, 0.0)
        grad = load(grad_base, queries, grad_row, columns, stop, width, padded, masked, upcast)
        grad_v = tl.dot(shares.to(grad.dtype), grad, grad_v, input_precision=precision)
        grad_shares = tl.dot(v, tl.trans(grad), input_precision=precision)
        grad_scores = shares * (grad_shares - products[None, :])
        if capped:
            grad_scores = grad_scores * (1.0 - scores * scores)
        grad_k = tl.dot(grad_scores.to(q.dtype), q, grad_k, input_precision=precision)
    return grad_k, grad_v


@triton.jit
def backward_keys(
    q_pointer,
    k_pointer,
    v_pointer,
    grad_pointer,
    logs_pointer,
    products_pointer,
    grad_k_pointer,
    grad_v_pointer,
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
    grad_batch,
    grad_row,
    grad_head,
    out_batch,
    out_row,
    num_rows,
    num_heads,
    window,
    scale,
    gain,
    natural_scale,
    repeats: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    query_size: tl.constexpr,
    key_size: tl.constexpr,
    capped: tl.constexpr,
    adds: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute the gradients of keys and values ``[B, S, K, D]``, with one program per tile of keys and
    key/value head; if ``adds``, add them to what is there."""
    batch, first, end, range_begin, range_end = tile_at(tiles_pointer)
    kv_head = tl.program_id(1).to(tl.int64)
    keys, columns = first + tl.arange(0, key_size), tl.arange(0, padded)
    k_base = k_pointer + batch * k_batch + kv_head * k_head
    v_base = v_pointer + batch * v_batch + kv_head * v_head
    k = load(k_base, keys, k_row, columns, end, width, padded, True, upcast)
    v = load(v_base, keys, v_row, columns, end, width, padded, True, upcast)
    grad_k = tl.zeros([key_size, padded], tl.float32)
    grad_v = tl.zeros([key_size, padded], tl.float32)
    for repeat in range(repeats):
        head = kv_head * repeats + repeat
        q_base = q_pointer + batch * q_batch + head * q_head
        grad_base = grad_pointer + batch * grad_batch + head * grad_head
        flat = (batch * num_heads + head) * num_rows
        logs_base, products_base = logs_pointer + flat, products_pointer + flat
        for number in range(range_begin, range_end):
            start, stop, shift = range_at(ranges_pointer, number)
            # queries that see some of the keys, and queries that see all of them
            begin = tl.maximum(start, first - shift)
            last = tl.minimum(stop, end - 1 - shift + window)
            all_begin = tl.maximum(start, end - 1 - shift)
            all_begin, all_end = whole_blocks(
                begin, all_begin, tl.minimum(stop, first - shift + window), last, query_size
            )
            places = keys - shift
            grad_k, grad_v = _meet_queries(
                grad_k, grad_v, k, v, q_base, grad_base, logs_base, products_base, q_row, grad_row, places,
                begin, all_begin, stop, window, scale, gain, width, padded, query_size, True, capped, upcast,
                precision,
            )  # fmt: skip
            grad_k, grad_v = _meet_queries(
                grad_k, grad_v, k, v, q_base, grad_base, logs_base, products_base, q_row, grad_row, places,
                all_begin, all_end, stop, window, scale, gain, width, padded, query_size, False, capped,
                upcast, precision,
            )  # fmt: skip
            grad_k, grad_v = _meet_queries(
                grad_k, grad_v, k, v, q_base, grad_base, logs_base, products_base, q_row, grad_row, places,
                all_end, last, stop, window, scale, gain, width, padded, query_size, True, capped, upcast,
                precision,
            )  # fmt: skip
    target = batch * out_batch + kv_head * width
    store(grad_k_pointer + target, grad_k * natural_scale, keys, out_row, columns, end, width, adds)
    store(grad_v_pointer + target, grad_v, keys, out_row, columns, end, width, adds)


@triton.jit
def _meet_keys(
    grad_q,
    q,
    grad,
    logs,
    products,
    k_base,
    v_base,
    k_row,
    v_row,
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
    """Process the blocks of keys from ``begin`` to ``end``, as `attention_forward` does."""
    columns = tl.arange(0, padded)
    for start in range(begin, end, size):
        keys = start + tl.arange(0, size)
        k = load(k_base, keys, k_row, columns, stop, width, padded, masked, upcast)
        v = load(v_base, keys, v_row, columns, stop, width, padded, masked, upcast)
        scores = bounded(tl.dot(q, tl.trans(k), input_precision=precision), scale, capped)
        shares = tl.exp2(scores * gain - logs[:, None])
        if masked:
            seen = sees(places[:, None] - keys[None, :], window) & (keys < stop)[None, :]
            shares = tl.where(seen, shares, 0.0)
        grad_shares = tl.dot(grad, tl.trans(v), input_precision=precision)
        grad_scores = shares * (grad_shares - products[:, None])
        if capped:
            grad_scores = grad_scores * (1.0 - scores * scores)
        grad_q = tl.dot(grad_scores.to(k.dtype), k, grad_q, input_precision=precision)
    return grad_q


@triton.jit
def backward_queries(
    q_pointer,
    k_pointer,
    v_pointer,
    grad_pointer,
    logs_pointer,
    products_pointer,
    grad_q_pointer,
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
    grad_batch,
    grad_row,
    grad_head,
    out_batch,
    out_row,
    num_rows,
    num_heads,
    window,
    scale,
    gain,
    natural_scale,
    repeats: tl.constexpr,
    width: tl.constexpr,
    padded: tl.constexpr,
    query_size: tl.constexpr,
    key_size: tl.constexpr,
    capped: tl.constexpr,
    adds: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute the gradient of the queries ``[B, S, N, D]``; programs as in `forward`. If ``adds``, add it to
    what is there."""
    batch, first, end, range_begin, range_end = tile_at(tiles_pointer)
    head = tl.program_id(1).to(tl.int64)
    queries, columns = first + tl.arange(0, query_size), tl.arange(0, padded)
    k_base = k_pointer + batch * k_batch + (head // repeats) * k_head
    v_base = v_pointer + batch * v_batch + (head // repeats) * v_head
    q_base = q_pointer + batch * q_batch + head * q_head
    grad_base = grad_pointer + batch * grad_batch + head * grad_head
    q = load(q_base, queries, q_row, columns, end, width, padded, True, upcast)
    grad = load(grad_base, queries, grad_row, columns, end, width, padded, True, upcast)
    flat = (batch * num_heads + head) * num_rows
    inside = queries < end
    logs = tl.load(logs_pointer + flat + queries, mask=inside, other=0.0) / LN_2
    products = tl.load(products_pointer + flat + queries, mask=inside, other=0.0)
    grad_q = tl.zeros([query_size, padded], tl.float32)
    for number in range(range_begin, range_end):
        start, stop, shift = range_at(ranges_pointer, number)
        begin = tl.maximum(start, first + shift - window + 1)
        last = tl.minimum(stop, end + shift)
        all_begin = tl.maximum(start, end + shift - window)
        all_begin, all_end = whole_blocks(
            begin, all_begin, tl.minimum(stop, first + shift + 1), last, key_size
        )
        places = queries + shift
        grad_q = _meet_keys(
            grad_q, q, grad, logs, products, k_base, v_base, k_row, v_row, places, begin, all_begin, stop,
            window, scale, gain, width, padded, key_size, True, capped, upcast, precision,
        )  # fmt: skip
        grad_q = _meet_keys(
            grad_q, q, grad, logs, products, k_base, v_base, k_row, v_row, places, all_begin, all_end, stop,
            window, scale, gain, width, padded, key_size, False, capped, upcast, precision,
        )  # fmt: skip
        grad_q = _meet_keys(
            grad_q, q, grad, logs, products, k_base, v_base, k_row, v_row, places, all_end, last, stop,
            window, scale, gain, width, padded, key_size, True, capped, upcast, precision,
        )  # fmt: skip
    target = grad_q_pointer + batch * out_batch + head * width
    store(target, grad_q * natural_scale, queries, out_row, columns, end, width, adds)
