"""LayerNorm and RMSNorm as Triton kernels, with the addition to the residual stream in the same pass.

    forward    stream = x + branch           both are read once, stream and y written once
               y = (stream - mean) root weight + bias           root = 1 / deviation; RMSNorm: mean 0
    backward   with n = (stream - mean) root, g = grad_y weight:
               grad = root (g - mean(g) - n mean(g n)) + grad_stream         RMSNorm: without mean(g)
               grad_weight = sum over rows of grad_y n,  grad_bias = that of grad_y

The stream is rounded to its type before it is normalised, so y has the bits that the norm of the stored
stream gives: a backward may make y again from the stream. Everything is float32 inside.

One program holds a row. In the backward each takes every P-th row and keeps its own sum of the weight's
gradient (Liger Kernel, arXiv 2410.10989, section 3.2, does it alike).
"""

# mypy: disable-error-code="untyped-decorator"
from typing import Any

import torch
import triton
import triton.language as tl

from myriad.kernels.gradient import sink_of
from myriad.kernels.triton.launch import block_of, launch, num_programs, rows_of

__all__ = ["add_norm"]


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
    grad_y_stride: tl.tensor,
    grad_stream_stride: tl.tensor,
    stream_stride: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    IS_LAYER: tl.constexpr,
    HAS_STREAM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
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


def _warps(block: int) -> int:
    """16 values a thread, within what a program may have."""
    return min(max(block // 512, 1), 16)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        epsilon: float,
        is_layer: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, branch_rows = rows_of(x), None if branch is None else rows_of(branch)
        stream = rows if branch is None else torch.empty_like(rows, memory_format=torch.contiguous_format)
        y = torch.empty_like(rows, memory_format=torch.contiguous_format)
        roots = rows.new_empty(len(rows), dtype=torch.float32)
        means = torch.empty_like(roots) if is_layer else roots
        block = block_of(rows.shape[1])
        launch(
            forward_kernel,
            (len(rows),),
            rows,
            rows if branch_rows is None else branch_rows,
            weight,
            weight if bias is None else bias,
            stream,
            y,
            means,
            roots,
            rows.stride(0),
            0 if branch_rows is None else branch_rows.stride(0),
            rows.shape[1],
            epsilon,
            IS_LAYER=is_layer,
            HAS_BRANCH=branch is not None,
            HAS_BIAS=bias is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(stream, means, roots)
        ctx.weight, ctx.bias, ctx.is_layer, ctx.has_branch = weight, bias, is_layer, branch is not None
        return x if branch is None else stream.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_stream, grad_y = grads
        if grad_y is None:
            return grad_stream, grad_stream if ctx.has_branch else None, None, None, None, None
        grad, grad_weight, grad_bias = _backward(ctx, grad_stream, grad_y)
        return grad, grad if ctx.has_branch else None, grad_weight, grad_bias, None, None


def _backward(
    ctx: Any, grad_stream: torch.Tensor | None, grad_y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    stream, means, roots = ctx.saved_tensors
    rows, weight, bias = rows_of(grad_y), ctx.weight, ctx.bias
    more = rows if grad_stream is None else rows_of(grad_stream)
    width, block = rows.shape[1], block_of(rows.shape[1])
    programs = num_programs(len(rows), rows.device)
    grad = torch.empty_like(rows, memory_format=torch.contiguous_format)
    make = torch.empty if len(rows) else torch.zeros
    sums = make(1 if bias is None else 2, programs, width, device=rows.device)
    launch(
        backward_kernel,
        (programs if len(rows) else 0,),
        rows,
        more,
        stream,
        weight,
        means,
        roots,
        grad,
        sums[0],
        sums[-1],
        rows.stride(0),
        more.stride(0),
        stream.stride(0),
        len(rows),
        width,
        IS_LAYER=ctx.is_layer,
        HAS_STREAM=grad_stream is not None,
        HAS_BIAS=bias is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    grad_bias = None if bias is None else _added_up(bias, sums[1])
    return grad.view(grad_y.shape), _added_up(weight, sums[0]), grad_bias


def _added_up(parameter: torch.Tensor, sums: torch.Tensor) -> torch.Tensor | None:
    """The programs' sums ``[P, H]`` as the parameter's gradient, if no sink takes it."""
    sink = sink_of(parameter)
    if sink is None:
        return sums.sum(0).to(parameter.dtype)
    sink.add_rows(sums)
    return None


def add_norm(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    is_layer: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x + branch``, and its norm; without a branch ``x`` as it is."""
    stream, y = _AddNorm.apply(x, branch, weight, bias, epsilon, is_layer)
    return stream, y
