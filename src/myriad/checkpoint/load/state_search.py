"""Find the state that a run resumes from: the newest step in memory or storage that verifies.

Steps are tried newest first. Parts of a step are read from memory before files, and each bad part is fetched
from its other locations. A damaged checkpoint is set aside only after a better state has been loaded. If
there is none, `start_over` decides, and the next attempt must find the same checkpoints.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from myriad.checkpoint.checkpoint_world import CheckpointWorld
from myriad.checkpoint.format.checkpoint_manifest import MANIFEST, CheckpointManifest
from myriad.checkpoint.load.collective_load import LoadCandidate, LoadResult, load_candidate
from myriad.checkpoint.load.read_plan import (
    LoadPart,
    MemoryLocation,
    ShardLocation,
    shards_in_manifest,
    shards_in_snapshot,
)
from myriad.checkpoint.load.start_over import RunHistory, check_restart
from myriad.checkpoint.snapshots.rank_entry import OpenedSnapshot
from myriad.checkpoint.snapshots.snapshot_client import SnapshotClient
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.checkpoint.storage.folder_owner import AcquiredFolder
from myriad.model.tensor_shard import TensorShard

__all__ = ["FoundState", "StateSearch", "complete_in_memory", "gather_in_memory"]

Summary = dict[str, Any]
_ReadManifest = tuple[CheckpointManifest | None, str, bool]
"""The manifest, why it cannot be read, and whether it is damaged."""
"""Description of one rank's snapshots in a node's memory; see
`myriad.checkpoint.snapshots.rank_entry.RankEntry.summary`."""


@dataclass
class FoundState:
    """Result of a search."""

    step: int | None = None
    source: str = ""
    """``memory`` if any part had a location in memory, else ``storage``."""
    has_random: bool = False
    has_optional: bool = True
    """Whether the state has the tensors that it may lack."""
    problems: list[str] = field(default_factory=list)
    """Parts and manifests that were bad or unreadable, in this step or in newer ones."""
    damaged: list[int] = field(default_factory=list)
    """Steps whose checkpoint differs from what was written, so that a retry would not help."""
    set_aside: list[str] = field(default_factory=list)
    """New names of the damaged checkpoints."""
    wrong: list[str] = field(default_factory=list)
    """New names of checkpoints of steps that are not trusted."""
    unreadable: bool = False
    """Whether some state could not be read and may be intact."""
    in_memory: list[str] = field(default_factory=list)
    """Text descriptions of the snapshots that each node holds."""


@dataclass(frozen=True)
class StateSearch:
    """The search of one attempt. Every rank makes the same search."""

    folder: CheckpointFolder
    acquired: AcquiredFolder
    """The content of the folder as found when the attempt acquired it."""
    client: SnapshotClient
    world: CheckpointWorld
    run: Path
    """Path of the run, used in messages."""
    newest: int | None = None
    """The last step to consider; ``None``: any."""
    optional: str | None = None
    """Prefix of the names of tensors that a state may lack; they keep their values then."""

    def load(self, shards: Sequence[TensorShard], random: TensorShard, history: RunHistory) -> FoundState:
        """Load the newest good state into the shards, then set damaged and wrong checkpoints aside.

        ``random`` is filled if the same rank of an equally large world saved it. If there is no good state,
        the run starts at step 1 if it may; otherwise raises `RunFailedError` or `NoStateError`, with nothing
        changed."""
        acquired, steps = self.acquired, self.acquired.steps
        trusted = [step for step in steps if self.newest is None or step <= self.newest]
        found = _find_newest(self, trusted, shards, random)
        if found.step is None:
            check_restart(
                history,
                self.run,
                self.folder.storage.url,
                problems=found.problems,
                in_memory=found.in_memory,
                committed=steps,
                damaged=acquired.damaged,
                unreadable=found.unreadable or acquired.problem is not None,
                newest=self.newest,
            )
        found.wrong = self._set_aside([step for step in steps if step not in trusted])
        found.set_aside = self._set_aside(found.damaged)
        return found

    def _set_aside(self, steps: Sequence[int]) -> list[str]:
        """Rename checkpoints. Return their new names on all ranks."""
        own = [_renamed(self.folder, step) for step in steps] if self.world.rank == 0 else []
        return self.world.from_first(own, list[str])


def _find_newest(
    search: StateSearch, durable: Sequence[int], shards: Sequence[TensorShard], random: TensorShard
) -> FoundState:
    folder, client, world, newest = search.folder, search.client, search.world, search.newest
    in_memory = gather_in_memory(client, world)
    complete, found = complete_in_memory(in_memory), FoundState(in_memory=_in_words(in_memory))
    steps = (step for step in {*durable, *complete} if newest is None or step <= newest)
    for step in sorted(steps, reverse=True):
        one = _StepSources(step, folder, client, in_memory[world.rank], world)
        candidate = one.candidate(step in durable, complete.get(step))
        found.problems += one.problems
        damaged = one.damaged
        if candidate is not None:
            result = _load(candidate, search.optional, shards, random, world, found)
            if result.good:
                return found
            damaged |= result.damaged
        elif step in complete:
            found.problems.append(
                f"memory: step {step}: the snapshots were dropped before they could be read"
            )
            found.unreadable = True
        found.unreadable |= not damaged
        if step in durable and damaged:
            found.damaged.append(step)
    return found


def _in_words(in_memory: Sequence[Sequence[Summary]]) -> list[str]:
    """Describe the snapshots of each node: steps and ranks."""
    lines = []
    for rank, snapshots in enumerate(in_memory):
        ranks_of_step: dict[tuple[int, int], set[int]] = defaultdict(set)
        for one in snapshots:
            for step in one["steps"]:
                ranks_of_step[step, one["world"]].add(one["rank"])
        lines += [
            f"step {step} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))} of "
            f"{world} (node of rank {rank})"
            for (step, world), ranks in sorted(ranks_of_step.items())
        ]
    return lines


def _load(
    candidate: LoadCandidate,
    optional: str | None,
    shards: Sequence[TensorShard],
    random: TensorShard,
    world: CheckpointWorld,
    found: FoundState,
) -> LoadResult:
    if optional is not None:
        found.has_optional = any(part.tensor.startswith(optional) for part in candidate.parts)
        shards = [one for one in shards if found.has_optional or not one.name.startswith(optional)]
    found.has_random = _has_random(candidate, random, world)
    wanted = [*shards, random] if found.has_random else shards
    result = load_candidate(candidate, wanted, world)
    found.problems += result.problems
    if result.good:
        in_memory = any(isinstance(part.locations[0], MemoryLocation) for part in candidate.parts)
        found.step, found.source = candidate.step, "memory" if in_memory else "storage"
    return result


def _renamed(folder: CheckpointFolder, step: int) -> str:
    """Set a checkpoint aside. Return its new name, or an error text if the rename failed."""
    try:
        return folder.set_aside(step)
    except OSError as error:
        return f"step-{step} could not be renamed: {error}"


def gather_in_memory(client: SnapshotClient, world: CheckpointWorld) -> list[list[Summary]]:
    """Return the snapshots of each node, at the index of the node's first rank."""
    is_first = world.rank == world.ranks_of_node[world.node][0]
    return world.gather(client.snapshots() if is_first else [], list[Summary])


