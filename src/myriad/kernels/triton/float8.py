"""Scaling in blocks and products of what was scaled so, as Triton kernels. Import late: needs triton.

A product goes through the inner length in steps of 128: the float8 values of a step are multiplied by the
tensor cores, their sum is scaled and added to float32 sums (as DeepSeek-V3, arXiv 2412.19437, section 3.3.2,
promotes partial sums: the tensor cores of Hopper keep about 14 bits of them).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201
import torch
import triton
import triton.language as tl

from myriad.kernels.choice import in_interpreter
from myriad.kernels.triton.launch import launch

__all__ = ["product_kernel", "product_of_blocks", "scale_kernel", "scaled_in_blocks"]

_ROWS, _COLUMNS, _INNER = 128, 128, 128
_SCALED_ROWS = 16
"""Rows of a program where each has scales of its own."""


@triton.jit
def scale_kernel(
    x_pointer,
    values_pointer,
    scales_pointer,
    num_rows,
    num_columns,
    x_row,
    x_column,
    scales_row,
    most: tl.constexpr,
    least: tl.constexpr,
    height: tl.constexpr,
    size: tl.constexpr,
    square: tl.constexpr,
):
    """A tile ``[height, 128]`` to float8: one scale for each row, or for the whole tile."""
    rows = tl.program_id(0) * height + tl.arange(0, height)
    columns = tl.program_id(1) * size + tl.arange(0, size)
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    address = x_pointer + rows[:, None].to(tl.int64) * x_row + columns[None, :].to(tl.int64) * x_column
    x = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x), 1)

    if square:
        largest = tl.zeros([height], tl.float32) + tl.max(largest, 0)
    scales = tl.exp2(tl.ceil(tl.log2(tl.maximum(largest / most, least))))
    values = (x / scales[:, None]).to(values_pointer.dtype.element_ty)
    target = values_pointer + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    tl.store(target, values, mask=inside)
    if square:
        place = scales_pointer + tl.program_id(0) * scales_row + tl.program_id(1)
        tl.store(place, tl.max(scales, 0))
    else:
        tl.store(scales_pointer + rows * scales_row + tl.program_id(1), scales, mask=rows < num_rows)


def scaled_in_blocks(x: torch.Tensor, dtype: torch.dtype, square: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values ``[M, K]`` and scales ``[M, K/128]``, or ``[M/128, K/128]`` where ``square``."""
    rows, columns = x.shape
    height = _ROWS if square else _SCALED_ROWS
    values = torch.empty(rows, columns, dtype=dtype, device=x.device)
    wide = -(-columns // _INNER)
    scales = torch.empty(-(-rows // _ROWS) if square else rows, wide, device=x.device)
    launch(
        scale_kernel,
        (-(-rows // height), wide),
        x, values, scales, rows, columns, x.stride(0), x.stride(1), wide,
        most=torch.finfo(dtype).max, least=2.0**-100, height=height, size=_INNER, square=square,
        num_warps=8 if square else 4,
    )  # fmt: skip
    return values, scales


@triton.jit
def product_kernel(
    a_pointer,
    b_pointer,
    out_pointer,
    a_scales_pointer,
    b_scales_pointer,
    num_rows,
    num_columns,
    inner,
    a_scales_row,
    b_scales_row,
    b_height: tl.constexpr,
    row_size: tl.constexpr,
    column_size: tl.constexpr,
    inner_size: tl.constexpr,
    group: tl.constexpr,
    upcast: tl.constexpr,
):
    """``a b^T`` of ``[M, K]`` and ``[N, K]``. Programs of ``group`` rows of tiles go together, so that their
    tiles of ``b`` are read from the cache."""
    tiles_down, tiles_across = tl.cdiv(num_rows, row_size), tl.cdiv(num_columns, column_size)
    first = tl.program_id(0) // (group * tiles_across) * group
    together = tl.minimum(tiles_down - first, group)
    down = first + tl.program_id(0) % (group * tiles_across) % together
    across = tl.program_id(0) % (group * tiles_across) // together
    rows = down * row_size + tl.arange(0, row_size)
    columns = across * column_size + tl.arange(0, column_size)
    steps = tl.arange(0, inner_size)
    a_rows = a_pointer + rows[:, None].to(tl.int64) * inner + steps[None, :]
    b_rows = b_pointer + columns[:, None].to(tl.int64) * inner + steps[None, :]
    a_scales = a_scales_pointer + rows * a_scales_row
    b_scales = b_scales_pointer + columns // b_height * b_scales_row
    total = tl.zeros([row_size, column_size], tl.float32)
    for step in range(tl.cdiv(inner, inner_size)):
        left = steps[None, :] < inner - step * inner_size
        a = tl.load(a_rows + step * inner_size, mask=(rows[:, None] < num_rows) & left, other=0.0)
        b = tl.load(b_rows + step * inner_size, mask=(columns[:, None] < num_columns) & left, other=0.0)
        if upcast:
            a, b = a.to(tl.float32), b.to(tl.float32)
        a_scale = tl.load(a_scales + step, mask=rows < num_rows, other=0.0)
        b_scale = tl.load(b_scales + step, mask=columns < num_columns, other=0.0)
        total += tl.dot(a, tl.trans(b)) * a_scale[:, None] * b_scale[None, :]
    target = out_pointer + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
    inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
    tl.store(target, total.to(out_pointer.dtype.element_ty), mask=inside)


def product_of_blocks(
    a: torch.Tensor, a_scales: torch.Tensor, b: torch.Tensor, b_scales: torch.Tensor, out: torch.dtype
) -> torch.Tensor:
    """``[M, K]`` and ``[N, K]``, each with its scales, to ``[M, N]``; those of ``a`` are of rows."""
    rows, inner, columns = *a.shape, len(b)
    result = torch.empty(rows, columns, dtype=out, device=a.device)
    tiles = -(-rows // _ROWS) * -(-columns // _COLUMNS)
    launch(
        product_kernel,
        (tiles,),
        a, b, result, a_scales, b_scales, rows, columns, inner, a_scales.stride(0), b_scales.stride(0),
        b_height=1 if len(b_scales) == columns else _ROWS,
        row_size=_ROWS, column_size=_COLUMNS, inner_size=_INNER, group=8, upcast=in_interpreter(),
        num_warps=8, num_stages=3,
    )  # fmt: skip
    return result
