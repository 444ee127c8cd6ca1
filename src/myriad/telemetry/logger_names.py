"""Which other tools may get a run's metrics. No torch here."""

import importlib.util
from collections.abc import Sequence
from typing import Literal

from myriad.errors import BadInputError

__all__ = ["LoggerName", "check_loggers"]

LoggerName = Literal["tensorboard", "wandb", "mlflow"]
"""Each is a package of that name."""


def check_loggers(names: Sequence[LoggerName]) -> None:
    """Refuses one whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            allowed = f"needs the package {name} (pip install 'myriad[{name}]')"
            raise BadInputError("telemetry.loggers", list(names), allowed)
