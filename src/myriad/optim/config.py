"""The ``[optimizer]`` and ``[loss_scale]`` sections of a job, and number formats. This module does not
import torch."""

import math
from typing import Literal

from pydantic import Field

from myriad.config import Config
from myriad.errors import BadInputError

__all__ = [
    "LARGEST_LOSS_SCALE",
    "LossScaleConfig",
    "NewtonSchulzPrecision",
    "OptimizerConfig",
    "OptimizerName",
    "Precision",
    "check_loss_scale",
    "float8_scaling",
]

LARGEST_LOSS_SCALE = 2.0**40
"""Upper bound of the loss scale; without it, gradients that are all zero would double it forever."""

Precision = Literal["auto", "float32", "bfloat16", "float16", "float8", "float8-blocks"]
"""Number formats of the computation.

bfloat16 and float16: compute in this format, with master weights and gradient sums in float32; float16 uses a
dynamic loss scale (`LossScaleConfig`). auto: bfloat16 where the device multiplies it natively, float16 on
GPUs that multiply only that (Volta, Turing), else float32. float8: like auto, but the blocks' matrix products
in 8 bits with a scale for each tensor; float8-blocks: with a scale for each 128 neighbours, and for weights
for each 128 x 128.
"""


def float8_scaling(precision: Precision) -> Literal["tensor", "blocks"] | None:
    """Return the unit that has its own scale in float8, or ``None`` for other formats."""
    if precision == "float8":
        return "tensor"
    return "blocks" if precision == "float8-blocks" else None


OptimizerName = Literal["adamw", "lamb", "muon"]
"""Optimizers that ``optimizer.name`` may name."""

NewtonSchulzPrecision = Literal["auto", "float32", "bfloat16"]
"""Number formats of Muon's Newton-Schulz iteration."""


class OptimizerConfig(Config):
    """Optimizer and learning-rate schedule."""

    name: OptimizerName = "adamw"
    """adamw (Loshchilov & Hutter 2019), lamb (You et al. 2019), or muon (Jordan 2024; Liu et al. 2025): the
    matrices of the blocks move along their orthogonalized momentum, all other parameters by AdamW."""
    learning_rate: float = Field(1e-3, gt=0)
    """Learning rate after the warm-up, before the decay."""
    final_learning_rate_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate as a fraction of the peak."""
    decay: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape of the schedule after warm-up. wsd: constant, then linear decay over the last
    optimizer.decay_ratio of the steps."""
    decay_ratio: float = Field(0.2, gt=0, le=1)
    """Fraction of all steps in which wsd decays."""
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0 (step k of n uses (k + 1) / n)."""
    beta1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(0.95, ge=0, lt=1)
    """Decay of the second moment."""
    epsilon: float = Field(1e-8, gt=0)
    """Added to the square root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices, in units of the learning rate. Norms and biases do not decay."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Maximum global gradient norm; larger gradients are scaled down to it. off: no clipping."""
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    """Decay of the momentum of matrices that muon orthogonalizes."""
    muon_nesterov: bool = True
    """Orthogonalize the mean of gradient and momentum, weighted by the momentum's decay. off: the momentum
    alone."""
    muon_iterations: int = Field(5, ge=1, le=99)
    """Newton-Schulz iterations that orthogonalize a matrix."""
    muon_precision: NewtonSchulzPrecision = "auto"
    """Number format of the Newton-Schulz iterations, in which matrices are also sent. auto: bfloat16 where
    the training computes in bfloat16, else float32. In bfloat16 two layouts agree only to its rounding."""
    muon_scaling: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate of an orthogonalized [m, n] matrix, named as in torch.optim.Muon.
    match_rms_adamw: 0.2 sqrt(max(m, n)), which makes updates as large as AdamW's (Liu et al. 2025). original:
    sqrt(max(1, m / n)) (Jordan 2024), which needs a larger optimizer.learning_rate."""

    qk_clip: float | None = Field(None, gt=0)
    """With muon, largest attention score that a head may have, e.g. 100 (Kimi K2, arXiv 2507.20534): after
    the update, weights of queries and keys of heads above it are scaled down. The scores are computed a
    second time for it. off: no limit."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keep an exponential moving average of the parameters in float32, with this decay, e.g. 0.999: 4 bytes
    more per parameter, sharded like a moment. `myriad eval`, `sample` and `checkpoint export` use it with
    `--ema`. off: no average."""
    ema_every: int = Field(1, ge=1)
    """Steps between updates of the moving average; optimizer.ema_decay is the decay of one update."""

    @property
    def ema_steps(self) -> int:
        """Steps between updates of the moving average of the parameters; 0: there is none."""
        return 0 if self.ema_decay is None else self.ema_every

    @property
    def orthogonalizes(self) -> bool:
        """Whether matrices are orthogonalized before the update."""
        return self.name == "muon"


class LossScaleConfig(Config):
    """Dynamic loss scaling in float16: the loss is multiplied, so that small gradients do not underflow."""

    initial: float | None = Field(None, gt=0, le=LARGEST_LOSS_SCALE)
    """Loss scale of the first step, a power of two. A gradient overflow halves it and skips the step. off:
    the largest power of two up to 16 x the tokens of a step (65,536 at 4,096 tokens)."""
    growth_interval: int = Field(2000, ge=1)
    """Steps without overflow after which the scale doubles, up to 2^40."""
    minimum: float = Field(1.0, gt=0, le=LARGEST_LOSS_SCALE)
    """Smallest loss scale, a power of two."""
    max_skips: int = Field(3, ge=0)
    """Overflows in a row to skip at the smallest scale. The next one is handled as a non-finite loss
    (resilience.on_nan)."""


def check_loss_scale(config: LossScaleConfig) -> None:
    """Raise `BadInputError` for a scale that is not a power of two, or is below the minimum."""
    for key in ("initial", "minimum"):
        value = getattr(config, key)
        if value is not None and math.frexp(value)[0] != 0.5:
            raise BadInputError(f"loss_scale.{key}", value, "must be a power of two")
    if config.initial is not None and config.initial < config.minimum:
        allowed = f"at least loss_scale.minimum = {config.minimum:g}"
        raise BadInputError("loss_scale.initial", config.initial, allowed)
