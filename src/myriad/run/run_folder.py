"""Files of a run. Lines can be appended and read while other processes write or die.

    runs/NAME/job.toml            the resolved job; replaced atomically
              metrics.jsonl       a line per step      } a line is complete or absent (`jsonl`), so a run is
              events.jsonl        a line per event     } readable after a kill or on a full disk
              spans/              timed actions of ranks, in complete files: attempt-A-node-N-K.parquet
              tokenizer.json                of its corpus, so that the run can generate text anywhere
              streams/            of streamed corpora: their files (sources.json), and an index
              hugging_face/       files that came with imported weights, such as the template of a chat
              logs/               rank-R-attempt-A.log
              checkpoints/        step-N/
              profile.json, hierarchy.json, tensor_overlap.json
                            measured once, so that a resumed run computes the same way
              traces/             traces of ranks that a user requested
              routing/            experts of every token: step-S-rank-R.npz (telemetry.routing)
              counters/           of the nodes' links, each second; around/: each 10 ms, around anomalies
              nodes/              node-N.json: the hardware and software of each node
              notes.json          note, tags, and whether it is archived (`run_notes`)
              exports.jsonl       what was exported from it (`run_exports`)
              lock                held (flock) by the launcher while ranks run

`run_lines` defines the meaning of the lines.

The folder's mode is the job key run.mode. Every process of a run begins with `Run.share_as_folder`, so that
what it writes can be read by those who may read the folder, whatever the umask of its user is. Files that are
made for their owner alone (the secret, the state of alerts) stay so.
"""

import contextlib
import difflib
import fcntl
import logging
import os
import re
import stat
import time
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from myriad.errors import BadInputError
from myriad.run.run_lines import EventLines, StepLines
from myriad.system.jsonl import LineFile, Record, late_events
from myriad.system.path_lock import PathLock
from myriad.system.person import person
from myriad.system.whole_file import remove_drafts, write_whole

if TYPE_CHECKING:
    from myriad.checkpoint.load.start_over import RunHistory
    from myriad.job import Job
    from myriad.job.job_changes import JobChange

__all__ = ["Run", "existing_run", "nearest_run"]

_LOG = logging.getLogger(__name__)

_HEADER = "# Every key of this run, as `myriad train` resolved it.\n"
"""First line of a job.toml that is complete only with every section."""
_LATER_SECTIONS = ("alerts", "eval", "run")
"""Sections that an older job.toml lacks. None is the last one, so a truncated file always lacks another."""


_PRIVATE = ("secret", "alerts", "id", "lock")
"""Files and folders that no mode of the run opens to others. Who can read a file can lock it."""


