"""Operands of float8 products as Triton kernels. One read of a matrix gives its float8 values, those of the
transposed matrix, and the scales of both. Import late: needs triton.

    tensor     read for the largest value, then read, scaled and written in one form or both
    lines      read, scaled by the rows of a tile, by its columns or both, and written
    squares    the same, with one scale for a tile

Scales are computed from the bits of float32, which have the same order as absolute values: infinity above all
numbers, and NaN above infinity. So they are exact for any order of programs, and NaN is preserved. Values are
multiplied by the scale's inverse, a power of two, which causes no rounding.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201, ANN202
import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from myriad.kernels.triton.launch import block_of, launch, num_programs

__all__ = ["cast_kernel", "largest", "largest_kernel", "scaled"]

_SIZE = 128
"""Size of a tile in both dimensions: the number of neighbours that share a scale."""
_SEARCHED_ROWS = 64


@triton.jit
def _bits(x):
    """Return the bits of absolute values, as integers with the same order."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _power_of_two(bits, shift: tl.constexpr):
    """Return the smallest scale, at least 2^-100, that brings a value into a type whose largest is 1.75 x
    2^shift, and its inverse."""
    exponent = tl.maximum(((bits + 0x1FFFFF) >> 23) - shift, 27)
    is_number = bits < 0x7F800000
    scale = tl.where(is_number, exponent << 23, bits)
    inverse = tl.where(is_number, (254 - exponent) << 23, tl.where(bits == 0x7F800000, 0, bits))
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _tile(x_pointer, rows, columns, num_rows, num_columns, x_row, x_column):
    """Load a tile as float32, with zeros outside the matrix."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    address = x_pointer + rows[:, None].to(tl.int64) * x_row + columns[None, :].to(tl.int64) * x_column
    return tl.load(address, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(
    values,
    scales,
    values_pointer,
    scales_pointer,
    rows,
    columns,
    num_rows,
    num_columns,
    axis: tl.constexpr,
    kind: tl.constexpr,
):
    """Store one form. ``axis``: the grid axis along the form's rows."""
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    target = values_pointer + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    tl.store(target, values, mask=inside)
    down, across = tl.program_id(axis), tl.program_id(1 - axis)
    tiles_across = tl.num_programs(1 - axis)
    if kind == "lines":
        tl.store(scales_pointer + rows * tiles_across + across, scales, mask=rows < num_rows)
    elif kind == "squares":
        tl.store(scales_pointer + down * tiles_across + across, scales)
    elif (down == 0) & (across == 0):
        tl.store(scales_pointer, scales)


@triton.jit
def largest_kernel(
    x_pointer,
    largest_pointer,
    num_rows,
    num_columns,
    x_row,
    x_column,
    tiles_across,
    num_tiles,
    height: tl.constexpr,
    width: tl.constexpr,
):
    """Store the largest absolute value of the tiles of this program, as bits."""
    found = tl.zeros([height, width], tl.int32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        rows = tile // tiles_across * height + tl.arange(0, height)
        columns = tile % tiles_across * width + tl.arange(0, width)
        x = _tile(x_pointer, rows, columns, num_rows, num_columns, x_row, x_column)
        found = tl.maximum(found, _bits(x))
    tl.store(largest_pointer + tl.program_id(0), tl.max(tl.max(found, 1), 0))


@triton.jit
def cast_kernel(
    x_pointer,
    rows_pointer,
    columns_pointer,
    row_scales_pointer,
    column_scales_pointer,
    largest_pointer,
    num_rows,
    num_columns,
    x_row,
    x_column,
    num_largest,
    shift: tl.constexpr,
    kind: tl.constexpr,
    gives_rows: tl.constexpr,
    gives_columns: tl.constexpr,
    size: tl.constexpr,
    block: tl.constexpr,
):
    """Convert a tile ``[size, size]`` to float8, as stored and transposed."""
    down, across = tl.program_id(0), tl.program_id(1)
    rows, columns = down * size + tl.arange(0, size), across * size + tl.arange(0, size)
    x = _tile(x_pointer, rows, columns, num_rows, num_columns, x_row, x_column)
    if kind == "tensor":
        place = tl.arange(0, block)
        most = tl.max(tl.load(largest_pointer + place, mask=place < num_largest, other=0), 0)
    else:
        most = tl.max(tl.max(_bits(x), 1), 0)

    if gives_rows:
        scales, inverse = _power_of_two(tl.max(_bits(x), 1) if kind == "lines" else most, shift)
        values = (x * (inverse[:, None] if kind == "lines" else inverse)).to(rows_pointer.dtype.element_ty)
        _store(
            values, scales, rows_pointer, row_scales_pointer, rows, columns, num_rows, num_columns, 0, kind
        )
    if gives_columns:
        scales, inverse = _power_of_two(tl.max(_bits(x), 0) if kind == "lines" else most, shift)
        values = (x * (inverse[None, :] if kind == "lines" else inverse)).to(columns_pointer.dtype.element_ty)
        values = tl.trans(values)
        _store(
            values,
            scales,
            columns_pointer,
            column_scales_pointer,
            columns,
            rows,
            num_columns,
            num_rows,
            1,
            kind,
        )


def largest(x: torch.Tensor) -> torch.Tensor:
    """Return some float32 numbers, whose largest is the largest absolute value of ``x`` ``[M, K]``."""
    rows, columns = x.shape
    tiles_across = -(-columns // _SIZE)
    num_tiles = -(-rows // _SEARCHED_ROWS) * tiles_across
    programs = num_programs(num_tiles, x.device)
    found = torch.empty(programs, dtype=torch.int32, device=x.device)
    launch(
        largest_kernel,
        (programs,),
        x, found, rows, columns, x.stride(0), x.stride(1), tiles_across, num_tiles,
        height=_SEARCHED_ROWS, width=_SIZE, num_warps=8,
    )  # fmt: skip
    return found.view(torch.float32)


def scaled(
    x: torch.Tensor, dtype: torch.dtype, kind: str, among: torch.Tensor | None, forms: Sequence[str]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return values and scales of each of ``forms``. ``among``: the result of `largest`, for "tensor"."""
    rows, columns = x.shape
    least = 1 if kind == "tensor" else 0  # an empty matrix has a scale too
    grid = max(least, -(-rows // _SIZE)), max(least, -(-columns // _SIZE))
    made = {form: _place(x, form, dtype, kind, grid) for form in forms}
    some = made[forms[0]]
    (row_values, row_scales), (column_values, column_scales) = (
        made.get(form, some) for form in ("rows", "columns")
    )
    bits = some[1] if among is None else among.view(torch.int32)
    launch(
        cast_kernel,
        grid,
        x, row_values, column_values, row_scales, column_scales, bits,
        rows, columns, x.stride(0), x.stride(1), bits.numel(),
        shift=int(math.log2(torch.finfo(dtype).max)), kind=kind, gives_rows="rows" in made,
        gives_columns="columns" in made, size=_SIZE, block=block_of(bits.numel()) if kind == "tensor" else 1,
        num_warps=8, maxnreg=None if kind == "tensor" else 128,
    )  # fmt: skip
    return [made[form] for form in forms]


def _place(
    x: torch.Tensor, form: str, dtype: torch.dtype, kind: str, grid: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return uninitialised memory for values and scales."""
    tall, wide = x.shape if form == "rows" else x.shape[::-1]
    down, across = grid if form == "rows" else grid[::-1]
    shape = {"tensor": (), "lines": (tall, across), "squares": (down, across)}[kind]
    values = torch.empty(tall, wide, dtype=dtype, device=x.device)
    return values, torch.empty(shape, dtype=torch.float32, device=x.device)
