"""Dynamic loss scaling for float16: the loss is multiplied before the backward, gradients divided after it.

    float16       smallest number 6e-8, largest 65,504: small gradients of the backward vanish, unless the
                  loss, and with it each of them, is multiplied by a scale (Micikevicius et al. 2018,
                  arXiv 1710.03740, section 3.2)
    overflow      a gradient is not finite while the loss is: this step's update is skipped, the scale halved
    growth        after `growth_interval` finite steps in a row the scale is doubled (PyTorch's GradScaler)
    fault         the loss itself is not finite, which no scale causes; or gradients overflow at the smallest
                  scale, more often in a row than `max_skips`

Every scale is a power of two, so that scaling and unscaling change exponents only. All ranks compute the same
global norm. Each rank therefore updates its own copy of this state, and all copies stay equal without
communication.
"""

import math
from collections.abc import Mapping
from typing import Any

from myriad.errors import BadInputError
from myriad.optim.config import LARGEST_LOSS_SCALE, LossScaleConfig

__all__ = ["LossScaler"]

_SEED = 16.0
"""Largest gradient of one token's loss at the start: at 4,096 tokens PyTorch's initial scale, 65,536."""


class LossScaler:
    """The loss scale of one run, and the rule for its changes."""

    def __init__(self, config: LossScaleConfig, num_targets: int) -> None:
        """``num_targets`` is the number of tokens of a step, over which the loss is averaged."""
        self._config = config
        self.scale = config.initial or _default_scale(config, num_targets)
        """Factor on the mean loss."""
        self.finite_steps = 0
        """Consecutive finite steps since the last change of the scale."""
        self.skips_at_minimum = 0
        """Consecutive overflows at the smallest scale."""

    def moved(self) -> float:
        """Record a step with finite gradients, and return the factor by which the scale changed: 1 or 2."""
        self.skips_at_minimum = 0
        self.finite_steps += 1
        if self.finite_steps < self._config.growth_interval:
            return 1.0
        before, self.finite_steps = self.scale, 0
        self.scale = min(2 * self.scale, LARGEST_LOSS_SCALE)
        return self.scale / before

    def overflowed(self) -> bool:
        """Record a step with non-finite gradients, and return whether it may be skipped; otherwise it is a
        fault."""
        self.finite_steps = 0
        if self.scale > self._config.minimum:
            self.scale /= 2
            return True
        self.skips_at_minimum += 1
        return self.skips_at_minimum <= self._config.max_skips

    @property
    def fault(self) -> str:
        """The reason why an overflow is no longer skipped."""
        return (
            f"float16 gradients overflow at the smallest loss scale ({self._config.minimum:g}), "
            f"{self.skips_at_minimum} steps in a row"
        )

    def state(self) -> dict[str, float]:
        """Return the values that a checkpoint stores."""
        return {
            "scale": self.scale,
            "finite_steps": self.finite_steps,
            "skips_at_minimum": self.skips_at_minimum,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`. Raises `BadInputError` for values that no run writes."""
        scale, steps, skips = (state.get(key) for key in ("scale", "finite_steps", "skips_at_minimum"))
        valid = isinstance(scale, float) and 0 < scale <= LARGEST_LOSS_SCALE and math.frexp(scale)[0] == 0.5
        if not (valid and isinstance(steps, int) and isinstance(skips, int) and min(steps, skips) >= 0):
            raise BadInputError(
                "loss_scale in the checkpoint", dict(state), "must be the state that a float16 run stores"
            )
        self.scale = max(float(state["scale"]), self._config.minimum)
        self.finite_steps, self.skips_at_minimum = steps, skips


def _default_scale(config: LossScaleConfig, num_targets: int) -> float:
    """Return the largest power of two at which no token's gradient is above `_SEED`."""
    scale: float = 2.0 ** math.floor(math.log2(_SEED * num_targets))
    return min(max(scale, config.minimum), LARGEST_LOSS_SCALE)
