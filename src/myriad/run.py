"""A run on disk: where its files are, and how lines are added and read while others read or die.

    runs/NAME/job.toml            the resolved job; replaced atomically
              metrics.jsonl       a line per step      } lines are whole or absent (`jsonl`): killed at any
              events.jsonl        a line per event     } instant, or on a full disk, a run is readable
              spans/              what ranks did when, in files that are whole: attempt-A-node-N-K.parquet
              tokenizer.json                of its corpus: text can be made wherever the run lies
              logs/               rank-R-attempt-A.log
              checkpoints/        step-N/
              profile.json, hierarchy.json    measured once, so that a resumed run computes alike
              traces/             what a person asked to see of ranks at work
              counters/           of the links of nodes, each second
              lock                held (flock) by the launcher while ranks are at work

A resumed run goes back to its checkpoint, so its steps may be written twice. The newest attempt is right: a
line for step n makes every earlier line for a step >= n void (`read_metrics`). Lines may be missing: of a
full disk, whose writer was killed before there was room. So steps are counted by number (`count_steps`).
"""

import contextlib
import fcntl
import logging
import math
import os
import re
import time
import tomllib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.errors import BadInputError
from myriad.jsonl import JsonlTail, LineFile, Record, late_events
from myriad.whole_file import remove_drafts, write_whole

if TYPE_CHECKING:
    from myriad.checkpoint.start_over import Past
    from myriad.job import Job
    from myriad.job_changes import JobChange

__all__ = ["Run", "StepCount", "StepLines", "count_steps", "missing_lines_told", "step_line"]

_LOG = logging.getLogger(__name__)

