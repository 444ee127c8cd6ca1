"""How long a killed rank of `checkpoint.py` is away, when its state comes back from memory.

    parent    fork ─── rank: saves, trains ── SIGKILL, waits for its end, fork ─── rank: state is back
                                           └────────────────── measured ──────────────────┘

The parent has imported everything; the new process has no process group yet.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Protocol

import torch

from checkpoint_crew import CrewError, die_with
from checkpoint_state import Contender, Place, State, digest, make_state, update

__all__ = ["Recoverable", "restart_seconds"]

_FORK = multiprocessing.get_context("fork")
_PATIENCE_SECONDS = 120.0


class Recoverable(Contender, Protocol):
    """Whose copy in memory outlives the process."""

    def load_from_memory(self, state: State) -> None:
        """Fills a state with the last copy of this rank's."""


Make = Callable[[Place], Recoverable]
Work = Callable[[Make, float, Place, Connection], None]


def restart_seconds(make: Make, megabytes: float, place: Place) -> tuple[float, bool]:
    """From the kill to the state's return, and whether its bits are those of the last copy."""
    rank, told = _fork(_train, make, megabytes, place)
    expected, _ = _hear(told)
    start = time.monotonic()
    os.kill(rank.pid or 0, signal.SIGKILL)
    rank.join()
    heir, told = _fork(_come_back, make, megabytes, place)
    found, ready = _hear(told)
    heir.join()
    return ready - start, found == expected


def _fork(
    work: Work, make: Make, megabytes: float, place: Place
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    receiving, sending = _FORK.Pipe(duplex=False)
    process = _FORK.Process(target=_begin, args=(os.getpid(), work, make, megabytes, place, sending))
    process.start()
    sending.close()
    return process, receiving


def _begin(parent: int, work: Work, make: Make, megabytes: float, place: Place, told: Connection) -> None:
    die_with(parent)
    torch.set_num_threads(1)
    work(make, megabytes, place, told)


def _hear(told: Connection) -> tuple[str, float]:
    try:
        if not told.poll(_PATIENCE_SECONDS):
            raise CrewError(f"no answer in {_PATIENCE_SECONDS:g} s")
        heard: tuple[str, float] = told.recv()
    except EOFError:
        raise CrewError("the rank died") from None
    return heard


def _train(make: Make, megabytes: float, place: Place, told: Connection) -> None:
    state, contender = make_state(megabytes, "sharded", place), make(place)
    contender.setup(state)
    contender.save(0)
    contender.before_update()
    contender.wait_durable()
    told.send((digest(state), 0.0))
    while True:
        update(state)


def _come_back(make: Make, megabytes: float, place: Place, told: Connection) -> None:
    state, contender = make_state(megabytes, "sharded", place, empty=True), make(place)
    contender.load_from_memory(state)
    ready = time.monotonic()
    told.send((digest(state), ready))
