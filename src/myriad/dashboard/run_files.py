"""Read a run's folder as it grows: its job, steps and events. It never writes.

A file that is incomplete or invalid is skipped, counted and reported; it is read again after it changes.

`Curves` thins the steps for a chart: of a million steps it shows two thousand. Steps are divided into
sections of equal length. From each section it keeps the lowest and the highest loss, the longest step, the
largest gradient norm, and a step with a non-finite loss. So a spike of one step, or one NaN, stays visible
however long the run is."""

import contextlib
import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import AXES
from myriad.dashboard.insight.findings import ranks_of
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.dashboard.run_view import attempt_of
from myriad.errors import MyriadError
from myriad.run import Run
from myriad.run.run_lines import EventLines, StepCount, StepLines, count_steps
from myriad.run.run_speed import Peaks, SpeedMeter, attempt_lines
from myriad.system.jsonl import Record, late_events

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["RunFiles"]

_ALWAYS = ("step", "time", "loss", "step_seconds", "tokens_per_second", "mfu")
_OWN = "user"
"""Field with the values of `myriad.log`."""
_MOST_COLUMNS, _MOST_NAME = 128, 100
_DIGITS = 7
_EXACT = ("step", "time", "tokens")
_KEPT_PER_STRETCH = 6


class Curves:
    """The figures of one run by step, as arrays; NaN where a line has no number.

    A column for each number that the lines have, in the order in which they came; those of `myriad.log`
    are named ``user/NAME``."""

    def __init__(self) -> None:
        self._columns = {name: array("d") for name in _ALWAYS}
        self._names = set(_ALWAYS)
        """Names of columns, and of those for which there is no room."""

    def add(self, lines: Iterable[Record]) -> None:
        """Add lines from `StepLines.poll`. A line for a known step replaces that step and all later ones."""
        steps = self._columns["step"]
        for line in lines:
            step = line["step"]
            if steps and steps[-1] >= step:
                end = bisect_left(steps, step)
                for column in self._columns.values():
                    del column[end:]
            figures = _figures_of(line)
            if not figures.keys() <= self._names:
                self._open_columns(figures)
            for name, column in self._columns.items():
                column.append(figures.get(name, _NAN))

    def _open_columns(self, names: Iterable[str]) -> None:
        if len(self._names) < 10 * _MOST_COLUMNS:
            self._names.update(names)
        columns = dict(self._columns)  # another thread may read them meanwhile
        for name in names:
            if name not in columns and len(columns) < _MOST_COLUMNS and len(name) <= _MOST_NAME:
                columns[name] = array("d", [_NAN]) * len(columns["step"])
        self._columns = columns

    def thinned(
        self, points: int, peaks: Peaks, first: int = 0, last: int | None = None
    ) -> dict[str, list[float | None]]:
        """Return at most about ``points`` of the steps from ``first`` to ``last``, with the first and the
        last; their MFU by ``peaks``, and the model FLOPs up to each as ``total_flops``."""
        # Another thread may add or remove steps meanwhile, so cut all columns to the shortest.
        copies = {name: np.array(column) for name, column in self._columns.items()}
        length = min(map(len, copies.values()))
        copies = {name: column[:length] for name, column in copies.items()}
        if "flops" in copies:
            copies["total_flops"] = np.cumsum(np.nan_to_num(copies["flops"]))
        begin = int(np.searchsorted(copies["step"], first))
        end = length if last is None else int(np.searchsorted(copies["step"], last, side="right"))
        copies = {name: column[begin:end] for name, column in copies.items()}
        places = _places(copies, max(0, end - begin), points)
        copies = {name: column[places] for name, column in copies.items()}
        lines = zip(*(copies[name].tolist() for name in copies), strict=True)
        mfu = [peaks.mfu(dict(zip(copies, values, strict=True))) for values in lines]
        copies["mfu"] = np.array([_NAN if value is None else value for value in mfu])
        return {name: _rounded(name, column) for name, column in copies.items()}

    def steps_between(self, column: str, low: float | None, high: float | None) -> tuple[int, int | None]:
        """Return the first and the last step whose value in a rising column lies between two numbers; a last
        step of ``None`` is no end. Where no value lies there, the first step is after the last one."""
        if low is None and high is None:
            return 0, None
        columns, from_flops = self._columns, column == "total_flops"
        values = np.array(columns.get("flops" if from_flops else column, array("d")))
        steps = np.array(columns["step"])
        length = min(len(values), len(steps))
        values = np.nan_to_num(values[:length], nan=0.0 if from_flops else -np.inf)
        rising = np.cumsum(values) if from_flops else np.maximum.accumulate(values)
        first = 0 if low is None else int(np.searchsorted(rising, low))
        end = length if high is None else int(np.searchsorted(rising, high, side="right"))
        return (int(steps[first]), int(steps[end - 1])) if first < end else (1, 0)

    def steps_at(self, times: Sequence[float]) -> list[int]:
        """Return for each time the first step that ended then or later; the last step if there is none."""
        length = min(len(self._columns["step"]), len(self._columns["time"]))
        if not length:
            return [0] * len(times)
        ends = np.maximum.accumulate(np.nan_to_num(np.array(self._columns["time"][:length]), nan=-np.inf))
        places = np.minimum(np.searchsorted(ends, times), length - 1)
        steps = np.array(self._columns["step"][:length])[places]
        return [int(step) for step in steps]