_FIGURES = (
    *("time", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds", "mfu"),
    *("memory_bytes", "data_wait_seconds", "checkpoint_wait_seconds", "exposed_comm_seconds"),
)
"""Numbers of a step, or null."""
_HEADER = "# Every key of this run, as `myriad train` resolved it.\n"
"""First line of a job.toml that is whole only with every section."""
_MOST_STEP, _LARGEST = 2**53, 1e300


class StepLines:
    """metrics.jsonl as it grows: one line a step, in order, without those that a resumed attempt has
    replaced. What others wrote into it breaks nothing (`step_line`), and counts."""

    def __init__(self, path: Path) -> None:
        self._tail = JsonlTail(path)
        self.lines: list[Record] = []
        """One list, that grows."""
        self._num_wrong = 0

    @property
    def num_wrong(self) -> int:
        """Lines that are torn, of no step, or have a figure that is no number."""
        return self._num_wrong + self._tail.num_wrong

    @property
    def problem(self) -> str:
        """Why the file cannot be read; "": it can."""
        return self._tail.problem

    def poll(self) -> list[Record]:
        """What is new of it."""
        found = self._tail.poll()
        checked = [step_line(line) for line in found]
        self._num_wrong += sum(right is not line for line, right in zip(found, checked, strict=True))
        new = [right for right in checked if right is not None]
        for line in new:
            while self.lines and self.lines[-1]["step"] >= line["step"]:
                self.lines.pop()
            self.lines.append(line)
        return new


def step_line(line: Record) -> Record | None:
    """As it is, where it is right; ``None``: it is of no step; a figure that is no number becomes null."""
    step = line.get("step")
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < _MOST_STEP:
        return None
    wrong = {key: None for key in _FIGURES if not _is_figure(line.get(key))}
    return line | wrong if wrong else line


def _is_figure(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value is None
    return abs(value) < _LARGEST and math.isfinite(value)


@dataclass(frozen=True)
class StepCount:
    """How far a run has come, by the numbers of its steps."""

    done: int
    """Steps done, and not lost."""
    without_line: int
    """Of them, those of which metrics.jsonl has no line."""


def count_steps(lines: Sequence[Record], events: Sequence[Record]) -> StepCount:
    """``lines``: of `StepLines`; ``events``: all of them. An event after the newest line may show that more
    steps are done, or that an attempt begins before that line. A line that an attempt has gone back behind,
    and not replaced, is of a step that was lost."""
    done = int(lines[-1]["step"]) if lines else 0
    times = (_figure(line.get("time")) for line in reversed(lines))
    newest = next((at for at in times if at is not None), math.inf if lines else -math.inf)
    lost: list[tuple[int, int]] = []
    for event in late_events(events):
        name, at = event.get("event"), _figure(event.get("time"))
        if at is None or name not in ("start", "finish", "interrupted"):
            continue
        if name == "start":
            resumed = _count(event.get("resumed_from"))
            after = bisect_right(lines, resumed, key=_step_of)
            lost.append((after, bisect_left(lines, at, lo=after, key=_time_of)))
            done = resumed if at >= newest else done
        elif at >= newest:
            done = max(done, _count(event.get("step")))
    first, end = bisect_right(lines, 0, key=_step_of), bisect_right(lines, done, key=_step_of)
    num_lines, reached = end - first, first
    for start, stop in sorted(lost):
        if (ends := min(stop, end)) > (begins := max(start, reached)):
            num_lines, reached = num_lines - (ends - begins), ends
    return StepCount(done, max(0, done - num_lines))


def missing_lines_told(num_steps: int) -> str:
    """What people are told of `StepCount.without_line`; "" where there are none."""
    return f"{num_steps} steps trained without a metrics line" if num_steps else ""


def _step_of(line: Record) -> int:
    return int(line["step"])


def _time_of(line: Record) -> float:
    return _figure(line.get("time")) or 0.0


def _figure(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and _is_figure(value) else None


def _count(value: object) -> int:
    found = _figure(value)
    return 0 if found is None or not 0 <= found < _MOST_STEP else int(found)


class Run:
    """The folder of one run. Making the object touches nothing."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.job_path = self.path / "job.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.spans_path = self.path / "spans"
        self.logs_path = self.path / "logs"
        self.checkpoints_path = self.path / "checkpoints"
        self.traces_path = self.path / "traces"
        self.counters_path = self.path / "counters"
        self.plot_path = self.path / "loss.svg"
        self.report_path = self.path / "report.html"
        self._lock_path = self.path / "lock"
        self._metrics = LineFile(self.metrics_path, partial(self._report_lines, "metrics.jsonl"))
        self._events = LineFile(
            self.events_path, partial(self._report_lines, "events.jsonl"), marks_late=True
        )

    @property
    def exists(self) -> bool:
        """Whether a job was ever started here."""
        return self.job_path.is_file()

    def job(self) -> "Job":
        """The job of this run. Raises `BadInputError` when there is none."""
        if not self.exists:
            raise BadInputError("run", str(self.path), "no run here (no job.toml)")
        from myriad.job import load_job  # here: whoever watches ranks needs the paths alone, and quickly

        self.check_job_file()
        try:
            return load_job(str(self.job_path))
        except BadInputError as error:  # names a key, which nobody has typed
            allowed = f"has {error}; another version of Myriad may have written it"
            raise BadInputError("run", str(self.job_path), allowed) from None

    def check_job_file(self) -> None:
        """Refuse a job.toml that is not whole: a missing section would silently become its defaults. One that
        a person wrote (for torchrun) may leave sections out. Raises `BadInputError`, with the copies that
        checkpoints hold."""
        from myriad.job import Job

        try:
            text = self.job_path.read_text()
            tree = tomllib.loads(text)
            needed = Job.model_fields if text.startswith(_HEADER) else ()
            missing = [name for name in needed if name not in tree]
            problem = f"it has no {', '.join(missing)}" if missing else "" if tree else "it is empty"
        except (OSError, ValueError) as error:
            problem = str(error)
        if problem:
            copies = sorted(
                self.checkpoints_path.glob("step-*/job.toml"), key=lambda path: path.stat().st_mtime
            )
            source = copies[-1] if copies else "BACKUP"
            allowed = f"is damaged ({problem}); restore it: cp {source} {self.job_path}"
            raise BadInputError("run", str(self.job_path), allowed)

    def checkpoints(self, job: "Job | None" = None) -> str:
        """Where durable checkpoints are: the path or URL that the job says, else a folder of the run."""
        return (job or self.job()).checkpoint.url or str(self.checkpoints_path)

    def num_starts(self) -> int:
        """How often ranks have started here."""
        return sum(event.get("event") == "start" for event in self.read_events())

    def check(self, job: "Job") -> None:
        """Refuses, without touching anything, a folder that ``job`` cannot start or go on in."""
        if self.exists:
            self.changes(job)
        elif self.path.exists() and not self.path.is_dir():
            raise BadInputError("run", str(self.path), "must be a folder")
        elif self.path.is_dir() and any(entry.name != "lock" for entry in self.path.iterdir()):
            raise BadInputError("run", str(self.path), "must be new, empty or a run: it holds other files")

    def changes(self, job: "Job") -> "list[JobChange]":
        """Return what a resume with ``job`` changes. Raises `BadInputError` for what it cannot."""
        from myriad.job_changes import check_resume

        return check_resume(self.job(), job, str(self.path))

    def create_or_resume(self, job: "Job") -> bool:
        """Make the folder and save the job; True: the run was here already, and what differs from its job is
        a ``job_changed`` event for each key, with the step after which the new value holds."""
        from myriad.job import dump_toml

        self.check(job)
        resumed = self.exists
        changes = self.changes(job) if resumed else []
        kept = job.checkpoint.model_copy(update={"restart_from_scratch": False})  # holds for one start
        text = _HEADER + dump_toml(job.model_copy(update={"checkpoint": kept}))
        with _refuse_unwritable(self.path):
            for folder in (self.path, self.logs_path, self.checkpoints_path):
                folder.mkdir(parents=True, exist_ok=True)
            remove_drafts(self.path)
            step = self.last_step() if changes else 0
            for key, before, after in changes:  # before job.toml, which forgets the old values
                self.append_event("job_changed", step=step, key=key, before=before, after=after)
            if not resumed or self.job_path.read_text() != text:
                write_whole(self.job_path, text)
        return resumed

    def past(self) -> "Past":
        """Return what the files report about earlier attempts."""
        from myriad.checkpoint.start_over import past_of

        return past_of(self.read_events(), self.last_step(), str(self.checkpoints_path))

    def allow_restart(self, *, allowed: bool) -> None:
        """Note whether the start that follows may begin at step 1 again, as a person decided; once it has
        begun to train this holds no more."""
        if self.past().may_start_over != allowed:
            self.append_event("restart_from_scratch", allowed=allowed)

    def last_step(self) -> int:
        """Return the newest step in metrics.jsonl; 0: none was done."""
        lines = self.read_metrics()
        return int(lines[-1]["step"]) if lines else 0

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the run for one launcher and refuses a second; released however this process ends."""
        with _refuse_unwritable(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise BadInputError(
                "run", str(self.path), "is being trained by another process; stop it or choose another --run"
            ) from None
        try:
            yield
        finally:
            os.close(handle)

    @property
    def is_locked(self) -> bool:
        """Whether a launcher of this machine holds it; asked of the kernel, as trying would be in its way."""
        try:
            found = self._lock_path.stat()
            held = Path("/proc/locks").read_text()
        except OSError:
            return False
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        return any("FLOCK" in line and device in line.split() for line in held.splitlines())

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Add the line of one step. What a full disk refuses waits in memory, and is written with a later
        line, or by `flush_lines`."""
        self._metrics.append(record)
        self._events.flush()

    def append_event(self, event: str, **fields: Any) -> None:
        """Add an event, with the time in seconds since the epoch, as `append_metrics` does."""
        self._events.append({"time": time.time(), "event": event, **fields})
        self._metrics.flush()

    @property
    def num_waiting(self) -> int:
        """Lines that are in memory only."""
        return self._metrics.num_waiting + self._events.num_waiting

    def flush_lines(self) -> int:
        """Write the lines that wait for room, at the end of a process. Return how many there are still."""
        self._metrics.flush()
        self._events.flush()
        return self.num_waiting

    def _report_lines(self, place: str, problem: str, num_late: int, num_dropped: int) -> None:
        """A file begins to fail, or works again."""
        if problem:
            _LOG.warning("lines of %s wait in memory: %s", self.path / place, problem)
        else:
            _LOG.warning("%s: %d lines were late, %d are lost", self.path / place, num_late, num_dropped)
        counts = {} if problem else {"num_late": num_late, "num_dropped": num_dropped}
        self._events.append(
            {"time": time.time(), "event": "telemetry", "place": place, "problem": problem, **counts}
        )

    def read_metrics(self) -> list[Record]:
        """One line per step, in order, without those that a resumed attempt has replaced."""
        steps = StepLines(self.metrics_path)
        steps.poll()
        return steps.lines

    def read_events(self) -> list[Record]:
        """All events, oldest first."""
        return late_events(JsonlTail(self.events_path).poll())

    def next_attempt(self) -> int:
        """Number of the attempt about to start: one more than any that left a log."""
        found = [
            re.fullmatch(r"rank-\d+-attempt-(\d+)\.log", path.name) for path in self.logs_path.glob("*.log")
        ]
        return 1 + max((int(match.group(1)) for match in found if match), default=0)

    def log_path(self, rank: int, attempt: int) -> Path:
        """Everything that one rank printed in one attempt."""
        return self.logs_path / f"rank-{rank}-attempt-{attempt}.log"


@contextlib.contextmanager
def _refuse_unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInputError("run", str(path), f"must be a writable folder ({error.strerror})") from None
