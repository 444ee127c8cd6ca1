"""Process groups, made when first used and only among their members.

A group of one is ``None``: every collective of `myriad.comm.collectives` is then the identity. Creation
synchronises the members through the store and nobody else, so the whole start costs O(n), not O(n^2)
(MegaScale, section 3.5).
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout

__all__ = ["Groups", "close_world", "open_world"]

Group = dist.ProcessGroup


def open_world(layout: Layout, device: torch.device, timeout_seconds: float = 600.0) -> "Groups":
    """Joins the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (a world of one needs none
    of them)."""
    rank, world = int(os.environ.get("RANK", "0")), layout.world
    if world > 1:
        backend = "nccl" if device.type == "cuda" else "gloo"
        timeout = timedelta(seconds=timeout_seconds)
        dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout)
    return Groups(RankGrid(layout, rank))


def close_world() -> None:
    """Leaves the world, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Groups:
    """The groups of one rank, by the axes along which their members differ."""

    def __init__(self, grid: RankGrid) -> None:
        self.grid = grid
        self._made: dict[tuple[tuple[int, ...], str], Group] = {}

    def along(self, *axes: str, purpose: str = "") -> Group | None:
        """The group of `RankGrid.peers`; one more for each ``purpose`` (so that two streams never queue
        behind each other)."""
        return self.of(self.grid.peers(*axes), purpose)

    def of(self, ranks: tuple[int, ...], purpose: str = "") -> Group | None:
        """The group of these ranks, this one among them. All of them must ask for it, in the same order of
        asking."""
        if len(ranks) == 1:
            return None
        if (ranks, purpose) not in self._made:
            group = dist.new_group(list(ranks), use_local_synchronization=True)
            assert isinstance(group, Group)
            self._made[ranks, purpose] = group
        return self._made[ranks, purpose]

    @property
    def world(self) -> Group | None:
        """All ranks."""
        return dist.group.WORLD if self.grid.layout.world > 1 else None
