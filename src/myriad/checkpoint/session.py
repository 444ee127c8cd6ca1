"""A run's checkpoints while it trains, as one rank sees them.

    session = Session(settings, place, ...)
    loaded = session.resume(rectangles)      the newest state that any tier has; None: there is none
    session.begin(rectangles)                memory for snapshots
    session.take(step, progress, wants)      after an update
    session.settle()                         before the next
    session.finish(step)                     until it is durable

Every rank calls the same at the same time, but for `settle`.
"""

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from myriad.checkpoint.claiming import Claimed
from myriad.checkpoint.config import CheckpointConfig, num_slots
from myriad.checkpoint.copies import choose_node, new_token
from myriad.checkpoint.dcp import make_pieces
from myriad.checkpoint.dcp_metadata import METADATA, make_metadata
from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.keeper_client import KeeperClient
from myriad.checkpoint.keeper_start import node_keeper
from myriad.checkpoint.load import LoadWorld
from myriad.checkpoint.memory import SnapshotMemory
from myriad.checkpoint.progress import decode_progress, progress_rectangle, write_progress
from myriad.checkpoint.random_state import load_random, random_rectangle, write_random
from myriad.checkpoint.search import Found, Search, gather_in_memory, whole_in_memory
from myriad.checkpoint.snapshot import Snapshots, Wants
from myriad.checkpoint.start_over import Past
from myriad.checkpoint.store import constant_manifest
from myriad.checkpoint.storing import Outcome
from myriad.checkpoint.wire import Closed
from myriad.comm.grid import RankGrid
from myriad.comm.layout import AXES
from myriad.errors import BadInputError
from myriad.jsonl import LineFile
from myriad.model.rectangle import Rectangle

__all__ = ["Loaded", "Session", "Settings"]

_Known = TypeVar("_Known")
_NO_PAST = Past()
_CLAIM_SECONDS = 60.0
"""How long a start waits for the storage, if it does not say sooner that it is away."""


_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
"""Between tries to store the last step."""
_FINISHES, _LOOK_SECONDS = 4, 0.5
"""How often a keeper may die under the last checkpoint, and how often ranks look whether theirs has."""


@dataclass(frozen=True)
class Settings:
    """What is the same on all ranks."""

    config: CheckpointConfig
    run: Path
    """Names the keeper: the same in all attempts."""
    folder: CheckpointFolder
    events: Path
    log: Path
    """Of the keeper."""
    job: str
    """Kept with each checkpoint, as ``job.toml``."""
    compares: bool = False
    """Replicas are compared: what can be gone back to is kept (`Session.trust`)."""


@dataclass(frozen=True)
class Loaded:
    """What a run goes on from."""

    step: int
    progress: dict[str, Any]
    source: str
    """``memory`` or ``storage``."""
    seconds: float
    problems: tuple[str, ...]
    """What was bad in this or in newer ones."""
    set_aside: tuple[str, ...]
    """New names of durable checkpoints that did not verify."""


