"""Which state a run goes on from: the newest step that memory or storage has, and that verifies.

Steps are tried newest first. Of one step, parts in memory are read before parts in files, and each bad part
is fetched from wherever else it is. What has no good copy is not tried again: a durable checkpoint is set
aside under a name that says so.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.keeper_client import KeeperClient
from myriad.checkpoint.load import Candidate, LoadWorld, Verdict, load_candidate
from myriad.checkpoint.manifest import MANIFEST, Manifest
from myriad.checkpoint.member import Opened
from myriad.checkpoint.sources import InMemory, Part, Place, parts_of_manifest, parts_of_snapshot
from myriad.errors import RunFailedError
from myriad.model.rectangle import Rectangle

__all__ = ["Found", "find_newest", "gather_in_memory", "set_aside", "whole_in_memory"]

Summary = dict[str, Any]
"""A snapshot of one rank in the memory of a node; see `myriad.checkpoint.member.Member.summary`."""


@dataclass
class Found:
    """What a search came to."""

    step: int | None = None
    source: str = ""
    """``memory`` when any part could come from there, else ``storage``."""
    has_random: bool = False
    problems: list[str] = field(default_factory=list)
    set_aside: list[str] = field(default_factory=list)


def find_newest(
    folder: CheckpointFolder,
    durable: Sequence[int],
    client: KeeperClient,
    rectangles: Sequence[Rectangle],
    random: Rectangle,
    world: LoadWorld,
    newest: int | None = None,
) -> Found:
    """Fills the rectangles, and ``random`` where it was saved by the same rank of as many; every rank calls
    it. ``durable``: steps of which the folder has a checkpoint; ``newest``: the last step to be considered.
    Raises `RunFailedError` when there is
    something, and nothing is good."""
    in_memory = gather_in_memory(client, world)
    whole, found = whole_in_memory(in_memory), Found()
    steps = (step for step in {*durable, *whole} if newest is None or step <= newest)
    for step in sorted(steps, reverse=True):
        search = _Step(step, folder, client, in_memory[world.rank], world)
        candidate = search.candidate(step in durable, whole.get(step))
        found.problems += search.problems
        damaged = search.damaged
        if candidate is not None:
            verdict = _load(candidate, rectangles, random, world, found)
            if verdict.good:
                return found
            damaged |= verdict.damaged
        if step in durable and damaged:
            found.set_aside += world.gather(set_aside(folder, step) if world.rank == 0 else "")[:1]
    if found.problems:
        raise RunFailedError(f"no checkpoint is good: {'; '.join(found.problems)}")
    return found


def _load(
    candidate: Candidate, rectangles: Sequence[Rectangle], random: Rectangle, world: LoadWorld, found: Found
) -> Verdict:
    found.has_random = _has_random(candidate, random, world)
    wanted = [*rectangles, random] if found.has_random else rectangles
    verdict = load_candidate(candidate, wanted, world)
    found.problems += verdict.problems
    if verdict.good:
        in_memory = any(isinstance(part.places[0], InMemory) for part in candidate.parts)
        found.step, found.source = candidate.step, "memory" if in_memory else "storage"
    return verdict


def set_aside(folder: CheckpointFolder, step: int) -> str:
    """Gives the new name of a checkpoint that is no good, or why it has none."""
    try:
        return folder.set_aside(step)
    except OSError as error:
        return f"step-{step} could not be renamed: {error}"


def gather_in_memory(client: KeeperClient, world: LoadWorld) -> list[list[Summary]]:
    """What the nodes have, each at its first rank."""
    is_first = world.rank == world.ranks_of_node[world.node][0]
    return world.gather(client.snapshots() if is_first else [])


def whole_in_memory(in_memory: Sequence[Sequence[Summary]]) -> dict[int, int]:
    """Steps of which all ranks of some attempt have a snapshot somewhere, with the newest such attempt."""
    ranks: dict[tuple[int, int, int], set[int]] = defaultdict(set)
    for snapshots in in_memory:
        for one in snapshots:
            for step in one["steps"]:
                ranks[step, one["attempt"], one["world"]].add(one["rank"])
    whole: dict[int, int] = {}
    for (step, attempt, size), present in ranks.items():
        if len(present) == size:
            whole[step] = max(attempt, whole.get(step, -1))
    return whole


def _has_random(candidate: Candidate, random: Rectangle, world: LoadWorld) -> bool:
    """Whether every rank finds the states of a rank of its number, and there were no more ranks."""
    known = {part.tensor: part.full_shape for part in candidate.parts if part.tensor.startswith("random.")}
    fits = known.get(random.name) == random.full_shape and len(known) == world.size
    return all(world.gather(fits))


class _Step:
    """What there is of one step."""

    def __init__(
        self,
        step: int,
        folder: CheckpointFolder,
        client: KeeperClient,
        in_memory: Sequence[Summary],
        world: LoadWorld,
    ) -> None:
        """``in_memory``: of this node, on its first rank."""
        self._step, self._folder, self._client, self._world = step, folder, client, world
        self._here = [one for one in in_memory if step in one["steps"]]
        self._known: dict[tuple[int, int, bool], Opened] = {}
        self._opening = threading.Lock()
        self.problems: list[str] = []
        self.damaged = False
        """The manifest is there, and is not what was written."""

    def candidate(self, is_durable: bool, attempt: int | None) -> Candidate | None:
        """``attempt``: one whose ranks all have the step in memory. ``None`` when there is nothing to load
        after all."""
        own: list[Part] = []
        for one in self._here:
            with suppress(OSError):
                key = one["attempt"], one["rank"], one["copied"]
                opened = self._open(*key)
                own += parts_of_snapshot(opened.pieces, opened.hashes, self._world.node, *key)
        everywhere = [part for parts in self._world.gather(own) for part in parts]
        manifest = self._manifest() if is_durable else None
        if manifest is not None:
            parts = _with_memory(parts_of_manifest(manifest), everywhere)
            return Candidate(self._step, parts, self._folder.at_step(self._step), self._open)
        mine = [part for part in everywhere if _attempt_of(part) == attempt]
        parts = _with_memory(_one_of_each(mine), mine)
        return Candidate(self._step, parts, None, self._open) if parts else None

    def _open(self, attempt: int, rank: int, copied: bool) -> Opened:
        key = attempt, rank, copied
        with self._opening:
            if key not in self._known:
                opened = self._client.open(attempt, rank, self._step, copied=copied)
                if opened is None:
                    raise OSError(f"the snapshot of rank {rank} is gone")
                self._known[key] = opened
            return self._known[key]

    def _manifest(self) -> Manifest | None:
        """Read by rank 0, told to all."""
        result: tuple[Manifest | None, str, bool] = None, "", False
        if self._world.rank == 0:
            checkpoint = self._folder.at_step(self._step)
            try:
                result = checkpoint.manifest(), "", False
            except (OSError, ValueError, KeyError, TypeError) as error:
                told = f"{checkpoint.name}/{MANIFEST}: not readable ({error})"
                result = None, told, not isinstance(error, OSError)
        manifest, problem, self.damaged = self._world.gather(result)[0]
        if problem:
            self.problems.append(problem)
        return manifest


def _attempt_of(part: Part) -> int | None:
    place = part.places[0]
    return place.attempt if isinstance(place, InMemory) else None


def _one_of_each(parts: Sequence[Part]) -> list[Part]:
    """Pieces that are in several places once, with none of them."""
    by_place: dict[tuple[str, tuple[int, ...]], Part] = {}
    for part in parts:
        by_place.setdefault((part.tensor, part.offsets), replace(part, places=()))
    return list(by_place.values())


def _with_memory(parts: Sequence[Part], in_memory: Sequence[Part]) -> list[Part]:
    """The parts with every place in memory that has the same bytes of them, before their own: own snapshots
    before copies."""
    places: dict[tuple[Any, ...], list[Place]] = defaultdict(list)
    for part in in_memory:
        places[part.key] += part.places
    return [replace(part, places=(*sorted(places[part.key], key=_is_copy), *part.places)) for part in parts]


def _is_copy(place: Place) -> bool:
    return isinstance(place, InMemory) and place.copied
