"""gloo's thread that reads and writes sockets, kept from interrupting the one that it would wait for.

With a core of its own it does no harm. Where it shares one with the thread that sends, the kernel lets a
thread that wakes go before one that has computed for long; and gloo's thread, woken by what a peer sends,
asks again and again for a lock that the interrupted sender holds, until its slice is over: many times as
long as the transfer takes. A thread of the policy ``SCHED_BATCH`` interrupts nobody when it wakes (sched(7)),
and one of less weight does not ask for long. ``SCHED_IDLE`` would be quicker by a little, and stand still
where other work takes all cores.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["loops_that_interrupt_nobody"]

_TASKS = Path("/proc/self/task")
_WORKER = "pt_gloo_runloop"
"""torch's threads, which send; a group has two of them beside gloo's own."""
_NUM_WORKERS, _PATIENCE_SECONDS = 2, 0.1
_NICER = 10
"""A tenth of a usual thread's weight."""


@contextmanager
def loops_that_interrupt_nobody() -> Iterator[None]:
    """Around the making of one gloo group. Does nothing where the kernel has no such policy."""
    if not hasattr(os, "SCHED_BATCH") or not _TASKS.is_dir():
        yield
        return
    before = _threads()
    yield
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while _num_workers(made := _threads() - before) < _NUM_WORKERS and time.monotonic() < deadline:
        time.sleep(1e-4)  # a thread names itself when it first runs
    for thread in made:
        if _name(thread) != _WORKER:
            _make_patient(thread)


def _threads() -> set[int]:
    return {int(entry.name) for entry in _TASKS.iterdir()}


def _num_workers(threads: set[int]) -> int:
    return sum(_name(thread) == _WORKER for thread in threads)


def _name(thread: int) -> str:
    with suppress(OSError):  # it has ended
        return (_TASKS / str(thread) / "comm").read_text().strip()
    return ""


def _make_patient(thread: int) -> None:
    with suppress(OSError):  # it has ended
        os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + _NICER)
