"""Float8 products of groups of rows with a weight for each group, scaled in blocks of 128, as Triton kernels.
Import late: needs triton.

As `myriad.kernels.triton.grouped_kernels`, with operands as in `myriad.kernels.triton.float8_kernels`: rows
are scaled by 128 neighbours, weights by 128 x 128 values. A weight's gradient multiplies tokens, 128 of which
share a scale, so that the rows of each group begin at a multiple of 128 (`RowGroups.padded`).
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,import-untyped"
# ruff: noqa: ANN001, ANN201
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from myriad.kernels.choice import in_interpreter
from myriad.kernels.triton.grouped_kernels import address_table, tile_of
from myriad.kernels.triton.launch import block_of, launch

__all__ = ["add_products_of_groups", "float8_product_kernel", "float8_weight_kernel", "product_of_groups"]

_SIZE = 128


@triton.jit
def float8_product_kernel(
    a_pointer,
    a_scales_pointer,
    ends_pointer,
    weights_pointer,
    weight_scales_pointer,
    out_pointer,
    like_pointer,
    num_groups,
    num_columns,
    inner,
    scales_row,
    groups: tl.constexpr,
    size: tl.constexpr,
    upcast: tl.constexpr,
):
    """Compute a tile of ``a_g W_g^T``: rows ``[N, K]`` and weights ``[M, K]``. ``like``: a tensor of the
    weights' type."""
    across = tl.cdiv(num_columns, size)
    own, first, end = tile_of(ends_pointer, tl.program_id(0) // across, num_groups, groups, size)
    if own < num_groups:
        rows = first + tl.arange(0, size)
        block = tl.program_id(0) % across
        columns = block * size + tl.arange(0, size)
        steps = tl.arange(0, size)
        weight = tl.load(weights_pointer + own).to(tl.pointer_type(like_pointer.dtype.element_ty))
        scales = tl.load(weight_scales_pointer + own).to(tl.pointer_type(tl.float32)) + block * scales_row
        a_rows = a_pointer + rows[:, None].to(tl.int64) * inner + steps[None, :]
        b_rows = weight + columns[:, None].to(tl.int64) * inner + steps[None, :]
        a_scales = a_scales_pointer + rows.to(tl.int64) * scales_row
        total = tl.zeros([size, size], tl.float32)
        for step in range(tl.cdiv(inner, size)):
            left = steps[None, :] < inner - step * size
            a = tl.load(a_rows + step * size, mask=(rows[:, None] < end) & left, other=0.0)
            b = tl.load(b_rows + step * size, mask=(columns[:, None] < num_columns) & left, other=0.0)
            if upcast:
                a, b = a.to(tl.float32), b.to(tl.float32)
            a_scale = tl.load(a_scales + step, mask=rows < end, other=0.0)
            total += tl.dot(a, tl.trans(b)) * (a_scale * tl.load(scales + step))[:, None]
        target = out_pointer + rows[:, None].to(tl.int64) * num_columns + columns[None, :]
        inside = (rows[:, None] < end) & (columns[None, :] < num_columns)
        tl.store(target, total.to(out_pointer.dtype.element_ty), mask=inside)


@triton.jit
def float8_weight_kernel(
    grad_pointer,
    grad_scales_pointer,
    x_pointer,
    x_scales_pointer,
    ends_pointer,
    totals_pointer,
    outputs,
    inputs,
    tokens,
    scales_row,
    size: tl.constexpr,
    accumulate: tl.constexpr,
    upcast: tl.constexpr,
):
    """Add a tile of ``grad_g^T x_g`` to the sum of its weight, or write it: transposed gradients ``[O, N]``
    and values ``[I, N]``, whose groups end at multiples of ``size``."""
    group = tl.program_id(1)
    end = tl.load(ends_pointer + group)
    start = tl.load(ends_pointer + group - 1, mask=group > 0, other=0)
    across = tl.cdiv(inputs, size)
    down = tl.program_id(0) // across * size + tl.arange(0, size)
    columns = tl.program_id(0) % across * size + tl.arange(0, size)
    total = tl.zeros([size, size], tl.float32)
    steps = tl.arange(0, size)
    grad_rows = grad_pointer + down[:, None].to(tl.int64) * tokens + steps[None, :]
    x_rows = x_pointer + columns[:, None].to(tl.int64) * tokens + steps[None, :]
    grad_scales, x_scales = grad_scales_pointer + down * scales_row, x_scales_pointer + columns * scales_row
    for place in range(start // size, end // size):
        grad = tl.load(grad_rows + place * size, mask=down[:, None] < outputs, other=0.0)
        x = tl.load(x_rows + place * size, mask=columns[:, None] < inputs, other=0.0)
        if upcast:
            grad, x = grad.to(tl.float32), x.to(tl.float32)
        grad_scale = tl.load(grad_scales + place, mask=down < outputs, other=0.0)
        x_scale = tl.load(x_scales + place, mask=columns < inputs, other=0.0)
        total += tl.dot(grad, tl.trans(x)) * grad_scale[:, None] * x_scale[None, :]
    sums = tl.load(totals_pointer + group).to(tl.pointer_type(tl.float32))
    target = sums + down[:, None].to(tl.int64) * inputs + columns[None, :]
    inside = (down[:, None] < outputs) & (columns[None, :] < inputs)
    if accumulate:
        total += tl.load(target, mask=inside, other=0.0)
    tl.store(target, total, mask=inside)


def product_of_groups(
    a: torch.Tensor,
    a_scales: torch.Tensor,
    ends: torch.Tensor,
    weights: Sequence[tuple[torch.Tensor, torch.Tensor]],
    out: torch.dtype,
) -> torch.Tensor:
    """Multiply rows ``[N, K]`` and the weight ``[M, K]`` of their group, each with its scales: ``[N, M]``.
    ``ends``: of the groups, int32 ``[G]``."""
    values, scales = zip(*weights, strict=True)
    num_columns = len(values[0])
    result = torch.empty(len(a), num_columns, dtype=out, device=a.device)
    tiles = -(-len(a) // _SIZE) + len(weights) if len(a) else 0
    launch(
        float8_product_kernel,
        (tiles * -(-num_columns // _SIZE),),
        a, a_scales, ends, address_table(values), address_table(scales), result, values[0],
        len(weights), num_columns, a.shape[1], a_scales.shape[1],
        groups=block_of(len(weights)), size=_SIZE, upcast=in_interpreter(), num_warps=8, num_stages=3,
    )  # fmt: skip
    return result


def add_products_of_groups(
    totals: Sequence[torch.Tensor],
    grad: tuple[torch.Tensor, torch.Tensor],
    x: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    *,
    accumulate: bool,
) -> None:
    """Add ``grad_g^T x_g`` to the float32 sums ``[O, I]`` of all groups, or write it there, from transposed
    operands ``[O, N]`` and ``[I, N]`` with their scales. ``ends``: of the groups, multiples of 128."""
    outputs, inputs = totals[0].shape
    launch(
        float8_weight_kernel,
        (-(-outputs // _SIZE) * -(-inputs // _SIZE), len(totals)),
        *grad, *x, ends, address_table(totals), outputs, inputs, grad[0].shape[1], grad[1].shape[1],
        size=_SIZE, accumulate=accumulate, upcast=in_interpreter(), num_warps=8, num_stages=3,
    )  # fmt: skip
