"""Which state a run goes on from: the newest step that memory or storage has, and that verifies.

Steps are tried newest first. Of one step, parts in memory are read before parts in files, and each bad part
is fetched from wherever else it is. A damaged checkpoint is set aside once a better state is loaded, not
before: without one `myriad.checkpoint.start_over` decides, and the next attempt must find the same.
"""

import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from myriad.checkpoint.claiming import Claimed
from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.keeper_client import KeeperClient
from myriad.checkpoint.load import Candidate, LoadWorld, Verdict, load_candidate
from myriad.checkpoint.manifest import MANIFEST, Manifest
from myriad.checkpoint.member import Opened
from myriad.checkpoint.sources import InMemory, Part, Place, parts_of_manifest, parts_of_snapshot
from myriad.checkpoint.start_over import Past, check_start_over
from myriad.model.rectangle import Rectangle

__all__ = ["Found", "Search", "gather_in_memory", "whole_in_memory"]

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
    """What was bad or could not be read, in this or in newer steps."""
    damaged: list[int] = field(default_factory=list)
    """Steps whose checkpoint is not what was written: trying again would not help."""
    set_aside: list[str] = field(default_factory=list)
    """New names of those."""
    wrong: list[str] = field(default_factory=list)
    """New names of checkpoints of steps that are not trusted."""
    unreadable: bool = False
    """Some state could not be read, and may be good."""
    in_memory: list[str] = field(default_factory=list)
    """What each node holds, in words."""


@dataclass(frozen=True)
class Search:
    """The search of one start of the ranks; every rank makes the same."""

    folder: CheckpointFolder
    claimed: Claimed
    """What the folder holds."""
    client: KeeperClient
    world: LoadWorld
    run: Path
    """The folder of the run, which messages name."""
    newest: int | None = None
    """The last step to be considered; ``None``: any."""

    def load(self, rectangles: Sequence[Rectangle], random: Rectangle, past: Past) -> Found:
        """Fill the rectangles, and ``random`` where it was saved by the same rank of as many, with the newest
        good state, then set damaged and wrong checkpoints aside. Without such a state the run begins at step
        1, where it may, or this raises `RunFailedError` with nothing changed."""
        claimed, steps = self.claimed, self.claimed.steps
        trusted = [step for step in steps if self.newest is None or step <= self.newest]
        found = _find_newest(self, trusted, rectangles, random)
        if found.step is None:
            check_start_over(
                past,
                self.run,
                self.folder.storage.url,
                problems=found.problems,
                in_memory=found.in_memory,
                committed=steps,
                damaged=claimed.damaged,
                unreadable=found.unreadable or claimed.problem is not None,
                newest=self.newest,
            )
        found.wrong = self._set_aside([step for step in steps if step not in trusted])
        found.set_aside = self._set_aside(found.damaged)
        return found

    def _set_aside(self, steps: Sequence[int]) -> list[str]:
        """Rename checkpoints; gives their new names, on all ranks."""
        own = [_renamed(self.folder, step) for step in steps] if self.world.rank == 0 else []
        renamed: list[str] = self.world.gather(own)[0]
        return renamed


def _find_newest(
    search: Search, durable: Sequence[int], rectangles: Sequence[Rectangle], random: Rectangle
) -> Found:
    folder, client, world, newest = search.folder, search.client, search.world, search.newest
    in_memory = gather_in_memory(client, world)
    whole, found = whole_in_memory(in_memory), Found(in_memory=_in_words(in_memory))
    steps = (step for step in {*durable, *whole} if newest is None or step <= newest)
    for step in sorted(steps, reverse=True):
        one = _Step(step, folder, client, in_memory[world.rank], world)
        candidate = one.candidate(step in durable, whole.get(step))
        found.problems += one.problems
        damaged = one.damaged
        if candidate is not None:
            verdict = _load(candidate, rectangles, random, world, found)
            if verdict.good:
                return found
            damaged |= verdict.damaged
        elif step in whole:
            found.problems.append(
                f"memory: step {step}: the snapshots were dropped before they could be read"
            )
            found.unreadable = True
        found.unreadable |= not damaged
        if step in durable and damaged:
            found.damaged.append(step)
    return found


def _in_words(in_memory: Sequence[Sequence[Summary]]) -> list[str]:
    """What each node holds: steps, and of which ranks."""
    told = []
    for rank, snapshots in enumerate(in_memory):
        ranks_of_step: dict[tuple[int, int], set[int]] = defaultdict(set)
        for one in snapshots:
            for step in one["steps"]:
                ranks_of_step[step, one["world"]].add(one["rank"])
        told += [
            f"step {step} of rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))} of "
            f"{world} (node of rank {rank})"
            for (step, world), ranks in sorted(ranks_of_step.items())
        ]
    return told


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


def _renamed(folder: CheckpointFolder, step: int) -> str:
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