class Session:
    """One rank's side."""

    def __init__(
        self,
        settings: Settings,
        grid: RankGrid,
        local_rank: int,
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        """``group``: all ranks, on the host; ``None``: this one is alone."""
        self._settings, self._grid, self._device = settings, grid, device
        self._events = LineFile(settings.events, marks_late=True)
        alone = LoadWorld(grid.rank, (tuple(range(grid.layout.world)),), group)
        places = alone.gather((_machine(), local_rank))
        self._world = LoadWorld(grid.rank, _nodes(places), group)
        self._first = local_rank == 0
        shared = _shares_machine(places, self._world)
        name = node_keeper(settings.run, self._world.node if shared else None)
        self._client = KeeperClient(name, starts=self._first, log=settings.log)
        self._progress = progress_rectangle({})
        self._random = random_rectangle(grid.rank, device)
        self._snapshots: Snapshots | None = None
        self.waited_seconds = 0.0
        """For which training has waited in `take` and `settle`."""
        self.attempt, self._claimed = 0, Claimed(0)
        self._resumed: int | None = None
        self._newest: int | None = None
        self._retries: _Retries | None = None
        self.set_aside_wrong: list[str] = []
        """New names of checkpoints that `distrust` has ruled out."""

    def claim(self, attempts_before: int) -> None:
        """A new attempt owns the run; earlier ones commit no more. A storage that takes nothing is asked
        again by the first checkpoint, if memory has a state to go on from; otherwise raises
        `BadInputError`."""
        url, claimed = self._settings.folder.storage.url, None
        if self._grid.rank == 0:
            seconds = min(_CLAIM_SECONDS, self._settings.config.timeout_seconds)
            run = None if self._settings.config.url is None else str(self._settings.run)
            claimed = self._client.claim(url, attempts_before, seconds, run)
        self._claimed = self._world.gather(claimed)[0]
        in_memory = whole_in_memory(gather_in_memory(self._client, self._world))
        if self._claimed.problem is not None and not in_memory:
            raise BadInputError("checkpoint.url", url, self._claimed.problem)
        self.attempt = max(self._claimed.attempt, 1 + max(in_memory.values(), default=0))

    @property
    def taken_from(self) -> str | None:
        """Another run that stored in the same place, and is not there any more."""
        return self._claimed.taken_from

    def agree(self, known: _Known) -> _Known:
        """Return what rank 0 knows, on every rank."""
        found: _Known = self._world.gather(known)[0]
        return found

    def distrust(self, newest: int) -> None:
        """States of later steps than ``newest`` are wrong, though they are what was written: `resume` loads
        none of them, and sets those that are stored aside."""
        self._newest = newest

    def resume(self, rectangles: Sequence[Rectangle], past: Past = _NO_PAST) -> Loaded | None:
        """Fill the rectangles with the newest state that memory or storage has, and verified; ``None``: the
        run begins at step 1. ``past``: what the run's files report. Raises `NoStateError` or
        `RunFailedError`, with nothing changed, when the run has trained and no state of it can be loaded."""
        began = time.perf_counter()
        wanted = [*rectangles, self._progress]
        settings, claimed = self._settings, self._claimed
        url = settings.folder.storage.url
        search = Search(settings.folder, claimed, self._client, self._world, settings.run, self._newest)
        found: Found = search.load(wanted, self._random, past)
        self.set_aside_wrong = found.wrong
        if found.step is None:
            return None
        self._resumed = found.step
        load_random(self._random, found.has_random, self._device)
        progress = decode_progress(self._progress.values)
        seconds = time.perf_counter() - began
        away = [f"{url} {claimed.problem}"] if claimed.problem else []
        problems = (*away, *found.problems)
        return Loaded(found.step, progress, found.source, seconds, problems, tuple(found.set_aside))

    def begin(self, rectangles: Sequence[Rectangle]) -> None:
        """``rectangles``: what this rank keeps, as views of memory that stays where it is."""
        own = [*rectangles, self._random]
        if self._grid.rank == 0:
            own.append(self._progress)
        pieces, config, world = make_pieces(own), self._settings.config, self._world
        pieces_of_rank = world.gather(pieces)
        several = len(world.ranks_of_node) > 1
        self._join = partial(
            self._client.join,
            pieces,
            attempt=self.attempt,
            rank=self._grid.rank,
            world=self._grid.layout.world,
            num_local=len(world.ranks_of_node[world.node]),
            num_slots=num_slots(config, several_nodes=several, compares=self._settings.compares),
            resumed=self._resumed,
        )
        try:
            memory = self._join()
        except Closed:  # the server ended since this rank connected to it; the state is loaded already
            self._client.reconnect()
            memory = self._join()
        ports = world.gather(self._client.port() if several and self._first else 0)
        addresses = self._addresses() if several else [""] * len(pieces_of_rank)
        token = world.gather(new_token())[0]
        if self._first:
            firsts = [ranks[0] for ranks in world.ranks_of_node]
            message = self._message() | {
                "nodes": [[addresses[rank], ports[rank]] for rank in firsts],
                "token": token,
                "constant": constant_manifest(pieces_of_rank, self._grid.layout.model_dump(mode="json")),
            }
            files = {METADATA: make_metadata(pieces_of_rank), "job.toml": self._settings.job.encode()}
            self._configuration = message, files if self._grid.rank == 0 else {}
            self._client.configure(*self._configuration)
        self._snapshots = Snapshots(self._client, memory, own, pieces, self._device, self._rejoin)
        if self._settings.compares:
            self._snapshots.trusted_step = self._resumed or 0
        world.gather(None)  # every keeper is ready for the others
        if several and config.copies_every and self._resumed is not None:
            # a host that came back empty has no copies yet: the next one to be lost may be another
            self.take(self._resumed, decode_progress(self._progress.values), Wants(copies=True))

    def _addresses(self) -> list[str]:
        """Where other nodes find each rank's. A machine on whose own list of names rank 0's is a loopback
        address (Debian writes 127.0.1.1 there) looks how it gets to one that is not."""
        addresses = self._world.gather(_own_address(os.environ.get("MASTER_ADDR", "127.0.0.1")))
        far = [address for address in addresses if not _is_loopback(address)]
        if 0 < len(far) < len(addresses):
            own = addresses[self._grid.rank]
            addresses = self._world.gather(_own_address(far[0]) if _is_loopback(own) else own)
        return addresses

    def _rejoin(self) -> SnapshotMemory:
        """The keeper has died: a new one, which is told what the old one was told."""
        self._client.reconnect()
        memory = self._join()
        if self._first:
            message, files = self._configuration
            node = self._world.node
            if several := len(self._world.ranks_of_node) > 1:
                message["nodes"][node][1] = self._client.port(message["nodes"][node][1])
            self._client.configure(message | {"moved": several}, files)
            why = self._client.why_killed or "died"
            problem = (
                f"the snapshot server of node {node} {why}, and its snapshots with it; a new one is there"
            )
            self._events.append({"time": time.time(), "event": "fault", "problem": problem})
        self._client.why_killed = ""
        return memory

    def _message(self) -> dict[str, Any]:
        config, world = self._settings.config, self._world
        copies = config.copies_every > 0
        here = world.ranks_of_node[world.node]
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
            "target_of": targets if copies else {},
        }

    def _peers(self, rank: int) -> frozenset[int]:
        """All ranks that share a parallel group with a rank."""
        grid = RankGrid(self._grid.layout, rank)
        return frozenset(peer for axis in AXES for peer in grid.peers(axis)) - {rank}

    def wants(self, step: int, *, is_last: bool, due: bool, memory_due: bool = True) -> Wants | None:
        """What a snapshot after ``step`` steps is for; ``None``: it is not wanted. ``due``, ``memory_due``:
        by time, to store it and to keep it in memory."""
        config, several = self._settings.config, len(self._world.ranks_of_node) > 1
        durable = is_last or due or bool(config.every and step % config.every == 0)
        copies = bool(several and config.copies_every and step % config.copies_every == 0)
        memory = bool(memory_due and config.memory_every and step % config.memory_every == 0)
        return Wants(durable, copies, is_last) if durable or copies or memory else None

    def parting_wants(self) -> Wants:
        """What the last snapshot of an attempt is for, with which another one is to begin."""
        several = len(self._world.ranks_of_node) > 1
        return Wants(copies=several and self._settings.config.copies_every > 0, last=True)

    def take(self, step: int, progress: Mapping[str, Any], wants: Wants) -> None:
        """Begins a snapshot; the state may not change before `settle`."""
        assert self._snapshots is not None, "begin comes first"
        began = time.perf_counter()
        self._snapshots.settle()
        write_random(self._random, self._device)
        self._tell_progress = partial(write_progress, self._progress.values, progress)
        self._snapshots.take(step, wants, self._tell_progress)
        self.waited_seconds += time.perf_counter() - began

    def trust(self, step: int) -> None:
        """Replicas are known to have held the same after this step: the newest snapshot up to it stays in
        memory, and the newest such checkpoint stored. Every rank calls it before the same snapshot."""
        if self._snapshots is not None and self._settings.compares:
            self._snapshots.trusted_step = max(step, self._snapshots.trusted_step)

    def settle(self) -> None:
        """Returns when the state may change."""
        if self._snapshots is not None:
            began = time.perf_counter()
            self._snapshots.settle()
            self.waited_seconds += time.perf_counter() - began

    def outcome(self, step: int) -> Outcome | None:
        """What became of a step so far, without waiting; for the ranks of rank 0's node."""
        return self._client.wait_stored(step, 0.0)

    def finish(self, step: int, *, retry: bool = False) -> str | None:
        """Wait until a step is durable, on all ranks: ``None``, or why it is not. The state may not change
        meanwhile: when a snapshot server dies, all ranks hand it to the new one. ``retry``: a step that
        cannot be stored is tried again until ``checkpoint.timeout_seconds`` have passed."""
        assert self._snapshots is not None, "begin comes first"
        deadline = time.monotonic() + self._settings.config.timeout_seconds
        lost = 0
        self._retries = _Retries(self._client, step, deadline, self._tell_retry) if retry else None
        while lost < _FINISHES:
            self._snapshots.await_told()
            own = self._outcome_by(step, deadline) if self._grid.rank == 0 else None
            outcome: Outcome | None = self._world.gather(own)[0]
            # asked after the outcome: a keeper that died is why it is a bad one
            is_gone = self._snapshots.lost_step == step or not self._client.is_alive()
            if any(self._world.gather(is_gone)):
                lost += 1
                self._snapshots.take(step, Wants(durable=True, last=True), self._tell_progress)
            elif outcome is not None:
                return outcome.problem
        return f"the checkpoint process died {lost} times while step {step} was stored"

    def _tell_retry(self, step: int, problem: str, seconds: float) -> None:
        line = {"time": time.time(), "event": "retry", "step": step, "problem": problem, "seconds": seconds}
        self._events.append(line)

    def hold(self, step: int, problem: str) -> None:
        """The last step could not be stored: the snapshot servers of all nodes keep it in memory after the
        ranks have ended. Reports on which nodes, and by which processes."""
        pid: int | None = None
        if self._first:
            with suppress(OSError):
                pid = self._client.hold(step)
        own = [socket.gethostname(), pid, self._world.node] if self._first else None
        servers = [
            {"node": node, "host": host, "pid": pid}
            for host, pid, node in filter(None, self._world.gather(own))
        ]
        if self._grid.rank == 0:
            line = {"time": time.time(), "event": "held", "step": step, "problem": problem}
            self._events.append(line | {"servers": servers})

    def _outcome_by(self, step: int, deadline: float) -> Outcome | None:
        """What became of a step; ``None``: ask again."""
        with suppress(Closed):
            outcome = self._client.wait_stored(step, _LOOK_SECONDS)
            if outcome is not None and self._retries is not None and self._retries.wants(outcome):
                return None
            if outcome is None and time.monotonic() > deadline:
                seconds = self._settings.config.timeout_seconds
                return Outcome(f"not stored after {seconds:g} s", time.monotonic())
            return outcome
        return None

    def close(self, *, for_good: bool = True) -> None:
        """This rank has ended well: nobody will need its memory, unless it is not ``for_good``."""
        if self._snapshots is not None:
            self._snapshots.close()
        if for_good:
            self._client.bye()


