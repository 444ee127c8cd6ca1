"""Collective loading of a checkpoint from the nodes' memory, from durable storage, or from both.

    candidates     every step that memory or storage has in full, newest first
    one candidate  all ranks compute the same read plan (`read_plan`); a reader checks the hash of every part
                   and sends it along a tree to the ranks that need it
    a bad part     is fetched from another location; if there is none, the next older step is tried and the
                   durable checkpoint is set aside

A candidate is used only if every part of it is good.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash

from myriad.checkpoint.checkpoint_world import CheckpointWorld
from myriad.checkpoint.format.checkpoint_manifest import hash_of
from myriad.checkpoint.format.dcp_archive import dtype_name
from myriad.checkpoint.load.read_plan import (
    FileLocation,
    LoadPart,
    MemoryLocation,
    NeededShards,
    ReadBlock,
    ShardLocation,
    plan_blocks,
)
from myriad.checkpoint.snapshots.rank_entry import OpenedSnapshot
from myriad.checkpoint.storage.checkpoint_folder import Checkpoint
from myriad.checkpoint.storage.storage_backends import CACHE_BYTES
from myriad.errors import RunFailedError
from myriad.model.tensor_shard import TensorShard

__all__ = ["LoadCandidate", "load_candidate"]

_RETRY_SECONDS = (0.2, 1.0)
"""Pauses between attempts to read a part."""
_READ_AHEAD, _READERS = 4, 2
"""Blocks that a reader reads ahead of sending, and its number of threads."""


@dataclass
class LoadCandidate:
    """The state of one step, and the locations of its parts."""

    step: int
    parts: list[LoadPart]
    durable: Checkpoint | None
    opened: Callable[[int, int, bool], OpenedSnapshot] | None = None
    """Open a snapshot of this rank's node by (attempt, rank, is a copy). Raises ``OSError``."""


@dataclass
class LoadResult:
    """Result of loading a candidate."""

    problems: list[str]
    """Every bad part, including those that another location replaced."""
    good: bool = False
    """Whether every tensor shard holds the bytes that were written."""
    damaged: bool = False
    """Bytes are missing or differ from what was written. A read that failed for now does not count."""


def _check_same_model(
    parts: Sequence[LoadPart], shards: Sequence[TensorShard], world: CheckpointWorld
) -> None:
    """Raise `RunFailedError`, before any read, if a tensor is missing or has another shape on any rank."""
    shapes = {part.tensor: part.full_shape for part in parts}
    other = {part.name: part.full_shape for part in shards if not part.is_part_of(shapes.get(part.name))}
    others = world.gather(other, dict[str, tuple[int, ...]])
    found = {name: shape for own in others for name, shape in own.items()}
    if found:
        name, shape = next(iter(found.items()))
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        there = shapes.get(name, "nothing")
        raise RunFailedError(f"checkpoint of another model: {name} is {shape} here, {there} there{more}")


def load_candidate(
    candidate: LoadCandidate, shards: Sequence[TensorShard], world: CheckpointWorld
) -> LoadResult:
    """Fill the tensor shards; every rank calls it. Raises `RunFailedError` for a checkpoint of another
    model."""
    _check_same_model(candidate.parts, shards, world)
    needs = NeededShards([(part.name, tuple(part.offsets), tuple(part.values.shape)) for part in shards])
    uncovered = [f"{name} is not whole" for name in needs.uncovered(candidate.parts)]
    if any(everywhere := world.gather(uncovered, list[str])):
        return LoadResult(_unique(everywhere), damaged=True)
    needed_by = world.gather(needs.of(candidate.parts), list[int])
    excluded: frozenset[tuple[int, ShardLocation]] = frozenset()
    result = LoadResult([])
    wanted = needed_by
    while True:
        near = candidate.durable is not None and candidate.durable.storage.is_near
        blocks, lost = plan_blocks(candidate.parts, wanted, world.ranks_of_node, excluded, near_files=near)
        if lost:
            return result
        bad = _LoadPass(candidate, shards, needs, world).run(blocks)
        found = world.gather(bad, list[BadPart])
        if not any(found):
            result.good = True
            return result
        flat = list(itertools.chain.from_iterable(found))
        result.problems += [one.problem for one in flat]
        result.damaged |= any(one.is_permanent for one in flat)
        excluded |= {(one.number, one.location) for one in flat}
        again = {one.number for one in flat}
        wanted = [[number for number in numbers if number in again] for numbers in needed_by]


