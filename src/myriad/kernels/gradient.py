"""Accumulation of weight gradients directly in float32 memory that the runtime owns.

Autograd would allocate a new tensor per micro-batch and add it to ``.grad``: two more passes over every
matrix. With a `GradientSink` the backward's matrix product accumulates in place (``total += g^T x``, one BLAS
call). The memory is a view of the chunk's flat buffer, float32 for any compute precision. An operator whose
weight has a sink returns no gradient to autograd, so ``weight.grad`` stays ``None``.

The first write of an iteration may overwrite the memory (`GradientSink.begin`): zeros are then neither
written nor read.

Zero-bubble schedules split a backward into its input part and its weight part. While ``sink.deferred`` is a
list, products are appended to it instead of computed; `apply_deferred` is the weight part. Several sinks may
share one list, so a stage keeps one list per micro-batch. The products are added in the order of the
backward, so the sums have the same bits.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from myriad.kernels.constant_tensors import constant_tensor
from myriad.kernels.float8 import Float8, Float8Operand, KeptForms, Scaled

__all__ = [
    "DeferredProduct",
    "GradientSink",
    "LaterProducts",
    "PendingRows",
    "WeightProduct",
    "apply_deferred",
    "feed_sink",
    "rows_as_one",
    "set_sink",
    "sink_of",
]


_TILE_VALUES, _FEWEST_ROWS = 2**19, 256
"""Tile of float16 operands that a CPU converts at once: 2 MiB, or enough rows for an efficient product."""

DeferredProduct = Callable[[], None]
"""Compute a weight's gradient and add it to the sink's total, at the total's address at that time."""


class GradientSink:
    """Float32 gradient sum of one weight."""

    __slots__ = ("_is_blank", "_memory", "deferred", "float8", "forms", "pending")

    def __init__(
        self,
        total: torch.Tensor,
        deferred: list[DeferredProduct] | None = None,
        float8: Float8 | None = None,
        pending: "PendingRows | None" = None,
    ) -> None:
        """``total``: float32 memory of the weight's shape, usually a view of a flat buffer."""
        self._memory, self._is_blank = total, False
        self.deferred = deferred
        """If a list, `run` appends products to it instead of computing them."""
        self.float8 = float8
        """Float8 settings of the weight's three products; ``None``: the products have the operands' type."""
        self.forms: KeptForms | None = None
        """The weight's float8 forms, kept for all micro-batches of a step; ``None``: they are made for each
        micro-batch."""
        self.pending = pending
        """Place where an operator may leave partial sums of this gradient until the end of the stage's
        backward; ``None``: the operator adds them up itself."""

    @property
    def total(self) -> torch.Tensor:
        """The sum, to be read or added to. It is zero if nothing was written since `begin`."""
        self.settle()
        return self._memory

    def settle(self) -> None:
        """Fill the memory with zeros if nothing was written since `begin`."""
        if self._is_blank:
            self._is_blank = False
            self._memory.zero_()

    @property
    def is_blank(self) -> bool:
        """Whether nothing was written since `begin`, so that the memory has no meaning."""
        return self._is_blank

    def begin(self) -> None:
        """Start a new sum: the first write overwrites the memory; `settle` zeroes it if there is none."""
        self._is_blank = True

    def take(self) -> tuple[torch.Tensor, bool]:
        """Return the memory to write to now, and whether the write must overwrite its content."""
        is_first, self._is_blank = self._is_blank, False
        return self._memory, is_first

    def run(self, product: DeferredProduct, later: list[DeferredProduct] | None = None) -> None:
        """Compute a product now, or append it to `deferred` or else to ``later``, to be applied later."""
        waiting = later if self.deferred is None else self.deferred
        if waiting is None:
            product()
        else:
            waiting.append(product)

    def add_product(self, grad_output: torch.Tensor, x: torch.Tensor) -> None:
        """Compute ``total += grad_output^T x`` now: ``[T, O]`` and ``[T, I]`` to ``[O, I]``."""
        total, first = self.take()
        accumulate_product(total, grad_output, x, first=first)

    def add_float8(self, columns: Scaled, x: Float8Operand) -> None:
        """Add the float8 product now, from the result of `Float8.gradient` for the outputs' gradient."""
        assert self.float8 is not None
        total, first = self.take()
        self.float8.add_weight_gradient(total, columns, x, first=first)

    def add_rows(self, rows: torch.Tensor) -> None:
        """Compute ``total += rows.sum(0)`` now, for float32 ``rows`` ``[n, ...]``: one kernel, in a fixed
        order."""
        self.total.view(-1).addmv_(rows.flatten(1).t(), _ones(len(rows), rows.device))

    def add(self, gradient: torch.Tensor, scale: float = 1.0) -> None:
        """Compute ``total += scale * gradient`` now."""
        if scale != 1.0:
            self.total.add_(gradient, alpha=scale)
            return
        total, first = self.take()
        if first and gradient.is_sparse:
            total.zero_().add_(gradient)
        elif first:
            total.copy_(gradient)
        else:
            total.add_(gradient)

    def add_scaled(self, gradient: torch.Tensor, scale: torch.Tensor) -> None:
        """Compute ``total += scale * gradient`` now, for a float32 ``gradient`` and a ``scale`` on the
        device."""
        total, first = self.take()
        if first:
            torch.mul(gradient, scale, out=total)
        else:
            total.addcmul_(gradient, scale)


