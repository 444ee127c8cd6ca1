"""Products of groups of rows, each group with a weight of its own: what the experts of a rank multiply.

    y_g = x_g W_g^T + b_g       x [N, I] ordered by group, W_g [O, I], y [N, O]

It is one operator of all groups, however many rows each has (none, too), with one node in autograd's graph:

    triton     one kernel each way, and one that adds the products of all weights to their float32 sums;
               the host need not know the numbers of rows
    library    `torch.nn.functional.grouped_mm`, where the weights lie in memory at equal distances, as those
               of experts in a chunk's flat memory do; weights' products one after another
    plain      a product for each group, into one result

As in `myriad.kernels.linear`, weights are kept as objects, and their gradients are added to their sinks.

Legend: G groups, N rows of all groups, I and O inputs and outputs.
"""

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch.nn import functional as F

from myriad.kernels.choice import runs_triton
from myriad.kernels.config import Kernels
from myriad.kernels.float8 import BLOCK, Float8, Float8Operand, Form, Scaled
from myriad.kernels.gradient import GradientSink, sink_of
from myriad.kernels.linear import Later, parts_of, weight_gradient
from myriad.kernels.remade import Remade

__all__ = ["RowGroups", "grouped_linear"]

_ALIGNMENT = 16
"""Bytes of which `grouped_mm` needs multiples between rows, and between weights."""


