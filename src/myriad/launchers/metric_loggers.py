"""Runs the loggers of a job's metrics (`telemetry.loggers`) as processes beside the launcher.

They start with the run, and at its end they process the remaining lines. A logger that takes more than a few
seconds is killed, and the number of missing lines is reported. No failure of a logger affects the run.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from myriad.run import Run
from myriad.system.processes import open_log
from myriad.system.whole_file import opened_to_read
from myriad.telemetry.config import LoggerName
from myriad.telemetry.loggers import read_forwarded

__all__ = ["Loggers", "logged"]

_LOG = logging.getLogger(__name__)
_END_SECONDS = 15.0
"""Seconds in which all logger processes together must end."""
_BLOCK_BYTES = 2**20


class Loggers:
    """The logger processes of a run, within a ``with`` block. A standby starts them only when it leads,
    because two sets would report all metrics twice."""

    def __init__(self, run: Run, names: Sequence[LoggerName], end_seconds: float = _END_SECONDS) -> None:
        self._run, self._names, self._end_seconds = run, tuple(dict.fromkeys(names)), end_seconds
        self._started: dict[str, subprocess.Popen[bytes] | None] = {}

    def begin(self) -> None:
        """Start the logger processes; a repeated call does nothing."""
        for name in self._names:
            if name not in self._started:
                self._started[name] = _start(self._run, name)

    def __enter__(self) -> "Loggers":
        return self

    def __exit__(self, *problem: object) -> None:
        for process in self._started.values():
            if process is not None and process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + self._end_seconds
        for name, process in self._started.items():
            _end(self._run, name, process, deadline)


@contextmanager
def logged(run: Run, names: Sequence[LoggerName], end_seconds: float = _END_SECONDS) -> Iterator[None]:
    """Run the logger processes during the block."""
    with Loggers(run, names, end_seconds) as loggers:
        loggers.begin()
        yield


def _start(run: Run, name: str) -> "subprocess.Popen[bytes] | None":
    words = [sys.executable, "-Pm", "myriad.telemetry.loggers", name, str(run.path)]
    try:
        with open(open_log(run.logs_path / f"logger-{name}.log"), "ab") as log:
            return subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
    except OSError as error:
        _LOG.warning("%s was not started: %s", name, error)
        return None


def _end(run: Run, name: str, process: "subprocess.Popen[bytes] | None", deadline: float) -> None:
    if process is not None:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    if missed := _count_lines(run.metrics_path, read_forwarded(run.path, name).metrics):
        problem = f"{name} did not receive the last {missed} lines (log: {run.logs_path}/logger-{name}.log)"
        run.append_event("logger", logger=name, missed=missed, problem=problem)


def _count_lines(path: Path, start: int) -> int:
    try:
        with opened_to_read(path) as handle, open(handle, "rb", closefd=False) as file:
            file.seek(start)
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
    except OSError:
        return 0
