"""Curves of chosen runs, by steps, tokens, FLOPs or time since each run began.

Lines of a run are read whole, become arrays and are dropped: 12 MB for 100,000 steps. They are read again
when a file changes, but not before 20 times the time of the last reading. A long run takes seconds, so a
thread reads it; meanwhile answers have the curves of before, or none.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from myriad.dashboard.api.run_api import validation_curves
from myriad.dashboard.run_files import Curves, number
from myriad.many_runs.row_cache import Stamp, stamp_of
from myriad.run import Run
from myriad.run.run_lines import StepLines
from myriad.run.run_speed import Peaks

__all__ = ["AXES", "NO_CURVES", "CurveCache", "RunCurves"]

AXES = {"steps": "step", "tokens": "tokens", "FLOPs": "total_flops", "time": "time"}
"""Column of `Curves` that holds the position on each axis."""
_MOST_KEPT = 16
_REREAD_TIMES = 20.0
_MOST_BYTES_AT_ONCE = 2**21
"""Largest metrics.jsonl that is read while a request waits: about 0.1 s."""


@dataclass(frozen=True)
class RunCurves:
    """What the charts of a run show."""

    curves: Curves
    peaks: Peaks
    validations: Sequence[dict[str, Any]]
    began: float
    """Time from which the axis of time counts."""

    @classmethod
    def read(cls, run: Run) -> "RunCurves":
        """Read the files of a run."""
        lines, events, curves = StepLines(run.metrics_path), run.read_events(), Curves()
        curves.add(lines.poll())
        times = (number(one.get("time")) for one in (*events[:1], *lines.lines[:1]))
        began = min((at for at in times if at is not None), default=0.0)
        return cls(curves, Peaks(events), validation_curves(events), began)

    def thinned(self, points: int, axis: str, low: float | None, high: float | None) -> dict[str, Any]:
        """Return the columns of about ``points`` steps between two places on the axis, with ``began`` and the
        validations."""
        offset = self.began if axis == "time" else 0.0
        ends = [None if end is None else end + offset for end in (low, high)]
        first, last = self.curves.steps_between(AXES[axis], *ends)
        columns = self.curves.thinned(points, self.peaks, first, last)
        return {"began": self.began, "validation": self.validations, "columns": columns}


NO_CURVES = RunCurves(Curves(), Peaks(), (), 0.0)
"""The curves of a run whose files are being read."""


class CurveCache:
    """Curves of the runs that were asked for last. It is thread-safe."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, tuple[Stamp, float, RunCurves]] = OrderedDict()
        self._reading: set[str] = set()
        self._lock = threading.Lock()

    def of(self, name: str, run: Run) -> RunCurves | None:
        """Return the curves of a run, by its id; ``None`` while a long run is read for the first time."""
        with self._lock:
            stamp, kept = stamp_of(run), self._kept.get(name)
            is_stale = kept is None or (kept[0] != stamp and time.monotonic() >= kept[1])
            is_stale &= name not in self._reading
            if is_stale:
                self._reading.add(name)
            elif kept is not None:
                self._kept.move_to_end(name)
        if is_stale and _num_bytes(run) <= _MOST_BYTES_AT_ONCE:
            self._read(name, run, stamp)
        elif is_stale:
            work = threading.Thread(target=self._read, args=(name, run, stamp), name="curves", daemon=True)
            work.start()
        with self._lock:
            kept = self._kept.get(name)
            return None if kept is None else kept[2]

    def _read(self, name: str, run: Run, stamp: Stamp) -> None:
        began = time.monotonic()
        try:
            curves = RunCurves.read(run)
        finally:
            with self._lock:
                self._reading.discard(name)
        done = time.monotonic()
        with self._lock:
            self._kept[name] = stamp, done + _REREAD_TIMES * (done - began), curves
            self._kept.move_to_end(name)
            while len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)


def _num_bytes(run: Run) -> int:
    try:
        return run.metrics_path.stat().st_size
    except OSError:
        return 0
