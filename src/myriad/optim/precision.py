"""Choose number formats that the device multiplies natively, so that ``precision = "auto"`` is never slow.

A CPU without bfloat16 instructions emulates them at about a hundredth of the float32 rate. Float8 is never
chosen automatically. It is emulated on a CPU (the same numbers, slower than without), and refused on a GPU
without such instructions, where it could only be a mistake.
"""

import torch

from myriad.errors import BadInputError
from myriad.kernels.config import Kernels
from myriad.kernels.float8 import Float8, multiplies_float8
from myriad.optim.config import Precision, float8_scaling

__all__ = ["multiplies_bfloat16", "multiplies_float16_only", "resolve_float8", "resolve_precision"]


def resolve_precision(
    config: Precision, device: torch.device | str, *, skips_steps: bool = True
) -> torch.dtype:
    """Return the type to compute in. Master weights and gradient sums are float32 either way.

    ``skips_steps`` says whether a step whose gradients overflow can be skipped, which float16 needs; without
    it, "auto" is never float16. Raises `BadInputError` for a GPU without the requested format.
    """
    on = torch.device(device)
    if float8_scaling(config) is not None:
        allowed = (
            "auto, bfloat16 or float32 here: float8 needs a GPU from Ada or Hopper on (or a CPU, emulated)"
        )
        if on.type == "cuda" and not multiplies_float8(on):
            raise BadInputError("train.precision", config, allowed)
        return resolve_precision("auto", on)
    if config == "auto":
        if skips_steps and multiplies_float16_only(on):
            return torch.float16
        return torch.bfloat16 if multiplies_bfloat16(on) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[config]


def resolve_float8(config: Precision, kernels: Kernels = "auto") -> Float8 | None:
    """Return how the blocks' products are computed in float8, or ``None`` if they use the training type."""
    scaling = float8_scaling(config)
    return None if scaling is None else Float8(scaling, kernels=kernels)


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device has bfloat16 matrix instructions: GPUs from Ampere, CPUs with AVX-512 BF16 or
    AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )


def multiplies_float16_only(device: torch.device) -> bool:
    """Return whether the device has matrix instructions for float16 and none for bfloat16: GPUs of the Volta
    and Turing generations."""
    return device.type == "cuda" and (7, 0) <= torch.cuda.get_device_capability(device) < (8, 0)
