"""Values that a user's own code measures in a step: `myriad.log`.

    myriad.log({"temperature": t, "share of long samples": 0.3})     anywhere in the process of a rank

A step's line in metrics.jsonl has the mean of all calls on all ranks since the line before, under ``user``
(`myriad.parallel.user_means`). The page draws a chart for each name, and loggers and Prometheus get the
values too.
"""

import threading
from collections.abc import Mapping
from typing import SupportsFloat

__all__ = ["MOST_NAMES", "UserMetrics", "log", "take_logged"]

MOST_NAMES = 64
_LONGEST_NAME = 80


class UserMetrics:
    """The sums of named values since the last `take`. It is thread-safe."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, int]] = {}
        self._lock = threading.Lock()

    def add(self, values: Mapping[str, SupportsFloat]) -> None:
        """Add a value to the sum of each name. Raises `ValueError` for a name that no chart can have, or
        more names than charts are drawn for."""
        found = {name: float(value) for name, value in values.items()}
        for name in found:
            if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
                allowed = f"allowed are 1 to {_LONGEST_NAME} printable characters"
                raise ValueError(f"myriad.log: the name {name!r}: {allowed}")
        with self._lock:
            if len(self._sums.keys() | found.keys()) > MOST_NAMES:
                raise ValueError(f"myriad.log: at most {MOST_NAMES} names in a step")
            for name, value in found.items():
                total, count = self._sums.get(name, (0.0, 0))
                self._sums[name] = total + value, count + 1

    def take(self) -> dict[str, tuple[float, int]]:
        """Return the sum and the number of values of each name, and begin again."""
        with self._lock:
            sums, self._sums = self._sums, {}
        return sums


_OF_PROCESS = UserMetrics()


def log(values: Mapping[str, SupportsFloat]) -> None:
    """Record values of the step that is being trained, each under a name of your own.

    ``values`` are numbers, or tensors of one number (of a GPU's tensor, reading it waits for the device). The
    step's line in metrics.jsonl has the mean over all calls on all ranks, under ``user``: over replicas, and
    also if only some ranks log a name, as those of the last pipeline stage, which compute the loss. Calls
    after the gradients of a step are complete count in the next one. Calls in an evaluation, in the data
    loader's process, and in a process that only starts ranks do not count. Raises `ValueError` for more than
    64 names in a step, or a name that is not of 1 to 80 printable characters. Of more than 64 names in a run,
    the first 64 are kept."""
    _OF_PROCESS.add(values)


def take_logged() -> dict[str, tuple[float, int]]:
    """Return the sums of the values that `log` got in this process since the last call."""
    return _OF_PROCESS.take()