class _Retries:
    """Further tries to store the last step, at growing intervals, until the deadline."""

    def __init__(
        self,
        client: KeeperClient,
        step: int,
        deadline: float,
        tell: Callable[[int, str, float], None],
    ) -> None:
        """``tell(step, problem, seconds)`` reports, once, the problem and for how long saving is retried."""
        self._client, self._step, self._deadline, self._tell = client, step, deadline, tell
        self._is_told = False
        self._pause, self._next = _FIRST_RETRY_SECONDS, 0.0

    def wants(self, outcome: Outcome) -> bool:
        """Whether this outcome is not the last one: the step is being tried again, or will be."""
        now = time.monotonic()
        if outcome.problem is None or outcome.is_final or now >= self._deadline:
            return False
        if not self._is_told:
            self._is_told = True
            with suppress(OSError):
                self._tell(self._step, outcome.problem, self._deadline - now)
        if not self._next:
            self._next, self._pause = now + self._pause, min(2 * self._pause, _LAST_RETRY_SECONDS)
        if now >= self._next:
            self._next = 0.0
            self._client.store_again(self._step)
        else:
            time.sleep(min(_LOOK_SECONDS, self._next - now, self._deadline - now))
        return True


def _machine() -> str:
    """Equal for processes that reach the same abstract sockets."""
    return f"{socket.gethostname()}:{os.stat('/proc/self/ns/net').st_ino}"


def _nodes(places: Sequence[tuple[str, int]]) -> tuple[tuple[int, ...], ...]:
    """Ranks of each node: a node begins with its local rank 0."""
    nodes: list[list[int]] = []
    for rank, (_, local_rank) in enumerate(places):
        if local_rank == 0 or not nodes:
            nodes.append([])
        nodes[-1].append(rank)
    return tuple(map(tuple, nodes))


def _shares_machine(places: Sequence[tuple[str, int]], world: LoadWorld) -> bool:
    """Whether another node of the run is on this machine."""
    machines = [places[ranks[0]][0] for ranks in world.ranks_of_node]
    return machines.count(machines[world.node]) > 1


def _own_address(other: str) -> str:
    """By which another host that this one reaches gets here."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 1))
        address: str = probe.getsockname()[0]
        return address


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback
