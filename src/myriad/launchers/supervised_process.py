"""A process that a launcher keeps alive: killed when it is stopped or silent, restarted when it ends.

It asks the kernel to be killed when its launcher dies (`child_process`), and has a session of its own, so
that a Ctrl-C in the terminal reaches only the launcher.
"""

import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from myriad.errors import RunFailedError
from myriad.run import Run
from myriad.system.processes import PausableClock, StopTimer, open_log

__all__ = ["SupervisedProcess", "end_all", "of_module", "wait_all"]

_LOG = logging.getLogger(__name__)
_END_SECONDS = 5.0
_MOST_DEATHS, _SOON_SECONDS = 5, 2.0
"""A process that dies this often, each time this soon, is not restarted."""
_FIRST_SECONDS = 10.0
"""Extra time that a process has for its first output."""
_STOPPED_SECONDS = 1.5


def of_module(name: str, *arguments: object) -> list[str]:
    """Return the command that runs a module, by its whole name, as a process. ``-P``: it imports nothing from
    the folder in which it starts, which may hold the files of others."""
    return [sys.executable, "-Pm", name, *map(str, arguments)]


class SupervisedProcess:
    """A process that is restarted when it dies."""

    def __init__(
        self, run: Run, name: str, command: Sequence[str], environment: Mapping[str, str] = {}
    ) -> None:
        self._name, self._log = name, run.logs_path / f"{name}.log"
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths, self._started = 0, 0.0
        self._clock, self._stopped = PausableClock(), StopTimer()
        self._dead_since: float | None = None
        self.environment = dict(environment)
        """Additions to the environment of processes that are started from now on."""

    def start(self) -> None:
        """Start the process, with its output in the log."""
        self._started = time.monotonic()
        self._dead_since = None
        with open(open_log(self._log), "ab") as log, _blocked_interrupts():
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | {"MYRIAD_ENGINE_PID": str(os.getpid())} | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert self._process.stdout is not None
        os.set_blocking(self._process.stdout.fileno(), False)
        self._text, self._heard_at = b"", self._clock.read() + _FIRST_SECONDS

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """Return new lines of its output, waiting up to ``seconds`` for them."""
        assert self._process is not None and self._process.stdout is not None
        output = self._process.stdout
        if output.closed:  # the process has ended and is not restarted yet
            time.sleep(seconds)
            return []
        if not select.select([output], [], [], seconds)[0]:
            return []
        data = output.read()
        if not data:
            time.sleep(0.01)  # the process has ended or is about to end
            return []
        self._heard_at = self._clock.read()
        *lines, self._text = (self._text + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end_if_stopped(self) -> None:
        """Kill the process if it was stopped by SIGSTOP."""
        if self._process is None:
            return
        stopped = self._stopped.poll(self._process.pid, self._clock.read())
        if stopped is not None and stopped > _STOPPED_SECONDS:
            self.end(signal.SIGKILL)

    def end_if_silent(self, seconds: float) -> None:
        """Kill the process if it has written nothing for this long, because it is stopped or hangs."""
        if self._clock.read() - self._heard_at > seconds:
            self.end(signal.SIGKILL)

    def revive(self, *, for_ever: bool = False, after_seconds: float = 0.0) -> None:
        """Restart the process if it has been dead for ``after_seconds``. If it keeps dying, raise
        `RunFailedError`; with ``for_ever`` keep trying at intervals, because ranks can train without it."""
        assert self._process is not None
        if self._process.poll() is None:
            return
        now = time.monotonic()
        self._dead_since = now if self._dead_since is None else self._dead_since
        lived = now - self._started
        given_up = self._deaths > _MOST_DEATHS and for_ever and lived < _SOON_SECONDS
        if given_up or now - self._dead_since < after_seconds:
            return
        self._deaths = self._deaths + 1 if self._dead_since - self._started < _SOON_SECONDS else 1
        if self._deaths > _MOST_DEATHS and not for_ever:
            raise RunFailedError(f"the {self._name} exits repeatedly (log: {self._log})")
        _LOG.info("the %s has ended with %s; starting another", self._name, self._process.returncode)
        self._again()

    def replace(self) -> None:
        """Kill the process and start another one at once."""
        self.end(signal.SIGKILL)
        self._again()

    def _again(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.stdout.close()
        self.start()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process only, not to its children."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Wait for the process to end, ``seconds`` at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(seconds)

    def end(self, number: signal.Signals) -> None:
        """End the process, by SIGKILL if the signal does not end it. Do not wait for a process that hangs in
        a disk access."""
        end_all([self], number)

    def _close(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()


def wait_all(processes: Collection[SupervisedProcess], seconds: float) -> None:
    """Wait for all processes to end, ``seconds`` at most for all together."""
    deadline = time.monotonic() + seconds
    for each in processes:
        each.wait(max(0.0, deadline - time.monotonic()))


def end_all(processes: Collection[SupervisedProcess], number: signal.Signals) -> None:
    """End all processes as `SupervisedProcess.end`, in the time that one takes: any number of them may hang,
    such as each ``srun`` while the controller is silent."""
    for ending in (number, signal.SIGKILL):
        for each in processes:
            each.send_signal(ending)
        wait_all(processes, _END_SECONDS)
    for each in processes:
        each._close()


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Block SIGINT in processes that are started inside the block, until they are ready for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
