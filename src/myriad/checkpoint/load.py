"""Ranks load a checkpoint together: from the memory of their nodes, from durable storage, or from both.

    candidates     every step that some place has whole, the newest first
    of one         all ranks plan alike who reads what (`myriad.checkpoint.sources`); a reader checks the hash
                   of every part and sends it on along a tree to those who need it
    a bad part     is fetched from another place; where there is none the next older step is tried, and the
                   durable checkpoint is set aside

Nothing of a candidate counts until every part of it was good.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from myriad.checkpoint.dcp import dtype_name
from myriad.checkpoint.folder import Checkpoint
from myriad.checkpoint.manifest import hash_of
from myriad.checkpoint.member import Opened
from myriad.checkpoint.sources import Block, InFile, InMemory, Needs, Part, Place, plan_blocks
from myriad.checkpoint.storage import CACHE_BYTES
from myriad.errors import RunFailedError
from myriad.model.rectangle import Rectangle

__all__ = ["Candidate", "LoadWorld", "load_candidate"]

_RETRY_SECONDS = (0.2, 1.0)
"""Between tries to read what should be there."""
_READ_AHEAD, _READERS = 4, 2
"""Blocks that a reader holds before they are sent on, and its threads."""


@dataclass(frozen=True)
class LoadWorld:
    """The ranks that load together."""

    rank: int = 0
    ranks_of_node: tuple[tuple[int, ...], ...] = ((0,),)
    group: dist.ProcessGroup | None = None
    """All of them, on the host; ``None``: one."""

    @property
    def node(self) -> int:
        """Of this rank."""
        return next(node for node, ranks in enumerate(self.ranks_of_node) if self.rank in ranks)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.ranks_of_node))

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, on every rank."""
        if self.group is None:
            return [value]
        found = [None] * self.group.size()
        dist.all_gather_object(found, value, self.group)
        return found


@dataclass
class Candidate:
    """One step's state, and where its parts are."""

    step: int
    parts: list[Part]
    durable: Checkpoint | None
    opened: Callable[[int, int, bool], Opened] | None = None
    """Snapshots of this rank's node by attempt, rank and whether they are copies; raises ``OSError``."""


@dataclass
class Verdict:
    """What loading a candidate came to."""

    problems: list[str]
    """Whatever was bad, had from elsewhere or not."""
    good: bool = False
    """Every rectangle is filled with what was written."""
    damaged: bool = False
    """Bytes are missing or others than were written; not: could not be read now."""


def _check_same_model(parts: Sequence[Part], rectangles: Sequence[Rectangle], world: LoadWorld) -> None:
    """Refuses, before anything is read, a checkpoint in which a tensor is missing or has another shape, on
    any rank."""
    shapes = {part.tensor: part.full_shape for part in parts}
    other = {part.name: part.full_shape for part in rectangles if shapes.get(part.name) != part.full_shape}
    found = {name: shape for own in world.gather(other) for name, shape in own.items()}
    if found:
        name, shape = next(iter(found.items()))
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        there = shapes.get(name, "nothing")
        raise RunFailedError(f"checkpoint of another model: {name} is {shape} here, {there} there{more}")


def load_candidate(candidate: Candidate, rectangles: Sequence[Rectangle], world: LoadWorld) -> Verdict:
    """Fills the rectangles; every rank calls it. Raises `RunFailedError` for a checkpoint of another
    model."""
    _check_same_model(candidate.parts, rectangles, world)
    needs = Needs([(part.name, tuple(part.offsets), tuple(part.values.shape)) for part in rectangles])
    uncovered = [f"{name} is not whole" for name in needs.uncovered(candidate.parts)]
    if any(found := world.gather(uncovered)):
        return Verdict(_unique(found), damaged=True)
    needed_by = world.gather(needs.of(candidate.parts))
    struck_out: frozenset[tuple[int, Place]] = frozenset()
    verdict = Verdict([])
    wanted = needed_by
    while True:
        near = candidate.durable is not None and candidate.durable.storage.is_near
        blocks, lost = plan_blocks(candidate.parts, wanted, world.ranks_of_node, struck_out, near_files=near)
        if lost:
            return verdict
        bad = _Loading(candidate, rectangles, needs, world).go(blocks)
        found = world.gather(bad)
        if not any(found):
            verdict.good = True
            return verdict
        flat = list(itertools.chain.from_iterable(found))
        verdict.problems += [one.problem for one in flat]
        verdict.damaged |= any(one.lasts for one in flat)
        struck_out |= {(one.number, one.place) for one in flat}
        again = {one.number for one in flat}
        wanted = [[number for number in numbers if number in again] for numbers in needed_by]


