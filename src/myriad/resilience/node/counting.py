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
from myriad.telemetry.link_evidence import samples_of
from myriad.telemetry.link_peaks import told_peaks
from myriad.telemetry.link_ring import LinkRing

__all__ = ["CounterLog", "watch_often"]

_EVERY_SECONDS, _LINES_AT_ONCE = 1.0, 3


class CounterLog:
    """Samples the counters of one node agent's node, and has them written."""

    def __init__(self, run: Run, node: int, scribe: Scribe | None = None) -> None:
        self._counters, self._scribe = Counters(_names()), scribe or Scribe()
        self._file = CounterFile(run.counters_path / f"node-{node}.jsonl", self._counters.speeds())
        self._due, self._waiting = 0.0, list[Sample]()

    def look(self) -> None:
        """Take a sample if it is due; call this more often than each second."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + _EVERY_SECONDS - 0.1  # whoever calls may be a little early
        self._waiting.append(self._counters.look())
        if len(self._waiting) >= _LINES_AT_ONCE:
            self._scribe.enter("", partial(self._file.append, tuple(self._waiting)))
            self._waiting.clear()


def watch_often(run: Run, node: int, seconds: float, ring: LinkRing | None = None) -> tuple[str, list[str]]:
    """Each 10 ms for so long, from the node's ring where it has one; gives the file, and words about it.
    Raises ``OSError``."""
    counters = Counters(_names())
    try:
        speeds = counters.speeds()
        samples = sample_often(counters, seconds) if ring is None else _sample_ring(ring, seconds)
    finally:
        counters.close()
    at = time.strftime("%Y%m%d-%H%M%S", time.localtime(samples[0].time))
    path = run.counters_path / f"node-{node}-each-10-ms-{at}.jsonl"
    CounterFile(path, speeds).append(samples)
    words = [f"node {node}, {line}" for line in told_peaks(samples, speeds)]
    return str(path.relative_to(run.path)), words


def _sample_ring(ring: LinkRing, seconds: float) -> list[Sample]:
    since = time.monotonic_ns()
    time.sleep(seconds)
    rows = ring.newest().since(since)
    if not len(rows.values):
        raise OSError("the process that samples the links has written nothing")
    return samples_of(rows, LinkRing.epoch_ns())


def _names() -> list[str]:
    return [*(nic.name for nic in find_nics()), "lo"]
