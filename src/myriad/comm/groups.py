"""Process groups, made on demand and only among their members.

A group of one is ``None``: every collective of `myriad.comm.collectives` is then the identity.

Start-up costs each rank a fixed number of requests to the store, so O(n) in all (MegaScale, section 3.5):

    world of n       gloo: publish an address, one read of those of the ranks it will talk to (`gloo_setup`),
                     connections at the first collective;  NCCL: one identity read, tensor- and data-parallel
                     groups split from the world's communicator, without the store
    any other group  the same, among its members alone; gloo connects all of them (up to `MESH_RANKS`) before
                     a group is handed out, so that posting a send or a receive never waits for a peer; on
                     NCCL `myriad.comm.connection_setup` does so

A group is named by its members and purpose, not by how many groups a rank has (as `dist.new_group` does).
Ranks that have made different groups before can therefore still connect. Only gloo has been run; the NCCL
path has the same shape and has run on no machine yet.
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
from myriad.comm.connection_setup import open_collectives
from myriad.comm.gloo_setup import MESH_RANKS, GlooStore, connecting, low_priority_gloo_threads
from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.comm.node_order import grid_rank
from myriad.comm.rendezvous.rendezvous_store import open_store
from myriad.comm.rendezvous.store_secret import STORE_SECRET

__all__ = ["Groups", "close_world", "local_rank", "open_world"]

Group = dist.ProcessGroup
_COMM, _CPU = CommConfig(), torch.device("cpu")
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The communication backend for each device type."""


def local_rank(rank: int, world: int, port: int, secret: str = "") -> dict[str, str]:
    """Return the environment of a rank of a world on this machine alone, in which rank 0 serves the store
    at ``port``. ``secret``: `new_store_secret`; by default the ranks use this user's."""
    return {
        STORE_SECRET: secret,
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }


def open_world(layout: Layout, device: torch.device, *, comm: CommConfig = _COMM) -> "Groups":
    """Join the world that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, in the place that
    ``comm.node_order`` gives.

    A world of one needs none of the variables. Raises `RunFailedError` when the ranks do not meet.
    """
    rank, world = grid_rank(comm, layout.world), layout.world
    groups = Groups(RankGrid(layout, rank), device, comm=comm)
    if world == 1:
        return groups
    launched = int(os.environ.get("RANK", "0"))
    store, timeout = open_store(comm, launched, world), timedelta(seconds=comm.timeout_seconds)
    options: dict[str, Any] = {"rank": rank, "world_size": world, "timeout": timeout}
    backend = BACKENDS[device.type]
    if backend == "gloo":
        store = GlooStore(store)
        met = store.making_group("the world", range(world), rank)
        with met, connecting(lazily=True), low_priority_gloo_threads():
            dist.init_process_group(backend, store=store, **options)
        _keep_store(dist.group.WORLD, store)
        return groups
    bound = device if device.type == "cuda" else None
    nccl = nccl_options(backend, comm.max_ctas)
    dist.init_process_group(backend, store=store, device_id=bound, pg_options=nccl, **options)
    _keep_store(dist.group.WORLD, store)
    open_collectives(groups.world, device)
    if bound is not None:
        groups.split(timeout)
    return groups


def nccl_options(backend: str, max_ctas: int | None) -> Any | None:
    """Return the options for one more NCCL communicator, or ``None`` for another backend.

    Its kernels run on streams of high priority: a message posted behind a matrix product begins when the
    product's blocks end, not behind those that wait. ``max_ctas`` is the largest number of thread blocks,
    hence multiprocessors, that a message takes from concurrent compute (``ncclConfig_t.maxCTAs``); ``None``:
    NCCL's choice.
    """
    if backend != "nccl":
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if max_ctas is not None:
        options.config.max_ctas = max_ctas
    return options


def _keep_store(group: Group | None, store: Store) -> None:
    """Make torch hold the Python object of the store as long as the group lives. torch holds only the C++
    half, which lacks the methods."""
    assert group is not None
    c10d._world.pg_map[group] = (c10d._world.pg_map[group][0], store)


