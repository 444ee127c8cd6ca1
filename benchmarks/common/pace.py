"""How fast each core is just now: two processes that sleep, and time one block all at once when asked.

with Pace() as pace:
    pace.seconds()        of each core
"""

import multiprocessing
import os
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

import torch

from myriad.kernels.host_memory import keep_freed_memory
from myriad.planner.cluster_config import Cluster
from myriad.train.calibration.compute_timings import PacedTimer as CorePace

__all__ = ["Pace", "core_speeds"]

_WARM_SECONDS, _MEASURE_SECONDS = 2.0, 1.5
"""Cores that have slept are quicker for a second or two than while they train."""


class Pace:
    """One process for each core."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._pipes: list[Connection] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Pace":
        context = multiprocessing.get_context("spawn")
        for core in self._cores:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(core, there), daemon=True)
            process.start()
            self._stack.callback(process.join)
            self._stack.callback(process.kill)
            self._pipes.append(here)
        self.seconds()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def seconds(self) -> list[float]:
        """Return the seconds of the block on each core."""
        for pipe in self._pipes:
            pipe.send(None)
        return [pipe.recv() for pipe in self._pipes]


def _serve(core: int, pipe: Connection) -> None:
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    keep_freed_memory()
    core_pace = CorePace()
    while True:
        pipe.recv()
        core_pace.seconds(_WARM_SECONDS)
        pipe.send(core_pace.seconds(_MEASURE_SECONDS))


def core_speeds(machine: Cluster, seconds: Sequence[float]) -> tuple[float, ...]:
    """Against the core that ``machine`` was measured as."""
    assert machine.pace_seconds is not None, "measured by `myriad plan --measure`"
    return tuple(machine.pace_seconds / one for one in seconds)
