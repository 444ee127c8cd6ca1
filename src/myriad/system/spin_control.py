"""Stop OpenMP threads from spinning while other processes need the cores.

PyTorch's CPU operators meet at a barrier after each parallel region. GNU's OpenMP library (libgomp) spins
there for some milliseconds before it sleeps. On idle cores that is twice as fast as sleeping at once. When
another process needs a core, it is up to fifty times slower: one thread spins for its whole time slice,
waiting for a thread that is not running.

The number of spins cannot be changed after the library is loaded. But libgomp itself nearly stops spinning
while a process has more OpenMP threads than cores (`gomp_throttled_spin_count_var` in its wait.h). So:

    threads wait for a core  ──► a second, idle team of threads starts   ──► libgomp sleeps at barriers
    threads wait no more     ──► that team ends                          ──► libgomp spins at barriers

The kernel reports how long threads have waited for a core (/proc/PID/task/TID/schedstat). Only the kind of
waiting changes, not which thread computes what, so results are bitwise equal. If the user has set how OpenMP
waits, that setting stays.
"""

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Iterator

from myriad.system.machine import num_cores

__all__ = ["SpinControl", "control_spinning", "spinning_controlled"]

_OWN_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_POLL_SECONDS = 0.1
_CROWDED_RATIO, _FREE_RATIO = 0.2, 0.1
"""Thresholds of time waited for a core over wall time: 0.04 on idle cores, 0.5 beside a busy loop."""
_FREE_CHECKS = 5
"""Number of polls below the threshold before threads may spin again."""
_MOST_IDLE_THREADS = 64
"""Limit of idle threads: a process that needs more has a small share of a large machine."""


class SpinControl:
    """Turns spinning off and on in this process. A thread checks ten times a second."""

    def __init__(self, library: ctypes.CDLL, num_idle_threads: int) -> None:
        """``num_idle_threads``: number of idle threads that makes OpenMP threads outnumber the cores."""
        self._library, self._num_idle = library, num_idle_threads
        self._over = threading.Event()
        self._holding: threading.Event | None = None
        self._free_checks = 0
        self._thread = threading.Thread(target=self._watch, name="spin-watch", daemon=True)
        self._thread.start()

    @property
    def sleeps(self) -> bool:
        """Whether threads sleep at barriers instead of spinning."""
        return self._holding is not None

    def close(self) -> None:
        """Stop watching, and allow threads to spin again."""
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        now, waited = time.monotonic(), _seconds_without_core()
        while not self._over.wait(_POLL_SECONDS):
            before, waited_before = now, waited
            now, waited = time.monotonic(), _seconds_without_core()
            self.decide((waited - waited_before) / (now - before))
        self._spin()

    def decide(self, waited_ratio: float) -> None:
        """Make threads sleep or spin. ``waited_ratio``: time waited for a core, over the last wall time."""
        self._free_checks = self._free_checks + 1 if waited_ratio < _FREE_RATIO else 0
        if waited_ratio > _CROWDED_RATIO and self._holding is None:
            self._holding = threading.Event()
            threading.Thread(target=self._hold, args=(self._holding,), name="idle-team", daemon=True).start()
        elif self._free_checks >= _FREE_CHECKS:
            self._spin()

    def _spin(self) -> None:
        if self._holding is not None:
            self._holding.set()
            self._holding = None

    def _hold(self, released: threading.Event) -> None:
        """Own a team of idle OpenMP threads, which libgomp ends together with this thread."""
        nothing = ctypes.cast(self._library.omp_get_num_threads, ctypes.c_void_p)
        self._library.GOMP_parallel(nothing, None, ctypes.c_uint(self._num_idle + 1), ctypes.c_uint(0))
        released.wait()


def control_spinning(threads: int) -> SpinControl | None:
    """Watch a process that computes with ``threads`` OpenMP threads. PyTorch must be imported already.

    Return ``None`` if there is nothing to watch: one thread, another OpenMP library, or the user's own
    setting."""
    idle = num_cores() - threads + 1
    is_set = any(name in os.environ for name in _OWN_SETTINGS)
    if threads < 2 or is_set or not 1 <= idle <= _MOST_IDLE_THREADS:
        return None
    library = _loaded_libgomp()
    return None if library is None else SpinControl(library, idle)


@contextlib.contextmanager
def spinning_controlled() -> Iterator[None]:
    """Watch this process inside the block, with PyTorch's number of threads."""
    import torch

    watch = control_spinning(torch.get_num_threads())
    try:
        yield
    finally:
        if watch is not None:
            watch.close()


def _loaded_libgomp() -> ctypes.CDLL | None:
    with contextlib.suppress(OSError), open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libgomp" in line}
        if len(paths) == 1:  # with two copies it is unknown which one PyTorch uses
            return ctypes.CDLL(paths.pop())
    return None


def _seconds_without_core() -> float:
    """Return how long threads of this process were ready to run without a core, in seconds."""
    total = 0
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # the thread has ended
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
    return total / 1e9
