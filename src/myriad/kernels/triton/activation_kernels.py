"""Activation functions of the MLP as Triton kernels, with the bias of the preceding product.

    forward    y = f(x + bias)                        x read once, y written once; x is kept, without its bias
    backward   grad = f'(x + bias) grad_y,  grad_bias = sum of grad over rows, in the same pass

The functions are GELU by the error function or by tanh (Hendrycks & Gimpel, arXiv 1606.08415, section 2),
ReLU^2 (So et al., arXiv 2109.08668), and the gated functions SwiGLU and GeGLU (Shazeer, arXiv 2002.05202) of
``[..., 2 F]`` with the gate in the first half, and GPT-OSS's SwiGLU with bounds.

A program processes a stripe of columns and every P-th row.

Legend: F width of the MLP.
"""

# mypy: disable-error-code="untyped-decorator"
from typing import Any

import torch
import triton
import triton.language as tl

from myriad.kernels.config import CLAMPED_SWIGLU_ALPHA, CLAMPED_SWIGLU_LIMIT, GATED
from myriad.kernels.side_by_side import Slot
from myriad.kernels.triton.launch import block_of, launch, num_programs, rows_of

__all__ = ["activate"]

_MOST_COLUMNS = 1024
"""Largest number of columns in a stripe."""

_HALF_ROOT_2: tl.constexpr = tl.constexpr(0.7071067811865476)
_ROOT_OF_8_BY_PI: tl.constexpr = tl.constexpr(1.5957691216057308)
_ONE_BY_ROOT_2_PI: tl.constexpr = tl.constexpr(0.3989422804014327)
_CUBIC: tl.constexpr = tl.constexpr(0.044715)
"""Constant of GELU's tanh form (arXiv 1606.08415, section 2)."""
_ALPHA: tl.constexpr = tl.constexpr(CLAMPED_SWIGLU_ALPHA)
_LIMIT: tl.constexpr = tl.constexpr(CLAMPED_SWIGLU_LIMIT)


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _gelu(x: tl.tensor) -> tl.tensor:
    """Return the value and the slope."""
    share = 0.5 * (1.0 + tl.erf(x * _HALF_ROOT_2))
    return x * share, share + x * _ONE_BY_ROOT_2_PI * tl.exp(-0.5 * x * x)


@triton.jit
def _gelu_tanh(x: tl.tensor) -> tl.tensor:
    """Return the value and the slope."""
    square = x * x * _CUBIC  # tensors first: in the interpreter a constant times a constant is no tensor
    share = _sigmoid((x + square * x) * _ROOT_OF_8_BY_PI)  # (1 + tanh(z)) / 2
    inner = (square * 3.0 + 1.0) * _ROOT_OF_8_BY_PI
    return x * share, share + x * share * (1.0 - share) * inner


@triton.jit
def _value_and_slope(x: tl.tensor, NAME: tl.constexpr) -> tl.tensor:
    """Return the value and the slope of a function, or of the gate of a gated function."""
    if NAME == "gelu" or NAME == "geglu":
        value, slope = _gelu(x)
    elif NAME == "gelu_tanh" or NAME == "geglu_tanh":
        value, slope = _gelu_tanh(x)
    elif NAME == "swiglu":
        share = _sigmoid(x)
        value = x * share
        slope = share * (1.0 + x * (1.0 - share))
    elif NAME == "clamped_swiglu":
        inside = tl.where(x > _LIMIT, _LIMIT, x)  # not minimum, which would drop a NaN
        share = _sigmoid(inside * _ALPHA)
        value = inside * share
        slope = tl.where(x > _LIMIT, 0.0, share * (1.0 + inside * _ALPHA * (1.0 - share)))
    else:
        value = tl.where(x <= 0.0, 0.0, x)  # not maximum, which would drop a NaN
        slope = 2.0 * value
        value *= value
    return value, slope


@triton.jit
def _factor_and_slope(x: tl.tensor, NAME: tl.constexpr) -> tl.tensor:
    """Return the factor of a gated function's gate, given its second half, and the factor's slope."""
    if NAME == "clamped_swiglu":
        beyond = tl.abs(x) > _LIMIT
        factor = tl.where(beyond, tl.where(x > 0.0, _LIMIT, -_LIMIT), x) + 1.0
        slope = tl.where(beyond, 0.0, 1.0)
    else:
        factor = x
        slope = tl.full(x.shape, 1.0, tl.float32)
    return factor, slope