def complete_in_memory(in_memory: Sequence[Sequence[Summary]]) -> dict[int, int]:
    """Return the steps of which snapshots have the shards of all ranks of an attempt, with the newest such
    attempt."""
    ranks: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for snapshots in in_memory:
        for one in snapshots:
            for step in one["steps"]:
                ranks[step, one["attempt"], one["world"]].update(one["holds"])
    complete: dict[int, int] = {}
    for (step, attempt, size), present in ranks.items():
        if len(present) == size:
            complete[step] = max(attempt, complete.get(step, -1))
    return complete


def _has_random(candidate: LoadCandidate, random: TensorShard, world: CheckpointWorld) -> bool:
    """Whether the saved world had as many ranks and saved the random states of every rank."""
    known = {part.tensor: part.full_shape for part in candidate.parts if part.tensor.startswith("random.")}
    fits = known.get(random.name) == random.full_shape and len(known) == world.size
    return all(world.gather(fits, bool))


class _StepSources:
    """The locations of one step's state."""

    def __init__(
        self,
        step: int,
        folder: CheckpointFolder,
        client: SnapshotClient,
        in_memory: Sequence[Summary],
        world: CheckpointWorld,
    ) -> None:
        """``in_memory``: snapshots of this node, given on its first rank."""
        self._step, self._folder, self._client, self._world = step, folder, client, world
        self._here = [one for one in in_memory if step in one["steps"]]
        self._known: dict[tuple[int, int, bool], OpenedSnapshot] = {}
        self._opening = threading.Lock()
        self.problems: list[str] = []
        self.damaged = False
        """Whether the manifest exists but differs from what was written."""

    def candidate(self, is_durable: bool, attempt: int | None) -> LoadCandidate | None:
        """Return the parts of the step and their locations; ``None``: there is nothing to load.

        ``attempt``: an attempt whose ranks all have the step in memory."""
        own: list[LoadPart] = []
        for one in self._here:
            with suppress(OSError):
                key = one["attempt"], one["rank"], one["copied"]
                opened = self._open(*key)
                own += shards_in_snapshot(opened.stored_shards, opened.hashes, self._world.node, *key)
        everywhere = [part for parts in self._world.gather(own, list[LoadPart]) for part in parts]
        manifest = self._manifest() if is_durable else None
        if manifest is not None:
            parts = _with_memory(shards_in_manifest(manifest), everywhere)
            return LoadCandidate(self._step, parts, self._folder.at_step(self._step), self._open)
        mine = [part for part in everywhere if _attempt_of(part) == attempt]
        parts = _with_memory(_one_of_each(mine), mine)
        return LoadCandidate(self._step, parts, None, self._open) if parts else None

    def _open(self, attempt: int, rank: int, copied: bool) -> OpenedSnapshot:
        key = attempt, rank, copied
        with self._opening:
            if key not in self._known:
                opened = self._client.open(attempt, rank, self._step, copied=copied)
                if opened is None:
                    raise OSError(f"the snapshot of rank {rank} is gone")
                self._known[key] = opened
            return self._known[key]

    def _manifest(self) -> CheckpointManifest | None:
        """Return the manifest, read by rank 0 and broadcast to all ranks; ``None``: not readable."""
        result: _ReadManifest = None, "", False
        if self._world.rank == 0:
            checkpoint = self._folder.at_step(self._step)
            try:
                result = checkpoint.manifest(), "", False
            except (OSError, ValueError, KeyError, TypeError) as error:
                problem = f"{checkpoint.name}/{MANIFEST}: not readable ({error})"
                result = None, problem, not isinstance(error, OSError)
        manifest, problem, self.damaged = self._world.from_first(result, _ReadManifest)
        if problem:
            self.problems.append(problem)
        return manifest


def _attempt_of(part: LoadPart) -> int | None:
    location = part.locations[0]
    return location.attempt if isinstance(location, MemoryLocation) else None


def _one_of_each(parts: Sequence[LoadPart]) -> list[LoadPart]:
    """Return each shard once, without locations."""
    by_place: dict[tuple[str, tuple[int, ...]], LoadPart] = {}
    for part in parts:
        by_place.setdefault((part.tensor, part.offsets), replace(part, locations=()))
    return list(by_place.values())


def _with_memory(parts: Sequence[LoadPart], in_memory: Sequence[LoadPart]) -> list[LoadPart]:
    """Add to each part its locations in memory with equal bytes, before its own locations.

    A rank's own snapshot precedes copies."""
    locations: dict[tuple[Any, ...], list[ShardLocation]] = defaultdict(list)
    for part in in_memory:
        locations[part.key] += part.locations
    return [
        replace(part, locations=(*sorted(locations[part.key], key=_is_copy), *part.locations))
        for part in parts
    ]


def _is_copy(location: ShardLocation) -> bool:
    return isinstance(location, MemoryLocation) and location.copied
