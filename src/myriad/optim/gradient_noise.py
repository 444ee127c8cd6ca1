"""The gradient noise scale: the batch size up to which a larger batch trains in proportionally fewer steps.

    E|g_b|^2 = |G|^2 + S / b        squared norm of the mean gradient of b tokens; G: true gradient
    noise scale = S / |G|^2         S: trace of the covariance of one token's gradient

(McCandlish et al. 2018, arXiv 1812.06162, appendix A.1.) Two batch sizes give both unknowns. The small ones
are the shares of the data-parallel replicas, whose gradients exist before the reduction; the big one is the
whole batch of B tokens. A replica holds its part of the mean over B, g_i = (b_i / B) x the mean over its own
b_i. With q = sum of (b_i / B)^2, the sums over replicas A = sum |g_i|^2 and C = |sum g_i|^2 have the means

    E A = q |G|^2 + S / B           E C = |G|^2 + S / B

so (C - A) / (1 - q) is an unbiased estimate of |G|^2, and B (A - q C) / (1 - q) one of S. Replicas of equal
size give the formulas of the paper. Each estimate is noisy and may be negative: both are averaged over steps,
and the ratio is taken of the averages. This module does not import torch.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from myriad.errors import BadInputError

__all__ = ["GradientNoise", "NoiseEstimate"]


class NoiseEstimate(NamedTuple):
    """Averages over the last steps."""

    gradient: float
    """Squared norm of the true gradient."""
    variance: float
    """Trace of the covariance of the gradient of one token."""

    @property
    def scale(self) -> float:
        """The noise scale in tokens; NaN while the squared norm is not positive."""
        return self.variance / self.gradient if self.gradient > 0 else math.nan


class GradientNoise:
    """Running averages of the two estimates. All ranks hold the same."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._weight = self._gradient = self._variance = 0.0

    def add(self, small: float, big: float, shares: float, num_tokens: int) -> NoiseEstimate:
        """Add a step and return the averages. ``small`` and ``big``: A and C; ``shares``: q, below 1."""
        gradient = (big - small) / (1 - shares)
        variance = num_tokens * (small - shares * big) / (1 - shares)
        kept, new = self._decay, 1 - self._decay
        self._weight = kept * self._weight + new
        self._gradient = kept * self._gradient + new * gradient
        self._variance = kept * self._variance + new * variance
        return NoiseEstimate(self._gradient / self._weight, self._variance / self._weight)

    def state(self) -> dict[str, float]:
        """Return the values that a checkpoint stores."""
        return {"weight": self._weight, "gradient": self._gradient, "variance": self._variance}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises `BadInputError` for values that no run writes."""
        values = [state.get(key) for key in ("weight", "gradient", "variance")]
        if not all(isinstance(value, float) and math.isfinite(value) for value in values):
            raise BadInputError("noise_scale in the checkpoint", dict(state), "must be three finite numbers")
        self._weight, self._gradient, self._variance = (float(state[key]) for key in self.state())
