"""Float8 in `gpu.py`: operands made by Myriad's kernels and by plain operators, and the products
of one weight with the making of their operands."""

from collections.abc import Callable
from functools import partial

import torch

from myriad.kernels.config import Kernels
from myriad.kernels.float8 import BOTH, Float8, Kind, multiplies_float8, scaled, seen
from myriad.kernels.gradient import accumulate_product
from myriad.planner.cost.quantization_costs import operand_bytes

__all__ = ["KINDS", "makers", "moved_bytes", "products"]

Runs = dict[str, Callable[[], object]]
KINDS: dict[Kind, str] = {"tensor": "float8, one scale", "lines": "float8, scales of blocks"}


def moved_bytes(x: torch.Tensor, kind: Kind) -> float:
    """As the planner counts them."""
    return x.numel() * operand_bytes(kind, x.element_size(), 2, searched=kind == "tensor")


def makers(x: torch.Tensor, kind: Kind) -> Runs:
    """Return the ways to make both forms, as for a gradient."""

    def both(kernels: Kernels) -> object:
        return scaled(seen(x, kind, kernels), torch.float8_e5m2, kind, BOTH, kernels)

    return {"myriad": partial(both, "auto"), "torch eager": partial(both, "plain")}


def products(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> Runs:
    """Output, gradient of the input, and that of the weight added to its float32 sum."""
    total = torch.zeros(weight.shape, device=weight.device)

    def plain() -> object:
        accumulate_product(total, grad, x)
        return x @ weight.t(), grad @ weight

    def three(float8: Float8) -> object:
        operand, matrix = float8.seen(x, weight)
        rows, columns = float8.gradient(grad)
        float8.add_weight_gradient(total, columns, operand)
        return float8.output(operand, matrix), float8.input_gradient(rows, matrix)

    runs: Runs = {"bf16": plain}
    if weight.device.type == "cpu" or multiplies_float8(weight.device):
        runs["float8"] = partial(three, Float8("tensor"))
        runs["float8-blocks"] = partial(three, Float8("blocks"))
    return runs