def close_world() -> None:
    """Leave the world, if one was joined."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Groups:
    """The groups of one rank, by the axes along which their members differ."""

    def __init__(self, grid: RankGrid, device: torch.device = _CPU, *, comm: CommConfig = _COMM) -> None:
        """``device`` is where this rank computes."""
        self.grid, self.comm, self._device = grid, comm, device
        self._made: dict[tuple[tuple[int, ...], str], Group] = {}

    def along(self, *axes: str, purpose: str = "", pairwise: bool = False) -> Group | None:
        """Return the group of `RankGrid.peers`.

        Each ``purpose`` has its own group, so that two streams never queue behind each other. ``pairwise`` is
        as for `of`.
        """
        return self.of(self.grid.peers(*axes), purpose, pairwise=pairwise)

    def on_host(self, purpose: str) -> Group | None:
        """Return a gloo group of all ranks, for threads that communicate while the device computes. It is
        gloo even if the world's backend is not."""
        return self.of(tuple(range(self.grid.layout.world)), purpose, backend="gloo")

    def of(
        self,
        ranks: tuple[int, ...],
        purpose: str = "",
        *,
        backend: str | None = None,
        pairwise: bool = False,
    ) -> Group | None:
        """Return the group of these ranks, this rank among them.

        All of them must ask for it, in the same order, and before the first step: on NCCL its communicator is
        made here (`myriad.comm.connection_setup`). ``backend`` is by default the world's. A ``pairwise``
        group carries messages between pairs only, so it has no communicator of all ranks."""
        if len(ranks) == 1:
            return None
        if not (purpose or backend) and self._is_world(ranks):
            return self.world
        if (ranks, purpose) not in self._made:
            group = _make_group(tuple(sorted(ranks)), self.grid.rank, purpose, backend, self.comm.max_ctas)
            self._made[ranks, purpose] = group
            if not pairwise:
                open_collectives(group, self._device)
        return self._made[ranks, purpose]

    @property
    def world(self) -> Group | None:
        """The group of all ranks."""
        return dist.group.WORLD if self.grid.layout.world > 1 else None

    def _is_world(self, ranks: tuple[int, ...]) -> bool:
        """Return whether the world's own communicator can be used. It cannot on gloo, where the world
        connects lazily, so that posting a message would wait for the peer."""
        return len(ranks) == self.grid.layout.world and dist.get_backend() != "gloo"

    def split(self, timeout: timedelta) -> None:
        """Split the data- and tensor-parallel groups from the world's NCCL communicator; all ranks call it
        together.

        Later groups are not split, because only their members ask for them.
        """
        across = self.grid.layout.reduces_across
        for axis in (*(("dp_shard", "dp_replicate") if across else ("dp_cp",)), "tp"):
            peers = self.grid.peers(axis)
            if len(peers) > 1 and not self._is_world(peers):
                rows = self.grid.rows(axis)
                options = nccl_options("nccl", self.comm.max_ctas)
                group = dist.split_group(
                    split_ranks=rows, timeout=timeout, pg_options=options, group_desc=axis
                )
                assert isinstance(group, Group)
                self._made[peers, ""] = group
                open_collectives(group, self._device)
        assert dist.group.WORLD is not None
        dist.group.WORLD.bound_device_id = None  # otherwise torch splits every later group as well, and hangs


def _make_group(
    ranks: tuple[int, ...], rank: int, purpose: str, backend: str | None, max_ctas: int | None
) -> Group:
    world = dist.group.WORLD
    assert world is not None, "open_world comes first"
    store: Any = c10d._world.pg_map[world][1]
    backend = backend or c10d._world.pg_map[world][0]
    if backend == "gloo" and not isinstance(store, GlooStore):
        store = GlooStore(store)
    index, name, lazily = ranks.index(rank), _group_name(ranks, purpose), len(ranks) > MESH_RANKS
    met = (
        store.making_group(f"group {purpose or ranks}", ranks, index) if backend == "gloo" else nullcontext()
    )
    patient = low_priority_gloo_threads() if backend == "gloo" else nullcontext()
    with met, connecting(lazily=lazily), patient:
        group, _ = c10d._new_process_group_helper(
            len(ranks),
            index,
            list(ranks),
            backend,
            store,
            name,
            backend_options=nccl_options(backend, max_ctas),
            timeout=store.timeout,
            group_desc=purpose,
        )
    c10d._world.pg_group_ranks[group] = {member: place for place, member in enumerate(ranks)}
    _keep_store(group, store)
    if lazily and backend == "gloo":
        dist.barrier(group=group)  # neighbours are connected from here on
    return group


def _group_name(ranks: tuple[int, ...], purpose: str) -> GroupName:
    """Return a name that is the same on every member: purpose, members, and the number of such groups made
    so far."""
    members = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    name = f"{purpose or 'group'}:{members}:"
    return GroupName(name + str(sum(made.startswith(name) for made in c10d._world.pg_names.values())))
