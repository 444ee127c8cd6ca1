"""Ranks as processes of this machine: start, watch, stop; none is ever left behind.

Each rank is the leader of its own session, so a Ctrl-C of the terminal reaches the launcher alone. The
launcher passes it on once (ranks finish their step, save, and exit with 0); a second one kills. When a rank
dies, the others cannot go on: they are told to stop, and killed after a grace time. When the launcher itself
is killed, the kernel kills the ranks (see `child.py`).

Which rank is to blame: the first to die, unless its error only says that a peer hung up; then the first whose
error says something else. Peers often fall over each other within milliseconds, so a short wait collects
them.
"""

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol

from myriad.errors import BadInputError, RunFailedError
from myriad.resilience.engines import child
from myriad.resilience.engines.logs import error_excerpt, is_secondary
from myriad.run import Run

__all__ = ["Observer", "check_cores", "num_cores", "run_local"]

_LOG = logging.getLogger(__name__)
_POLL_SECONDS = 0.1
_BLAME_SECONDS = 1.5
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WORKER = (sys.executable, "-m", "myriad.train.worker")


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
    command: Sequence[str] = _WORKER,
    grace_seconds: float = 4.0,
) -> Literal["finished", "interrupted"]:
    """Starts ``world`` ranks of ``command RUN_DIR`` and waits for their end. Raises `RunFailedError`.

    ``threads`` of each rank; 0: the cores divided among them. Ranks asked to stop get ``grace_seconds`` when
    a peer has died, and as long as they need after a Ctrl-C.
    """
    with _catch_signals() as caught, _ranks(run, world, threads, command) as ranks:
        return _watch(ranks, caught, _Guarded(observer), grace_seconds)


@dataclass
class _Rank:
    number: int
    process: "subprocess.Popen[bytes]"
    log_path: Path

    @property
    def alive(self) -> bool:
        """Looks without reaping first, and ends what the rank has left behind while its number is still its
        own."""
        if self.process.returncode is None:
            ended = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is not None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        return self.process.returncode is None

    @property
    def failed(self) -> bool:
        return not self.alive and self.process.returncode != 0

    def signal(self, number: signal.Signals) -> None:
        """To the rank and to whatever it has started."""
        if self.alive:
            os.killpg(self.process.pid, number)

    def wait(self) -> None:
        """Until it has ended."""
        while self.alive:
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)


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


@contextlib.contextmanager
def _ranks(run: Run, world: int, threads: int, command: Sequence[str]) -> Iterator[list[_Rank]]:
    attempt, port = run.next_attempt(), _free_port()
    name = f"{run.path.name}.{attempt}.{uuid.uuid4().hex}"
    threads = threads or max(1, num_cores() // world)
    ranks: list[_Rank] = []
    try:
        for number in range(world):
            log_path = run.log_path(number, attempt)
            environment = _environment(number, world, port, threads) | {"MYRIAD_ATTEMPT_ID": name}
            ranks.append(_Rank(number, _start([*command, str(run.path)], environment, log_path), log_path))
        yield ranks
    finally:
        for rank in ranks:
            rank.signal(signal.SIGKILL)
        for rank in ranks:
            rank.wait()


def _start(command: list[str], environment: dict[str, str], log_path: Path) -> "subprocess.Popen[bytes]":
    log_path.parent.mkdir(parents=True, exist_ok=True)
    shim = [sys.executable, "-S", str(Path(child.__file__)), str(os.getpid())]
    with log_path.open("wb") as log:
        return subprocess.Popen(
            shim + command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _environment(rank: int, world: int, port: int, threads: int) -> dict[str, str]:
    mine = {
        "RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": world,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": threads,
        "PYTHONUNBUFFERED": 1,
        "PYTHONFAULTHANDLER": 1,
    }
    defaults = {"GLOO_SOCKET_IFNAME": "lo"}  # else gloo looks up the host's name, which may not resolve
    return defaults | dict(os.environ) | {key: str(value) for key, value in mine.items()}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _watch(
    ranks: list[_Rank], caught: _Caught, observer: Observer, grace_seconds: float
) -> Literal["finished", "interrupted"]:
    asked = False
    while any(rank.alive for rank in ranks):
        if any(rank.failed for rank in ranks):
            break
        if caught.count and not asked:
            asked = True
            for rank in ranks:
                rank.signal(signal.SIGINT)
            observer.stopping()
        if caught.count > 1:
            raise RunFailedError(
                "killed before the checkpoint was complete; an earlier one is used next time"
            )
        observer.tick()
        time.sleep(_POLL_SECONDS)
    failed = _settle(ranks, grace_seconds)
    observer.tick()
    if failed and not (asked and all(rank.process.returncode == -signal.SIGINT for rank in failed)):
        raise RunFailedError(_blame(failed))
    return "interrupted" if asked else "finished"


def _settle(ranks: list[_Rank], grace_seconds: float) -> list[_Rank]:
    """Ranks that failed by themselves, first to die first; the others have ended too when this returns."""
    failed = [rank for rank in ranks if rank.failed]
    if not failed:
        return []

    def any_alive() -> bool:
        return any(rank.alive for rank in ranks)

    def only_secondary() -> bool:
        failed.extend(rank for rank in ranks if rank.failed and rank not in failed)
        return all(
            rank.process.returncode > 0 and is_secondary(error_excerpt(rank.log_path)) for rank in failed
        )

    _wait_while(lambda: only_secondary() and any_alive(), _BLAME_SECONDS)
    for rank in ranks:
        rank.signal(signal.SIGTERM)
    _wait_while(any_alive, grace_seconds)
    return failed


def _wait_while(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while condition() and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)


def _blame(failed: list[_Rank]) -> str:
    """One rank and its error."""
    excerpts = {rank.number: error_excerpt(rank.log_path) for rank in failed}
    primary = [
        rank for rank in failed if rank.process.returncode < 0 or not is_secondary(excerpts[rank.number])
    ]
    rank = (primary or failed)[0]
    excerpt, code = excerpts[rank.number], rank.process.returncode
    if code > 0 and excerpt and "\n" not in excerpt:
        return f"rank {rank.number}: {excerpt} (log: {rank.log_path})"
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    return f"rank {rank.number} {how} (log: {rank.log_path})" + (f"\n{excerpt}" if excerpt else "")


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
