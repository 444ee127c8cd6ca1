"""Matrix products in 8 bits: each operand is scaled, rounded to a float8 type and multiplied in it. The
result and everything around it keep the type of training.

    y  = x W^T     x e4m3, W e4m3 (4 bits of exponent, 3 of mantissa)
    dx = g W       g e5m2, W e4m3
    dW = g^T x     g e5m2, x e4m3

The formats are those of Micikevicius et al. (arXiv 2209.05433, section 3): more range for gradients. A scale
belongs to a whole tensor (``tensor``), or to 128 neighbours of a row and, for weights, to 128 x 128 values
(``blocks``: DeepSeek-V3, arXiv 2412.19437, section 3.3.2). It is computed anew for each product. It is a
power of two, so that it adds no rounding error: a scaled float8 is exact in bfloat16, so a device without
float8 instructions computes the same values, multiplied in bfloat16 or float32. That is how a CPU rehearses a
run in float8 (slower, not faster).

Neighbours are values that are multiplied together, so every matrix is needed in two forms, as stored and
transposed. A gradient gets both at once, with one read. ``x`` and ``W`` get the stored form in the forward,
and the transposed one in the backward, from tensors that are kept in any case. The forward passes on their
largest value (`Float8Operand`), so that the backward does not compute it again. Both forms of a weight may be
kept for the other micro-batches of a step (`KeptForms`). Nothing here reads a number back from the device.

NaN and infinity are preserved, so that checks can detect them.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch

from myriad.kernels.choice import has_triton
from myriad.kernels.config import Kernels

__all__ = [
    "BLOCK",
    "BOTH",
    "MULTIPLE",
    "Float8",
    "Float8Operand",
    "Form",
    "KeptForms",
    "Kind",
    "Scaled",
    "Scaling",
    "multiplies_float8",
    "scaled",
    "scaled_reference",
    "seen",
    "seen_reference",
]

Scaling = Literal["tensor", "blocks"]
Kind = Literal["tensor", "lines", "squares"]
"""The unit that has its own scale: the whole tensor, 128 neighbours of a row, or 128 x 128 values."""
Form = Literal["rows", "columns"]
"""The form of a matrix: as stored, or transposed."""
BOTH: tuple[Form, Form] = ("rows", "columns")
BLOCK = 128
"""Number of neighbours that share a scale."""
MULTIPLE = 16
"""Every length of a product must be a multiple of this (torch._scaled_mm, cuBLASLt)."""
_LEAST = 127 - 100
"""Smallest scale, as a float32 exponent: zeros have 2^-100."""


class Scaled(NamedTuple):
    """A scaled matrix: ``values * scales``, where each scale applies to its block."""

    values: torch.Tensor
    """Float8 ``[M, K]``; the neighbours in a row are multiplied together."""
    scales: torch.Tensor
    """Powers of two: ``[]`` for the tensor, ``[M, K/128]`` for rows, ``[M/128, K/128]`` for blocks."""

    def restored(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the exact numbers in ``dtype``."""
        values, scales = _numbers(self.values, dtype), self.scales.to(dtype)
        if scales.ndim:
            rows, columns = values.shape
            scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
            if len(scales) != rows:
                scales = scales.repeat_interleave(BLOCK, 0)[:rows]
        return values * scales


