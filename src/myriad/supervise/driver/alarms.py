"""The driver's end of the process that sends alarms. `AlarmProcess` starts the process, restarts it when it
ends, and notifies it of a requested stop and of the end of the run."""

import logging
import subprocess
import sys
import time
from contextlib import suppress

from myriad.run import Run

__all__ = ["AlarmProcess"]

_LOG = logging.getLogger(__name__)
_AGAIN_SECONDS = 10.0
_EARLIER_SECONDS = 10.0
"""Seconds before the start of this driver from which events raise alarms: the launcher may have written
some."""


class AlarmProcess:
    """Sends the alarms of one run. A failure of this process does not affect the run."""

    def __init__(self, run: Run) -> None:
        self._run, self._since = run, time.time() - _EARLIER_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at, self._is_stopping = 0.0, False

    def poll(self) -> None:
        """Start the process if it does not run. Call this method each second."""
        if self._process is not None and self._process.poll() is None:
            return
        if (now := time.monotonic()) < self._start_at:
            return
        self._start_at = now + _AGAIN_SECONDS
        words = [sys.executable, "-m", "myriad.supervise.driver.alarm_process", str(self._run.path)]
        try:
            # The process shares the driver's log, because opening a file on a disk that hangs would block the
            # driver.
            self._process = subprocess.Popen(
                [*words, str(self._since)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            _LOG.warning("alarms are not sent: %s", error)
        if self._is_stopping:
            self._report(b"stopping\n")

    def stopping(self) -> None:
        """Announce a requested stop, so that the end of driver and launcher raises no alarm."""
        self._is_stopping = True
        self._report(b"stopping\n")

    def _report(self, word: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(word)
                self._process.stdin.flush()

    def finish(self) -> None:
        """Announce the end of the run. The process sends the remaining messages by itself."""
        self._report(b"over\n")
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
