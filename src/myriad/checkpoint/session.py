"""Checkpoints and in-memory snapshots of a training run, from one rank's side.

    session = Session(settings, grid, ...)
    loaded = session.resume(shards)          load the newest state of any tier; None: there is none
    session.begin(shards)                    allocate memory for snapshots
    session.take(step, progress, purpose)    start a snapshot after an optimizer update
    session.settle()                         wait for it before the next update
    session.finish(step)                     wait until the step is durable

These calls are collective: every rank makes them in the same order. `settle` alone is local.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from myriad.checkpoint.blocking_store import BlockingStore
from myriad.checkpoint.checkpoint_files import constant_manifest
from myriad.checkpoint.checkpoint_world import (
    CheckpointWorld,
    machine_id,
    rank_addresses,
    ranks_of_nodes,
    shares_machine,
)
from myriad.checkpoint.config import CheckpointConfig, num_slots
from myriad.checkpoint.format.dcp_archive import make_stored_shards
from myriad.checkpoint.format.dcp_metadata import METADATA, make_metadata
from myriad.checkpoint.format.stored_shard import StoredShard, without_mirrors
from myriad.checkpoint.format.trainer_state import (
    decode_progress,
    load_random,
    progress_shard,
    random_shard,
    write_progress,
    write_random,
)
from myriad.checkpoint.load.start_over import RunHistory
from myriad.checkpoint.load.state_search import (
    FoundState,
    StateSearch,
    complete_in_memory,
    gather_in_memory,
)
from myriad.checkpoint.snapshots.checkpoint_writer import StoreOutcome
from myriad.checkpoint.snapshots.peer_servers import choose_holders, choose_node, new_token
from myriad.checkpoint.snapshots.server_start import StartServer, node_server_name, start_snapshot_server
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient
from myriad.checkpoint.snapshots.snapshot_memory import SnapshotMemory
from myriad.checkpoint.snapshots.snapshot_taker import SnapshotPurpose, SnapshotTaker
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.checkpoint.storage.folder_owner import AcquiredFolder
from myriad.comm.grid import RankGrid
from myriad.comm.layout import AXES, Layout
from myriad.errors import BadInputError
from myriad.model.tensor_shard import TensorShard
from myriad.system.jsonl import LineFile
from myriad.wire.socket_channel import Closed

__all__ = ["CheckpointSession", "LoadedState", "SessionSettings"]

_Known = TypeVar("_Known")
_NO_HISTORY = RunHistory()
_ACQUIRE_SECONDS = 60.0
"""How long a start waits for storage to answer. An error that the storage reports sooner ends the wait."""


@dataclass(frozen=True)
class SessionSettings:
    """Checkpoint settings that are equal on all ranks."""

    config: CheckpointConfig
    run: Path
    """Path of the run. It names the snapshot server, and is the same in all attempts."""
    folder: CheckpointFolder
    events: Path
    log: Path
    """Log file of the snapshot server."""
    job: str
    """The job as TOML; each checkpoint stores it as ``job.toml``."""
    compares: bool = False
    """Whether replicas are compared. If so, the newest trusted snapshot is kept
    (`CheckpointSession.trust`)."""
    holders: int = 1
    """Nodes whose snapshots may hold each part of the state (`JobValues.snapshot_holders`)."""
    encrypts: bool = False
    """Whether copies of snapshots between nodes are encrypted."""
    start: StartServer = start_snapshot_server
    """Starts the snapshot server of the node."""


@dataclass(frozen=True)
class LoadedState:
    """The state that a run resumes from."""

    step: int
    progress: dict[str, Any]
    source: str
    """Tier that the state was loaded from: ``memory`` or ``storage``."""
    seconds: float
    problems: tuple[str, ...]
    """Problems of this checkpoint and of newer ones that could not be loaded."""
    set_aside: tuple[str, ...]
    """New names of durable checkpoints that failed verification."""
    has_optional: bool = True
    """Whether the state has the tensors that it may lack."""


class CheckpointSession:
    """Take, store and load the checkpoints of one rank."""

    def __init__(
        self,
        settings: SessionSettings,
        grid: RankGrid,
        local_rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """``group``: a host (CPU) process group of all ranks; ``None`` in a run with one rank."""
        self._settings, self._grid, self._device = settings, grid, device
        self._events = LineFile(settings.events, marks_late=True)
        alone = CheckpointWorld(grid.rank, (tuple(range(grid.layout.world)),), group)
        machines = alone.gather((machine_id(), local_rank), tuple[str, int])
        self._world = CheckpointWorld(grid.rank, ranks_of_nodes(machines), group)
        self._first = local_rank == 0
        shared = shares_machine(machines, self._world)
        name = node_server_name(settings.run, self._world.node if shared else None)
        self._client = SnapshotClient(name, starts=self._first, log=settings.log, start=settings.start)
        timeout_seconds = settings.config.timeout_seconds
        self._blocking_store = BlockingStore(self._client, self._world, self._events, timeout_seconds)
        self._progress = progress_shard({})
        self._random = random_shard(grid.rank, device)
        self._snapshots: SnapshotTaker | None = None
        self._sends_copies = self._has_mirrors = False
        self.waited_seconds = 0.0
        """Seconds for which training has waited in `take` and `settle`."""
        self.attempt, self._acquired = 0, AcquiredFolder(0)
        self._resumed: int | None = None
        self._newest: int | None = None
        self.set_aside_wrong: list[str] = []
        """New names of checkpoints that `exclude_after` has ruled out."""

    def acquire(self, attempts_before: int) -> None:
        """Make a new attempt the owner of the run; earlier attempts can no longer commit.

        If the storage fails and memory has a complete state, the first checkpoint tries again to acquire the
        folder. Raises `BadInputError` if the storage fails and memory has no such state."""
        url, acquired = self._settings.folder.storage.url, AcquiredFolder(0)
        if self._grid.rank == 0:
            seconds = min(_ACQUIRE_SECONDS, self._settings.config.timeout_seconds)
            run = None if self._settings.config.url is None else str(self._settings.run)
            acquired = self._client.acquire(url, attempts_before, seconds, run)
        self._acquired = self._world.from_first(acquired, AcquiredFolder)
        in_memory = complete_in_memory(gather_in_memory(self._client, self._world))
        if self._acquired.problem is not None and not in_memory:
            raise BadInputError("checkpoint.url", url, self._acquired.problem)
        self.attempt = max(self._acquired.attempt, 1 + max(in_memory.values(), default=0))

    @property
    def taken_from(self) -> str | None:
        """Path of another run that stored in the same folder and no longer exists."""
        return self._acquired.taken_from

    def agree(self, known: _Known, kind: Any) -> _Known:
        """Return rank 0's value, of type ``kind``, on every rank."""
        return self._world.from_first(known, kind)

    def exclude_after(self, newest: int) -> None:
        """Rule out states of steps after ``newest``: their bytes are intact but their values are wrong.

        `resume` loads none of these states and sets the stored ones aside."""
        self._newest = newest

    def resume(
        self,
        shards: Sequence[TensorShard],
        history: RunHistory = _NO_HISTORY,
        *,
        optional: str | None = None,
    ) -> LoadedState | None:
        """Load the newest verified state from memory or storage into the tensor shards.

        Return ``None`` if the run starts at step 1. ``history`` is the progress that the run's files report.
        ``optional``: prefix of the names of tensors that a state may lack.
        Raises `NoStateError` or `RunFailedError`, with nothing changed, if the run has trained and no state
        can be loaded."""
        began = time.perf_counter()
        wanted = [*shards, self._progress]
        settings, acquired = self._settings, self._acquired
        url = settings.folder.storage.url
        search = StateSearch(
            settings.folder, acquired, self._client, self._world, settings.run, self._newest, optional
        )
        found: FoundState = search.load(wanted, self._random, history)
        self.set_aside_wrong = found.wrong
        if found.step is None:
            return None
        self._resumed = found.step
        load_random(self._random, found.has_random, self._device)
        progress = decode_progress(self._progress.values)
        seconds = time.perf_counter() - began
        away = [f"{url} {acquired.problem}"] if acquired.problem else []
        problems = (*away, *found.problems)
        aside = tuple(found.set_aside)
        return LoadedState(found.step, progress, found.source, seconds, problems, aside, found.has_optional)

    def begin(
        self,
        shards: Sequence[TensorShard],
        shards_of: Callable[[int], Iterable[TensorShard]] = lambda _: (),
    ) -> None:
        """Join the snapshot server and allocate snapshot memory.

        ``shards``: the tensor shards of this rank, as views of memory that stays in place. ``shards_of``:
        those of another rank that holds the same state, as views of this rank's memory."""
        config, world, rank = self._settings.config, self._world, self._grid.rank
        holders = _holders_of_rank(self._grid.layout, world.ranks_of_node, self._settings.holders)
        mirrored = [other for other, found in enumerate(holders) if rank in found]
        own = [*shards, self._random, *((self._progress,) if rank == 0 else ())]
        mirrors = [shard for other in mirrored for shard in shards_of(other)]
        if 0 in mirrored:
            mirrors.append(self._progress)
        stored_shards = [
            replace(shard, is_mirror=number >= len(own))
            for number, shard in enumerate(make_stored_shards([*own, *mirrors]))
        ]
        own += mirrors
        shards_of_rank = world.gather(without_mirrors(stored_shards), list[StoredShard])
        several = len(world.ranks_of_node) > 1
        copied = {one for one, found in enumerate(holders) if several and config.copies_every and not found}
        self._sends_copies, self._has_mirrors = bool(copied), any(holders)
        self._join = partial(
            self._client.join,
            stored_shards,
            attempt=self.attempt,
            rank=rank,
            holds=[rank, *mirrored],
            world=self._grid.layout.world,
            num_local=len(world.ranks_of_node[world.node]),
            num_slots=self._num_slots(),
            resumed=self._resumed,
        )
        try:
            memory = self._join()
        except Closed:  # the server ended since this rank connected to it; the state is loaded already
            self._client.reconnect()
            memory = self._join()
        addresses = rank_addresses(world) if several else [""] * len(shards_of_rank)
        listens, encrypts = several and self._first, self._settings.encrypts
        port = self._client.port(addresses[world.rank], encrypts=encrypts) if listens else 0
        ports = world.gather(port, int)
        token = world.from_first(new_token(), str)
        if self._first:
            firsts = [ranks[0] for ranks in world.ranks_of_node]
            message = self._message(copied) | {
                "nodes": [[addresses[rank], ports[rank]] for rank in firsts],
                "token": token,
                "constant": constant_manifest(shards_of_rank, self._grid.layout.model_dump(mode="json")),
            }
            files = {METADATA: make_metadata(shards_of_rank), "job.toml": self._settings.job.encode()}
            self._configuration = message, files if self._grid.rank == 0 else {}
            self._client.configure(*self._configuration)
        self._snapshots = SnapshotTaker(self._client, memory, own, stored_shards, self._device, self._rejoin)
        if self._settings.compares:
            self._snapshots.trusted_step = self._resumed or 0
        world.barrier()  # every snapshot server is ready for requests of the others
        if self._resumed is not None and (self._sends_copies or self._has_mirrors):
            # A host that was replaced has nothing yet, and another host may fail next.
            purpose = SnapshotPurpose(copies=self._sends_copies)
            self.take(self._resumed, decode_progress(self._progress.values), purpose)

    def _num_slots(self) -> int:
        config = self._settings.config
        if self._has_mirrors and not config.memory_every:
            config = config.model_copy(update={"memory_every": 1})  # of mirrors, at checkpoint.copies_every
        return num_slots(config, sends_copies=self._sends_copies, compares=self._settings.compares)

    def _rejoin(self) -> SnapshotMemory:
        """Replace a snapshot server that died: join a new one and configure it like the old one."""
        self._client.reconnect()
        memory = self._join()
        if self._first:
            message, files = self._configuration
            node = self._world.node
            if several := len(self._world.ranks_of_node) > 1:
                message["nodes"][node][1] = self._client.port(
                    *message["nodes"][node], encrypts=self._settings.encrypts
                )
            self._client.configure(message | {"moved": several}, files)
            why = self._client.why_killed or "died"
            problem = (
                f"the snapshot server of node {node} {why}, and its snapshots with it; a new one is there"
            )
            self._events.append({"time": time.time(), "event": "fault", "problem": problem})
        self._client.why_killed = ""
        return memory

    def _message(self, copied: Collection[int]) -> dict[str, Any]:
        """``copied``: the ranks whose snapshots are copied to another node."""
        config, world = self._settings.config, self._world
        here = [rank for rank in world.ranks_of_node[world.node] if rank in copied]
        targets = {rank: choose_node(world.node, world.ranks_of_node, self._peers(rank)) for rank in here}
        return {
            "url": self._settings.folder.storage.url,
            "events": str(self._settings.events),
            "linger_seconds": config.linger_seconds,
            "keep": config.keep,
            "max_age_seconds": None if config.keep_days is None else config.keep_days * 86400,
            "alarm_after": config.alarm_after,
            "node": world.node,
            "moved": False,
            "encrypt": self._settings.encrypts,
            "target_of": targets,
        }

    def _peers(self, rank: int) -> frozenset[int]:
        """Return all ranks that share a parallel group with ``rank``, without ``rank`` itself."""
        grid = RankGrid(self._grid.layout, rank)
        return frozenset(peer for axis in (*AXES, "ep", "expert_dp") for peer in grid.peers(axis)) - {rank}

    def purpose(
        self, step: int, *, is_last: bool, due: bool, memory_due: bool = True
    ) -> SnapshotPurpose | None:
        """Return the purposes of a snapshot after ``step`` steps; ``None``: no snapshot is due.

        ``due`` and ``memory_due``: whether the time interval for storage and for memory has passed."""
        config = self._settings.config
        durable = is_last or due or bool(config.every and step % config.every == 0)
        apart = bool(config.copies_every and step % config.copies_every == 0)
        copies = self._sends_copies and apart
        memory = bool(memory_due and config.memory_every and step % config.memory_every == 0)
        memory |= self._has_mirrors and apart
        return SnapshotPurpose(durable, copies, is_last) if durable or copies or memory else None

    def final_purpose(self) -> SnapshotPurpose:
        """Return the purposes of the last snapshot of an attempt that a new attempt will replace."""
        return SnapshotPurpose(copies=self._sends_copies, last=True)

    def take(self, step: int, progress: Mapping[str, Any], purpose: SnapshotPurpose) -> None:
        """Start a snapshot; the state must not change before `settle` returns."""
        assert self._snapshots is not None, "begin comes first"
        began = time.perf_counter()
        self._snapshots.settle()
        write_random(self._random, self._device)
        self._write_progress = partial(write_progress, self._progress.values, progress)
        self._snapshots.take(step, purpose, self._write_progress)
        self.waited_seconds += time.perf_counter() - began

    def trust(self, step: int) -> None:
        """Record that replicas were equal after ``step``.

        The newest snapshot up to ``step`` stays in memory, and the newest such checkpoint stays stored. Every
        rank calls `trust` before the same snapshot."""
        if self._snapshots is not None and self._settings.compares:
            self._snapshots.trusted_step = max(step, self._snapshots.trusted_step)

    def settle(self) -> None:
        """Wait until the snapshot is copied and the state may change."""
        if self._snapshots is not None:
            began = time.perf_counter()
            self._snapshots.settle()
            self.waited_seconds += time.perf_counter() - began

    def outcome(self, step: int) -> StoreOutcome | None:
        """Return the storage outcome of a step so far, without waiting. Valid on ranks of rank 0's node."""
        return self._client.wait_stored(step, 0.0)

    def finish(self, step: int, *, retry: bool = False) -> str | None:
        """Wait until a step is durable. Return ``None``, or the reason for failure, on all ranks.

        The state must not change meanwhile: if a snapshot server dies, all ranks copy it to the new one.
        ``retry``: retry a failed store until ``checkpoint.timeout_seconds`` have passed."""
        assert self._snapshots is not None, "begin comes first"
        return self._blocking_store.finish(step, self._snapshots, self._write_progress, retry=retry)

    def hold(self, step: int, problem: str) -> None:
        """Have all snapshot servers keep a last step that could not be stored after the ranks exit."""
        self._blocking_store.hold(step, problem)

    def leave(self) -> None:
        """End this rank's session after an error: the snapshot server stores the newest snapshot."""
        if self._snapshots is not None:
            self._snapshots.close()
        self._client.leave(self._settings.config.timeout_seconds)

    def close(self, *, for_good: bool = True) -> None:
        """End this rank's session after a clean exit. Snapshot memory stays unless ``for_good``."""
        if self._snapshots is not None:
            self._snapshots.close()
        if for_good:
            self._client.bye()


def _holders_of_rank(layout: Layout, ranks_of_node: Sequence[Sequence[int]], number: int) -> list[list[int]]:
    """Return for each rank the others whose snapshots hold its shards too; see `choose_holders`."""
    nodes = {rank: node for node, ranks in enumerate(ranks_of_node) for rank in ranks}
    node_of_rank = [nodes[rank] for rank in range(layout.world)]
    rows = RankGrid(layout, 0).rows("dp_replicate") if number > 1 else []
    found: list[list[int]] = [[] for _ in node_of_rank]
    for row in rows:
        for rank in row:
            found[rank] = choose_holders(rank, row, node_of_rank, number)
    return found
