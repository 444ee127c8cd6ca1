"""A process that an engine keeps alive: ended when it stops or falls silent, started again when it ends.

It asks the kernel to be killed when its engine is (`child.py`), and leads a session of its own: a Ctrl-C of
the terminal reaches the engine alone.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from myriad.errors import RunFailedError
from myriad.processes import StopTimer, WatchClock, open_log
from myriad.run import Run

__all__ = ["Kept", "of_module"]

_LOG = logging.getLogger(__name__)
_END_SECONDS = 5.0
_MOST_DEATHS, _SOON_SECONDS = 5, 2.0
"""One that dies so often, each time so soon, will not stay."""
_FIRST_SECONDS = 10.0
"""How much longer than later it may say nothing before its first word."""
_STOPPED_SECONDS = 1.5


def of_module(name: str, *arguments: object) -> list[str]:
    """The command of a module of `myriad.resilience` that dies with its engine."""
    return [sys.executable, "-m", f"myriad.resilience.{name}", *map(str, arguments)]


class Kept:
    """A process that is started again when it dies."""

    def __init__(
        self, run: Run, name: str, command: Sequence[str], environment: Mapping[str, str] = {}
    ) -> None:
        self._name, self._log = name, run.logs_path / f"{name}.log"
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths, self._started = 0, 0.0
        self._clock, self._stopped = WatchClock(), StopTimer()
        self._dead_since: float | None = None
        self.environment = dict(environment)
        """Of those that will be started."""

    def start(self) -> None:
        """One."""
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
        self._text, self._heard_at = b"", self._clock.look() + _FIRST_SECONDS

    def read(self, seconds: float) -> list[dict[str, Any]]:
        """Lines of its output, waited for."""
        assert self._process is not None and self._process.stdout is not None
        output = self._process.stdout
        if output.closed:  # ended, and not started again for now
            time.sleep(seconds)
            return []
        if not select.select([output], [], [], seconds)[0]:
            return []
        data = output.read()
        if not data:
            time.sleep(0.01)  # it has ended, or is about to
            return []
        self._heard_at = self._clock.look()
        *lines, self._text = (self._text + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end_if_stopped(self) -> None:
        """By SIGSTOP, be it before anybody else knows of it."""
        if self._process is None:
            return
        stopped = self._stopped.look(self._process.pid, self._clock.look())
        if stopped is not None and stopped > _STOPPED_SECONDS:
            self.end(signal.SIGKILL)

    def end_if_silent(self, seconds: float) -> None:
        """It is stopped, or hangs."""
        if self._clock.look() - self._heard_at > seconds:
            self.end(signal.SIGKILL)

    def revive(self, *, for_ever: bool = False, after_seconds: float = 0.0) -> None:
        """Another, if it has been dead for so long. ``for_ever``: one that keeps dying is tried now and then,
        as ranks train without it; else raises `RunFailedError`."""
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
            raise RunFailedError(f"the {self._name} does not stay alive (log: {self._log})")
        _LOG.info("the %s has ended with %s; starting another", self._name, self._process.returncode)
        self._again()

    def replace(self) -> None:
        """It is no good: another, at once."""
        self.end(signal.SIGKILL)
        self._again()

    def _again(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        self._process.stdout.close()
        self.start()

    def send_signal(self, number: signal.Signals) -> None:
        """To it alone."""
        if self._process is not None:
            self._process.send_signal(number)

    def wait(self, seconds: float) -> None:
        """Until it has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process is not None:
                self._process.wait(seconds)

    def end(self, number: signal.Signals) -> None:
        """Whatever it does; one that hangs in a disk is not waited for."""
        if self._process is not None:
            self.send_signal(number)
            self.wait(_END_SECONDS)
            self._process.kill()
            self.wait(_END_SECONDS)
            assert self._process.stdout is not None
            self._process.stdout.close()


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """What is started inside has SIGINT blocked until it is ready for one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
