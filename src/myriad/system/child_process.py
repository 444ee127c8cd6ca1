"""Runs a command that dies with its parent: ``python child.py PARENT_PID COMMAND...``.

A launcher that is killed with SIGKILL cannot tidy up, so each rank asks the kernel to be killed with it
(PR_SET_PDEATHSIG, which survives exec). Done here, in a fresh process, and not between fork and exec of the
launcher: Python code there can deadlock when the launcher has threads. Run by path with ``-S``: it costs 15
ms, not an import.
"""

import ctypes
import os
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """From now on SIGKILL reaches this process when its parent ends; exits if it has ended already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
