"""Process groups, made when asked for and only among their members.

A group of one is ``None``: every collective of `myriad.comm.collectives` is then the identity.

Start-up costs each rank a fixed number of requests to the store, so O(n) in all (MegaScale, section 3.5):

    world of n       gloo: publish an address, one read of those of the ranks it will talk to (`meeting`),
                     connections at the first collective;  NCCL: one identity read, tensor- and data-parallel
                     groups split from the world's communicator, without the store
    any other group  the same, among its members alone; gloo connects all of them (up to `MESH_RANKS`) before
                     a group is handed out, so that posting a send or a receive never waits for a peer; on
                     NCCL `myriad.comm.first_use` does so

A group is named by its members and purpose, not by how many groups a rank has (as `dist.new_group` does):
ranks that have made different groups before still meet. What has been run is gloo; the NCCL path has the same
shape and has run on no machine yet.
"""

import hashlib
import os
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName

from myriad.comm.config import CommConfig
from myriad.comm.first_use import open_collectives
from myriad.comm.gloo_threads import loops_that_interrupt_nobody
from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.comm.meeting import MESH_RANKS, MeetingStore, connecting
from myriad.comm.node_order import grid_rank
from myriad.comm.store import open_store

__all__ = ["Groups", "close_world", "local_rank", "open_world"]

Group = dist.ProcessGroup
_COMM, _CPU = CommConfig(), torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What connects the ranks of a world, by the type of their devices."""
_SPLIT_AXES = ("dp", "tp")
"""Axes whose groups come from the world's communicator where the backend can: in this order on every rank."""


def local_rank(rank: int, world: int, port: int) -> dict[str, str]:
    """The environment of a rank of a world on this machine alone, in which rank 0 serves the store at
    ``port``."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def open_world(layout: Layout, device: torch.device, *, comm: CommConfig = _COMM) -> "Groups":
    """Joins the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe (a world of one needs none
    of them), in the place that ``comm.node_order`` gives. Raises `RunFailedError` when the ranks do not
    meet."""
    rank, world = grid_rank(comm, layout.world), layout.world
    groups = Groups(RankGrid(layout, rank), device)
    if world == 1:
        return groups
    launched = int(os.environ.get("RANK", "0"))
    store, timeout = open_store(comm, launched, world), timedelta(seconds=comm.timeout_seconds)
    options: dict[str, Any] = {"rank": rank, "world_size": world, "timeout": timeout}
    backend = BACKENDS[device.type]
    if backend == "gloo":
        store = MeetingStore(store)
        met = store.meeting("the world", range(world), rank)
        with met, connecting(lazily=True), loops_that_interrupt_nobody():
            dist.init_process_group(backend, store=store, **options)
        _keep_store(dist.group.WORLD, store)
        return groups
    bound = device if device.type == "cuda" else None
    dist.init_process_group(backend, store=store, device_id=bound, **options)
    _keep_store(dist.group.WORLD, store)
    open_collectives(groups.world, device)
    if bound is not None:
        groups.split(timeout)
    return groups


def _keep_store(group: Group | None, store: Store) -> None:
    """Makes torch hold the Python object of the store as long as the group lives: it holds only the C++ half,
    and the other half has the methods."""
    assert group is not None
    c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], store)


def close_world() -> None:
    """Leaves the world, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Groups:
    """The groups of one rank, by the axes along which their members differ."""

    def __init__(self, grid: RankGrid, device: torch.device = _CPU) -> None:
        """``device``: what this rank computes on."""
        self.grid, self._device = grid, device
        self._made: dict[tuple[tuple[int, ...], str], Group] = {}

    def along(self, *axes: str, purpose: str = "", pairwise: bool = False) -> Group | None:
        """The group of `RankGrid.peers`; one more for each ``purpose`` (so that two streams never queue
        behind each other). ``pairwise``: as for `of`."""
        return self.of(self.grid.peers(*axes), purpose, pairwise=pairwise)

    def on_host(self, purpose: str) -> Group | None:
        """All ranks over gloo, also where the world's backend is another: for threads that agree on something
        while the device computes."""
        return self.of(tuple(range(self.grid.layout.world)), purpose, backend="gloo")

    def of(
        self,
        ranks: tuple[int, ...],
        purpose: str = "",
        *,
        backend: str | None = None,
        pairwise: bool = False,
    ) -> Group | None:
        """The group of these ranks, this one among them. All of them must ask for it, in the same order of
        asking, and before the first step: on NCCL its communicator is made here (`myriad.comm.first_use`).
        ``backend``: the world's when left out. ``pairwise``: it carries messages between pairs only, so it
        has no communicator of all ranks."""
        if len(ranks) == 1:
            return None
        if not (purpose or backend) and self._is_world(ranks):
            return self.world
        if (ranks, purpose) not in self._made:
            group = _make_group(tuple(sorted(ranks)), self.grid.rank, purpose, backend)
            self._made[ranks, purpose] = group
            if not pairwise:
                open_collectives(group, self._device)
        return self._made[ranks, purpose]

    @property
    def world(self) -> Group | None:
        """All ranks."""
        return dist.group.WORLD if self.grid.layout.world > 1 else None

    def _is_world(self, ranks: tuple[int, ...]) -> bool:
        """Whether the world's own communicator serves: not on gloo, where the world connects lazily, so that
        posting a message would wait for the peer."""
        return len(ranks) == self.grid.layout.world and dist.get_backend() != "gloo"

    def split(self, timeout: timedelta) -> None:
        """Makes groups from the world's NCCL communicator: a call of all ranks, so at a moment that all
        share. Groups made later are not split: only their members ask for them."""
        for axis in _SPLIT_AXES:
            peers = self.grid.peers(axis)
            if len(peers) > 1 and not self._is_world(peers):
                rows = self.grid.rows(axis)
                group = dist.split_group(split_ranks=rows, timeout=timeout, group_desc=axis)
                assert isinstance(group, Group)
                self._made[peers, ""] = group
                open_collectives(group, self._device)
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = None  # else torch splits every later group as well, and hangs


def _make_group(ranks: tuple[int, ...], rank: int, purpose: str, backend: str | None) -> Group:
    world = dist.group.WORLD
    assert world is not None, "open_world comes first"
    store: Any = c10d._world.pg_map[world][1]
    backend = backend or c10d._world.pg_map[world][0]
    if backend == "gloo" and not isinstance(store, MeetingStore):
        store = MeetingStore(store)
    index, name, lazily = ranks.index(rank), _group_name(ranks, purpose), len(ranks) > MESH_RANKS
    met = store.meeting(f"group {purpose or ranks}", ranks, index) if backend == "gloo" else nullcontext()
    patient = loops_that_interrupt_nobody() if backend == "gloo" else nullcontext()
    with met, connecting(lazily=lazily), patient:
        group, _ = c10d._new_process_group_helper(
            len(ranks), index, list(ranks), backend, store, name, timeout=store.timeout, group_desc=purpose
        )
    c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
    _keep_store(group, store)
    if lazily and backend == "gloo":
        dist.barrier(group=group)  # neighbours are connected from here on
    return group


def _group_name(ranks: tuple[int, ...], purpose: str) -> GroupName:
    """The same on every member: of purpose, members, and how many such groups each of them has made."""
    members = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    name = f"{purpose or 'group'}:{members}:"
    return GroupName(name + str(sum(made.startswith(name) for made in c10d._world.pg_names.values())))
