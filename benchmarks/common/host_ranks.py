"""Ranks inside the hosts of `hosts.py`: how they get in, and how their results get out."""

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from myriad.faults.namespaces import enter_host

__all__ = ["Place", "RankError", "Ranks", "enter_host"]


class RankError(RuntimeError):
    """A rank failed, or gave no answer in time."""


@dataclass(frozen=True)
class Place:
    """Where one rank runs."""

    rank: int
    namespace: str
    hostname: str
    core: int
    environment: Mapping[str, str]


def _be_rank(place: Place, parent: int, function: Callable[[], Any], pipe: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the owner's to handle
    try:
        enter_host(place.namespace, place.hostname, parent)
        os.sched_setaffinity(0, {place.core})
        os.environ |= place.environment
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)
        answer: tuple[Any, str | None] = (function(), None)
    except BaseException:
        answer = (None, traceback.format_exc())
    try:
        pipe.send(answer)
    except Exception:  # the result itself cannot be sent
        pipe.send((None, traceback.format_exc()))


class Ranks:
    """Forked processes that run one function, each in its place."""

    def __init__(self, places: Sequence[Place], function: Callable[[], Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.places = places
        self._pipes: list[Connection] = []
        self.processes = []
        for place in places:
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=_be_rank, args=(place, os.getpid(), function, sending), daemon=False
            )
            process.start()
            sending.close()
            self._pipes.append(receiving)
            self.processes.append(process)

    def results(self, timeout_seconds: float = 270.0) -> list[Any]:
        """Every rank's result. Raises `RankError` at the first that fails, dies or is late."""
        deadline = time.monotonic() + timeout_seconds
        waiting = dict(zip(self._pipes, self.places, strict=True))
        found: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                late = ", ".join(str(place.rank) for place in waiting.values())
                raise RankError(f"no answer from rank {late} in {timeout_seconds:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                place = waiting.pop(pipe)
                found[place.rank] = self._take(pipe, place)
        return [found[place.rank] for place in self.places]

    def _take(self, pipe: Connection, place: Place) -> Any:
        where = f"rank {place.rank} on {place.hostname}"
        try:
            value, error = pipe.recv()
        except EOFError:
            process = self.processes[place.rank]
            process.join(5)
            raise RankError(f"{where} died with exit code {process.exitcode}") from None
        if error is not None:
            raise RankError(f"{where} failed:\n{error}")
        return value

    def kill(self) -> None:
        """Ends what still runs; the ranks' own children go with their host."""
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.join()
            pipe.close()
