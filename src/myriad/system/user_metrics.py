"""Values that a user's own code measures in a step: `myriad.log`.

    myriad.log({"temperature": t, "share of long samples": 0.3})     anywhere in the process of a rank

A step's line in metrics.jsonl has the mean of all calls since the line before, under ``user``. The page draws
a chart for each name, and loggers and Prometheus get the values too.
"""

import math
import threading
from collections.abc import Mapping
from typing import SupportsFloat

__all__ = ["UserMetrics", "log", "take_logged"]

_MOST_NAMES, _LONGEST_NAME = 64, 80


class UserMetrics:
    """The means of named values since the last `take`. It is thread-safe."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def add(self, values: Mapping[str, SupportsFloat]) -> None:
        """Add a value to the mean of each name. Raises `ValueError` for a name that no chart can have, or
        more names than charts are drawn for."""
        found = {name: float(value) for name, value in values.items()}
        for name in found:
            if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
                raise ValueError(
                    f"myriad.log: the name {name!r}: allowed are 1 to {_LONGEST_NAME} characters"
                )
        with self._lock:
            if len(self._sums.keys() | found.keys()) > _MOST_NAMES:
                raise ValueError(f"myriad.log: at most {_MOST_NAMES} names in a step")
            for name, value in found.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, float | None]:
        """Return the means, and begin again; ``None`` for a mean that is not finite."""
        with self._lock:
            sums, self._sums = self._sums, {}
        means = {name: total / count for name, (total, count) in sums.items()}
        return {name: mean if math.isfinite(mean) else None for name, mean in means.items()}


_OF_PROCESS = UserMetrics()


def log(values: Mapping[str, SupportsFloat]) -> None:
    """Record values of the step that is being trained, each under a name of your own.

    ``values`` are numbers, or tensors of one number (of a GPU's tensor, reading it waits for the device). The
    step's line in metrics.jsonl has the mean over all calls in rank 0's process, under ``user``; values of
    other ranks and of the data loader's process are not collected. Calls in an evaluation do not count.
    Raises `ValueError` for more than 64 names in a step, or a name of no or more than 80 characters."""
    _OF_PROCESS.add(values)


def take_logged() -> dict[str, float | None]:
    """Return the means of the values that `log` got in this process since the last call."""
    return _OF_PROCESS.take()
