"""Read plan of a checkpoint, computed identically by all ranks. Without torch.

    part      a stored shard of a tensor with its hash and every location of its bytes: the memory of a
              node, or a file of the durable checkpoint
    reader    one rank for each part: on a node that has the part in memory, else the rank with the least to
              read among those that need it
    block     adjacent parts with the same reader and the same receivers: one read, one message

Each part is read once in the whole world, in any layout. There is one exception: all ranks that need a part
may be on one node that has it in memory or in local files. Then each of them reads it, which is faster than a
transfer. A location whose bytes do not match the hash is excluded, and its parts are planned again.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from myriad.checkpoint.format.checkpoint_manifest import CheckpointManifest
from myriad.checkpoint.format.stored_shard import Shape, StoredShard

__all__ = [
    "FileLocation",
    "LoadPart",
    "MemoryLocation",
    "NeededShards",
    "ReadBlock",
    "ShardLocation",
    "overlap",
    "plan_blocks",
    "shards_in_manifest",
    "shards_in_snapshot",
]

BLOCK_BYTES, _LARGE_BYTES = 2**25, 2**20
"""Largest size of a block, and the size from which a shard is a block of its own."""


class MemoryLocation(NamedTuple):
    """Location in a snapshot of a node's snapshot server."""

    node: int
    attempt: int
    rank: int
    copied: bool
    number: int
    """Index of the shard among the rank's stored shards."""


class FileLocation(NamedTuple):
    """Location in a file of the durable checkpoint."""

    file: str
    start: int


ShardLocation = MemoryLocation | FileLocation


@dataclass(frozen=True)
class LoadPart:
    """A stored shard to load, with its hash and the locations of its bytes."""

    tensor: str
    full_shape: Shape
    dtype: str
    offsets: Shape
    shape: Shape
    num_bytes: int
    xxh3_128: str
    locations: tuple[ShardLocation, ...]
    """Locations of the bytes, nearest first."""

    @property
    def key(self) -> tuple[str, Shape, Shape, str]:
        """Key that is equal for equal bytes of the same region of a tensor."""
        return self.tensor, self.offsets, self.shape, self.xxh3_128

    def __str__(self) -> str:
        return f"{self.tensor}{list(self.shape)} at {list(self.offsets)}"


def shards_in_manifest(manifest: CheckpointManifest) -> list[LoadPart]:
    """Return every chunk of a durable checkpoint, in the order of its files."""
    return [
        LoadPart(
            chunk.tensor,
            manifest.shapes[chunk.tensor],
            manifest.tensors[chunk.tensor]["dtype"],
            chunk.offsets,
            chunk.shape,
            chunk.bytes,
            chunk.xxh3_128,
            (FileLocation(file, chunk.data_start),),
        )
        for file, chunk in manifest.chunks()
    ]


def shards_in_snapshot(
    stored_shards: Sequence[StoredShard],
    hashes: Sequence[str],
    node: int,
    attempt: int,
    rank: int,
    copied: bool,
) -> list[LoadPart]:
    """Return every shard of one rank's snapshot in the memory of a node."""
    return [
        LoadPart(
            shard.tensor,
            shard.full_shape,
            shard.dtype,
            shard.offsets,
            shard.shape,
            shard.num_bytes,
            known,
            (MemoryLocation(node, attempt, rank, copied, index),),
        )
        for index, (shard, known) in enumerate(zip(stored_shards, hashes, strict=True))
    ]


def overlap(
    offsets: Shape, shape: Shape, other_offsets: Shape, other_shape: Shape
) -> tuple[Shape, Shape] | None:
    """Return offsets (in the full tensor) and shape of the intersection of two boxes, or ``None``."""
    low = tuple(map(max, offsets, other_offsets))
    high = tuple(
        min(a + m, b + n) for a, m, b, n in zip(offsets, shape, other_offsets, other_shape, strict=True)
    )
    size = tuple(stop - start for start, stop in zip(low, high, strict=True))
    return (low, size) if all(length > 0 for length in size) else None


