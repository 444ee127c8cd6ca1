"""The profile of a row of the general form: its framework's, with what the row says of its run."""

from dataclasses import replace

from myriad.planner.cost.quantization_costs import Quantization
from myriad.planner.validation.general_cells import GeneralCells
from myriad.planner.workload import FrameworkProfile

__all__ = ["profile_of", "value_bytes_of"]

_FLOAT32 = ("fp32", "float32")
_ATTENTION = ("attention", "attn")
"""Captured graphs that launch what a block has before its tokens travel to experts."""


def profile_of(read: GeneralCells, profile: FrameworkProfile) -> FrameworkProfile:
    """Return the profile of a row. Raises `BadInputError`."""
    if quantization := _quantization(read):
        profile = replace(profile, quantization=quantization)
    if profile.selective_attention and read.word("recompute").lower() not in ("", "selective"):
        profile = replace(profile, selective_attention=False)  # It names modules.
    if (overlaps := read.switch("expert_overlap")) is not None:
        profile = replace(profile, hides_expert_comm=overlaps)
    if (fuses := read.switch("fused_experts")) is not None:
        profile = replace(profile, fused_expert_mlp=fuses)
    if graphs := read.word("cuda_graphs").lower():
        if graphs not in ("full", "none", *_ATTENTION):
            raise read.refused("cuda_graphs", "full, attention or none")
        profile = replace(profile, cuda_graphs=graphs == "full", captures_attention=graphs in _ATTENTION)
    return profile


def value_bytes_of(read: GeneralCells) -> int:
    """Return the bytes of a value of the compute type."""
    return 4 if read.word("dtype").lower() in _FLOAT32 else 2


def _quantization(read: GeneralCells) -> Quantization | None:
    dtype = read.word("dtype", "bf16").lower()
    if dtype in ("fp8-blocks", "float8-blocks", "mxfp8", "fp8-mx"):
        return "blocks"
    if dtype.startswith(("fp8", "float8")):
        return "tensor"
    if dtype.startswith("nvfp4"):
        return "nvfp4"
    if not dtype.startswith(("bf16", "fp16", "bfloat16", "float16", *_FLOAT32)):
        raise read.refused("dtype", "bf16, fp16, fp32, fp8, fp8-blocks or nvfp4")
    return None
