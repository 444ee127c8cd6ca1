"""What snapshots hold up an iteration, on average over steps.

    update | copy to host memory ...forward, backward... | what is left of it | update

A rank copies its share of parameters and optimizer state behind forward and backward (`checkpoint`); the next
update waits for what is left. What is stored, hashed and sent to other nodes is so from the copy, by other
processes: it holds up nobody, unless overlap.checkpoint is off, when training waits until it is durable. Only
where storage is too slow for what it is asked are checkpoints left out, never waited for.

    share of steps    that are a multiple of any interval: 1/a + 1/b - 1/lcm(a, b), ...
    stall of one      max(0, copy - (iteration - update));  waited for: copy + store
"""

from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from myriad.planner.cluster import Cluster
from myriad.planner.operators import Number

__all__ = ["Saves", "Saving"]

_STATE_BYTES = 12.0
"""Of a parameter: float32 master value and two moments."""
_REACHED = 0.78
"""Share of a host link's rate that large copies from pinned memory reach: 24.8 of 32 GB/s on each of eight
A100 SXM (nvbandwidth, forums.developer.nvidia.com/t/352186)."""

_Steps: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Saves:
    """When a job takes snapshots (`checkpoint/config.py` has the keys); nothing unless asked for."""

    every: int = 0
    """Steps between durable ones; 0: none."""
    minutes: float | None = None
    """Between durable ones, whichever of the two is due first."""
    memory_every: int = 0
    """Steps between those that stay in memory; 0: none."""
    memory_seconds: float = 0.0
    """At least so long between them."""
    copies_every: int = 0
    """Steps between those that go to another node's memory; 0: none."""

    def durable_steps(self, seconds: Number) -> list[_Steps]:
        """Interval of durable ones, if there is any."""
        found = [np.asarray(self.every, dtype=np.int64)] if self.every else []
        if self.minutes is not None:
            found.append(_steps(60 * self.minutes / seconds))
        return [reduce(np.minimum, found)] if found else []

    def all_steps(self, seconds: Number, num_nodes: int) -> list[_Steps]:
        """Intervals of all kinds."""
        found = self.durable_steps(seconds)
        if self.memory_every:
            found.append(self.memory_every * _steps(self.memory_seconds / (seconds * self.memory_every)))
        if self.copies_every and num_nodes > 1:
            found.append(np.asarray(self.copies_every, dtype=np.int64))
        return found


def _steps(number: Number) -> _Steps:
    """At least one, a whole number."""
    return np.maximum(1, np.ceil(number)).astype(np.int64)


@dataclass(frozen=True)
class Saving:
    """What a job's snapshots cost on a cluster."""

    cluster: Cluster
    saves: Saves
    parameters: float
    """Of the whole model."""
    waits: bool
    """Training goes on when a durable one is stored: overlap.checkpoint is off."""

    def copy_seconds(self, parameters: Number) -> Number:
        """Of one rank's share of the state into host memory; ranks that share cores copy in turn."""
        cluster, chip = self.cluster, self.cluster.accelerator
        rate = _REACHED * chip.host_bytes_per_second
        if cluster.on_cpu:
            taking_turns = max(1.0, cluster.world / (cluster.shared_cores or cluster.world))
            rate = chip.memory_bytes_per_second * chip.memory_ratio / 2 / taking_turns  # read and written
        return _STATE_BYTES * parameters / rate

    @property
    def store_seconds(self) -> float | None:
        """Of everybody's share; ``None``: how quick storage is is not known."""
        rate = self.cluster.storage_bytes_per_second
        return None if rate is None else _STATE_BYTES * self.parameters / rate

    def stall_seconds(self, seconds: Number, update: Number, parameters: Number) -> Number:
        """Of an iteration of ``seconds`` without it, ``update`` of them the optimizer's, on average;
        ``parameters``: that a rank copies."""
        copy = self.copy_seconds(parameters)
        late = np.maximum(0.0, copy - (seconds - update))
        found: Number = 0.0
        if np.any(late):
            found = _each_step(self.saves.all_steps(seconds, self.cluster.nodes)) * late
        if self.waits:
            waited = copy + (self.store_seconds or 0.0) - late
            found = found + _each_step(self.saves.durable_steps(seconds)) * waited
        return found


def _each_step(intervals: list[_Steps]) -> Number:
    """Share of the steps that are a multiple of any of some intervals."""
    share: Number = 0.0
    for count in range(1, len(intervals) + 1):
        for some in combinations(intervals, count):
            share = share - (-1) ** count / reduce(np.lcm, some)
    return share