@dataclass
class NeededShards:
    """The shards that one rank needs, as ``(tensor, offsets, shape)``."""

    shards: Sequence[tuple[str, Shape, Shape]]
    by_tensor: Mapping[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        by_tensor = defaultdict(list)
        for index, (tensor, _, _) in enumerate(self.shards):
            by_tensor[tensor].append(index)
        self.by_tensor = by_tensor

    def hits(self, part: LoadPart) -> Iterator[tuple[int, Shape, Shape]]:
        """Yield the needed shards that a part overlaps: index, offsets in the full tensor, shape."""
        for index in self.by_tensor.get(part.tensor, ()):
            _, offsets, shape = self.shards[index]
            if found := overlap(part.offsets, part.shape, offsets, shape):
                yield index, *found

    def of(self, parts: Sequence[LoadPart]) -> list[int]:
        """Return the indices of the parts that the rank needs."""
        return [number for number, part in enumerate(parts) if next(self.hits(part), None) is not None]

    def uncovered(self, parts: Sequence[LoadPart]) -> list[str]:
        """Return the tensors that the parts do not fully cover. The parts must not overlap."""
        left = [prod(shape) for _, _, shape in self.shards]
        for part in parts:
            for index, _, shape in self.hits(part):
                left[index] -= prod(shape)
        return sorted({self.shards[index][0] for index, rest in enumerate(left) if rest})


class ReadBlock(NamedTuple):
    """Parts that one rank reads at once and sends to the other ranks that need them."""

    numbers: tuple[int, ...]
    """Indices of the parts."""
    locations: tuple[ShardLocation, ...]
    """Location of each part."""
    reader: int | None
    """``None``: every rank in ``receivers`` reads, because that is faster than a transfer."""
    receivers: tuple[int, ...]
    """Ranks that need the parts, ascending; the reader may not be among them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Reader and receivers, the reader first."""
        if self.reader is None:
            return self.receivers
        return self.reader, *(rank for rank in self.receivers if rank != self.reader)


def plan_blocks(
    parts: Sequence[LoadPart],
    needed_by: Sequence[Sequence[int]],
    ranks_of_node: Sequence[Sequence[int]],
    excluded: frozenset[tuple[int, ShardLocation]] = frozenset(),
    *,
    near_files: bool = False,
) -> tuple[list[ReadBlock], list[int]]:
    """Return the blocks, in the order in which all ranks process them, and the parts without a location.

    ``needed_by``: indices of the parts that each rank needs. ``near_files``: after one rank of a node has
    read a file, the other ranks of the node read it at almost no cost."""
    receivers: list[list[int]] = [[] for _ in parts]
    for rank, numbers in enumerate(needed_by):
        for number in numbers:
            receivers[number].append(rank)
    busy = [0] * len(needed_by)
    blocks: list[ReadBlock] = []
    lost: list[int] = []
    for number, part in enumerate(parts):
        if not receivers[number]:
            continue
        locations = tuple(location for location in part.locations if (number, location) not in excluded)
        if not locations:
            lost.append(number)
            continue
        last = blocks[-1] if blocks else None
        if last and _continues(parts, last, number, locations[0], tuple(receivers[number])):
            numbers, where = (*last.numbers, number), (*last.locations, locations[0])
            blocks[-1] = last._replace(numbers=numbers, locations=where)
            if last.reader is not None:
                busy[last.reader] += part.num_bytes
            continue
        reader = None
        if not _is_near(locations[0], receivers[number], ranks_of_node, near_files):
            reader = _reader(locations[0], receivers[number], ranks_of_node, busy)
            busy[reader] += part.num_bytes
        blocks.append(ReadBlock((number,), locations[:1], reader, tuple(receivers[number])))
    return blocks, lost


def _is_near(
    location: ShardLocation,
    receivers: Sequence[int],
    ranks_of_node: Sequence[Sequence[int]],
    near_files: bool,
) -> bool:
    """Whether all ranks that need a part are on one node, which has the part in memory or local files."""
    nodes = [node for node, ranks in enumerate(ranks_of_node) if set(ranks) & set(receivers)]
    if isinstance(location, MemoryLocation):
        return nodes == [location.node]
    return near_files and len(nodes) == 1


def _reader(
    location: ShardLocation,
    receivers: Sequence[int],
    ranks_of_node: Sequence[Sequence[int]],
    busy: Sequence[int],
) -> int:
    allowed: Sequence[int] = receivers
    if isinstance(location, MemoryLocation):
        here = ranks_of_node[location.node]
        allowed = [rank for rank in receivers if rank in here] or here
    return min(allowed, key=lambda rank: busy[rank])


def _continues(
    parts: Sequence[LoadPart],
    block: ReadBlock,
    number: int,
    location: ShardLocation,
    receivers: tuple[int, ...],
) -> bool:
    """Whether a part directly follows a block and has the same receivers."""
    if block.numbers[-1] != number - 1 or block.receivers != receivers:
        return False
    if max(parts[number].num_bytes, parts[block.numbers[-1]].num_bytes) >= _LARGE_BYTES:
        return False
    if sum(parts[known].num_bytes for known in block.numbers) + parts[number].num_bytes > BLOCK_BYTES:
        return False
    last = block.locations[-1]
    if isinstance(location, FileLocation):
        return isinstance(last, FileLocation) and location.file == last.file
    return isinstance(last, MemoryLocation) and location[:4] == last[:4]