class RowGroups:
    """Numbers of the rows of each group, which lie one after another."""

    def __init__(self, counts: torch.Tensor) -> None:
        """``counts``: int64 ``[G]``, on the device of the rows."""
        self.counts = counts

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of rows. The host waits for the device."""
        return [int(size) for size in self.counts.tolist()]

    @cached_property
    def ends(self) -> torch.Tensor:
        """Where the rows of each group end, int32 ``[G]``."""
        return self.counts.cumsum(0).to(torch.int32)

    @cached_property
    def padded_ends(self) -> torch.Tensor:
        """Where they end in `padded` rows, int32 ``[G]``."""
        return ((self.counts + (BLOCK - 1)) // BLOCK * BLOCK).cumsum(0).to(torch.int32)

    def padded(self, x: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x`` with zeros behind those of each group, so that each begins at a multiple
        of 128, and further zeros behind all: as many as there may be, so that the host need not know."""
        gaps = self.padded_ends.diff(prepend=self.padded_ends.new_zeros(1)) - self.counts
        before = (gaps.cumsum(0) - gaps).repeat_interleave(self.counts, output_size=len(x))
        most = -(-(len(x) + (BLOCK - 1) * len(self.counts)) // BLOCK) * BLOCK
        places = torch.arange(len(x), device=x.device) + before
        return x.new_zeros(most, x.shape[1]).index_copy_(0, places, x)


def grouped_linear(
    x: torch.Tensor,
    groups: RowGroups,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None = None,
    later: Later = None,
    remade: Remade | None = None,
    kernels: Kernels = "auto",
) -> torch.Tensor:
    """Multiply the rows ``[N, I]`` of each group with its weight ``[O, I]``, and add its bias ``[O]``.

    ``later`` and ``remade`` as in `myriad.kernels.linear.linear`.
    """
    vectors = () if biases is None else tuple(biases)
    y: torch.Tensor = _Grouped.apply(x, groups, later, remade, kernels, *weights, *vectors)
    return y


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        groups: RowGroups,
        later: Later,
        remade: Remade | None,
        kernels: Kernels,
        *weights: torch.Tensor,
    ) -> torch.Tensor:
        if remade is None:
            ctx.save_for_backward(x)
        number = len(groups.counts)
        ctx.groups, ctx.later, ctx.remade, ctx.kernels = groups, later, remade, kernels
        ctx.weights, biases, ctx.num_parts = weights[:number], weights[number:], parts_of(later)
        ctx.float8 = _Float8Groups.of(ctx.weights)
        if ctx.float8 is None:
            return _product(x, groups, ctx.weights, biases, kernels)
        y: torch.Tensor = ctx.float8.output(x, groups)
        if not biases:
            return y
        return y.add_(torch.stack(biases).repeat_interleave(groups.counts, 0, output_size=len(y)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        grad, number = grads[0], len(ctx.weights)
        needs_x, needs_weights = ctx.needs_input_grad[0], ctx.needs_input_grad[5 : 5 + number]
        of_weights: Sequence[torch.Tensor | None] = [None] * number
        if ctx.float8 is not None:
            grad_x = ctx.float8.gradients(grad, _input_of(ctx), ctx.groups, ctx.later)
        else:
            grad_x = _input_gradient(grad, ctx.groups, ctx.weights, ctx.kernels) if needs_x else None
            if any(needs_weights):
                of_weights = _weight_gradients(ctx, grad, _input_of(ctx))
        of_biases = _sums(grad, ctx.groups) if len(ctx.needs_input_grad) > 5 + number else ()
        return grad_x, None, None, None, None, *of_weights, *of_biases


def _input_of(ctx: Any) -> torch.Tensor:
    x: torch.Tensor = ctx.saved_tensors[0] if ctx.remade is None else ctx.remade.take()
    return x


def _product(
    x: torch.Tensor,
    groups: RowGroups,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    kernels: Kernels,
) -> torch.Tensor:
    """Return ``x_g W_g^T + b_g`` of all groups."""
    if runs_triton("experts", x, kernels):
        from myriad.kernels.triton import grouped_kernels

        return grouped_kernels.product(x, groups.ends, weights, biases)
    stacked = None if biases else _stacked(x, weights)
    if stacked is not None:
        return F.grouped_mm(x, stacked.transpose(1, 2), offs=groups.ends)
    y = x.new_empty(len(x), len(weights[0]))
    for number, (rows, out) in enumerate(zip(x.split(groups.sizes), y.split(groups.sizes), strict=True)):
        if len(rows) and biases:
            torch.addmm(biases[number], rows, weights[number].t(), out=out)
        elif len(rows):
            torch.mm(rows, weights[number].t(), out=out)
    return y


def _input_gradient(
    grad: torch.Tensor, groups: RowGroups, weights: Sequence[torch.Tensor], kernels: Kernels
) -> torch.Tensor:
    """Return ``grad_g W_g`` of all groups, ``[N, I]``."""
    if runs_triton("experts", grad, kernels):
        from myriad.kernels.triton import grouped_kernels

        return grouped_kernels.input_gradient(grad, groups.ends, weights)
    stacked = _stacked(grad, weights)
    if stacked is not None:
        return F.grouped_mm(grad, stacked, offs=groups.ends)
    grad_x = grad.new_empty(len(grad), weights[0].shape[1])
    for rows, weight, out in zip(grad.split(groups.sizes), weights, grad_x.split(groups.sizes), strict=True):
        if len(rows):
            torch.mm(rows, weight, out=out)
    return grad_x


def _weight_gradients(ctx: Any, grad: torch.Tensor, x: torch.Tensor) -> Sequence[torch.Tensor | None]:
    """Add ``grad_g^T x_g`` to the sinks of the weights, now or later, or return it for those without."""
    weights, groups = ctx.weights, ctx.groups
    own = [sink for sink in map(sink_of, weights) if sink is not None]
    if len(own) == len(weights) and runs_triton("experts", x, ctx.kernels):
        own[0].run(partial(_add_products, own, grad, x, groups.ends), ctx.later)
        return [None] * len(weights)
    found: list[torch.Tensor | None] = []
    for weight, of_output, rows in zip(weights, grad.split(groups.sizes), x.split(groups.sizes), strict=True):
        has_rows = len(rows) > 0
        found.append(weight_gradient(weight, of_output, rows, ctx.later, ctx.num_parts) if has_rows else None)
    return found


def _add_products(
    sinks: Sequence[GradientSink], grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor
) -> None:
    """Add ``grad_g^T x_g`` to the sinks of all groups now, by one kernel."""
    from myriad.kernels.triton import grouped_kernels

    totals, accumulate = _taken(sinks)
    grouped_kernels.add_weight_products(totals, grad, x, ends, accumulate=accumulate)


def _taken(sinks: Sequence[GradientSink]) -> tuple[list[torch.Tensor], bool]:
    """Return the memory of the sinks, and whether to add to it: else all of it is overwritten."""
    accumulate = not all(sink.is_blank for sink in sinks)
    if accumulate:
        for sink in sinks:
            sink.settle()
    return [sink.take()[0] for sink in sinks], accumulate


class _Float8Groups:
    """The products of weights that are multiplied in float8, scaled in blocks (`myriad.kernels.float8`)."""

    def __init__(self, weights: Sequence[torch.Tensor], sinks: list[GradientSink], how: Float8) -> None:
        assert how.scaling == "blocks", "a product needs 16 tokens or a multiple"
        self._weights, self._sinks, self._how = weights, sinks, how

    @classmethod
    def of(cls, weights: Sequence[torch.Tensor]) -> "_Float8Groups | None":
        """Return the products if the weights' sinks ask for float8."""
        sinks = [sink for sink in map(sink_of, weights) if sink is not None]
        how = sinks[0].float8 if sinks else None
        return None if how is None else cls(weights, sinks, how)

    def output(self, x: torch.Tensor, groups: RowGroups) -> torch.Tensor:
        """Return ``x_g W_g^T`` of all groups."""
        if self._how.multiplies(x):
            return self._grouped(self._how.lines(x), groups, "rows", x.dtype)
        y = x.new_empty(len(x), len(self._weights[0]))
        parts = zip(x.split(groups.sizes), y.split(groups.sizes), range(len(self._weights)), strict=True)
        for rows, out, number in parts:
            if len(rows):
                out.copy_(self._how.output(Float8Operand(rows, None), self._operand(number)))
        return y

    def gradients(self, grad: torch.Tensor, x: torch.Tensor, groups: RowGroups, later: Later) -> torch.Tensor:
        """Return ``grad_g W_g`` of all groups, and add ``grad_g^T x_g`` to the sinks, now or later."""
        how = self._how
        if how.multiplies(grad):
            columns = how.lines(groups.padded(grad), "columns", of_gradient=True)
            self._sinks[0].run(partial(self._add, columns, x, groups), later)
            return self._grouped(how.lines(grad, of_gradient=True), groups, "columns", x.dtype)
        grad_x = torch.empty_like(x)
        parts = zip(*(one.split(groups.sizes) for one in (grad, x, grad_x)), strict=True)
        for number, (of_output, rows, out) in enumerate(parts):
            if len(rows):
                stored, transposed = how.gradient(of_output)
                out.copy_(how.input_gradient(stored, self._operand(number)))
                sink = self._sinks[number]
                sink.run(partial(sink.add_float8, transposed, Float8Operand(rows, None)), later)
        return grad_x

    def _operand(self, number: int) -> Float8Operand:
        """Return a weight, with its forms where they are kept."""
        kept = self._sinks[number].forms
        weight = self._weights[number]
        return Float8Operand(weight, None) if kept is None else kept.seen(weight, self._how)

    def _grouped(self, rows: Scaled, groups: RowGroups, form: Form, out: torch.dtype) -> torch.Tensor:
        from myriad.kernels.triton.grouped_float8_kernels import product_of_groups

        weights = [self._how.form(self._operand(number), form) for number in range(len(self._weights))]
        return product_of_groups(*rows, groups.ends, weights, out)

    def _add(self, columns: Scaled, x: torch.Tensor, groups: RowGroups) -> None:
        from myriad.kernels.triton.grouped_float8_kernels import add_products_of_groups

        totals, accumulate = _taken(self._sinks)
        of_x = self._how.lines(groups.padded(x), "columns")
        add_products_of_groups(totals, columns, of_x, groups.padded_ends, accumulate=accumulate)


def _sums(grad: torch.Tensor, groups: RowGroups) -> list[torch.Tensor | None]:
    """Return the sum of the rows of each group, the gradient of its bias."""
    return [rows.sum(0) if len(rows) else None for rows in grad.split(groups.sizes)]


def _stacked(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return the weights ``[G, O, I]`` as they lie in memory, if `grouped_mm` can multiply them with the rows
    of ``x``: they lie at equal distances, all lengths are aligned, and on a GPU the type is bfloat16."""
    first, size = weights[0], x.element_size()
    if not (hasattr(F, "grouped_mm") and len(x) and x.stride(1) == 1 and first.is_contiguous()):
        return None
    if first.dtype != x.dtype or (x.is_cuda and x.dtype != torch.bfloat16):
        return None
    starts = [weight.data_ptr() for weight in weights]
    gap = starts[1] - starts[0] if len(starts) > 1 else first.numel() * size
    even = gap > 0 and all(start == starts[0] + number * gap for number, start in enumerate(starts))
    lengths = (starts[0], x.data_ptr(), gap, x.stride(0) * size, first.shape[0] * size, first.shape[1] * size)
    storages = {weight.untyped_storage().data_ptr() for weight in weights}
    if not even or len(storages) > 1 or any(length % _ALIGNMENT for length in lengths):
        return None
    return first.detach().as_strided((len(weights), *first.shape), (gap // size, first.shape[1], 1))
