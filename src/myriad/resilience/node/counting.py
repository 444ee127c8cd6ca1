"""The network counters of a node, written into the run folder each second for as long as its executor lives.

A disk that hangs or is full costs lines, never the executor: another thread writes, and what it cannot keep
up with is left out.
"""

import time
from functools import partial

from myriad.resilience.doctor.hardware import find_nics
from myriad.resilience.drive.scribe import Scribe
from myriad.run import Run
from myriad.telemetry.counters import CounterFile, Counters, Sample, sample_often
from myriad.telemetry.link_peaks import told_peaks

__all__ = ["CounterLog", "watch_often"]

_EVERY_SECONDS, _LINES_AT_ONCE = 1.0, 3


class CounterLog:
    """Of one executor."""

    def __init__(self, run: Run, node: int, scribe: Scribe | None = None) -> None:
        self._counters, self._scribe = Counters(_names()), scribe or Scribe()
        self._file = CounterFile(run.counters_path / f"node-{node}.jsonl", self._counters.speeds())
        self._due, self._waiting = 0.0, list[Sample]()

    def look(self) -> None:
        """Called more often than there is something to do."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + _EVERY_SECONDS - 0.1  # whoever calls may be a little early
        self._waiting.append(self._counters.look())
        if len(self._waiting) >= _LINES_AT_ONCE:
            self._scribe.enter("", partial(self._file.append, tuple(self._waiting)))
            self._waiting.clear()


def watch_often(run: Run, node: int, seconds: float) -> tuple[str, list[str]]:
    """Each 10 ms for so long; gives the file and what is in it in words. Raises ``OSError``."""
    counters = Counters(_names())
    try:
        speeds, samples = counters.speeds(), sample_often(counters, seconds)
    finally:
        counters.close()
    at = time.strftime("%Y%m%d-%H%M%S", time.localtime(samples[0].time))
    path = run.counters_path / f"node-{node}-each-10-ms-{at}.jsonl"
    CounterFile(path, speeds).append(samples)
    return str(path.relative_to(run.path)), [f"node {node}, {line}" for line in told_peaks(samples, speeds)]


def _names() -> list[str]:
    return [*(nic.name for nic in find_nics()), "lo"]