@lru_cache(maxsize=8)
def _every(float8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """Return the number of each of the 256 bit patterns."""
    return torch.arange(256, dtype=torch.uint8).view(float8).to(dtype)


def _numbers(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert float8 values to numbers. On a CPU a table lookup takes a sixth of the time of a cast."""
    if values.device.type != "cpu":
        return values.to(dtype)
    patterns = values.view(torch.uint8).flatten().int()
    return _every(values.dtype, dtype).index_select(0, patterns).view(values.shape)


def multiplies_float8(device: torch.device) -> bool:
    """Return whether the device has float8 matrix instructions: GPUs from Ada and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class Float8Operand(NamedTuple):
    """A matrix ``[M, K]`` and, if it gets a single scale, numbers that include its largest absolute value."""

    matrix: torch.Tensor
    largest: torch.Tensor | None
    forms: tuple[Scaled, Scaled] | None = None
    """The forms as stored and transposed, if they exist already."""


def seen(x: torch.Tensor, kind: Kind, kernels: Kernels = "auto") -> Float8Operand:
    """Return the matrix with its largest absolute value, if ``kind`` needs it."""
    if kind != "tensor" or not _in_triton(x, kernels):
        return seen_reference(x, kind)
    from myriad.kernels.triton.scaling import largest

    return Float8Operand(x, largest(x))


def seen_reference(x: torch.Tensor, kind: Kind) -> Float8Operand:
    """Compute `seen` with plain operators."""
    if kind != "tensor":
        return Float8Operand(x, None)
    if x.numel() == 0:
        return Float8Operand(x, x.new_zeros(()))
    least, most = torch.aminmax(x)
    return Float8Operand(x, torch.maximum(-least, most))


def _in_triton(x: torch.Tensor, kernels: Kernels) -> bool:
    return x.is_cuda and kernels != "plain" and has_triton()


def _power_of_two(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the smallest scale that brings ``largest`` into the type, whose own largest value is 1.75 x 2^k.
    It is computed from the bits of float32, so that every device gets the same."""
    shift = int(math.log2(torch.finfo(dtype).max))
    bits = largest.float().view(torch.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - shift  # one more where the mantissa is above 1.75
    scales = (exponent.clamp(min=_LEAST) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, largest.float())


def scaled(
    x: Float8Operand, dtype: torch.dtype, kind: Kind, forms: Sequence[Form], kernels: Kernels = "auto"
) -> list[Scaled]:
    """Return ``x`` as float8 in each of the forms."""
    if not _in_triton(x.matrix, kernels):
        return scaled_reference(x, dtype, kind, forms)
    from myriad.kernels.triton.scaling import scaled as scaled_in_triton

    return [Scaled(*one) for one in scaled_in_triton(x.matrix, dtype, kind, x.largest, forms)]


def scaled_reference(x: Float8Operand, dtype: torch.dtype, kind: Kind, forms: Sequence[Form]) -> list[Scaled]:
    """Compute `scaled` with plain operators."""
    matrix, largest = x.matrix, x.largest
    if kind == "lines":
        return [_in_blocks(matrix if form == "rows" else matrix.t(), dtype, 1) for form in forms]
    if kind == "squares":
        rows = _in_blocks(matrix, dtype, BLOCK)
    else:
        assert largest is not None
        scale = _power_of_two(largest, dtype)
        rows = Scaled((matrix / scale.to(matrix.dtype)).to(dtype).contiguous(), scale)
    return [rows if form == "rows" else Scaled(*(part.t().contiguous() for part in rows)) for form in forms]


def _in_blocks(x: torch.Tensor, dtype: torch.dtype, height: int) -> Scaled:
    rows, columns = x.shape
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK, 0, -rows % height))
    cut = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height))  # [M/h, h, K/128, 128]
    scales = _power_of_two(cut.abs().amax((1, 3)), dtype)
    values = (cut / scales[:, None, :, None].to(x.dtype)).to(dtype)
    return Scaled(values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales)


class Float8(NamedTuple):
    """The float8 settings and the three products of a weight."""

    scaling: Scaling
    forward_type: torch.dtype = torch.float8_e4m3fn
    gradient_type: torch.dtype = torch.float8_e5m2
    kernels: Kernels = "auto"
    """plain: operands are made by the library's operators, and blocks are multiplied as on a CPU."""

    @property
    def token_multiple(self) -> int:
        """The number of tokens must be a multiple of this. It is the inner length of the product for the
        weight's gradient, unless one of Myriad's kernels computes that product."""
        return MULTIPLE if self.scaling == "tensor" else 1

    @property
    def _of_values(self) -> Kind:
        return "tensor" if self.scaling == "tensor" else "lines"

    @property
    def _of_weights(self) -> Kind:
        return "tensor" if self.scaling == "tensor" else "squares"

    def seen(
        self, x: torch.Tensor, weight: torch.Tensor, kept: "KeptForms | None" = None
    ) -> tuple[Float8Operand, Float8Operand]:
        """Return both operands as the products take them. With ``kept``, the weight's forms are kept ones."""
        of_x = seen(x, self._of_values, self.kernels)
        if kept is not None:
            return of_x, kept.seen(weight, self)
        return of_x, seen(weight, self._of_weights, self.kernels)

    def weight_forms(self, weight: torch.Tensor) -> tuple[Scaled, Scaled]:
        """Convert a weight to float8 as stored and transposed, with one read and one more for the largest
        value."""
        found = seen(weight, self._of_weights, self.kernels)
        rows, columns = scaled(found, self.forward_type, self._of_weights, BOTH, self.kernels)
        return rows, columns

    def output(self, x: Float8Operand, weight: Float8Operand) -> torch.Tensor:
        """Compute ``x W^T``: ``[T, I]`` and ``[O, I]`` to ``[T, O]``."""
        (rows,) = scaled(x, self.forward_type, self._of_values, ["rows"], self.kernels)
        outputs = self.form(weight, "rows")
        return self._product(rows, outputs, x.matrix.dtype, quick=True)

    def gradient(self, grad: torch.Tensor) -> tuple[Scaled, Scaled]:
        """Convert ``g`` ``[T, O]`` to float8 as stored and transposed, for the other two products."""
        found = seen(grad, self._of_values, self.kernels)
        rows, columns = scaled(found, self.gradient_type, self._of_values, BOTH, self.kernels)
        return rows, columns

    def lines(self, x: torch.Tensor, form: Form = "rows", *, of_gradient: bool = False) -> Scaled:
        """Convert values, or a gradient, whose 128 neighbours share a scale, to float8."""
        kind = self.gradient_type if of_gradient else self.forward_type
        return scaled(Float8Operand(x, None), kind, "lines", [form], self.kernels)[0]

    def input_gradient(self, rows: Scaled, weight: Float8Operand) -> torch.Tensor:
        """Compute ``g W``: float8 ``[T, O]`` and ``[O, I]`` to ``[T, I]``."""
        return self._product(rows, self.form(weight, "columns"), weight.matrix.dtype, quick=False)

    def form(self, weight: Float8Operand, form: Form) -> Scaled:
        """Return a weight as stored or transposed."""
        if weight.forms is not None:
            return weight.forms[BOTH.index(form)]
        (made,) = scaled(weight, self.forward_type, self._of_weights, [form], self.kernels)
        return made

    def add_weight_gradient(
        self, total: torch.Tensor, columns: Scaled, x: Float8Operand, *, first: bool = False
    ) -> None:
        """Compute ``total += g^T x``: float8 ``[O, T]`` and ``[T, I]`` to float32 ``[O, I]``. The ``first``
        product of a sum overwrites ``total``."""
        (inputs,) = scaled(x, self.forward_type, self._of_values, ["columns"], self.kernels)
        if self.scaling == "blocks" and self.multiplies(total):
            from myriad.kernels.triton.float8_kernels import add_product_of_blocks

            add_product_of_blocks(total, *columns, *inputs, first=first)
            return
        product = self._product(columns, inputs, x.matrix.dtype, quick=False)
        if first:
            total.copy_(product)
        else:
            total.add_(product)

    def multiplies(self, x: torch.Tensor) -> bool:
        """Return whether the device of ``x`` multiplies float8 values directly."""
        return multiplies_float8(x.device) and (self.scaling == "tensor" or _in_triton(x, self.kernels))

    def _product(self, a: Scaled, b: Scaled, out: torch.dtype, *, quick: bool) -> torch.Tensor:
        """Compute ``a b^T``: ``[M, K]`` and ``[N, K]`` to ``[M, N]``. ``quick``: intermediate sums may have
        fewer bits than float32."""
        if not self.multiplies(a.values):
            exact = torch.float32 if out == torch.float32 else torch.bfloat16
            return (a.restored(exact) @ b.restored(exact).t()).to(out)
        if self.scaling == "blocks":
            from myriad.kernels.triton.float8_kernels import product_of_blocks

            return product_of_blocks(*a, *b, out)
        return torch._scaled_mm(
            a.values, b.values.t(), a.scales, b.scales, out_dtype=out, use_fast_accum=quick
        )


class KeptForms:
    """Both float8 forms of one weight, made once for all micro-batches of a step.

    The forms belong to the weight's present values. `forget` drops them when the weight's memory is written
    or freed, and when a program begins or ends. (`myriad.parallel.chunk` calls it where it fetches values,
    the only place that writes them.) So the next program makes them anew, whatever happened before it. A
    write to the parameter itself is detected by its version.
    """

    __slots__ = ("_forms", "_version", "_weight")

    def __init__(self) -> None:
        self._weight: torch.Tensor | None = None
        self._version = (0, 0)
        self._forms: tuple[Scaled, Scaled] | None = None

    def seen(self, weight: torch.Tensor, how: Float8) -> Float8Operand:
        """Return the weight with its forms. They are made if there are none of this weight in its present
        version."""
        version = (weight._version, weight.data_ptr())
        if self._forms is None or self._weight is not weight or self._version != version:
            self._forms = how.weight_forms(weight)
            self._weight, self._version = weight, version
        return Float8Operand(weight, None, self._forms)

    def forget(self) -> None:
        """Drop the forms: the weight gets other values, or its memory is freed."""
        self._weight = self._forms = None
