"""LayerNorm and RMSNorm as Triton kernels, with the addition to the residual stream in the same pass.

    forward    stream = x + branch           both are read once, stream and y written once
               y = (stream - mean) root weight + bias           root = 1 / deviation; RMSNorm: mean 0
    backward   with n = (stream - mean) root, g = grad_y weight:
               grad = root (g - mean(g) - n mean(g n)) + grad_stream         RMSNorm: without mean(g)
               grad_weight = sum over rows of grad_y n,  grad_bias = that of grad_y

The stream is rounded to its type before it is normalised, so y has the same bits as the norm of the stored
stream: a backward may recompute y from the stream. Everything is float32 inside.

Each program of the backward keeps its own sum of the weight's gradient. If the weight's sink allows it, these
sums are left for the next norm's backward, which adds them up before its own work: that saves a launch. The
kernels are in `myriad.kernels.triton.norm_kernels`.
"""

from typing import Any

import torch

from myriad.kernels.gradient import GradientSink, PendingRows, sink_of
from myriad.kernels.triton.launch import launch, num_programs, rows_of
from myriad.kernels.triton.norm_kernels import backward_kernel, kernel_of

__all__ = ["add_norm"]


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
        kernel, block, warps = kernel_of("forward", rows.shape[1])
        launch(
            kernel,
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
            num_warps=warps,
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
    parameters = (weight,) if bias is None else (weight, bias)
    more = rows if grad_stream is None else rows_of(grad_stream)
    width = rows.shape[1]
    kernel, block, warps = kernel_of("backward", width)
    grad = torch.empty_like(rows, memory_format=torch.contiguous_format)
    if len(rows) == 0:
        return grad.view(grad_y.shape), *_as_gradients(parameters, rows.new_zeros(len(parameters), 1, width))
    at_once, of_processor = (1, 4) if kernel is backward_kernel else (2, 1)
    programs = num_programs(-(-len(rows) // at_once), rows.device, of_processor)
    sums = torch.empty(len(parameters), programs, width, device=rows.device)
    pending, sinks = _pending_of(parameters)
    left, left_sinks = (None, ()) if pending is None else pending.swap(sums, sinks)
    read = sums if left is None else left
    totals = [sink.total for sink in left_sinks] or [sums]
    launch(
        kernel,
        (programs,),
        rows,
        more,
        stream,
        weight,
        means,
        roots,
        grad,
        sums[0],
        sums[-1],
        read[0],
        read[-1],
        totals[0],
        totals[-1],
        read.shape[1],
        read.shape[2],
        rows.stride(0),
        more.stride(0),
        stream.stride(0),
        len(rows),
        width,
        IS_LAYER=ctx.is_layer,
        HAS_STREAM=grad_stream is not None,
        HAS_BIAS=bias is not None,
        NUM_LEFT=len(left_sinks),
        BLOCK=block,
        num_warps=warps,
    )
    if pending is not None:
        return grad.view(grad_y.shape), None, None
    return grad.view(grad_y.shape), *_as_gradients(parameters, sums)


def _pending_of(
    parameters: tuple[torch.Tensor, ...],
) -> tuple[PendingRows | None, tuple[GradientSink, ...]]:
    """Return the place where partial sums of all these gradients may be left, and the gradients' sinks;
    ``None`` as place: they must be added up directly."""
    sinks = tuple(sink for sink in map(sink_of, parameters) if sink is not None)
    places = {sink.pending for sink in sinks}
    return (places.pop() if len(sinks) == len(parameters) and len(places) == 1 else None), sinks


def _as_gradients(
    parameters: tuple[torch.Tensor, ...], sums: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Add the programs' sums ``[k, P, H]`` to the sinks. Return the gradients of weight and bias that have no
    sink."""
    gradients = [_added_up(parameter, rows) for parameter, rows in zip(parameters, sums, strict=True)]
    return gradients[0], gradients[1] if len(gradients) > 1 else None


def _added_up(parameter: torch.Tensor, sums: torch.Tensor) -> torch.Tensor | None:
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
    """Return ``x + branch`` and its norm; without a branch ``x`` is returned unchanged."""
    stream, y = _AddNorm.apply(x, branch, weight, bias, epsilon, is_layer)
    return stream, y
