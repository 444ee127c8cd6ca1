"""What the attention kernels share: the table of tiles, and loading, storing and masking of blocks of rows.

A program computes one tile: up to M neighbouring queries, or C neighbouring keys, of one sequence. An entry
of the table (`myriad.kernels.tile_tables`) names the ranges of positions that the tile attends to, or that
attend to it, each with the distance between its positions and the tile's:

    tiles     int32 [T, 5]     sequence, first position, end, first range, end of the ranges
    ranges    int32 [R, 3]     first position, end, shift: query - key + shift is the distance

A query sees the keys at distances from 0 to the window, exclusive.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201
import triton
import triton.language as tl

__all__ = ["LN_2", "bounded", "load", "range_at", "sees", "store", "tile_at", "whole_blocks"]

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def tile_at(tiles_pointer):
    """Return the entry of this program's tile."""
    entry = tiles_pointer + tl.program_id(0) * 5
    sequence = tl.load(entry).to(tl.int64)
    return sequence, tl.load(entry + 1), tl.load(entry + 2), tl.load(entry + 3), tl.load(entry + 4)


@triton.jit
def range_at(ranges_pointer, number):
    entry = ranges_pointer + number * 3
    return tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)


@triton.jit
def whole_blocks(begin, all_begin, all_end, end, size):
    """Return where the blocks from ``begin`` to ``end`` need no mask: those between ``all_begin`` and
    ``all_end``, of whose positions every one meets every one of the tile."""
    first = tl.minimum(begin + tl.cdiv(tl.maximum(all_begin - begin, 0), size) * size, end)
    return first, first + tl.maximum(all_end - first, 0) // size * size


@triton.jit
def load(
    base,
    rows,
    row_stride,
    columns,
    end,
    width: tl.constexpr,
    padded: tl.constexpr,
    checked: tl.constexpr,
    upcast: tl.constexpr,
):
    """Load ``[rows, columns]``, with zeros beyond the head size and, if ``checked``, from row ``end`` on."""
    address = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    if checked and width < padded:
        values = tl.load(address, mask=(rows[:, None] < end) & (columns[None, :] < width), other=0.0)
    elif checked:
        values = tl.load(address, mask=rows[:, None] < end, other=0.0)
    elif width < padded:
        values = tl.load(address, mask=columns[None, :] < width, other=0.0)
    else:
        values = tl.load(address)
    return values.to(tl.float32) if upcast else values


@triton.jit
def store(base, values, rows, row_stride, columns, end, width: tl.constexpr, adds: tl.constexpr):
    """Store ``[rows, columns]`` up to row ``end``; if ``adds``, added to what is there. No other program has
    these rows."""
    inside = (rows[:, None] < end) & (columns[None, :] < width)
    address = base + rows[:, None].to(tl.int64) * row_stride + columns[None, :]
    if adds:
        values += tl.load(address, mask=inside, other=0.0)
    tl.store(address, values.to(base.dtype.element_ty), mask=inside)


@triton.jit
def sees(distances, window):
    return (distances >= 0) & (distances < window)


@triton.jit
def bounded(products, scale, capped: tl.constexpr):
    """Return ``tanh(x)`` of ``scale * products = x * 2 / ln(2)`` if scores have a bound, else the
    products."""
    if capped:
        return 1.0 - 2.0 / (tl.exp2(products * scale) + 1.0)
    else:
        return products
