"""How parameters move: optimizer, learning-rate schedule, precision. No torch here."""

import math
from typing import Literal

from pydantic import Field

from myriad.config import Config
from myriad.errors import BadInputError

__all__ = [
    "LARGEST_LOSS_SCALE",
    "LossScaleConfig",
    "OptimizerConfig",
    "Precision",
    "check_loss_scale",
    "float8_scaling",
]

LARGEST_LOSS_SCALE = 2.0**40
"""The scale grows no further: gradients that are all zero never overflow."""

Precision = Literal["auto", "float32", "bfloat16", "float16", "float8", "float8-blocks"]
"""bfloat16, float16: compute in it, master weights and gradient sums in float32; float16 with a dynamic loss
scale (`LossScaleConfig`). auto: bfloat16 where the device multiplies it natively, float16 on GPUs that
multiply only that (Volta, Turing), else float32. float8: as auto, but the blocks' matrix products in 8 bits
with a scale for each tensor; float8-blocks: with one for each 128 neighbours, and of weights for each
128 x 128."""


def float8_scaling(precision: Precision) -> Literal["tensor", "blocks"] | None:
    """What has a scale of its own in float8; ``None``: nothing is."""
    if precision == "float8":
        return "tensor"
    return "blocks" if precision == "float8-blocks" else None


class OptimizerConfig(Config):
    """Optimizer and learning-rate schedule."""

    name: Literal["adamw", "lamb"] = "adamw"
    """adamw (Loshchilov & Hutter 2019) or lamb (You et al. 2019)."""
    learning_rate: float = Field(1e-3, gt=0)
    """Peak learning rate."""
    final_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the end, as a share of the peak."""
    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after warm-up; wsd stays at the peak and falls linearly over the last decay_ratio of steps."""
    decay_ratio: float = Field(0.2, gt=0, le=1)
    """Share of all steps in which wsd falls."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0 (step k of n uses (k + 1) / n)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled decay of matrices (norms and biases are left alone), in units of the learning rate."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled so that their global norm is at most this; off: no clipping."""


class LossScaleConfig(Config):
    """What the loss is multiplied by before a backward in float16, so that small gradients do not vanish."""

    initial: float | None = Field(None, gt=0, le=LARGEST_LOSS_SCALE)
    """Scale of the first step, a power of two; off: the largest up to 16 x the tokens of a step (65,536 at
    4,096 tokens). It is halved when a gradient overflows, and that step is skipped."""
    growth_interval: int = Field(2000, ge=1)
    """Steps in a row without overflow after which the scale is doubled, up to 2^40."""
    minimum: float = Field(1.0, gt=0, le=LARGEST_LOSS_SCALE)
    """Smallest scale, a power of two."""
    most_skips: int = Field(3, ge=0)
    """Overflows in a row that are skipped at the smallest scale; the next one is a fault, as a loss that is
    not finite is (resilience.on_nan)."""


def check_loss_scale(config: LossScaleConfig) -> None:
    """Raise `BadInputError` for a scale that is no power of two, or below the minimum."""
    for key in ("initial", "minimum"):
        value = getattr(config, key)
        if value is not None and math.frexp(value)[0] != 0.5:
            raise BadInputError(f"loss_scale.{key}", value, "must be a power of two")
    if config.initial is not None and config.initial < config.minimum:
        allowed = f"at least loss_scale.minimum = {config.minimum:g}"
        raise BadInputError("loss_scale.initial", config.initial, allowed)
