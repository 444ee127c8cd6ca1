"""Watches the launcher (`myriad train`), which restarts drivers and node agents that die.

    stopped   its state in /proc is T, for 2.5 s
    hung      it has not read the driver's output, to which a line is written each second, for 5 s

No other process can replace the launcher: when it ends, the run ends. So a problem is only reported, and the
run continues.
"""

import fcntl
import os
import stat
import struct
import termios
import time
from collections.abc import Callable
from contextlib import suppress

from myriad.system.processes import PausableClock, StopTimer

__all__ = ["LauncherMonitor", "unread_bytes"]

_STOPPED_SECONDS, _HUNG_SECONDS = 2.5, 5.0
_LONGEST_POLL_SECONDS = 2.0
_GOES_ON = "goes on"
_LEFT_ALONE = "training goes on, but a driver or node agent that dies is not replaced"


class LauncherMonitor:
    """Watches the process that has started this driver."""

    def __init__(
        self, pid: int | None = None, output: int = 1, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``pid``: the launcher; ``None``: MYRIAD_ENGINE_PID. ``output``: the pipe that the launcher
        reads."""
        engine = os.environ.get("MYRIAD_ENGINE_PID")
        self._pid = int(engine) if pid is None and engine is not None else pid
        self._output, self._stopped, self._clock = (
            output,
            StopTimer(),
            PausableClock(_LONGEST_POLL_SECONDS, clock),
        )
        self._unread, self._unread_since = 0, 0.0
        self._is_wrong = False

    def poll(self) -> str | None:
        """Return the problem of the launcher when it changes. Call this method each second."""
        if self._pid is None:
            return None
        now = self._clock.read()
        stopped = self._stopped.poll(self._pid, now)
        unread = unread_bytes(self._output)
        if unread < self._unread or not unread:  # the launcher has read something
            self._unread_since = now
        self._unread = unread
        wrong = ""
        if stopped is not None:
            wrong = "is stopped" if stopped >= _STOPPED_SECONDS else ""
        elif now - self._unread_since >= _HUNG_SECONDS:
            wrong = "hangs: it reads nothing"
        if bool(wrong) == self._is_wrong or (self._is_wrong and stopped is not None):
            return None
        self._is_wrong = bool(wrong)
        return f"{wrong}: {_LEFT_ALONE}" if wrong else _GOES_ON


def unread_bytes(pipe: int) -> int:
    """Return the number of unread bytes in a pipe; 0 if this is not a pipe."""
    with suppress(OSError):
        if not stat.S_ISFIFO(os.fstat(pipe).st_mode):
            return 0
        return int(struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))[0])
    return 0