def _unique(lists: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


class Bad(NamedTuple):
    """A part that could not be had from a place."""

    number: int
    place: Place
    problem: str
    lasts: bool
    """Trying again would not help."""


class _Loading:
    """One walk of one rank through the blocks."""

    def __init__(
        self, candidate: Candidate, rectangles: Sequence[Rectangle], needs: Needs, world: LoadWorld
    ) -> None:
        self._candidate, self._rectangles, self._needs, self._world = candidate, rectangles, needs, world
        self._bad: list[Bad] = []

    def go(self, blocks: Sequence[Block]) -> list[Bad]:
        """Reads, sends, receives and fills; gives what was bad where this rank read."""
        rank = self._world.rank
        mine = [block for block in blocks if rank in block.ranks]
        alone = [block for block in mine if block.reader is None or block.ranks == (rank,)]
        mine = [block for block in mine if block.reader is not None and block.ranks != (rank,)]
        own = [block for block in mine if block.reader == rank]
        with ThreadPoolExecutor(_READERS) as pool:
            reading = _ahead(pool, self._read, own)
            for block in mine:
                content = next(reading) if block.reader == rank else self._receive(block)
                self._send_on(block, content)
                if rank in block.needers:
                    self._fill(block, content)
            list(pool.map(self._take, alone))
        return self._bad

    def _take(self, block: Block) -> None:
        """What nobody else waits for; a large part goes straight to where it belongs, where that is
        possible."""
        target = self._whole_target(block.numbers[0]) if len(block.numbers) == 1 else None
        content = self._read(block, target)
        if target is None:
            self._fill(block, content)

    def _whole_target(self, number: int) -> memoryview | None:
        """Live memory that is just this part, to read into."""
        part = self._candidate.parts[number]
        hits = list(self._needs.hits(part))
        if len(hits) != 1 or hits[0][1:] != (part.offsets, part.shape) or not part.num_bytes:
            return None
        target = self._rectangles[hits[0][0]]
        inside = _inside(target.values.detach(), target.offsets, part.offsets, part.shape)
        same = inside.device.type == "cpu" and dtype_name(inside.dtype) == part.dtype
        if not (same and inside.is_contiguous()):
            return None
        return inside.view(-1).view(torch.uint8).numpy().data

    def _read(self, block: Block, into: memoryview | None = None) -> list[memoryview]:
        """The bytes of each part, checked; ``into``: where those of the only one go."""
        parts = [self._candidate.parts[number] for number in block.numbers]
        lasts = True
        try:
            found, hashes = self._bytes_surely(block, into)
        except OSError as error:
            found = [memoryview(bytearray(part.num_bytes)) for part in parts]
            problems, lasts = [f"not readable ({error})"] * len(parts), _lasts(error)
        else:
            same = (known == part.xxh3_128 for known, part in zip(hashes, parts, strict=True))
            problems = ["" if good else "its bytes changed after it was written" for good in same]
        for number, place, part, problem in zip(block.numbers, block.places, parts, problems, strict=True):
            if problem:
                told = f"{self._name_of(place)}: {part}: {problem}"
                self._bad.append(Bad(number, place, told, lasts))
        return found

    def _bytes_surely(self, block: Block, into: memoryview | None) -> tuple[list[memoryview], list[str]]:
        """`_bytes_of`, once more after each wait where it may help."""
        for seconds in _RETRY_SECONDS:
            try:
                return self._bytes_of(block, into)
            except OSError as error:
                if _lasts(error):
                    raise
            time.sleep(seconds)
        return self._bytes_of(block, into)

    def _bytes_of(self, block: Block, into: memoryview | None) -> tuple[list[memoryview], list[str]]:
        """Those of each part, from where it is, and their hashes; raises ``OSError`` when it is not there."""
        first = block.places[0]
        if isinstance(first, InMemory):
            assert self._candidate.opened is not None, "a place in memory is one of a keeper"
            opened = self._candidate.opened(first.attempt, first.rank, first.copied)
            found = [opened.data(place.number) for place in block.places if isinstance(place, InMemory)]
            if into is None:
                return found, [hash_of(data) for data in found]
            return [into], [_copy(found[0], into)]
        durable = self._candidate.durable
        assert durable is not None, "a place in a file is one of a durable checkpoint"
        starts = [place.start for place in block.places if isinstance(place, InFile)]
        sizes = [self._candidate.parts[number].num_bytes for number in block.numbers]
        content = memoryview(bytearray(starts[-1] + sizes[-1] - first.start)) if into is None else into
        read = partial(durable.storage.read_into, durable.at(first.file), first.start, content)
        if len(sizes) == 1:
            digest = xxhash.xxh3_128()
            if read(digest.update) < len(content):
                raise EndOfFile("cut short")
            return [content], [digest.hexdigest()]
        if read() < len(content):
            raise EndOfFile("cut short")
        found = [
            content[start - first.start : start - first.start + size]
            for start, size in zip(starts, sizes, strict=True)
        ]
        return found, [hash_of(data) for data in found]

    def _name_of(self, place: Place) -> str:
        if isinstance(place, InMemory):
            return f"memory of node {place.node}, rank {place.rank}"
        assert self._candidate.durable is not None
        return f"{self._candidate.durable.name}/{place.file}"

    def _receive(self, block: Block) -> list[memoryview]:
        """From the rank before this one in the block's tree."""
        parent = block.ranks[(block.ranks.index(self._world.rank) - 1) // 2]
        found = []
        for number in block.numbers:
            data = torch.empty(self._candidate.parts[number].num_bytes, dtype=torch.uint8)
            if data.numel():
                dist.recv(data, group=self._world.group, group_src=parent)
            found.append(data.numpy().data)
        return found

    def _send_on(self, block: Block, content: Sequence[memoryview]) -> None:
        """To the two ranks behind this one."""
        at = 2 * block.ranks.index(self._world.rank) + 1
        for child in block.ranks[at : at + 2]:
            for data in content:
                if len(data):
                    tensor = torch.frombuffer(data, dtype=torch.uint8)
                    dist.send(tensor, group=self._world.group, group_dst=child)

    def _fill(self, block: Block, content: Sequence[memoryview]) -> None:
        """Every rectangle that the parts have something for."""
        for number, data in zip(block.numbers, content, strict=True):
            part = self._candidate.parts[number]
            if not part.num_bytes:
                continue
            source = torch.frombuffer(data, dtype=getattr(torch, part.dtype)).view(part.shape)
            for index, offsets, shape in self._needs.hits(part):
                target = self._rectangles[index]
                inside = _inside(target.values, target.offsets, offsets, shape)
                inside.copy_(_inside(source, part.offsets, offsets, shape))


def _copy(source: memoryview, into: memoryview) -> str:
    """The hash of what was copied."""
    digest, target = xxhash.xxh3_128(), np.frombuffer(into, np.uint8)
    for start in range(0, len(into), CACHE_BYTES):
        block = target[start : start + CACHE_BYTES]
        np.copyto(block, np.frombuffer(source[start : start + CACHE_BYTES], np.uint8))
        digest.update(block.data)
    return digest.hexdigest()


class EndOfFile(OSError):
    """A file is shorter than it was."""


def _lasts(error: OSError) -> bool:
    """Whether bytes are gone, not only away."""
    return isinstance(error, EndOfFile | FileNotFoundError)


def _inside(
    values: torch.Tensor, stands_at: Sequence[int], offsets: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """The rectangle at ``offsets`` of the whole tensor, of which ``values`` stand at ``stands_at``."""
    for dim, (base, start, length) in enumerate(zip(stands_at, offsets, shape, strict=True)):
        values = values.narrow(dim, start - base, length)
    return values


def _ahead(
    pool: ThreadPoolExecutor, read: Callable[[Block], list[memoryview]], blocks: Sequence[Block]
) -> Iterator[list[memoryview]]:
    """What reading the blocks gives, in their order, a few of them ahead."""
    waiting: deque[Future[list[memoryview]]] = deque()
    for block in blocks:
        if len(waiting) == _READ_AHEAD:
            yield waiting.popleft().result()
        waiting.append(pool.submit(read, block))
    while waiting:
        yield waiting.popleft().result()