class Run:
    """The folder of one run. The constructor does not access the disk."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.job_path = self.path / "job.toml"
        self.metrics_path = self.path / "metrics.jsonl"
        self.events_path = self.path / "events.jsonl"
        self.spans_path = self.path / "spans"
        self.streams_path = self.path / "streams"
        self.logs_path = self.path / "logs"
        self.checkpoints_path = self.path / "checkpoints"
        self.traces_path = self.path / "traces"
        self.counters_path = self.path / "counters"
        self.nodes_path = self.path / "nodes"
        self.plot_path = self.path / "loss.svg"
        self.report_path = self.path / "report.html"
        self._lock_path = self.path / "lock"
        self._holds_lock = False
        self._metrics = LineFile(self.metrics_path, partial(self._report_lines, "metrics.jsonl"))
        self._events = LineFile(
            self.events_path, partial(self._report_lines, "events.jsonl"), marks_late=True
        )

    @property
    def exists(self) -> bool:
        """Whether the folder holds a run."""
        return self.job_path.is_file()

    def job(self) -> "Job":
        """Return the job of this run. Raises `BadInputError` if the folder holds no run."""
        if not self.exists:
            raise BadInputError("run", str(self.path), "no run here (no job.toml)")
        text = self.check_job_file()
        try:
            return _read_job(text, str(self.job_path))
        except BadInputError as error:  # the error names a key that the user did not type
            allowed = f"has {error}; correct it, or use the version of Myriad that wrote it"
            raise BadInputError("run", str(self.job_path), allowed) from None

    def check_job_file(self) -> str:
        """Return the text of job.toml. Raise `BadInputError` if it is damaged or incomplete; the message
        names a copy to restore.

        A missing section would otherwise silently get its default values. A file that a user wrote (for
        torchrun) may omit sections."""
        text = ""
        try:
            text = self.job_path.read_text()
            problem = _problem_of_job_file(text)
        except (OSError, ValueError) as error:
            problem = str(error)
        if problem:
            copies = sorted(
                self.checkpoints_path.glob("step-*/job.toml"), key=lambda path: path.stat().st_mtime
            )
            source = copies[-1] if copies else "BACKUP"
            allowed = f"is damaged ({problem}); restore it: cp {source} {self.job_path}"
            raise BadInputError("run", str(self.job_path), allowed)
        return text

    def checkpoints(self, job: "Job | None" = None) -> str:
        """Return the path or URL of durable checkpoints: the job's, or else a folder of the run."""
        return (job or self.job()).checkpoint.url or str(self.checkpoints_path)

    def num_starts(self) -> int:
        """Return how many attempts the run has started."""
        return sum(event.get("event") == "start" for event in self.read_events())

    def check(self, job: "Job") -> None:
        """Raise `BadInputError` if ``job`` cannot start or resume in this folder. Changes nothing."""
        if self.exists:
            self.changes(job)
        elif self.path.exists() and not self.path.is_dir():
            raise BadInputError("run", str(self.path), "must be a folder")
        elif self.path.is_dir() and any(entry.name != "lock" for entry in self.path.iterdir()):
            _path_lock(self.path).close()  # refuse if a run whose folder was removed still trains here
            raise BadInputError("run", str(self.path), "must be new, empty or a run: it holds other files")

    def changes(self, job: "Job") -> "list[JobChange]":
        """Return what a resume with ``job`` changes. Raises `BadInputError` for a forbidden change."""
        from myriad.job.job_changes import check_resume

        return check_resume(self.job(), job, str(self.path), self.last_step)

    def create_or_resume(self, job: "Job") -> bool:
        """Create the folder and save the job; return whether the run existed already.

        For a resumed run, each changed key is a ``job_changed`` event with the step after which its new value
        holds."""
        from myriad.job import dump_toml

        self.check(job)
        resumed = self.exists
        changes = self.changes(job) if resumed else []
        kept = job.checkpoint.model_copy(update={"restart_from_scratch": False})  # valid for one start only
        text = _HEADER + dump_toml(job.model_copy(update={"checkpoint": kept}))
        with _refuse_unwritable(self.path):
            self._make_folder()
            has_new_mode = any(change.key == "run.mode" for change in changes)
            if has_new_mode or (not resumed and job.run.mode != "0700"):
                self._open_to(int(job.run.mode, 8))
                if self._holds_lock:  # `lock` has followed the former mode
                    self.share_as_folder()
        with _refuse_unwritable(self.path), self.shared_as_folder():
            for folder in (self.logs_path, self.checkpoints_path):
                folder.mkdir(parents=True, exist_ok=True)
            remove_drafts(self.path)
            step = self.last_step() if changes else 0
            for key, before, after in changes:  # written first, because job.toml loses the old values
                change = {"key": key, "before": before, "after": after}
                self.append_event("job_changed", step=step, **change, user=person())
            if not resumed or self.job_path.read_text() != text:
                write_whole(self.job_path, text)
        return resumed

    def _make_folder(self) -> None:
        """Make the run's folder, which holds weights, logs and stack traces, for its user alone. An existing
        folder keeps its mode."""
        self.path.mkdir(0o700, parents=True, exist_ok=True)

    def _open_to(self, mode: int) -> None:
        """Give the folder and what is in it a mode, except for private files; a file has the mode without
        execution. Files of other users keep theirs."""
        self.path.chmod(_kept_bits(self.path) | mode)
        for folder, names, files in os.walk(self.path):
            names[:] = [name for name in names if name not in _PRIVATE]
            for name in (*names, *(name for name in files if name not in _PRIVATE)):
                path = Path(folder) / name
                with contextlib.suppress(OSError):
                    is_folder = name in names
                    if not path.is_symlink():
                        path.chmod(_kept_bits(path) | mode if is_folder else mode & 0o666)

    def share_as_folder(self) -> int:
        """Make the files that this process creates from now on readable for the readers of the run's folder
        only, and never writable for all users. Return the former umask."""
        try:
            mode = stat.S_IMODE(self.path.stat().st_mode)
        except OSError:
            mode = 0o700
        return os.umask(0o777 & ~(0o700 | mode) | stat.S_IWOTH)

    @contextlib.contextmanager
    def shared_as_folder(self) -> Iterator[None]:
        """Do `share_as_folder` for a block."""
        before = self.share_as_folder()
        try:
            yield
        finally:
            os.umask(before)

    def past(self) -> "RunHistory":
        """Return the history of earlier attempts, as the files record it."""
        from myriad.checkpoint.load.start_over import history_of

        url = self.job().checkpoint.url if self.exists else None
        return history_of(self.read_events(), self.last_step(), str(self.checkpoints_path), url or "")

    def allow_restart(self, *, allowed: bool) -> None:
        """Record whether the operator allows the next start to begin at step 1 again.

        The permission ends when that start begins to train."""
        if self.past().may_start_over != allowed:
            self.append_event("restart_from_scratch", allowed=allowed)

    def last_step(self) -> int:
        """Return the newest step in metrics.jsonl; 0: none."""
        lines = self.read_metrics()
        return int(lines[-1]["step"]) if lines else 0

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the run for one launcher; the kernel releases the lock when the process ends.

        Raises `BadInputError` if another process has the lock."""
        with _refuse_unwritable(self.path):
            self._make_folder()
            if (found := self.path.stat()).st_mode & stat.S_IWOTH or found.st_uid not in (os.geteuid(), 0):
                who = "all users" if found.st_mode & stat.S_IWOTH else f"user {found.st_uid}"
                _LOG.warning("%s: %s can replace what is in this folder, also its secret", self.path, who)
            with self.shared_as_folder():
                handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
                with contextlib.suppress(OSError):  # of another user, or of a file system without modes
                    os.fchmod(handle, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise BadInputError(
                "run", str(self.path), "is being trained by another process; stop it or choose another --run"
            ) from None
        try:
            with contextlib.closing(_path_lock(self.path)), self.shared_as_folder():
                self._holds_lock = True
                yield
        finally:
            self._holds_lock = False
            os.close(handle)

    @property
    def is_locked(self) -> bool:
        """Whether a launcher on this machine has the lock, read from /proc/locks without taking the lock."""
        try:
            found = self._lock_path.stat()
            held = Path("/proc/locks").read_text()
        except OSError:
            return False
        device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
        return any("FLOCK" in line and device in line.split() for line in held.splitlines())

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append the line of one step.

        A line that a full disk refuses stays in memory. It is written with a later line, or by
        `flush_lines`."""
        self._metrics.append(record)
        self._events.flush()

    def append_event(self, event: str, **fields: Any) -> None:
        """Append an event with the time in seconds since the epoch, buffered as in `append_metrics`."""
        self._events.append({"time": time.time(), "event": event, **fields})
        self._metrics.flush()

    @property
    def num_waiting(self) -> int:
        """Number of lines that are only in memory."""
        return self._metrics.num_waiting + self._events.num_waiting

    def flush_lines(self) -> int:
        """Write the buffered lines, at the end of a process. Return how many remain buffered."""
        self._metrics.flush()
        self._events.flush()
        return self.num_waiting

    def _report_lines(self, place: str, problem: str, num_late: int, num_dropped: int) -> None:
        """Report that writing a file fails, or works again."""
        if problem:
            _LOG.warning("lines of %s wait in memory: %s", self.path / place, problem)
        else:
            _LOG.warning("%s: %d lines were late, %d are lost", self.path / place, num_late, num_dropped)
        counts = {} if problem else {"num_late": num_late, "num_dropped": num_dropped}
        self._events.append(
            {"time": time.time(), "event": "telemetry", "place": place, "problem": problem, **counts}
        )

    def read_metrics(self) -> list[Record]:
        """Return one line per step, in order, without those that a resumed attempt has replaced."""
        steps = StepLines(self.metrics_path)
        steps.poll()
        return steps.lines

    def read_events(self) -> list[Record]:
        """Return all events, oldest first."""
        return late_events(EventLines(self.events_path).poll())

    def next_attempt(self) -> int:
        """Return the number of the next attempt: one more than the largest among the logs."""
        found = [
            re.fullmatch(r"rank-\d+-attempt-(\d+)\.log", path.name) for path in self.logs_path.glob("*.log")
        ]
        return 1 + max((int(match.group(1)) for match in found if match), default=0)

    def log_path(self, rank: int, attempt: int) -> Path:
        """Return the path of one rank's output in one attempt."""
        return self.logs_path / f"rank-{rank}-attempt-{attempt}.log"


