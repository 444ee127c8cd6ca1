"""Seconds that snapshots add to an iteration, on average over steps.

    update | copy to host memory ...forward, backward... | rest of the copy | update

A rank copies its share of parameters and optimizer state during forward and backward (`checkpoint`); the next
update waits for the rest of the copy. Other processes store, hash and send the copy to other nodes, without
delaying training. With overlap.checkpoint off, training waits until the snapshot is durable. Where storage is
too slow for the interval, checkpoints are skipped; training never waits for them.

    share of steps    that are a multiple of any interval: 1/a + 1/b - 1/lcm(a, b), ...
    stall of one      max(0, copy - (iteration - update));  without overlap: copy + store
"""

from dataclasses import dataclass
from functools import reduce
from itertools import combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import Layout
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.operator_costs import Number

__all__ = ["SnapshotCosts", "SnapshotSchedule", "host_copy_rate"]

_STATE_BYTES = 12.0
"""Bytes of state of a parameter: float32 master value and two moments."""
_AVERAGE_BYTES = 4.0
"""Bytes of a parameter's moving average."""
_REACHED = 0.78
"""Share of a host link's rate that large copies from pinned memory reach: 24.8 of 32 GB/s on each of eight
A100 SXM (nvbandwidth, forums.developer.nvidia.com/t/352186)."""

_Steps: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SnapshotSchedule:
    """The schedule of a job's snapshots (`checkpoint/config.py` has the keys); the default takes none."""

    every: int = 0
    """Steps between durable snapshots; 0: none."""
    minutes: float | None = None
    """Minutes between durable snapshots; the earlier of the two rules applies."""
    memory_every: int = 0
    """Steps between snapshots that stay in memory; 0: none."""
    memory_seconds: float = 0.0
    """Minimum seconds between snapshots in memory."""
    copies_every: int = 0
    """Steps between snapshots that are copied to another node's memory; 0: none."""
    holders: int | None = None
    """Nodes whose snapshots hold each part of the state, as in a job."""

    def num_holders(self, layout: Layout, num_nodes: int) -> int:
        """Return how many ranks' snapshots have each part of a layout's state."""
        return layout.num_snapshot_holders(self.holders, self.copies_every) if num_nodes > 1 else 1

    def durable_steps(self, seconds: Number) -> list[_Steps]:
        """Return the interval of durable snapshots in steps, or an empty list."""
        found = [np.asarray(self.every, dtype=np.int64)] if self.every else []
        if self.minutes is not None:
            found.append(_steps(60 * self.minutes / seconds))
        return [reduce(np.minimum, found)] if found else []

    def all_steps(self, seconds: Number, num_nodes: int) -> list[_Steps]:
        """Return the intervals of all kinds of snapshots, in steps."""
        found = self.durable_steps(seconds)
        if self.memory_every:
            found.append(self.memory_every * _steps(self.memory_seconds / (seconds * self.memory_every)))
        if self.copies_every and num_nodes > 1:
            found.append(np.asarray(self.copies_every, dtype=np.int64))
        return found


def _steps(number: Number) -> _Steps:
    """Round up to a whole number of at least one."""
    return np.maximum(1, np.ceil(number)).astype(np.int64)


@dataclass(frozen=True)
class SnapshotCosts:
    """Costs of a job's snapshots on a cluster."""

    cluster: Cluster
    snapshots: SnapshotSchedule
    parameters: float
    """Number of parameters of the whole model."""
    waits: bool
    """Whether training waits until a durable snapshot is stored: overlap.checkpoint is off."""
    averages: bool = False
    """Whether the state has a moving average of the parameters."""

    @property
    def _state_bytes(self) -> float:
        return _STATE_BYTES + (_AVERAGE_BYTES if self.averages else 0.0)

    def copy_seconds(self, parameters: Number) -> Number:
        """Return the seconds to copy one rank's share of the state into host memory. Ranks that share cores
        copy one after the other."""
        cluster = self.cluster
        taking_turns = max(1.0, cluster.world / (cluster.shared_cores or cluster.world))
        rate = host_copy_rate(cluster) / (taking_turns if cluster.on_cpu else 1.0)
        return self._state_bytes * parameters / rate

    @property
    def store_seconds(self) -> float | None:
        """Seconds to store the shares of all ranks; ``None``: the storage rate is unknown."""
        rate = self.cluster.storage_bytes_per_second
        return None if rate is None else self._state_bytes * self.parameters / rate

    def stall_seconds(self, seconds: Number, update: Number, parameters: Number) -> Number:
        """Return the average seconds that snapshots add to an iteration of ``seconds``. ``update``: seconds
        of the optimizer in it. ``parameters``: number of parameters that a rank copies."""
        copy = self.copy_seconds(parameters)
        late = np.maximum(0.0, copy - (seconds - update))
        found: Number = 0.0
        if np.any(late):
            found = _each_step(self.snapshots.all_steps(seconds, self.cluster.nodes)) * late
        if self.waits:
            waited = copy + (self.store_seconds or 0.0) - late
            found = found + _each_step(self.snapshots.durable_steps(seconds)) * waited
        return found


def host_copy_rate(cluster: Cluster) -> float:
    """Return the bytes per second that a rank copies to or from its host's memory."""
    chip = cluster.accelerator
    if cluster.on_cpu:
        return chip.memory_bytes_per_second * chip.memory_ratio / 2  # The copy reads and writes.
    return _REACHED * chip.host_bytes_per_second


def _each_step(intervals: list[_Steps]) -> Number:
    """Return the share of the steps that are a multiple of any of the intervals."""
    share: Number = 0.0
    for count in range(1, len(intervals) + 1):
        for some in combinations(intervals, count):
            share = share - (-1) ** count / reduce(np.lcm, some)
    return share
