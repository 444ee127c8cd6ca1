"""Products of groups of rows with a weight for each group, as Triton kernels. Import late: needs triton.

    product           y_g = x_g W_g^T + b_g      a program for a tile of rows of one group, and columns
    input gradient    grad x_g = grad_g W_g      the same kernel: the weights' strides are exchanged
    weights           W'_g += grad_g^T x_g       a program for a tile of a weight, over the rows of its group

Weights and their sums are wherever they are: the kernels read a table of addresses. The numbers of rows are
read on the device, so the host does not wait: the grid has as many tiles as there can be, and a program finds
its group by comparing its number with the sums of tiles. A weight's gradient is added in place to the float32
sum of a step's gradients, each tile by one program, in the order of the rows.

Legend: G groups, N rows of all groups, I and O inputs and outputs.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from myriad.kernels.choice import in_interpreter
from myriad.kernels.triton.launch import block_of, launch, rows_of

__all__ = [
    "add_weight_products",
    "address_table",
    "input_gradient",
    "product",
    "product_kernel",
    "tile_of",
    "tiles",
    "weight_kernel",
]


@triton.jit
def tile_of(ends_pointer, tile, num_groups, groups: tl.constexpr, row_size: tl.constexpr):
    """Return the group of a tile of rows, its first row, and where the group ends. The group is
    ``num_groups`` or more for a tile beyond the last one."""
    group = tl.arange(0, groups)
    ends = tl.load(ends_pointer + group, mask=group < num_groups, other=0)
    starts = tl.load(ends_pointer + group - 1, mask=(group > 0) & (group < num_groups), other=0)
    num_tiles = tl.where(group < num_groups, tl.cdiv(ends - starts, row_size), 0)
    tile_ends = tl.cumsum(num_tiles, 0)
    own = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    start = tl.sum(tl.where(group == own, starts, 0), 0)
    end = tl.sum(tl.where(group == own, ends, 0), 0)
    first_tile = tl.sum(tl.where(group == own, tile_ends - num_tiles, 0), 0)
    return own, start + (tile - first_tile) * row_size, end


@triton.jit
def product_kernel(
    x_pointer,
    ends_pointer,
    weights_pointer,
    biases_pointer,
    y_pointer,
    x_row,
    weight_row,
    weight_column,
    num_groups,
    num_columns,
    inner,
    groups: tl.constexpr,
    row_size: tl.constexpr,
    column_size: tl.constexpr,
    inner_size: tl.constexpr,
    has_bias: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
):
    """Compute a tile of ``y``. Neighbouring programs have the same rows and other columns."""
    across = tl.cdiv(num_columns, column_size)
    own, first, end = tile_of(ends_pointer, tl.program_id(0) // across, num_groups, groups, row_size)
    if own < num_groups:
        rows = first + tl.arange(0, row_size)
        columns = tl.program_id(0) % across * column_size + tl.arange(0, column_size)
        steps = tl.arange(0, inner_size)
        kind = tl.pointer_type(x_pointer.dtype.element_ty)
        weight = tl.load(weights_pointer + own).to(kind)
        x_rows = x_pointer + rows[:, None].to(tl.int64) * x_row + steps[None, :]
        weight_rows = weight + columns[None, :].to(tl.int64) * weight_row + steps[:, None] * weight_column
        total = tl.zeros([row_size, column_size], tl.float32)
        for step in range(0, inner, inner_size):
            x = tl.load(
                x_rows + step, mask=(rows[:, None] < end) & (steps[None, :] < inner - step), other=0.0
            )
            inside = (columns[None, :] < num_columns) & (steps[:, None] < inner - step)
            w = tl.load(weight_rows + step * weight_column, mask=inside, other=0.0)
            if upcast:
                x, w = x.to(tl.float32), w.to(tl.float32)
            total = tl.dot(x, w, total, input_precision=precision)
        if has_bias:
            bias = tl.load(biases_pointer + own).to(kind)
            values = tl.load(bias + columns, mask=columns < num_columns, other=0.0)
            total += values.to(tl.float32)[None, :]
        target = y_pointer + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        inside = (rows[:, None] < end) & (columns[None, :] < num_columns)
        tl.store(target, total.to(y_pointer.dtype.element_ty), mask=inside)


@triton.jit
def weight_kernel(
    grad_pointer,
    x_pointer,
    ends_pointer,
    totals_pointer,
    grad_row,
    x_row,
    outputs,
    inputs,
    output_size: tl.constexpr,
    input_size: tl.constexpr,
    row_size: tl.constexpr,
    accumulate: tl.constexpr,
    upcast: tl.constexpr,
    precision: tl.constexpr,
):
    """Add a tile of ``grad_g^T x_g`` to the sum of its weight, or write it. A group without rows gets zeros
    where it writes."""
    group = tl.program_id(1)
    end = tl.load(ends_pointer + group)
    start = tl.load(ends_pointer + group - 1, mask=group > 0, other=0)
    across = tl.cdiv(inputs, input_size)
    down = tl.program_id(0) // across * output_size + tl.arange(0, output_size)
    columns = tl.program_id(0) % across * input_size + tl.arange(0, input_size)
    total = tl.zeros([output_size, input_size], tl.float32)
    for first in range(start, end, row_size):
        rows = first + tl.arange(0, row_size)
        lines = rows.to(tl.int64)
        grad_inside = (rows[None, :] < end) & (down[:, None] < outputs)
        grad = tl.load(grad_pointer + lines[None, :] * grad_row + down[:, None], mask=grad_inside, other=0.0)
        x_inside = (rows[:, None] < end) & (columns[None, :] < inputs)
        x = tl.load(x_pointer + lines[:, None] * x_row + columns[None, :], mask=x_inside, other=0.0)
        if upcast:
            grad, x = grad.to(tl.float32), x.to(tl.float32)
        total = tl.dot(grad, x, total, input_precision=precision)
    sums = tl.load(totals_pointer + group).to(tl.pointer_type(tl.float32))
    target = sums + down[:, None].to(tl.int64) * inputs + columns[None, :]
    inside = (down[:, None] < outputs) & (columns[None, :] < inputs)
    if accumulate:
        total += tl.load(target, mask=inside, other=0.0)
    tl.store(target, total, mask=inside)


def tiles(dtype: torch.dtype) -> dict[str, Any]:
    """Return the sizes of a tile of both kernels for values of this type, and how it is computed: two or
    three tiles of operands fit a multiprocessor's shared memory."""
    wide = dtype == torch.float32
    sizes = {"column": 128, "inner": 32 if wide else 64, "row": 128}
    return {**sizes, "precision": "ieee" if wide else "tf32", "options": {"num_warps": 8, "num_stages": 3}}


