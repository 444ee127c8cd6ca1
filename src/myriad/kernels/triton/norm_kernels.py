"""Device code of LayerNorm and RMSNorm; `myriad.kernels.triton.fused_add_norm` has the formulas and launches.

One program holds a row. In the backward each program processes every P-th row and keeps its own sum of the
weight's gradient (as in Liger Kernel, arXiv 2410.10989, section 3.2). The sums that the norm before left are
added up before the program's own work.

Rows that do not fit into a program's registers (`_WIDEST`) are read in blocks of columns. The first read
computes the sums over the row; the second one, from the cache, computes the result. The programs' sums of the
weight's gradient are then in memory, and two rows at a time are added to them.
"""

# mypy: disable-error-code="untyped-decorator"
from typing import Any

import triton
import triton.language as tl

from myriad.kernels.triton.launch import block_of

__all__ = ["backward_kernel", "forward_kernel", "kernel_of", "wide_backward_kernel", "wide_forward_kernel"]


@triton.jit
def forward_kernel(
    x: tl.tensor,
    branch: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stream: tl.tensor,
    y: tl.tensor,
    means: tl.tensor,
    roots: tl.tensor,
    x_stride: tl.tensor,
    branch_stride: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    IS_LAYER: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        values += tl.load(branch + row * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(stream.dtype.element_ty)
        tl.store(stream + row * width + column, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if IS_LAYER:
        mean = tl.sum(values, 0) / width
        values = tl.where(inside, values - mean, 0.0)
        tl.store(means + row, mean)
    root = 1.0 / tl.sqrt(tl.sum(values * values, 0) / width + epsilon)
    tl.store(roots + row, root)
    out = values * root * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * width + column, out.to(y.dtype.element_ty), mask=inside)


_WIDEST = {"forward": 16384, "backward": 8192}
"""Largest row that a program holds in registers; rows of twice the size spill to memory."""
_WIDE = 4096
"""Columns of a wide row that are read at once."""
_COLUMNS, _ROWS = tl.constexpr(16), tl.constexpr(64)
"""Tile of partial sums that a program loads at once: 64 bytes of each row, which leaves a thread enough
registers."""


@triton.jit
def _add_up(sums: tl.tensor, total: tl.tensor, rows: tl.tensor, width: tl.tensor) -> None:
    """Compute ``total[H] += sums[P, H].sum(0)``. One program sums each column, in a fixed order."""
    row = tl.arange(0, _ROWS)
    for start in range(tl.program_id(0) * _COLUMNS, width, tl.num_programs(0) * _COLUMNS):
        column = start + tl.arange(0, _COLUMNS)
        inside = column < width
        found = tl.load(total + column, mask=inside, other=0.0)
        for first in range(0, rows, _ROWS):
            index = first + row
            mask = (index < rows)[:, None] & inside[None, :]
            found += tl.sum(tl.load(sums + index[:, None] * width + column[None, :], mask=mask, other=0.0), 0)
        tl.store(total + column, found, mask=inside)


@triton.jit
def backward_kernel(
    grad_y: tl.tensor,
    grad_stream: tl.tensor,
    stream: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    roots: tl.tensor,
    grad: tl.tensor,
    weight_sums: tl.tensor,
    bias_sums: tl.tensor,
    left_weight: tl.tensor,
    left_bias: tl.tensor,
    left_weight_total: tl.tensor,
    left_bias_total: tl.tensor,
    left_programs: tl.tensor,
    left_width: tl.tensor,
    grad_y_stride: tl.tensor,
    grad_stream_stride: tl.tensor,
    stream_stride: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    IS_LAYER: tl.constexpr,
    HAS_STREAM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    if NUM_LEFT > 0:
        _add_up(left_weight, left_weight_total, left_programs, left_width)
    if NUM_LEFT > 1:
        _add_up(left_bias, left_bias_total, left_programs, left_width)
    column = tl.arange(0, BLOCK)
    inside = column < width
    scale = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([BLOCK], tl.float32)
    bias_sum = tl.zeros([BLOCK], tl.float32)
    for index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        g = tl.load(grad_y + row * grad_y_stride + column, mask=inside, other=0.0).to(tl.float32)
        normed = tl.load(stream + row * stream_stride + column, mask=inside, other=0.0).to(tl.float32)
        root = tl.load(roots + row)
        if IS_LAYER:
            normed = tl.where(inside, normed - tl.load(means + row), 0.0)
        normed *= root
        weight_sum += g * normed
        if HAS_BIAS:
            bias_sum += g
        g *= scale
        out = g - normed * (tl.sum(g * normed, 0) / width)
        if IS_LAYER:
            out -= tl.sum(g, 0) / width
        out *= root
        if HAS_STREAM:
            out += tl.load(grad_stream + row * grad_stream_stride + column, mask=inside, other=0.0).to(
                tl.float32
            )
        tl.store(grad + row * width + column, out.to(grad.dtype.element_ty), mask=inside)
    tl.store(weight_sums + program * width + column, weight_sum, mask=inside)
    if HAS_BIAS:
        tl.store(bias_sums + program * width + column, bias_sum, mask=inside)


@triton.jit
def wide_forward_kernel(
    x: tl.tensor,
    branch: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stream: tl.tensor,
    y: tl.tensor,
    means: tl.tensor,
    roots: tl.tensor,
    x_stride: tl.tensor,
    branch_stride: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    IS_LAYER: tl.constexpr,
    HAS_BRANCH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    added, squares = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BRANCH:
            values += tl.load(branch + row * branch_stride + column, mask=inside, other=0.0).to(tl.float32)
            rounded = values.to(stream.dtype.element_ty)
            tl.store(stream + row * width + column, rounded, mask=inside)
            values = rounded.to(tl.float32)
        added += values
        squares += values * values
    read, stride = x, x_stride
    if HAS_BRANCH:
        tl.debug_barrier()  # another thread may read what this one wrote
        read, stride = stream, width
    mean = 0.0
    if IS_LAYER:
        mean = tl.sum(added, 0) / width
        tl.store(means + row, mean)
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            values = tl.load(read + row * stride + column, mask=inside, other=0.0).to(tl.float32)
            values = tl.where(inside, values - mean, 0.0)
            squares += values * values
    root = 1.0 / tl.sqrt(tl.sum(squares, 0) / width + epsilon)
    tl.store(roots + row, root)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        values = tl.load(read + row * stride + column, mask=inside, other=0.0).to(tl.float32)
        out = (values - mean) * root * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BIAS:
            out += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * width + column, out.to(y.dtype.element_ty), mask=inside)


@triton.jit
def wide_backward_kernel(
    grad_y: tl.tensor,
    grad_stream: tl.tensor,
    stream: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    roots: tl.tensor,
    grad: tl.tensor,
    weight_sums: tl.tensor,
    bias_sums: tl.tensor,
    left_weight: tl.tensor,
    left_bias: tl.tensor,
    left_weight_total: tl.tensor,
    left_bias_total: tl.tensor,
    left_programs: tl.tensor,
    left_width: tl.tensor,
    grad_y_stride: tl.tensor,
    grad_stream_stride: tl.tensor,
    stream_stride: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    IS_LAYER: tl.constexpr,
    HAS_STREAM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_LEFT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    if NUM_LEFT > 0:
        _add_up(left_weight, left_weight_total, left_programs, left_width)
    if NUM_LEFT > 1:
        _add_up(left_bias, left_bias_total, left_programs, left_width)
    for first in range(program * 2, rows, tl.num_programs(0) * 2):
        index = first + tl.arange(0, 2)
        is_row = index < rows
        row = index.to(tl.int64)[:, None]
        root = tl.load(roots + index, mask=is_row, other=0.0)[:, None]
        mean = tl.zeros([2, 1], tl.float32)
        if IS_LAYER:
            mean = tl.load(means + index, mask=is_row, other=0.0)[:, None]
        scaled, along = tl.zeros([2, BLOCK], tl.float32), tl.zeros([2, BLOCK], tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            inside = is_row[:, None] & (column < width)
            scale = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            g = tl.load(grad_y + row * grad_y_stride + column, mask=inside, other=0.0).to(tl.float32)
            normed = tl.load(stream + row * stream_stride + column, mask=inside, other=0.0).to(tl.float32)
            along += g * scale * ((normed - mean) * root)
            scaled += g * scale
        along_row = (tl.sum(along, 1) / width)[:, None]
        mean_row = (tl.sum(scaled, 1) / width)[:, None]
        tl.debug_barrier()  # another thread may have written the sums that this one reads
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)[None, :]
            inside = is_row[:, None] & (column < width)
            g = tl.load(grad_y + row * grad_y_stride + column, mask=inside, other=0.0).to(tl.float32)
            normed = tl.load(stream + row * stream_stride + column, mask=inside, other=0.0).to(tl.float32)
            normed = (normed - mean) * root
            place = program * width + start + tl.arange(0, BLOCK)
            fits = start + tl.arange(0, BLOCK) < width
            later = fits & (tl.zeros([BLOCK], tl.int32) + first > program * 2)
            found = tl.load(weight_sums + place, mask=later, other=0.0)
            tl.store(weight_sums + place, found + tl.sum(g * normed, 0), mask=fits)
            if HAS_BIAS:
                found = tl.load(bias_sums + place, mask=later, other=0.0)
                tl.store(bias_sums + place, found + tl.sum(g, 0), mask=fits)
            g *= tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
            out = g - normed * along_row
            if IS_LAYER:
                out -= mean_row
            out *= root
            if HAS_STREAM:
                out += tl.load(grad_stream + row * grad_stream_stride + column, mask=inside, other=0.0).to(
                    tl.float32
                )
            tl.store(grad + row * width + column, out.to(grad.dtype.element_ty), mask=inside)


def kernel_of(way: str, width: int) -> tuple[Any, int, int]:
    """Return the kernel ("forward" or "backward") for rows of ``width`` values, its block and its warps. A
    thread has 16 values of the row, within the limit of warps per program."""
    block = block_of(width)
    warps = min(max(block // 512, 1), 16)
    fits = block <= _WIDEST[way]
    if way == "forward":
        return (forward_kernel, block, warps) if fits else (wide_forward_kernel, _WIDE, warps)
    return (backward_kernel, block, warps) if fits else (wide_backward_kernel, _WIDE, warps)
