"""The run on this machine alone: its driver and its executor are processes of this one, and ranks of theirs.

    myriad train ─┬─ driver                                     restarted when it dies; ranks do not notice
      (engine,    └─ executor ── warm parent ─┬─ rank 0         when it dies, its ranks do; both begin again
       screen)                                └─ rank 1 ...     from the snapshots in the keeper's memory

None of them is ever left behind: each asks the kernel to be killed when its parent is (`child.py`), ranks
lead sessions of their own. So a Ctrl-C of the terminal reaches this process alone. It passes it on once
(ranks finish their step, save, and exit with 0); a second one kills.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, Protocol

from myriad.errors import BadInputError, RunFailedError
from myriad.processes import process_state
from myriad.resilience.facts import STOP_ASKED
from myriad.resilience.journal import Journal
from myriad.resilience.state import Plan
from myriad.resilience.wire import run_secret
from myriad.run import Run

__all__ = ["Observer", "check_cores", "num_cores", "run_local"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_END_SECONDS = 5.0
_MOST_DEATHS, _SOON_SECONDS = 5, 2.0
"""A driver or executor that dies so often, each time so soon, will not stay."""
_SILENT_SECONDS, _FIRST_SECONDS = 3.5, 10.0
"""How long a driver may say nothing, and how much longer before its first word."""
_STOPPED_SECONDS = 1.5
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Observer(Protocol):
    """Who watches a run; whatever it raises, the run goes on."""

    def tick(self) -> None:
        """Called about ten times a second while ranks are at work."""

    def stopping(self) -> None:
        """The ranks have just been asked to save and stop."""


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_cores(world: int, *, oversubscribe: bool = False) -> None:
    """Refuses more ranks than cores: they would take turns, and a slow run would look like a broken one."""
    cores = num_cores()
    if world > cores and not oversubscribe:
        allowed = f"at most {cores} on {cores} cores; --oversubscribe lets ranks take turns"
        raise BadInputError("layout (ranks)", world, allowed)


def run_local(
    run: Run,
    world: int,
    *,
    threads: int = 0,
    observer: Observer | None = None,
    command: Sequence[str] = (),
) -> Literal["finished", "interrupted"]:
    """Has ``world`` ranks train, or run ``command RUN_DIR``, until they are done, however often they must be
    started. Raises `RunFailedError`.

    ``threads`` of each rank; 0: the cores divided among them. After a Ctrl-C they get as long as they need.
    """
    job = run.job()
    plan = Plan(
        world=world,
        nodes=1,
        first_epoch=run.next_attempt(),
        patience=job.resilience.patience,
        restarts=job.resilience.restarts,
        saving_seconds=job.checkpoint.timeout_seconds + 60,
    )
    Journal(run.path / "journal.jsonl").begin(plan)
    run_secret(run.path / "secret")
    (run.path / "driver.json").unlink(missing_ok=True)
    threads = threads or max(1, num_cores() // world)
    silent = _SILENT_SECONDS * max(1.0, job.resilience.patience)
    with _catch_signals() as caught, _Processes(run, threads, command, silent) as processes:
        return _watch(processes, caught, _Guarded(observer))


@dataclass
class _Caught:
    """Signals that the launcher received."""

    count: int = 0


@contextlib.contextmanager
def _catch_signals() -> Iterator[_Caught]:
    caught = _Caught()

    def note(number: int, frame: FrameType | None) -> None:
        caught.count += 1

    previous = {number: signal.signal(number, note) for number in _STOP_SIGNALS}
    try:
        yield caught
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Processes:
    """The executor and the driver: kept alive."""

    def __init__(self, run: Run, threads: int, command: Sequence[str], silent_seconds: float) -> None:
        self._run = run
        self._executor = _Kept(run, "executor", ("executor_process", run.path, 0, threads, *command))
        self._driver = _Kept(run, "driver", ("driver", run.path))
        self._silent_seconds = silent_seconds

    def __enter__(self) -> "_Processes":
        self._executor.start()  # its imports take longest
        self._driver.start()
        return self

    def __exit__(self, *error: object) -> None:
        """The driver first, which would have ranks started; SIGTERM lets the executor end what ranks have
        started too."""
        self._driver.end(signal.SIGKILL)
        self._executor.end(signal.SIGTERM)

    def messages(self) -> list[dict[str, Any]]:
        """What the driver has said; waits a moment for it. Whoever has died is started again."""
        found = self._driver.read(_POLL_SECONDS)
        if not any("end" in message for message in found):
            has_driven = (self._run.path / "driver.json").exists()
            self._driver.end_if_silent(self._silent_seconds)
            for kept in (self._driver, self._executor):
                kept.end_if_stopped()
            self._driver.revive(for_ever=has_driven)
            self._executor.revive()
        return found

    def replace_node(self) -> None:
        """Its executor is silent: another."""
        self._executor.end(signal.SIGKILL)

    def ask_to_stop(self) -> None:
        """All ranks save and stop; an executor that is not yet able to hear it, and dies, has a follower that
        knows."""
        self._executor.environment[STOP_ASKED] = "1"
        self._executor.send_signal(signal.SIGINT)

    def wait(self) -> None:
        """They end by themselves when the run is over."""
        self._executor.wait(_END_SECONDS)


class _Kept:
    """A process that is started again when it dies."""

    def __init__(self, run: Run, name: str, module_and_arguments: Sequence[object]) -> None:
        self._name, self._log = name, run.logs_path / f"{name}.log"
        module, *arguments = map(str, module_and_arguments)
        self._command = [sys.executable, "-m", f"myriad.resilience.{module}", *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths, self._started, self._went_on_at = 0, 0.0, 0.0
        self.environment: dict[str, str] = {}
        """Of those that will be started."""

    def start(self) -> None:
        """One."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._started = self._went_on_at = time.monotonic()
        with self._log.open("ab") as log:
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
        self._text, self._heard_at = b"", time.monotonic() + _FIRST_SECONDS

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
        self._heard_at = time.monotonic()
        *lines, self._text = (self._text + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def end_if_stopped(self) -> None:
        """By SIGSTOP, be it before anybody else knows of it."""
        now = time.monotonic()
        if self._process is None or process_state(self._process.pid) != "T":
            self._went_on_at = now
        elif now - self._went_on_at > _STOPPED_SECONDS:
            self.end(signal.SIGKILL)

    def end_if_silent(self, seconds: float) -> None:
        """It is stopped, or hangs."""
        if time.monotonic() - self._heard_at > seconds:
            self.end(signal.SIGKILL)

    def revive(self, *, for_ever: bool = False) -> None:
        """Another, if it is dead. ``for_ever``: one that keeps dying is tried now and then, as ranks train
        without it; else raises `RunFailedError`."""
        assert self._process is not None
        if self._process.poll() is None:
            return
        lived = time.monotonic() - self._started
        if self._deaths > _MOST_DEATHS and for_ever and lived < _SOON_SECONDS:
            return
        self._deaths = self._deaths + 1 if lived < _SOON_SECONDS else 1
        if self._deaths > _MOST_DEATHS and not for_ever:
            raise RunFailedError(f"the {self._name} does not stay alive (log: {self._log})")
        _LOG.info("the %s has ended with %s; starting another", self._name, self._process.returncode)
        assert self._process.stdout is not None
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
        """Whatever it does."""
        if self._process is not None:
            self.send_signal(number)
            self.wait(_END_SECONDS)
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()


def _watch(processes: _Processes, caught: _Caught, observer: Observer) -> Literal["finished", "interrupted"]:
    asked = False
    while True:
        for message in processes.messages():
            if "replace" in message:
                processes.replace_node()
            if "end" in message:
                processes.wait()
                observer.tick()
                if message["end"] == "failed":
                    raise RunFailedError(message["reason"])
                return "interrupted" if message["end"] == "interrupted" else "finished"
        if caught.count and not asked:
            asked = True
            processes.ask_to_stop()
            observer.stopping()
        if caught.count > 1:
            told = "killed before the checkpoint was complete; an earlier one is used next time"
            raise RunFailedError(told)
        observer.tick()


class _Guarded:
    """Keeps a run safe from its observer: the first exception is logged, then nobody watches."""

    def __init__(self, observer: Observer | None) -> None:
        self._observer = observer

    def _call(self, call: Callable[[Observer], None]) -> None:
        if self._observer is None:
            return
        try:
            call(self._observer)
        except Exception:
            self._observer = None
            _LOG.warning("the run goes on, but its screen failed", exc_info=True)

    def tick(self) -> None:
        self._call(lambda observer: observer.tick())

    def stopping(self) -> None:
        self._call(lambda observer: observer.stopping())
