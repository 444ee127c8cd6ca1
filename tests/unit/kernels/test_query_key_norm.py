"""If this breaks: queries and keys are normalized otherwise than torch does it, or learn from other
gradients."""

import pytest
import torch
from torch.nn import functional as F

from myriad.kernels.attention_blocks import Heads
from myriad.kernels.query_key_norm import HeadNorm, query_key_norm
from myriad.model.boundary import Boundary

HEADS = Heads(4, 2, 6)


def reference(fused: torch.Tensor, scales: list[torch.Tensor], over: str, *, centered: bool) -> torch.Tensor:
    """Scales: weights of queries and keys, then biases."""
    parts = list(fused.unflatten(-1, (-1, 6)).split([4, 2, 2], 2))
    for index in range(2):
        weight, bias = scales[index], scales[index + 2]
        if over == "all":
            flat = F.rms_norm(parts[index].flatten(2), weight.shape, weight, 1e-3)
            parts[index] = flat.unflatten(-1, (-1, 6))
            continue
        unit = F.layer_norm(parts[index], (6,), eps=1e-3) if centered else F.rms_norm(
            parts[index], (6,), eps=1e-3
        )  # fmt: skip
        parts[index] = unit * weight.view(-1, 6) + (bias.view(-1, 6) if centered else 0)
    return torch.cat(parts, 2).flatten(2)


@pytest.mark.parametrize(
    ("over", "centered"), [("head", False), ("head", True), ("heads", False), ("heads", True), ("all", False)]
)
def test_values_and_gradients_equal_those_of_torch(over: str, centered: bool) -> None:
    torch.manual_seed(1)
    sizes = (6, 6) if over == "head" else (24, 12)
    fused = torch.randn(2, 3, 48, dtype=torch.float32, requires_grad=True)
    scales = [torch.randn(size, requires_grad=True) for size in sizes * 2]
    norm = HeadNorm(over, 1e-3, Boundary(), centered)  # type: ignore[arg-type]
    biases = (scales[2], scales[3]) if centered else (None, None)
    found = query_key_norm(fused, (scales[0], scales[1]), HEADS, norm, biases)
    expected = reference(fused, scales, over, centered=centered)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    used = [fused, *scales[: 4 if centered else 2]]
    grad = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad(found, used, grad), torch.autograd.grad(expected, used, grad), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
