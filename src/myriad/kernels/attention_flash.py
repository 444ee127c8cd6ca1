"""Attention with a window by Triton's kernels, as one differentiable operator: `triton.attention_forward` and
`triton.attention_backward`.

The kernels support heads of 16, 32, 64, 80, 96 and 128 values, in bfloat16, float16 or float32, on a CUDA
device. They also run in Triton's interpreter, if ``TRITON_INTERPRET=1`` was set before Triton was imported.
Scores, softmax and sums are float32 for inputs of any type.

Legend: B batch, S sequence, N query heads, K key/value heads, D head size.
"""

import math
from typing import Any, NamedTuple

import torch

from myriad.kernels.choice import in_interpreter
from myriad.kernels.memory_order import empty_in_order

__all__ = ["Launch", "Sizes", "flash_attention", "launch_of"]


class Launch(NamedTuple):
    """Launch parameters of one kernel: block of queries, block of keys, warps, pipeline stages."""

    query_size: int
    key_size: int
    num_warps: int
    num_stages: int


_LAUNCHES = {
    ("forward", 64): Launch(128, 64, 8, 3),
    ("forward", 128): Launch(128, 64, 8, 3),
    ("backward_keys", 64): Launch(64, 128, 8, 2),
    ("backward_keys", 128): Launch(64, 64, 8, 2),
    ("backward_queries", 64): Launch(128, 64, 8, 2),
    ("backward_queries", 128): Launch(128, 64, 8, 2),
}
"""The largest blocks whose sm_90 code keeps all but a few bytes in registers, according to
`cuobjdump --dump-resource-usage`. They have not been timed on a GPU."""
_WIDE = Launch(32, 32, 4, 1)
"""Blocks in float32: each value takes twice the memory, and no tensor core multiplies it directly."""


def padded_width(width: int) -> int:
    """Return the columns of a block: Triton's blocks have powers of two."""
    return 1 << (width - 1).bit_length()


def launch_of(kernel: str, width: int, dtype: torch.dtype) -> Launch:
    """Return the block sizes of a kernel for a head size and a type."""
    return _WIDE if dtype == torch.float32 else _LAUNCHES[kernel, max(64, padded_width(width))]


class Sizes(NamedTuple):
    """The sizes of one call, which every kernel gets."""

    batch: int
    num_rows: int
    num_heads: int
    repeats: int
    width: int
    window: int
    dtype: torch.dtype
    scale: float
    """Factor of the scores."""

    def constants(self, kernel: str) -> dict[str, Any]:
        """Return the compile-time arguments and the launch parameters of a kernel."""
        launch = launch_of(kernel, self.width, self.dtype)
        return {
            "repeats": self.repeats,
            "width": self.width,
            "padded": padded_width(self.width),
            "query_size": launch.query_size,
            "key_size": launch.key_size,
            "upcast": in_interpreter(),  # the interpreter multiplies bfloat16 wrongly
            "precision": "ieee" if self.dtype == torch.float32 else "tf32",
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
        }


def _strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, position and head; a head's values must be contiguous."""
    return x.stride(0), x.stride(1), x.stride(2)


def _rows_together(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int, scale: float
    ) -> torch.Tensor:
        from myriad.kernels.triton import attention_forward
        from myriad.kernels.triton.launch import launch

        q, k, v = (_rows_together(x) for x in (q, k, v))
        batch, num_rows, num_heads, width = q.shape
        sizes = Sizes(batch, num_rows, num_heads, num_heads // k.shape[2], width, window, q.dtype, scale)
        out = empty_in_order(q, *q.shape)
        logs = torch.empty(batch, num_heads, num_rows, dtype=torch.float32, device=q.device)
        constants = sizes.constants("forward")
        grid = (-(-num_rows // constants["query_size"]), batch * num_heads)
        if out.numel():
            launch(
                attention_forward.forward, grid, q, k, v, out, logs, *_strides(q), *_strides(k), *_strides(v),
                *out.stride()[:2], num_rows, num_heads, window, sizes.scale / math.log(2), **constants,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, logs)
        ctx.sizes = sizes
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, logs = ctx.saved_tensors
        grad = _rows_together(grads[0])
        grad_q, grad_k, grad_v = (empty_in_order(order, *x.shape) for order, x in ((q, q), (k, k), (k, v)))
        if out.numel():
            _differentiate(ctx.sizes, (q, k, v, grad), out, logs, (grad_q, grad_k, grad_v))
        return grad_q, grad_k, grad_v, None, None


def _differentiate(
    sizes: Sizes,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    logs: torch.Tensor,
    grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write the gradients of queries, keys and values to ``grads``."""
    from myriad.kernels.triton import attention_backward
    from myriad.kernels.triton.launch import launch

    grad, rows, heads = inputs[3], sizes.num_rows, sizes.num_heads
    products, size = torch.empty_like(logs), 64
    launch(
        attention_backward.row_products, (-(-rows // size), sizes.batch * heads),
        out, grad, products, *out.stride()[:2], *_strides(grad), rows, heads,
        width=sizes.width, padded=padded_width(sizes.width), size=size,
    )  # fmt: skip
    strides = [stride for x in inputs for stride in _strides(x)]
    size_arguments = rows, heads, sizes.window, sizes.scale / math.log(2), sizes.scale
    constants = sizes.constants("backward_keys")
    grid = (-(-rows // constants["key_size"]), sizes.batch * heads // sizes.repeats)
    arguments = (*strides, *grads[1].stride()[:2], *size_arguments)
    launch(
        attention_backward.backward_keys, grid, *inputs, logs, products, *grads[1:], *arguments, **constants
    )
    constants = sizes.constants("backward_queries")
    grid = (-(-rows // constants["query_size"]), sizes.batch * heads)
    arguments = (*strides, *grads[0].stride()[:2], *size_arguments)
    launch(
        attention_backward.backward_queries, grid, *inputs, logs, products, grads[0], *arguments, **constants
    )


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend causally to at most the last ``window`` positions: ``[B, S, N, D]`` and twice ``[B, S, K, D]``
    to ``[B, S, N, D]``. Any strides are allowed. ``scale``: factor of the scores, by default
    1 / sqrt(D)."""
    span = min(window or q.shape[1], max(1, q.shape[1]))
    out: torch.Tensor = _FlashAttention.apply(q, k, v, span, scale or q.shape[3] ** -0.5)
    return out
