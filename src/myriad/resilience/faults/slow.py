"""``python -m myriad.resilience.faults.slow PID PERIOD STOPPED PARENT``: makes a process slow. In each PERIOD
seconds it is stopped (SIGSTOP) for STOPPED of them, until it ends, or this process does.

The process is stopped nearly whenever it is looked at, and yet it works: a watcher that only looks at the
state of a process takes it for one that is stopped.
"""

import os
import signal
import sys
import time
from contextlib import suppress

from myriad.processes import process_start_ticks
from myriad.resilience.engines.child import die_with_parent

__all__ = ["main"]


class _Ended(Exception):
    """This process is to end."""


def main(arguments: list[str]) -> int:
    """Leave the process at work when this one is asked to end (SIGTERM)."""
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
