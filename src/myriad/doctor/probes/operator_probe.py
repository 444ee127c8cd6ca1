"""The kernel of each operator on this node and why; on a GPU also whether its results are right."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from myriad.doctor.diagnosis import Reading
from myriad.kernels.attention_choice import AttentionShape, choose_attention, choose_pieces
from myriad.kernels.choice import explain

if TYPE_CHECKING:
    import torch

__all__ = ["check_operators", "try_operators"]


def check_operators(device: str) -> Iterator[Reading]:
    """Yield the kernel of each operator. ``device`` is "cpu", or "cuda" if torch can use a GPU."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    for operator, choice in explain(device, dtype, "auto", {}).items():
        name = f"kernel of {operator.replace('_', ' ')}"
        yield Reading(name=name, value=choice.kernel, note=choice.why, advisory=True)
    for what, window in (("full", None), ("in a window", 512)):
        shape = AttentionShape(device, dtype, 4096, 128, window)
        path = choose_attention(shape)
        name = f"attention, {what}"
        yield Reading(name=name, value=path.path, note=f"{path.why}; 4,096 tokens", advisory=True)
        pieces = choose_pieces(shape, cut=window is not None)
        name = f"attention in a ring, {what}"
        yield Reading(name=name, value=pieces.path, note=pieces.why, advisory=True)


def try_operators(device: "torch.device") -> Iterator[Reading]:
    """Compare PyTorch's GPU kernels with the formulas, and Triton's where they run."""
    import torch

    from myriad.kernels.agreement import (
        beyond_limits,
        disagreements,
        float8_disagreements,
        library_disagreements,
    )
    from myriad.kernels.float8 import Scaling, multiplies_float8

    for dtype in (torch.float32, torch.bfloat16):
        scaling: Scaling | None = "tensor" if dtype == torch.bfloat16 and multiplies_float8(device) else None
        found = library_disagreements(dtype, device, scaling=scaling)
        wrong = beyond_limits(found, dtype)
        yield Reading(
            name=f"GPU {device.index} products and attention, {str(dtype).removeprefix('torch.')}",
            value=max(found.values()),
            unit="of the largest value",
            problem=f"not what the formulas say: {', '.join(wrong)}" if wrong else "",
            remedy="another node, or another version of PyTorch, cuBLAS and cuDNN",
        )
    if not any(choice.kernel == "triton" for choice in explain("cuda", "float32", "auto", {}).values()):
        return
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
