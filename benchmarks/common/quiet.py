"""Whether others use the machine's cores meanwhile: from the kernel's counters of the whole machine, less
what this process and the children it has waited for took.

    wait_for_quiet(60)
    with others_at_work() as others:
        ...
    others()        0.02: 2 % of the cores' time went to somebody else
"""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["QUIET_RATIO", "others_at_work", "wait_for_quiet"]

QUIET_RATIO = 0.1
"""Share of the cores' time that others may take; interrupts and the kernel's own threads take a third."""
_TICKS = os.sysconf("SC_CLK_TCK")


def _busy_seconds() -> float:
    """Return the busy seconds of all cores since boot; waits for a disk do not count."""
    fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    user, nice, system, _, _, interrupts, soft, _ = fields
    return (user + nice + system + interrupts + soft) / _TICKS


def _own_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


@contextmanager
def others_at_work() -> Iterator[Callable[[], float]]:
    """The share is known when the block is left."""
    found: list[float] = []
    start = time.perf_counter(), _busy_seconds(), _own_seconds()
    yield lambda: found[0]
    wall, busy, own = time.perf_counter() - start[0], _busy_seconds() - start[1], _own_seconds() - start[2]
    found.append(max(0.0, busy - own) / wall / len(os.sched_getaffinity(0)))


def wait_for_quiet(patience_seconds: float, sample_seconds: float = 0.4) -> None:
    """Until others leave the cores alone, or for so long."""
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        with others_at_work() as others:
            time.sleep(sample_seconds)
        if others() < QUIET_RATIO:
            return
