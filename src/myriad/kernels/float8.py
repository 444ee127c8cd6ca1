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

NaN and infinity stay what they are: whoever looks for them finds them.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch

__all__ = ["BLOCK", "MULTIPLE", "Float8", "Scaled", "Scaling", "multiplies_float8", "scaled"]

Scaling = Literal["tensor", "blocks"]
BLOCK = 128
"""Neighbours that share a scale."""
MULTIPLE = 16
"""Of which every length of a product must be one (torch._scaled_mm, cuBLASLt)."""
_LEAST = 2.0**-100
"""Of a scale: zeros have one too."""


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


def _largest(x: torch.Tensor) -> torch.Tensor:
    """Of the absolute values, in one pass."""
    if x.numel() == 0:
        return x.new_zeros(())
    least, most = torch.aminmax(x)
    return torch.maximum(-least, most)


def _power_of_two(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The least scale that brings ``largest`` into the type."""
    needed = largest.float() / torch.finfo(dtype).max
    return torch.exp2(torch.log2(needed.clamp(min=_LEAST)).ceil())


def scaled(x: torch.Tensor, dtype: torch.dtype, scaling: Scaling, *, square: bool = False) -> Scaled:
    """``x`` ``[M, K]`` as float8; ``square``: blocks of 128 x 128 instead of 128 of a row."""
    if scaling == "tensor":
        scale = _power_of_two(_largest(x), dtype)
        return Scaled((x / scale.to(x.dtype)).to(dtype).contiguous(), scale)
    if x.is_cuda:
        from myriad.kernels.triton.float8 import scaled_in_blocks

        return Scaled(*scaled_in_blocks(x, dtype, square))
    return _scaled_in_blocks(x, dtype, square)


def _scaled_in_blocks(x: torch.Tensor, dtype: torch.dtype, square: bool) -> Scaled:
    rows, columns = x.shape
    height = BLOCK if square else 1
    padded = torch.nn.functional.pad(x, (0, -columns % BLOCK, 0, -rows % height))
    cut = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, height))  # [M/h, h, K/128, 128]
    scales = _power_of_two(cut.abs().amax((1, 3)), dtype)
    values = (cut / scales[:, None, :, None].to(x.dtype)).to(dtype)
    return Scaled(values.flatten(2).flatten(0, 1)[:rows, :columns].contiguous(), scales)


def _product(a: Scaled, b: Scaled, out: torch.dtype, *, quick: bool) -> torch.Tensor:
    """``a b^T``: ``[M, K]`` and ``[N, K]`` to ``[M, N]``. ``quick``: sums may be kept in fewer bits than
    float32's on the way."""
    if not multiplies_float8(a.values.device):
        exact = torch.float32 if out == torch.float32 else torch.bfloat16
        return (a.restored(exact) @ b.restored(exact).t()).to(out)
    if a.scales.ndim:
        from myriad.kernels.triton.float8 import product_of_blocks

        return product_of_blocks(*a, *b, out)
    return torch._scaled_mm(a.values, b.values.t(), a.scales, b.scales, out_dtype=out, use_fast_accum=quick)


class Float8(NamedTuple):
    """The three products of a weight."""

    scaling: Scaling
    forward_type: torch.dtype = torch.float8_e4m3fn
    gradient_type: torch.dtype = torch.float8_e5m2

    def output(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``x W^T``: ``[T, I]`` and ``[O, I]`` to ``[T, O]``."""
        rows = scaled(x, self.forward_type, self.scaling)
        return _product(rows, self._weight(weight), x.dtype, quick=True)

    def input_gradient(self, grad: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """``g W``: ``[T, O]`` and ``[O, I]`` to ``[T, I]``."""
        rows = scaled(grad, self.gradient_type, self.scaling)
        return _product(rows, self._weight(weight.t()), grad.dtype, quick=False)

    def weight_gradient(self, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``g^T x``: ``[T, O]`` and ``[T, I]`` to ``[O, I]``."""
        columns = scaled(grad.t(), self.gradient_type, self.scaling)
        return _product(columns, scaled(x.t(), self.forward_type, self.scaling), grad.dtype, quick=False)

    def _weight(self, weight: torch.Tensor) -> Scaled:
        return scaled(weight, self.forward_type, self.scaling, square=True)