def product(
    x: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return ``x_g W_g^T + b_g`` ``[N, O]`` of rows ``[N, I]``. ``ends``: of their groups, int32 ``[G]``."""
    return _multiply(x, ends, weights, biases, len(weights[0]), (weights[0].shape[1], 1))


def input_gradient(grad: torch.Tensor, ends: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``grad_g W_g`` ``[N, I]`` of gradients ``[N, O]``."""
    columns = weights[0].shape[1]
    return _multiply(grad, ends, weights, (), columns, (1, columns))


def _multiply(
    x: torch.Tensor,
    ends: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    num_columns: int,
    strides: tuple[int, int],
) -> torch.Tensor:
    x = rows_of(x)
    y, how = x.new_empty(len(x), num_columns), tiles(x.dtype)
    down = -(-len(x) // how["row"]) + len(weights) if len(x) else 0
    table = address_table(weights)
    launch(
        product_kernel,
        (down * -(-num_columns // how["column"]),),
        x, ends, table, address_table(biases) if biases else table, y,
        x.stride(0), *strides, len(weights), num_columns, x.shape[1],
        groups=block_of(len(weights)), row_size=how["row"], column_size=how["column"],
        inner_size=how["inner"], has_bias=bool(biases), upcast=in_interpreter(), precision=how["precision"],
        **how["options"],
    )  # fmt: skip
    return y


def add_weight_products(
    totals: Sequence[torch.Tensor],
    grad: torch.Tensor,
    x: torch.Tensor,
    ends: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    """Add ``grad_g^T x_g`` to the float32 sums ``[O, I]`` of all groups, or write it there."""
    grad, x, how = rows_of(grad), rows_of(x), tiles(x.dtype)
    outputs, inputs = totals[0].shape
    grid = -(-outputs // how["row"]) * -(-inputs // how["column"]), len(totals)
    launch(
        weight_kernel,
        grid,
        grad, x, ends, address_table(totals), grad.stride(0), x.stride(0), outputs, inputs,
        output_size=how["row"], input_size=how["column"], row_size=how["inner"], accumulate=accumulate,
        upcast=in_interpreter(), precision=how["precision"], **how["options"],
    )  # fmt: skip


def address_table(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a table of the tensors' addresses, int64, on their device."""
    assert all(one.is_contiguous() for one in tensors), "the kernels know one distance of rows"
    return _table(tuple(one.data_ptr() for one in tensors), tensors[0].device)


@lru_cache(maxsize=4096)
def _table(addresses: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(addresses, dtype=torch.int64, device=device)
