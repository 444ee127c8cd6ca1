"""What the device multiplies natively, so that ``precision = "auto"`` is never the slow choice.

A CPU without bfloat16 instructions emulates them at about a hundredth of the float32 rate.
"""

import torch

from myriad.optim.config import Precision

__all__ = ["multiplies_bfloat16", "resolve_precision"]


def resolve_precision(config: Precision, device: torch.device | str) -> torch.dtype:
    """The type to compute in. Master weights and gradient sums are float32 either way."""
    if config == "auto":
        return torch.bfloat16 if multiplies_bfloat16(torch.device(device)) else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config]


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device has bfloat16 matrix instructions: GPUs from Ampere, CPUs with AVX-512 BF16 or
    AMX."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and (
        torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
