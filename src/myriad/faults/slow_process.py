"""Make a process slow: stop it for STOPPED of each PERIOD seconds, until it or this one ends.

    python -m myriad.faults.slow_process PID PERIOD STOPPED PARENT

The process is stopped nearly whenever its state is read, and yet it works. A watcher that reads only the
state takes it for a stopped process.
"""

import os
import signal
import sys
import time
from contextlib import suppress

from myriad.system.child_process import die_with_parent
from myriad.system.processes import process_start_ticks

__all__ = ["main"]


class _Ended(Exception):
    """Raised when SIGTERM arrives."""


def main(arguments: list[str]) -> int:
    """Slow the process; on SIGTERM leave it running."""
    pid, period, stopped, parent = int(arguments[0]), *map(float, arguments[1:3]), int(arguments[3])
    die_with_parent(parent)
    signal.signal(signal.SIGTERM, _end)
    began = process_start_ticks(pid)
    with suppress(ProcessLookupError, _Ended):
        while began is not None and process_start_ticks(pid) == began:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(stopped)
            os.kill(pid, signal.SIGCONT)
            time.sleep(period - stopped)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
    return 0


def _end(number: int, frame: object) -> None:
    raise _Ended


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