_NAN = float("nan")


def _figures_of(line: Record) -> dict[str, float]:
    """Return the numbers of a line, by column."""
    found = {name: value for name, value in line.items() if type(value) is float or type(value) is int}
    for name, value in (line.get(_OWN) or {}).items():
        if isinstance(value, int | float):
            found[f"{_OWN}/{name}"] = value
    return found


def _rounded(name: str, column: npt.NDArray[np.float64]) -> list[float | None]:
    """Return figures with as many digits as a chart shows, so that answers are small."""
    if name in _EXACT or not len(column):
        return column.tolist()
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        power = np.floor(np.log10(np.abs(column)))
        factor = 10.0 ** np.clip(_DIGITS - 1 - power, -300, 300)
        rounded = np.round(column * factor) / factor
    return np.where(np.isfinite(rounded), rounded, column).tolist()


def _places(columns: dict[str, npt.NDArray[np.float64]], length: int, points: int) -> npt.NDArray[np.int64]:
    if length <= points:
        return np.arange(length)
    stretches = max(1, (points - 2) // _KEPT_PER_STRETCH)
    size = -(-length // stretches)
    stretches = -(-length // size)

    def split(values: npt.NDArray[np.float64], filler: float) -> npt.NDArray[np.float64]:
        known = np.where(np.isfinite(values), values, filler)
        return np.pad(known, (0, stretches * size - length), constant_values=filler).reshape(stretches, size)

    loss, seconds = columns["loss"], columns["step_seconds"]
    norm = columns.get("grad_norm", seconds)
    begins = np.arange(stretches) * size
    kept = [
        split(loss, np.inf).argmin(axis=1),
        split(loss, -np.inf).argmax(axis=1),
        split(seconds, -np.inf).argmax(axis=1),
        split(norm, -np.inf).argmax(axis=1),
        split(np.where(np.isfinite(loss), 0.0, 1.0), -1.0).argmax(axis=1),
    ]
    found = np.concatenate([begins, *(begins + places for places in kept), [0, length - 1]])
    return np.unique(np.minimum(found, length - 1))


_BEGINS = ("start", "restart")
_MOST_FIRST_LINE = 2**16
_MOST_SECONDS, _START_SECONDS = 2**33, 1.0
"""Tolerance for the start of an attempt: a rank reports it late, by its own clock."""


@dataclass
class RunFiles:
    """The files of one run. Raises `BadInputError` if there is no run."""

    run: Run
    job: "Job" = field(init=False)
    """Job in the layout of the newest attempt."""
    metrics: list[Record] = field(init=False)
    """One line per step, in order, without lines that a resumed attempt has replaced."""
    curves: Curves = field(init=False)
    events: list[Record] = field(init=False)
    peaks: Peaks = field(init=False)
    """Peak FLOP/s for the MFU of each step."""
    speed_meter: SpeedMeter = field(init=False)
    """Speed of the newest attempt."""
    layout_since_ns: int = field(init=False)
    """Time since which ranks have their current places in the grid; 0 if they never moved."""
    expert_loads: Record | None = field(init=False)
    """The newest step with loads of experts: ``step``, ``blocks``, and the ``loads`` of each; ``None``: there
    is none."""
    norms_step: int | None = field(init=False)
    """The newest step with norms of layers; ``None``: there is none."""
    is_gone: bool = field(init=False, default=False)
    """Whether the folder existed before and is now missing."""
    num_runs: int = field(init=False, default=0)
    """Number of runs seen in this folder. A run that is deleted and trained again counts as another run."""

    def __post_init__(self) -> None:
        self._begin(self.run.job())

    def _begin(self, job: "Job") -> None:
        self.job = self._own_job = job
        self._has_looked, self._first_line = False, b""
        self._steps, self._events_tail = StepLines(self.run.metrics_path), EventLines(self.run.events_path)
        self.metrics, self.curves, self.events = self._steps.lines, Curves(), []
        self.expert_loads = self.norms_step = None
        self.peaks, self.layout_since_ns = Peaks(), 0
        self.speed_meter = SpeedMeter(self.peaks)
        self.num_runs += 1

    @property
    def ranks(self) -> Ranks:
        """Ranks in the layout of the newest attempt."""
        return ranks_of(self.job)

    def poll(self) -> bool:
        """Read new lines, and return whether there were any."""
        self.is_gone = not self.run.exists
        first_line = self._read_first_line()
        if first_line and self._first_line not in (b"", first_line):
            with contextlib.suppress(MyriadError, OSError):  # its job.toml may be half-written: the next poll
                self._begin(self.run.job())
        self._first_line = self._first_line or first_line
        before = self._events_tail.offset
        lines, events = self._steps.poll(), self._events_tail.poll()
        if events and self._events_tail.offset < before:  # cut short, and read from its beginning
            self.events.clear()
        self.curves.add(lines)
        if (line := next((one for one in reversed(lines) if one.get("expert_loads")), None)) is not None:
            loads = line["expert_loads"]
            self.expert_loads = {"step": line["step"], "blocks": [*loads], "loads": [*loads.values()]}
        if (line := next((one for one in reversed(lines) if one.get("layer_norms")), None)) is not None:
            self.norms_step = line["step"]
        self.events[:] = late_events(self.events + events) if events else self.events
        self._measure_speed(lines, events)
        if begins := [event for event in events if event.get("event") in _BEGINS]:
            self._follow_job(begins)
        self._has_looked = True
        return bool(lines or events)

    def _measure_speed(self, lines: list[Record], events: list[Record]) -> None:
        """Add the new lines; after a start, all lines of the attempt."""
        meter = self.speed_meter
        if events:
            meter.peaks = self.peaks = Peaks(self.events)
        if any(event.get("event") == "start" for event in events):
            meter = SpeedMeter(self.peaks)
            lines = [*attempt_lines(self.metrics, self.peaks)]
        for line in lines:
            meter.add(line)
        self.speed_meter = meter

    def _read_first_line(self) -> bytes:
        """Return the first line of events.jsonl, which identifies the run. The inode does not: rsync changes
        it at each update of a copy."""
        with contextlib.suppress(OSError):
            handle = os.open(self.run.events_path, os.O_RDONLY | os.O_NONBLOCK)
            with open(handle, "rb") as file:
                line = file.readline(_MOST_FIRST_LINE) if stat.S_ISREG(os.fstat(handle).st_mode) else b""
                return line if line.endswith(b"\n") else b""
        return b""

    def _follow_job(self, begins: list[Record]) -> None:
        """Read the job again: a resumed run may have more steps and another layout."""
        with contextlib.suppress(MyriadError, OSError):
            self._own_job = self.run.job()
        before, self.job = _grid(self.job), attempt_of(self._own_job, self.events)
        if not self._has_looked:
            self.layout_since_ns = _since_ns(begins, self.job.layout.world)
        elif _grid(self.job) != before:
            self.layout_since_ns = _began_ns(begins[-1])

    @property
    def no_room_at(self) -> float:
        """Time of rank 0's last failed attempt to add a step's line; 0 if the last attempt succeeded."""
        return self._steps.no_room_at

    @property
    def problems(self) -> list[str]:
        """Files that cannot be read, each with the reason."""
        problems = {"metrics.jsonl": self._steps.problem, "events.jsonl": self._events_tail.problem}
        return [f"{name} cannot be read: {problem}" for name, problem in problems.items() if problem]

    @property
    def num_wrong_lines(self) -> int:
        """Number of lines of steps and events that are torn, wrong or have a wrong figure."""
        return self._steps.num_wrong + self._events_tail.num_wrong

    @property
    def steps(self) -> StepCount:
        """Number of steps done and of steps without a line."""
        return count_steps(self.metrics, self.events)

    def last(self, *events: str) -> Record:
        """Return the newest event with one of the names; empty if there is none."""
        return next((each for each in reversed(self.events) if each.get("event") in events), {})

    def span_paths(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        """Yield the run's span files, newest first, each with a key that changes with the file."""
        folder = self.run.path.resolve() / "spans"
        if folder.is_symlink():
            return
        found: list[tuple[int, int, Path]] = []
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.endswith(".parquet") and entry.is_file(follow_symlinks=False):
                    seen = entry.stat(follow_symlinks=False)
                    found.append((seen.st_mtime_ns, seen.st_size, folder / entry.name))
        for changed, size, path in sorted(found, reverse=True):
            yield path, (changed, size)


def _grid(job: "Job") -> tuple[int, ...]:
    """Return the sizes that determine the place of each rank."""
    return tuple(getattr(job.layout, axis) for axis in AXES)


def _since_ns(begins: list[Record], world: int) -> int:
    """Return the start of the first of the newest attempts with ``world`` ranks; 0 if all attempts have
    it."""
    first = begins[-1]
    for event in reversed([one for one in begins if isinstance(one.get("world"), int)]):
        if event["world"] != world:
            return _began_ns(first)
        first = event
    return 0


def _began_ns(event: Record) -> int:
    at = number(event.get("time"))
    if at is None or not 0 <= at < _MOST_SECONDS:
        return 0
    return int((at - (_START_SECONDS if event["event"] == "start" else 0.0)) * 1e9)


def number(value: Any) -> float | None:
    """Return the value as a number, or ``None`` if it is none."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