def _kept_bits(folder: Path) -> int:
    """Return the folder's bit that gives new files its group, which a mode of three digits would clear."""
    return folder.stat().st_mode & stat.S_ISGID


def existing_run(name_or_path: str | Path) -> Path:
    """Return the folder of a run, given it or its name under runs/. Raises `BadInputError` where there is
    none."""
    for path in (Path(name_or_path), Path("runs") / name_or_path):
        if (path / "job.toml").is_file():
            return path
    allowed = f"must be a run folder, or the name of one under runs/{nearest_run(str(name_or_path))}"
    raise BadInputError("run", str(name_or_path), allowed)


def nearest_run(name: str) -> str:
    """Return "; did you mean NAME?" for the most similar run name under runs/, or "" if none is similar."""
    known = [path.parent.name for path in Path("runs").glob("*/job.toml")]
    near = difflib.get_close_matches(Path(name).name, known, 1, 0.5)
    return f"; did you mean {near[0]}?" if near else ""


def _path_lock(path: Path) -> PathLock:
    """Lock the path on this machine, because a lock file vanishes with its folder. Raises `BadInputError`."""
    try:
        return PathLock(path)
    except BlockingIOError:
        allowed = (
            "is being trained by another process, whose folder was removed; stop it or choose another --run"
        )
        raise BadInputError("run", str(path), allowed) from None


@contextlib.contextmanager
def _refuse_unwritable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise BadInputError("run", str(path), f"must be a writable folder ({error.strerror})") from None


@lru_cache(maxsize=16)
def _problem_of_job_file(text: str) -> str:
    """Return what a job.toml lacks, or an empty string. Raises ``ValueError`` if it is not TOML."""
    from myriad.job import Job  # slow import: processes that only watch ranks need the paths alone

    tree = tomllib.loads(text)
    needed = Job.model_fields if text.startswith(_HEADER) else ()
    missing = [name for name in needed if name not in tree and name not in _LATER_SECTIONS]
    return f"it has no {', '.join(missing)}" if missing else "" if tree else "it is empty"


def _read_job(text: str, path: str) -> "Job":
    """Return the job of a job.toml. A text that a user wrote may refer to files, so it is read again."""
    from myriad.job import load_job

    return _resolved_job(text, path) if text.startswith(_HEADER) else load_job(path)


@lru_cache(maxsize=16)
def _resolved_job(text: str, path: str) -> "Job":
    """Return the job of a resolved text, which depends on nothing else. A command asks a dozen times."""
    from myriad.job import parse_job

    return parse_job(text, path)
