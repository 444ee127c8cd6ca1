"""What a job asks of the device, against what that can: refused before anything starts, or done otherwise,
with a line that says so."""

import torch

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.kernels.attention_choice import (
    AttentionShape,
    check_attention,
    fallback_attention,
)
from myriad.kernels.choice import check_kernels, fallback, has_triton, in_interpreter
from myriad.optim.config import float8_scaling

__all__ = ["precision_told", "settle_kernels"]


def settle_kernels(job: Job, device: torch.device, dtype: torch.dtype) -> list[str]:
    """Lines about what is done otherwise than a user may expect. Raises `BadInputError` for what was insisted
    on and cannot be."""
    asked, kind, name, model = job.train.kernels, device.type, _name(dtype), job.model
    on_gpu, fixed = kind == "cuda", job.train.deterministic
    if on_gpu and fixed and asked == "plain":
        raise BadInputError("train.deterministic", True, "needs train.kernels = auto: plain adds by atomics")
    shape = AttentionShape(
        kind,
        name,
        model.sequence,
        model.head_width,
        model.window,
        deterministic=on_gpu and fixed,
        interpreted=in_interpreter(),
    )
    check_kernels(asked, kind, name, model.kernel_widths)
    check_attention(asked, shape)
    lines = [fallback(asked, kind, name, model.kernel_widths), fallback_attention(asked, shape)]
    scaling = float8_scaling(job.train.precision)
    without = kind == "cpu" or asked == "plain" or not has_triton()
    if (scaling == "blocks" and without) or (scaling == "tensor" and kind == "cpu"):
        lines.append(f"{job.train.precision} is emulated here: the same numbers, slower than {name}")
    if kind == "cpu" and job.train.cuda_graphs:
        lines.append("no CUDA graphs here: operators are started one by one")
    return [line for line in lines if line]


def precision_told(job: Job, dtype: torch.dtype) -> str:
    """For people."""
    asked = job.train.precision
    return f"{asked} in {_name(dtype)}" if float8_scaling(asked) is not None else _name(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
