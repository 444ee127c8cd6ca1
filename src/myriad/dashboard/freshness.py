"""How long ago a run showed its last sign of life, whatever its clocks say.

    quiet = when its files were read - time of the newest line or span - offset of its clock

The time of the reading counts, not now: a server that is busy with a long backlog takes no run for hung. Of a
run whose times lie in the future only the server's own clock says how long nothing has come. A clock that is
behind shows by steady news that are all equally old: that age is the offset.
"""

import time
from collections import deque
from typing import Any

__all__ = ["Freshness"]

_AHEAD_SECONDS = 5.0
_STEADY_LOOKS, _STEADY_SECONDS = 8, 5.0


class Freshness:
    """How recently the files of a run were read. Any thread may call all of it but `looked`."""

    def __init__(self) -> None:
        self._amounts: Any = None
        self._read_time = self._read_at = 0.0
        self._news_at: float | None = None
        """When something new came; at first: when files were first read. ``None``: not yet."""
        self._ages: deque[float] = deque(maxlen=_STEADY_LOOKS)
        self._offset = 0.0

    def looked(self, amounts: Any, newest: float, began: float | None = None) -> None:
        """Files were read. ``amounts``: differ if there was something new; ``newest``: the latest time in
        them; ``began``: when that reading began, by the monotonic clock."""
        now = time.monotonic()
        self._read_at = now if began is None else began
        self._read_time = time.time() - (now - self._read_at)
        is_first = self._news_at is None
        if is_first or amounts != self._amounts:
            self._news_at = self._read_at
            if not is_first:
                self._ages.append(self._read_time - newest)
        self._amounts = amounts
        if len(self._ages) == _STEADY_LOOKS and max(self._ages) - min(self._ages) < _STEADY_SECONDS:
            self._offset = max(0.0, min(self._ages))

    def quiet_seconds(self, newest: float) -> float:
        """Since the newest sign of life; 0: there was none."""
        if newest <= 0:
            return 0.0
        if self._news_at is None:
            return max(0.0, time.time() - newest)
        if newest > self._read_time + _AHEAD_SECONDS:
            return self._read_at - self._news_at
        return max(0.0, self._read_time - newest - self._offset)