def _unique(lists: Sequence[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


class BadPart(NamedTuple):
    """A part that could not be read from a location."""

    number: int
    location: ShardLocation
    problem: str
    is_permanent: bool
    """Whether the failure is permanent, so that a retry would not help."""


class _LoadPass:
    """One pass of one rank over the blocks."""

    def __init__(
        self,
        candidate: LoadCandidate,
        shards: Sequence[TensorShard],
        needs: NeededShards,
        world: CheckpointWorld,
    ) -> None:
        self._candidate, self._rectangles, self._needs, self._world = candidate, shards, needs, world
        self._bad: list[BadPart] = []

    def run(self, blocks: Sequence[ReadBlock]) -> list[BadPart]:
        """Read, send, receive and fill. Return the bad parts among those that this rank read."""
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
                if rank in block.receivers:
                    self._fill(block, content)
            list(pool.map(self._take, alone))
        return self._bad

    def _take(self, block: ReadBlock) -> None:
        """Load a block that no other rank waits for. A large part is read directly into its target."""
        target = self._whole_target(block.numbers[0]) if len(block.numbers) == 1 else None
        content = self._read(block, target)
        if target is None:
            self._fill(block, content)

    def _whole_target(self, number: int) -> memoryview | None:
        """Return the target memory of a part if the part can be read directly into it, else ``None``."""
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

    def _read(self, block: ReadBlock, into: memoryview | None = None) -> list[memoryview]:
        """Return the verified bytes of each part. ``into``: target memory of a block with a single part."""
        parts = [self._candidate.parts[number] for number in block.numbers]
        is_permanent = True
        try:
            found, hashes = self._bytes_with_retries(block, into)
        except OSError as error:
            found = [memoryview(bytearray(part.num_bytes)) for part in parts]
            problems, is_permanent = [f"not readable ({error})"] * len(parts), _is_permanent(error)
        else:
            same = (known == part.xxh3_128 for known, part in zip(hashes, parts, strict=True))
            problems = ["" if good else "its bytes changed after it was written" for good in same]
        for number, location, part, problem in zip(
            block.numbers, block.locations, parts, problems, strict=True
        ):
            if problem:
                text = f"{self._name_of(location)}: {part}: {problem}"
                self._bad.append(BadPart(number, location, text, is_permanent))
        return found

    def _bytes_with_retries(
        self, block: ReadBlock, into: memoryview | None
    ) -> tuple[list[memoryview], list[str]]:
        """Call `_bytes_of`; retry after a pause if the error may be temporary."""
        for seconds in _RETRY_SECONDS:
            try:
                return self._bytes_of(block, into)
            except OSError as error:
                if _is_permanent(error):
                    raise
            time.sleep(seconds)
        return self._bytes_of(block, into)

    def _bytes_of(self, block: ReadBlock, into: memoryview | None) -> tuple[list[memoryview], list[str]]:
        """Return the bytes and hash of each part, read from its location. Raises ``OSError``."""
        first = block.locations[0]
        if isinstance(first, MemoryLocation):
            assert self._candidate.opened is not None, "a location in memory has a snapshot server"
            opened = self._candidate.opened(first.attempt, first.rank, first.copied)
            found = [
                opened.data(location.number)
                for location in block.locations
                if isinstance(location, MemoryLocation)
            ]
            if into is None:
                return found, [hash_of(data) for data in found]
            return [into], [_copy(found[0], into)]
        durable = self._candidate.durable
        assert durable is not None, "a location in a file has a durable checkpoint"
        starts = [location.start for location in block.locations if isinstance(location, FileLocation)]
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

    def _name_of(self, location: ShardLocation) -> str:
        if isinstance(location, MemoryLocation):
            return f"memory of node {location.node}, rank {location.rank}"
        assert self._candidate.durable is not None
        return f"{self._candidate.durable.name}/{location.file}"

    def _receive(self, block: ReadBlock) -> list[memoryview]:
        """Receive a block from this rank's parent in the block's tree."""
        parent = block.ranks[(block.ranks.index(self._world.rank) - 1) // 2]
        found = []
        for number in block.numbers:
            data = torch.empty(self._candidate.parts[number].num_bytes, dtype=torch.uint8)
            if data.numel():
                dist.recv(data, group=self._world.group, group_src=parent)
            found.append(data.numpy().data)
        return found

    def _send_on(self, block: ReadBlock, content: Sequence[memoryview]) -> None:
        """Send a block to this rank's two children in the block's tree."""
        at = 2 * block.ranks.index(self._world.rank) + 1
        for child in block.ranks[at : at + 2]:
            for data in content:
                if len(data):
                    tensor = torch.frombuffer(data, dtype=torch.uint8)
                    dist.send(tensor, group=self._world.group, group_dst=child)

    def _fill(self, block: ReadBlock, content: Sequence[memoryview]) -> None:
        """Copy the parts into every tensor shard that overlaps them."""
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
    """Copy ``source`` into ``into``, and return the hash of the bytes."""
    digest, target = xxhash.xxh3_128(), np.frombuffer(into, np.uint8)
    for start in range(0, len(into), CACHE_BYTES):
        block = target[start : start + CACHE_BYTES]
        np.copyto(block, np.frombuffer(source[start : start + CACHE_BYTES], np.uint8))
        digest.update(block.data)
    return digest.hexdigest()


class EndOfFile(OSError):
    """A file is shorter than its manifest says."""


def _is_permanent(error: OSError) -> bool:
    """Whether the bytes are missing, rather than temporarily unreadable."""
    return isinstance(error, EndOfFile | FileNotFoundError)


def _inside(
    values: torch.Tensor, stands_at: Sequence[int], offsets: Sequence[int], shape: Sequence[int]
) -> torch.Tensor:
    """Return the box at ``offsets`` of the full tensor; ``values`` start at ``stands_at`` in it."""
    for dim, (base, start, length) in enumerate(zip(stands_at, offsets, shape, strict=True)):
        values = values.narrow(dim, start - base, length)
    return values


def _ahead(
    pool: ThreadPoolExecutor, read: Callable[[ReadBlock], list[memoryview]], blocks: Sequence[ReadBlock]
) -> Iterator[list[memoryview]]:
    """Yield the content of the blocks in order, reading a few blocks ahead."""
    waiting: deque[Future[list[memoryview]]] = deque()
    for block in blocks:
        if len(waiting) == _READ_AHEAD:
            yield waiting.popleft().result()
        waiting.append(pool.submit(read, block))
    while waiting:
        yield waiting.popleft().result()
