"""Where a weight's gradient goes: straight into float32 memory that the runtime owns.

Autograd would make a new tensor per micro-batch and add it to ``.grad``: two more passes over every matrix. A
`GradientSink` lets the matrix product of the backward accumulate in place (``total += g^T x``, one BLAS
call), in float32 whatever the compute precision, into a view of the chunk's flat buffer. An operator that
finds a sink on its weight returns no gradient to autograd, so ``weight.grad`` stays ``None``.

Zero-bubble schedules split a backward in its input part and its weight part. While ``sink.deferred`` is a
list, products are put on it instead of computed; `apply_deferred` is the weight part. Several sinks may share
one list, so a stage keeps one list per micro-batch and the order of the additions is that of the backward:
the sums have the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from myriad.kernels.float8 import Float8, Scaled, Seen

__all__ = ["DeferredProduct", "GradientSink", "apply_deferred", "set_sink", "sink_of"]


_TILE_VALUES, _FEWEST_ROWS = 2**19, 256
"""Tile of float16 operands that a CPU converts at once: 2 MiB, or enough rows for an efficient product."""

DeferredProduct = Callable[[], None]
"""Computes a weight's gradient and adds it to the sink's total, wherever that is by then."""


@dataclass(slots=True, eq=False)
class GradientSink:
    """Float32 gradient sum of one weight."""

    total: torch.Tensor
    """Same shape as the weight, float32; usually a view of a flat buffer."""
    deferred: list[DeferredProduct] | None = None
    """While a list, `run` puts products there instead of computing them."""
    float8: Float8 | None = None
    """In which the weight is multiplied, in all three products; ``None``: as the operands are."""

    def run(self, product: DeferredProduct, later: list[DeferredProduct] | None = None) -> None:
        """Now, or when what is on the list of `deferred`, or else on ``later``, is applied."""
        waiting = later if self.deferred is None else self.deferred
        if waiting is None:
            product()
        else:
            waiting.append(product)

    def add_product(self, grad_output: torch.Tensor, x: torch.Tensor) -> None:
        """``total += grad_output^T x``, now: ``[T, O]`` and ``[T, I]`` to ``[O, I]``."""
        accumulate_product(self.total, grad_output, x)

    def add_float8(self, columns: Scaled, x: Seen) -> None:
        """The same, now, of what `Float8.gradient` made of the outputs' gradient."""
        assert self.float8 is not None
        self.float8.add_weight_gradient(self.total, columns, x)

    def add_rows(self, rows: torch.Tensor) -> None:
        """``total += rows.sum(0)``, now, of float32 ``rows`` ``[n, ...]``: one kernel, in a fixed order."""
        self.total.view(-1).addmv_(rows.flatten(1).t(), _ones(len(rows), rows.device))

    def add(self, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """``total += scale * gradient``, now."""
        self.total.add_(gradient, alpha=scale)


@lru_cache(maxsize=16)
def _ones(length: int, device: torch.device) -> torch.Tensor:
    return torch.ones(length, device=device)


def accumulate_product(
    total: torch.Tensor, grad_output: torch.Tensor, x: torch.Tensor, *, first: bool = False
) -> None:
    """``total += grad_output^T x`` in float32; what is not float32 is multiplied as it is. The ``first``
    product of a sum is written over whatever ``total`` has, which need not be zeros.

    Only a CPU's product of bfloat16 is rounded before it is added. Rounding to float16 could overflow, so a
    CPU multiplies that in float32, as tensor cores add it up."""
    beta = 0 if first else 1
    if grad_output.dtype == total.dtype:
        total.addmm_(grad_output.t(), x, beta=beta)
    elif total.is_cuda:
        torch.addmm(total, grad_output.t(), x, out_dtype=total.dtype, beta=beta, out=total)
    elif x.dtype == torch.float16:
        if first:
            total.zero_()
        rows = max(_FEWEST_ROWS, _TILE_VALUES // (grad_output.shape[1] + x.shape[1]))
        for grads, inputs in zip(grad_output.split(rows), x.split(rows), strict=True):
            total.addmm_(grads.t().float(), inputs.float())
    elif first:
        total.copy_(grad_output.t() @ x)
    else:
        total.add_(grad_output.t() @ x)


def apply_deferred(products: list[DeferredProduct]) -> None:
    """The weight part of a backward: every product on the list, oldest first; leaves it empty."""
    for product in products:
        product()
    products.clear()


def set_sink(weight: torch.Tensor, sink: GradientSink | None) -> None:
    """From now on the gradient of ``weight`` goes to ``sink`` (``None``: to autograd again)."""
    weight.sink = sink  # type: ignore[attr-defined]


def sink_of(weight: torch.Tensor) -> GradientSink | None:
    """The sink of ``weight``, if the runtime gave it one."""
    return getattr(weight, "sink", None)