@triton.jit
def _with_bias(
    x: tl.tensor,
    bias: tl.tensor,
    at: tl.tensor,
    bias_at: tl.tensor,
    inside: tl.tensor,
    HAS_BIAS: tl.constexpr,
) -> tl.tensor:
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias + bias_at, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def forward_kernel(
    x: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    for index in range(tl.program_id(0), rows, tl.num_programs(0)):
        start = tl.cast(index, tl.int64) * x_stride
        first = _with_bias(x, bias, start + column, column, inside, HAS_BIAS)
        value, _ = _value_and_slope(first, NAME)
        if IS_GATED:
            second = _with_bias(x, bias, start + width + column, width + column, inside, HAS_BIAS)
            factor, _ = _factor_and_slope(second, NAME)
            value *= factor
        at = tl.cast(index, tl.int64) * width + column
        tl.store(y + at, value.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    grad_y: tl.tensor,
    x: tl.tensor,
    bias: tl.tensor,
    grad: tl.tensor,
    bias_sums: tl.tensor,
    grad_y_stride: tl.tensor,
    x_stride: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    NAME: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    full = width * (2 if IS_GATED else 1)
    first_sum = tl.zeros([BLOCK], tl.float32)
    second_sum = tl.zeros([BLOCK], tl.float32)
    for index in range(program, rows, tl.num_programs(0)):
        row = tl.cast(index, tl.int64)
        start = row * x_stride
        g = tl.load(grad_y + row * grad_y_stride + column, mask=inside, other=0.0).to(tl.float32)
        first = _with_bias(x, bias, start + column, column, inside, HAS_BIAS)
        out = grad + row * full + column
        value, slope = _value_and_slope(first, NAME)
        first_grad = g * slope
        if IS_GATED:
            second = _with_bias(x, bias, start + width + column, width + column, inside, HAS_BIAS)
            factor, factor_slope = _factor_and_slope(second, NAME)
            first_grad *= factor
            second_grad = g * value * factor_slope
            tl.store(out + width, second_grad.to(grad.dtype.element_ty), mask=inside)
            second_sum += second_grad
        tl.store(out, first_grad.to(grad.dtype.element_ty), mask=inside)
        first_sum += first_grad
    if HAS_BIAS:
        tl.store(bias_sums + program * full + column, first_sum, mask=inside)
        if IS_GATED:
            tl.store(bias_sums + program * full + width + column, second_sum, mask=inside)


def _grid(rows: torch.Tensor, width: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """Return the grid of programs, and the width of each stripe."""
    block = min(block_of(width), _MOST_COLUMNS)
    stripes = triton.cdiv(width, block)
    programs = -(-num_programs(len(rows) * stripes, rows.device) // stripes) if len(rows) else 0
    return (programs, stripes), {"BLOCK": block, "num_warps": max(1, block // 256)}


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, name: str, slots: tuple[Slot, Slot] | None
    ) -> torch.Tensor:
        rows = rows_of(x)
        width = rows.shape[1] // 2 if name in GATED else rows.shape[1]
        y = rows.new_empty(len(rows), width) if slots is None else slots[0].take(rows, len(rows), width)
        grid, blocks = _grid(rows, width)
        launch(
            forward_kernel,
            grid,
            rows,
            rows if bias is None else bias,
            y,
            rows.stride(0),
            len(rows),
            width,
            NAME=name,
            IS_GATED=name in GATED,
            HAS_BIAS=bias is not None,
            **blocks,
        )
        ctx.save_for_backward(rows)
        ctx.bias, ctx.name, ctx.shape, ctx.slots = bias, name, x.shape, slots
        return y.view(*x.shape[:-1], width)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        bias: torch.Tensor | None = ctx.bias
        grad_y, full = rows_of(grads[0]), rows.shape[1]
        slots: tuple[Slot, Slot] | None = ctx.slots
        grad = rows.new_empty(rows.shape) if slots is None else slots[1].take(rows, *rows.shape)
        grid, blocks = _grid(rows, grad_y.shape[1])
        make = torch.empty if len(rows) else torch.zeros
        sums = make(0 if bias is None else max(grid[0], 1), full, device=rows.device)
        launch(
            backward_kernel,
            grid,
            grad_y,
            rows,
            rows if bias is None else bias,
            grad,
            sums,
            grad_y.stride(0),
            rows.stride(0),
            len(rows),
            grad_y.shape[1],
            NAME=ctx.name,
            IS_GATED=ctx.name in GATED,
            HAS_BIAS=bias is not None,
            **blocks,
        )
        return grad.view(ctx.shape), None if bias is None else sums.sum(0).to(bias.dtype), None, None


def activate(
    name: str,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    slots: tuple[Slot, Slot] | None = None,
) -> torch.Tensor:
    """Apply ``f(x + bias)`` to ``[..., F]``, or to ``[..., 2 F]`` for gated functions. ``name`` is that of a
    model config. ``slots``: memory for the result and for the gradient of ``x``."""
    y: torch.Tensor = _Activation.apply(x, bias, name, slots)
    return y
