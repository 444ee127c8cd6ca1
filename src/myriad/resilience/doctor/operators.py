"""Which kernel computes each operator on this node, and why; on a GPU also whether it does so rightly."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from myriad.kernels.attention_choice import AttentionShape, choose_attention
from myriad.kernels.choice import explain
from myriad.resilience.doctor.item import Reading

if TYPE_CHECKING:
    import torch

__all__ = ["check_operators", "try_operators"]


def check_operators(device: str) -> Iterator[Reading]:
    """``device``: "cpu", or "cuda" where there is a GPU that torch can use."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    for operator, choice in explain(device, dtype, "auto", {}).items():
        name = f"kernel of {operator.replace('_', ' ')}"
        yield Reading(name=name, value=choice.kernel, note=choice.why, advisory=True)
    for what, window in (("full", None), ("in a window", 512)):
        shape = AttentionShape(device, dtype, 4096, 128, window)
        path = choose_attention(shape)
        name = f"attention, {what}"
        yield Reading(name=name, value=path.path, note=f"{path.why}; 4,096 tokens", advisory=True)


def try_operators(device: "torch.device") -> Iterator[Reading]:
    """Triton's kernels of a GPU against the formulas; nothing where they do not run."""
    if not any(choice.kernel == "triton" for choice in explain("cuda", "float32", "auto", {}).values()):
        return
    import torch

    from myriad.kernels.agreement import beyond_limits, disagreements, float8_disagreements
    from myriad.kernels.float8 import multiplies_float8

    for dtype in (torch.float32, torch.bfloat16):
        found = disagreements(dtype, device)
        if dtype == torch.bfloat16 and multiplies_float8(device):
            found |= float8_disagreements(device)
        wrong = beyond_limits(found, dtype)
        yield Reading(
            name=f"GPU {device.index} Triton kernels, {str(dtype).removeprefix('torch.')}",
            value=max(found.values()),
            unit="of the largest value",
            problem=f"not what the formulas say: {', '.join(wrong)}" if wrong else "",
            remedy='until it is found out why: train.kernels = "plain"',
        )
