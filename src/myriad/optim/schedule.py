"""Learning rate as a pure function of the step, so that a resumed run needs no schedule state.

    peak    ____....____________          warm-up, then cosine, linear, wsd or constant
           /            ''..    \\
    0     /                 ''..  \\       the last step has the final rate
          0   warmup_steps          steps - 1
"""

import math

from myriad.optim.config import OptimizerConfig

__all__ = ["learning_rate"]


def learning_rate(config: OptimizerConfig, step: int, steps: int, start: float = 0.0) -> float:
    """Return the rate of ``step`` (from 0) in a schedule of ``steps``; past the end it stays at the final
    rate. ``start``: the rate from which the warm-up rises."""
    if step < config.warmup_steps:
        return start + (config.learning_rate - start) * (step + 1) / config.warmup_steps
    final = config.final_learning_rate_ratio
    share = final + (1 - final) * _height(config, step, steps)
    return config.learning_rate * share


def _height(config: OptimizerConfig, step: int, steps: int) -> float:
    """Return the height of the schedule: 1 at the peak, 0 at the end."""
    peak_step = max(config.warmup_steps - 1, 0)
    falling = float(steps - 1 - peak_step)
    if config.decay == "wsd":
        falling = min(falling, config.decay_ratio * steps)
    if config.decay == "constant" or falling <= 0:
        return 1.0
    progress = min(max(1 - (steps - 1 - step) / falling, 0.0), 1.0)
    return (1 + math.cos(math.pi * progress)) / 2 if config.decay == "cosine" else 1 - progress
