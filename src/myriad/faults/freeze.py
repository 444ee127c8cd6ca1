"""Hold every thread of processes by ptrace, until they or this process end, or for SECONDS.

    python -m myriad.faults.freeze PID[,PID...] PARENT [SECONDS]

The processes then look hung: they are alive, none of their threads runs, and the kernel does not report them
as stopped (the state is t, not T). SIGKILL still ends them.
"""

import ctypes
import os
import sys
import time
from pathlib import Path

from myriad.system.child_process import die_with_parent

__all__ = ["main"]

_PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4206, 0x4207
_POLL_SECONDS = 0.05


def main(arguments: list[str]) -> int:
    """Hold the processes; the exit code is 1 if one cannot be traced."""
    die_with_parent(int(arguments[1]))
    processes, held = list(map(int, arguments[0].split(","))), set[int]()
    until = time.monotonic() + float(arguments[2]) if arguments[2:] else float("inf")
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
    while threads := _all_threads(processes) - held:  # some threads may have started meanwhile
        for thread in threads:
            if ptrace(_PTRACE_SEIZE, thread, None, None) and Path(f"/proc/{thread}").exists():
                sys.stderr.write(f"thread {thread} cannot be held: {os.strerror(ctypes.get_errno())}\n")
                return 1
            ptrace(_PTRACE_INTERRUPT, thread, None, None)
            held.add(thread)
    while _all_threads(processes) and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
    return 0


def _all_threads(processes: list[int]) -> set[int]:
    return set().union(*map(_threads, processes))


def _threads(process: int) -> set[int]:
    """Return the threads of a process; empty if the process is gone or a zombie, whose threads have ended."""
    try:
        if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
            return set()
        return set(map(int, os.listdir(f"/proc/{process}/task")))
    except OSError:
        return set()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
