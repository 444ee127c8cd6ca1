"""Matrix products in 8 bits: each operand is scaled, rounded to a float8 and multiplied there; the result and
everything around it stay in the type of training.

    y  = x W^T     x e4m3, W e4m3 (4 bits of exponent, 3 of mantissa)
    dx = g W       g e5m2, W e4m3
    dW = g^T x     g e5m2, x e4m3

The formats are those of Micikevicius et al. (arXiv 2209.05433, section 3): more range for gradients. A scale
belongs to a whole tensor (``tensor``), or to 128 neighbours of a row and, of weights, to 128 x 128 values
(``blocks``: DeepSeek-V3, arXiv 2412.19437, section 3.3.2), and is found anew for each product. It is a power
of two, so that it costs no rounding of its own: a scaled float8 is exact in bfloat16, hence a device without
such instructions computes the very same values, multiplied in bfloat16 or float32. That is how a CPU
rehearses a run in float8 (slower, not quicker).

Neighbours are those that are multiplied together, so every matrix is wanted in two forms, as it lies and
transposed: a gradient in both at once, which takes one read; ``x`` and ``W`` as they lie in the forward and
transposed in the backward, from what is kept in any case. Of these the forward hands over the largest value
(`Seen`), so that the backward does not look for it again. Nothing here asks the device for a number.

NaN and infinity stay what they are: whoever looks for them finds them.
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
    "Form",
    "Kind",
    "Scaled",
    "Scaling",
    "Seen",
    "multiplies_float8",
    "scaled",
    "scaled_reference",
    "seen",
    "seen_reference",
]

Scaling = Literal["tensor", "blocks"]
Kind = Literal["tensor", "lines", "squares"]
"""What has a scale of its own: everything, 128 neighbours of a row, 128 x 128 values."""
Form = Literal["rows", "columns"]
"""As it lies, and transposed."""
BOTH: tuple[Form, Form] = ("rows", "columns")
BLOCK = 128
"""Neighbours that share a scale."""
MULTIPLE = 16
"""Of which every length of a product must be one (torch._scaled_mm, cuBLASLt)."""
_LEAST = 127 - 100
"""Of a scale: zeros have 2^-100. As float32 writes an exponent."""


class Scaled(NamedTuple):
    """``values * scales``, where the scales are spread over their blocks."""

    values: torch.Tensor
    """Float8, rows of neighbours that are multiplied together: ``[M, K]``."""
    scales: torch.Tensor
    """Powers of two: ``[]`` of all, ``[M, K/128]`` of rows, ``[M/128, K/128]`` of blocks."""

    def restored(self, dtype: torch.dtype) -> torch.Tensor:
        """As numbers, exactly."""
        values, scales = _numbers(self.values, dtype), self.scales.to(dtype)
        if scales.ndim:
            rows, columns = values.shape
            scales = scales.repeat_interleave(BLOCK, 1)[:, :columns]
            if len(scales) != rows:
                scales = scales.repeat_interleave(BLOCK, 0)[:rows]
        return values * scales


@lru_cache(maxsize=8)
def _every(float8: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """The number of each of the 256 patterns."""
    return torch.arange(256, dtype=torch.uint8).view(float8).to(dtype)


def _numbers(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Of float8; a CPU looks them up in a sixth of the time of its cast."""
    if values.device.type != "cpu":
        return values.to(dtype)
    patterns = values.view(torch.uint8).flatten().int()
    return _every(values.dtype, dtype).index_select(0, patterns).view(values.shape)


def multiplies_float8(device: torch.device) -> bool:
    """Whether the device has float8 matrix instructions: GPUs from Ada and Hopper on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


class Seen(NamedTuple):
    """A matrix ``[M, K]``, and where it is to have one scale, numbers among which is its largest."""

    matrix: torch.Tensor
    largest: torch.Tensor | None


def seen(x: torch.Tensor, kind: Kind, kernels: Kernels = "auto") -> Seen:
    """Looks for the largest absolute value where that is needed."""
    if kind != "tensor" or not _in_triton(x, kernels):
        return seen_reference(x, kind)
    from myriad.kernels.triton.scaling import largest

    return Seen(x, largest(x))


def seen_reference(x: torch.Tensor, kind: Kind) -> Seen:
    """`seen` by plain operators."""
    if kind != "tensor":
        return Seen(x, None)
    if x.numel() == 0:
        return Seen(x, x.new_zeros(()))
    least, most = torch.aminmax(x)
    return Seen(x, torch.maximum(-least, most))


def _in_triton(x: torch.Tensor, kernels: Kernels) -> bool:
    return x.is_cuda and kernels != "plain" and has_triton()


def _power_of_two(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The least scale that brings ``largest`` into the type, whose own largest is 1.75 x 2^k: found in the
    bits of float32, so that every device finds the same."""
    shift = int(math.log2(torch.finfo(dtype).max))
    bits = largest.float().view(torch.int32)
    exponent = ((bits + 0x1FFFFF) >> 23) - shift  # one more where the mantissa is above 1.75
    scales = (exponent.clamp(min=_LEAST) << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scales, largest.float())


