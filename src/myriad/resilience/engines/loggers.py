"""The tools that a job's metrics go to (`telemetry.loggers`), as processes beside the launcher.

They are started with the run and told at its end to take what is left; one that does not in a few seconds is
killed, and how many lines it has not taken is told. Nothing that one of them does reaches the run.
"""

import logging
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from myriad.run import Run
from myriad.telemetry.logger_names import LoggerName
from myriad.telemetry.loggers import read_place

__all__ = ["logged"]

_LOG = logging.getLogger(__name__)
_END_SECONDS = 15.0
"""All together."""
_BLOCK_BYTES = 2**20


@contextmanager
def logged(run: Run, names: Sequence[LoggerName], end_seconds: float = _END_SECONDS) -> Iterator[None]:
    """Of a run, while ranks are at work."""
    started = {name: _start(run, name) for name in dict.fromkeys(names)}
    try:
        yield
    finally:
        for process in started.values():
            if process is not None and process.stdin is not None:
                process.stdin.close()
        deadline = time.monotonic() + end_seconds
        for name, process in started.items():
            _end(run, name, process, deadline)


def _start(run: Run, name: str) -> "subprocess.Popen[bytes] | None":
    run.logs_path.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", "myriad.telemetry.loggers", name, str(run.path)]
    try:
        with (run.logs_path / f"logger-{name}.log").open("ab") as log:
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
    if missed := _count_lines(run.metrics_path, read_place(run.path, name).metrics):
        problem = f"{name} has not taken the last {missed} lines (log: {run.logs_path}/logger-{name}.log)"
        run.append_event("logger", logger=name, missed=missed, problem=problem)


def _count_lines(path: Path, start: int) -> int:
    try:
        with path.open("rb") as file:
            file.seek(start)
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
    except OSError:
        return 0