@dataclass(slots=True, eq=False)
class PendingRows:
    """Partial sums that one operator of a backward left for the next one, which adds them up without a launch
    of its own. The sinks of a stage share one object. `add_up` adds the sums left at the end of the stage's
    backward."""

    sums: torch.Tensor | None = None
    """Float32 ``[k, P, H]``: P partial sums of k gradients; ``None``: there are none."""
    sinks: tuple[GradientSink, ...] = ()
    """Sinks of the k gradients."""

    def swap(
        self, sums: torch.Tensor, sinks: tuple[GradientSink, ...]
    ) -> tuple[torch.Tensor | None, tuple[GradientSink, ...]]:
        """Store ``sums`` and return the previous ones, which the caller must add up."""
        left = self.sums, self.sinks
        self.sums, self.sinks = sums, sinks
        return left

    def add_up(self) -> None:
        """Add the partial sums to their totals now, and clear them."""
        if self.sums is not None:
            for sink, rows in zip(self.sinks, self.sums, strict=True):
                sink.add_rows(rows)
        self.sums, self.sinks = None, ()


@constant_tensor
def _ones(length: int, device: torch.device) -> torch.Tensor:
    return torch.ones(length, device=device)


def accumulate_product(
    total: torch.Tensor, grad_output: torch.Tensor, x: torch.Tensor, *, first: bool = False
) -> None:
    """Compute ``total += grad_output^T x`` in float32; operands of other types are multiplied as they are.
    The ``first`` product of a sum overwrites ``total``, which need not be zero.

    Only on a CPU is a bfloat16 product rounded before it is added. Rounding to float16 could overflow, so a
    CPU multiplies float16 in float32, as tensor cores accumulate it.
    """
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


@dataclass(slots=True, eq=False)
class WeightProduct:
    """A `DeferredProduct` of matrices: ``total += grad_output^T x``."""

    sink: GradientSink
    grad_output: torch.Tensor
    x: torch.Tensor
    num_parts: int = 1
    """Number of products of this weight in one backward: one for each part of the micro-batch."""

    def __call__(self) -> None:
        self.sink.add_product(self.grad_output, self.x)


class LaterProducts(list[DeferredProduct]):
    """List of products that a backward defers until a collective is in flight."""

    num_parts: int = 1
    """Parts of the micro-batch that is in its forward pass; each part will append its products."""

    def apply_complete(self) -> None:
        """Compute and remove, oldest first, the products of sinks for which all parts have appended
        theirs."""
        found = Counter(id(one.sink) for one in self if isinstance(one, WeightProduct))
        waits = [isinstance(one, WeightProduct) and found[id(one.sink)] < one.num_parts for one in self]
        ready = [one for one, is_early in zip(self, waits, strict=True) if not is_early]
        self[:] = [one for one, is_early in zip(self, waits, strict=True) if is_early]
        apply_deferred(ready)


def apply_deferred(products: list[DeferredProduct]) -> None:
    """Compute every product on the list, oldest first, and empty it: the weight part of a backward. Products
    of one weight with adjacent operands (`myriad.kernels.side_by_side`) are computed as one."""
    for product in _joined(products):
        product()
    products.clear()


def _joined(products: list[DeferredProduct]) -> list[DeferredProduct]:
    joined: list[DeferredProduct] = []
    last_of: dict[int, int] = {}  # index of each sink's last product
    for product in products:
        if isinstance(product, WeightProduct) and product.num_parts > 1:
            at = last_of.get(id(product.sink))
            both = None if at is None else _as_one(joined[at], product)
            if at is not None and both is not None:
                joined[at] = both
                continue
            last_of[id(product.sink)] = len(joined)
        joined.append(product)
    return joined


def _as_one(one: DeferredProduct, other: WeightProduct) -> WeightProduct | None:
    assert isinstance(one, WeightProduct)
    for first, second in ((one, other), (other, one)):
        grads = rows_as_one(first.grad_output, second.grad_output)
        x = rows_as_one(first.x, second.x)
        if grads is not None and x is not None:
            return WeightProduct(first.sink, grads, x, first.num_parts)
    return None


def rows_as_one(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor | None:
    """Return both matrices as one, if the second begins in memory where the first ends."""
    if first.is_meta or not (first.is_contiguous() and second.is_contiguous()):
        return None
    follows = first.data_ptr() + first.numel() * first.element_size() == second.data_ptr()
    together = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    if not (follows and together):
        return None
    return first.detach().as_strided((len(first) + len(second), first.shape[1]), first.stride())


def set_sink(weight: torch.Tensor, sink: GradientSink | None) -> None:
    """Set where the gradient of ``weight`` goes: to ``sink``, or to autograd for ``None``."""
    weight.sink = sink  # type: ignore[attr-defined]


def sink_of(weight: torch.Tensor) -> GradientSink | None:
    """Return the sink of ``weight``, or None if the runtime has set none."""
    return getattr(weight, "sink", None)


def feed_sink(weight: torch.Tensor) -> None:
    """Add a gradient that autograd computed to the sink of ``weight``. If an operator fed the sink itself,
    autograd computed none."""
    if weight.grad is not None:
        weight.sink.add(weight.grad)  # type: ignore[attr-defined]
        weight.grad = None