def scaled(
    x: Seen, dtype: torch.dtype, kind: Kind, forms: Sequence[Form], kernels: Kernels = "auto"
) -> list[Scaled]:
    """``x`` as float8 in each of the forms."""
    if not _in_triton(x.matrix, kernels):
        return scaled_reference(x, dtype, kind, forms)
    from myriad.kernels.triton.scaling import scaled as scaled_in_triton

    return [Scaled(*one) for one in scaled_in_triton(x.matrix, dtype, kind, x.largest, forms)]


def scaled_reference(x: Seen, dtype: torch.dtype, kind: Kind, forms: Sequence[Form]) -> list[Scaled]:
    """`scaled` by plain operators."""
    matrix, largest = x
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
    """The three products of a weight."""

    scaling: Scaling
    forward_type: torch.dtype = torch.float8_e4m3fn
    gradient_type: torch.dtype = torch.float8_e5m2
    kernels: Kernels = "auto"
    """plain: operands by the library's operators, and what is in blocks multiplied as on a CPU."""

    @property
    def token_multiple(self) -> int:
        """The number of tokens must be a multiple of this: it is the inner length of the product that gives
        the weight's gradient, unless a kernel of Myriad's computes that."""
        return MULTIPLE if self.scaling == "tensor" else 1

    @property
    def _of_values(self) -> Kind:
        return "tensor" if self.scaling == "tensor" else "lines"

    @property
    def _of_weights(self) -> Kind:
        return "tensor" if self.scaling == "tensor" else "squares"

    def seen(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[Seen, Seen]:
        """As the products take them."""
        return seen(x, self._of_values, self.kernels), seen(weight, self._of_weights, self.kernels)

    def output(self, x: Seen, weight: Seen) -> torch.Tensor:
        """``x W^T``: ``[T, I]`` and ``[O, I]`` to ``[T, O]``."""
        (rows,) = scaled(x, self.forward_type, self._of_values, ["rows"], self.kernels)
        (outputs,) = scaled(weight, self.forward_type, self._of_weights, ["rows"], self.kernels)
        return self._product(rows, outputs, x.matrix.dtype, quick=True)

    def gradient(self, grad: torch.Tensor) -> tuple[Scaled, Scaled]:
        """``g`` ``[T, O]``, and transposed, for the other two products."""
        found = seen(grad, self._of_values, self.kernels)
        rows, columns = scaled(found, self.gradient_type, self._of_values, BOTH, self.kernels)
        return rows, columns

    def input_gradient(self, rows: Scaled, weight: Seen) -> torch.Tensor:
        """``g W``: ``[T, O]``, as float8 already, and ``[O, I]`` to ``[T, I]``."""
        (inputs,) = scaled(weight, self.forward_type, self._of_weights, ["columns"], self.kernels)
        return self._product(rows, inputs, weight.matrix.dtype, quick=False)

    def add_weight_gradient(self, total: torch.Tensor, columns: Scaled, x: Seen) -> None:
        """``total += g^T x``: ``[O, T]``, as float8 already, and ``[T, I]`` to ``[O, I]`` in float32."""
        (inputs,) = scaled(x, self.forward_type, self._of_values, ["columns"], self.kernels)
        if self.scaling == "blocks" and self._multiplies(total):
            from myriad.kernels.triton.float8 import add_product_of_blocks

            add_product_of_blocks(total, *columns, *inputs)
        else:
            total.add_(self._product(columns, inputs, x.matrix.dtype, quick=False))

    def _multiplies(self, x: torch.Tensor) -> bool:
        """Whether float8 values are multiplied as they are on the device of ``x``."""
        return multiplies_float8(x.device) and (self.scaling == "tensor" or _in_triton(x, self.kernels))

    def _product(self, a: Scaled, b: Scaled, out: torch.dtype, *, quick: bool) -> torch.Tensor:
        """``a b^T``: ``[M, K]`` and ``[N, K]`` to ``[M, N]``. ``quick``: sums may be kept in fewer bits than
        float32's on the way."""
        if not self._multiplies(a.values):
            exact = torch.float32 if out == torch.float32 else torch.bfloat16
            return (a.restored(exact) @ b.restored(exact).t()).to(out)
        if self.scaling == "blocks":
            from myriad.kernels.triton.float8 import product_of_blocks

            return product_of_blocks(*a, *b, out)
        return torch._scaled_mm(
            a.values, b.values.t(), a.scales, b.scales, out_dtype=out, use_fast_accum=quick
        )
