"""Runs the loggers of a job's metrics (`telemetry.loggers`) as processes beside the launcher.

They start with the run and get the paths of its artifacts. At its end they get its summary, and process the
remaining lines. A logger that takes more than a few seconds is killed, and the number of missing lines is
reported. No failure of a logger affects the run.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from myriad.run import Run
from myriad.run.run_exports import exported_paths
from myriad.run.run_figures import read_figures
from myriad.run.run_status import ended_state
from myriad.system.jsonl import Record
from myriad.system.processes import open_log
from myriad.system.whole_file import opened_to_read
from myriad.telemetry.loggers import outcome_line, read_forwarded
from myriad.telemetry.tracker_sinks import RunOutcome

__all__ = ["Loggers", "logged"]

_LOG = logging.getLogger(__name__)
_END_SECONDS = 15.0
"""Seconds in which all logger processes together must end."""
_BLOCK_BYTES = 2**20


class Loggers:
    """The logger processes of a run, within a ``with`` block. A standby starts them only when it leads,
    because two sets would report all metrics twice."""

    def __init__(self, run: Run, names: Sequence[str], end_seconds: float = _END_SECONDS) -> None:
        self._run, self._names, self._end_seconds = run, tuple(dict.fromkeys(names)), end_seconds
        self._started: dict[str, subprocess.Popen[bytes] | None] = {}

    def begin(self) -> None:
        """Start the logger processes; a repeated call does nothing."""
        for name in self._names:
            if name not in self._started:
                self._started[name] = _start(self._run, name)

    def __enter__(self) -> "Loggers":
        return self

    @property
    def num_missed(self) -> int:
        """Number of the run's lines that loggers have not taken, once the block has ended."""
        return sum(_missed(self._run, name) for name in self._started)

    def __exit__(self, *problem: object) -> None:
        if not self._started:
            return
        outcome = _outcome(self._run)
        for process in self._started.values():
            if process is not None and process.stdin is not None:
                _send(process, outcome)
                with suppress(OSError):
                    process.stdin.close()
        deadline = time.monotonic() + self._end_seconds
        for name, process in self._started.items():
            _end(self._run, name, process, deadline)


@contextmanager
def logged(run: Run, names: Sequence[str], end_seconds: float = _END_SECONDS) -> Iterator[None]:
    """Run the logger processes during the block."""
    with Loggers(run, names, end_seconds) as loggers:
        loggers.begin()
        yield


def _start(run: Run, name: str) -> "subprocess.Popen[bytes] | None":
    words = [sys.executable, "-Pm", "myriad.telemetry.loggers", name, str(run.path)]
    try:
        with open(open_log(run.logs_path / f"logger-{name}.log"), "ab") as log:
            process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
    except OSError as error:
        _LOG.warning("%s was not started: %s", name, error)
        return None
    _send(process, RunOutcome(artifacts=_artifacts(run, ())))
    return process


def _send(process: "subprocess.Popen[bytes]", outcome: RunOutcome) -> None:
    """Send an outcome to a logger, unless it has ended."""
    assert process.stdin is not None, "a pipe"
    with suppress(OSError):
        process.stdin.write(outcome_line(outcome))
        process.stdin.flush()


def _outcome(run: Run) -> RunOutcome:
    """Return the state and the figures of a run whose ranks have ended; none of them if that fails."""
    try:
        metrics, events = run.read_metrics(), run.read_events()
        found = read_figures(run, metrics, events)
        state = ended_state(events, found.steps, found.steps_planned)
        seconds = None
        if found.started is not None and found.last_line is not None:
            seconds = found.last_line - found.started
        figures = {
            "state": state,
            "loss": found.loss,
            "best_validation": found.best_validation,
            "best_validation_step": found.best_validation_step,
            "tokens_per_second": found.tokens_per_second,
            "mfu": found.mfu,
            "steps": found.steps,
            "steps_planned": found.steps_planned,
            "tokens": found.tokens,
            "seconds": seconds,
        }
        known = {name: value for name, value in figures.items() if value is not None}
        return RunOutcome(state, found.steps, known, _artifacts(run, events))
    except Exception as error:  # whatever the files hold: the run has ended well or not, and loggers end too
        _LOG.warning("the trackers get no summary: %s", error)
        return RunOutcome()


def _artifacts(run: Run, events: Sequence[Record]) -> dict[str, str]:
    """Return the paths of what a run has written, or will have written at its end."""
    where, folder = run.checkpoints(), run.path.resolve()
    checkpoints = where if "://" in where else str(Path(where).resolve())
    found = {"run": str(folder), "checkpoints": checkpoints, "report": str(folder / run.report_path.name)}
    newest = next((one for one in reversed(events) if one.get("event") == "checkpoint"), None)
    if newest is not None:
        found["newest_checkpoint"] = f"{checkpoints.rstrip('/')}/step-{newest.get('step')}"
    exports = exported_paths(run)
    return found | {f"export/{number}": path for number, path in enumerate(exports, 1)}


def _end(run: Run, name: str, process: "subprocess.Popen[bytes] | None", deadline: float) -> None:
    if process is not None:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if missed := _missed(run, name):
        problem = f"{name} did not receive the last {missed} lines (log: {run.logs_path}/logger-{name}.log)"
        run.append_event("logger", logger=name, missed=missed, problem=problem)


def _missed(run: Run, name: str) -> int:
    return _count_lines(run.metrics_path, read_forwarded(run.path, name).metrics)


def _count_lines(path: Path, start: int) -> int:
    try:
        with opened_to_read(path) as handle, open(handle, "rb", closefd=False) as file:
            file.seek(start)
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
    except OSError:
        return 0
