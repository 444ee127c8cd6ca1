"""Who reads which bytes of a checkpoint, and to whom they go: decided alike by all ranks. No torch here.

    part      a piece of a tensor, with its hash and every place where its bytes are: the memory of a node, a
              file of the durable checkpoint
    reader    for each part one rank: of a node that has it in memory, else the least busy that needs it
    block     parts that lie one behind the other and go the same way: one read, one message

So each part is read once in the world, whoever needs it, in whatever layout; but where all who need it are on
one node that has it at hand (in memory, or in local files), each of them reads it: that is quicker than to be
sent it. A place whose bytes are not what the hash says is struck out, and the parts that were there are
planned anew.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from myriad.checkpoint.manifest import Manifest
from myriad.checkpoint.piece import Piece, Shape

__all__ = [
    "Block",
    "InFile",
    "InMemory",
    "Needs",
    "Part",
    "Place",
    "overlap",
    "parts_of_manifest",
    "parts_of_snapshot",
    "plan_blocks",
]

BLOCK_BYTES, _LARGE_BYTES = 2**25, 2**20
"""Of a block, and of a piece that is one by itself."""


class InMemory(NamedTuple):
    """A snapshot that the keeper of a node has."""

    node: int
    attempt: int
    rank: int
    copied: bool
    number: int
    """Of the piece among the rank's."""


class InFile(NamedTuple):
    """A file of the durable checkpoint."""

    file: str
    start: int


Place = InMemory | InFile


@dataclass(frozen=True)
class Part:
    """A piece that can be loaded."""

    tensor: str
    full_shape: Shape
    dtype: str
    offsets: Shape
    shape: Shape
    num_bytes: int
    xxh3_128: str
    places: tuple[Place, ...]
    """The nearest first."""

    @property
    def key(self) -> tuple[str, Shape, Shape, str]:
        """Equal for the same bytes of the same tensor."""
        return self.tensor, self.offsets, self.shape, self.xxh3_128

    def __str__(self) -> str:
        return f"{self.tensor}{list(self.shape)} at {list(self.offsets)}"


def parts_of_manifest(manifest: Manifest) -> list[Part]:
    """Every chunk of a durable checkpoint, in the order of its files."""
    return [
        Part(
            chunk.tensor,
            manifest.shapes[chunk.tensor],
            manifest.tensors[chunk.tensor]["dtype"],
            chunk.offsets,
            chunk.shape,
            chunk.bytes,
            chunk.xxh3_128,
            (InFile(file, chunk.data_start),),
        )
        for file, chunk in manifest.chunks()
    ]


def parts_of_snapshot(
    pieces: Sequence[Piece], hashes: Sequence[str], node: int, attempt: int, rank: int, copied: bool
) -> list[Part]:
    """Every piece of one rank's snapshot in the memory of a node."""
    return [
        Part(
            piece.tensor,
            piece.full_shape,
            piece.dtype,
            piece.offsets,
            piece.shape,
            piece.num_bytes,
            known,
            (InMemory(node, attempt, rank, copied, index),),
        )
        for index, (piece, known) in enumerate(zip(pieces, hashes, strict=True))
    ]


def overlap(
    offsets: Shape, shape: Shape, other_offsets: Shape, other_shape: Shape
) -> tuple[Shape, Shape] | None:
    """Offsets in the whole, and shape, of what two rectangles have in common."""
    low = tuple(map(max, offsets, other_offsets))
    high = tuple(
        min(a + m, b + n) for a, m, b, n in zip(offsets, shape, other_offsets, other_shape, strict=True)
    )
    size = tuple(stop - start for start, stop in zip(low, high, strict=True))
    return (low, size) if all(length > 0 for length in size) else None


@dataclass
class Needs:
    """What one rank wants: rectangles ``(tensor, offsets, shape)``."""

    rectangles: Sequence[tuple[str, Shape, Shape]]
    by_tensor: Mapping[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        by_tensor = defaultdict(list)
        for index, (tensor, _, _) in enumerate(self.rectangles):
            by_tensor[tensor].append(index)
        self.by_tensor = by_tensor

    def hits(self, part: Part) -> Iterator[tuple[int, Shape, Shape]]:
        """The rectangles that a part has something for: number, offsets in the whole, shape."""
        for index in self.by_tensor.get(part.tensor, ()):
            _, offsets, shape = self.rectangles[index]
            if found := overlap(part.offsets, part.shape, offsets, shape):
                yield index, *found

    def of(self, parts: Sequence[Part]) -> list[int]:
        """Numbers of the parts that are needed."""
        return [number for number, part in enumerate(parts) if next(self.hits(part), None) is not None]

    def uncovered(self, parts: Sequence[Part]) -> list[str]:
        """Tensors of which the parts (which do not overlap) have not every element."""
        left = [prod(shape) for _, _, shape in self.rectangles]
        for part in parts:
            for index, _, shape in self.hits(part):
                left[index] -= prod(shape)
        return sorted({self.rectangles[index][0] for index, rest in enumerate(left) if rest})


class Block(NamedTuple):
    """Parts that one rank reads in one go and others get from it."""

    numbers: tuple[int, ...]
    """Of the parts."""
    places: tuple[Place, ...]
    """Where each of them is."""
    reader: int | None
    """``None``: each that needs it, as it is quicker to read there than to be sent."""
    needers: tuple[int, ...]
    """Ascending; the reader may not be among them."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Everybody, the reader first."""
        if self.reader is None:
            return self.needers
        return self.reader, *(rank for rank in self.needers if rank != self.reader)


def plan_blocks(
    parts: Sequence[Part],
    needed_by: Sequence[Sequence[int]],
    ranks_of_node: Sequence[Sequence[int]],
    struck_out: frozenset[tuple[int, Place]] = frozenset(),
    *,
    near_files: bool = False,
) -> tuple[list[Block], list[int]]:
    """Blocks in the order in which all ranks go through them, and the numbers of parts that somebody needs
    and that are nowhere. ``needed_by``: the numbers of the parts that each rank needs; ``near_files``: files
    that one rank of a node has read cost the others next to nothing."""
    needers: list[list[int]] = [[] for _ in parts]
    for rank, numbers in enumerate(needed_by):
        for number in numbers:
            needers[number].append(rank)
    busy = [0] * len(needed_by)
    blocks: list[Block] = []
    lost: list[int] = []
    for number, part in enumerate(parts):
        if not needers[number]:
            continue
        places = tuple(place for place in part.places if (number, place) not in struck_out)
        if not places:
            lost.append(number)
            continue
        last = blocks[-1] if blocks else None
        if last and _continues(parts, last, number, places[0], tuple(needers[number])):
            numbers, where = (*last.numbers, number), (*last.places, places[0])
            blocks[-1] = last._replace(numbers=numbers, places=where)
            if last.reader is not None:
                busy[last.reader] += part.num_bytes
            continue
        reader = None
        if not _is_near(places[0], needers[number], ranks_of_node, near_files):
            reader = _reader(places[0], needers[number], ranks_of_node, busy)
            busy[reader] += part.num_bytes
        blocks.append(Block((number,), places[:1], reader, tuple(needers[number])))
    return blocks, lost


def _is_near(
    place: Place, needers: Sequence[int], ranks_of_node: Sequence[Sequence[int]], near_files: bool
) -> bool:
    """Whether all who need a part are of one node, which has it at hand."""
    nodes = [node for node, ranks in enumerate(ranks_of_node) if set(ranks) & set(needers)]
    if isinstance(place, InMemory):
        return nodes == [place.node]
    return near_files and len(nodes) == 1


def _reader(
    place: Place, needers: Sequence[int], ranks_of_node: Sequence[Sequence[int]], busy: Sequence[int]
) -> int:
    allowed: Sequence[int] = needers
    if isinstance(place, InMemory):
        here = ranks_of_node[place.node]
        allowed = [rank for rank in needers if rank in here] or here
    return min(allowed, key=lambda rank: busy[rank])


def _continues(
    parts: Sequence[Part], block: Block, number: int, place: Place, needers: tuple[int, ...]
) -> bool:
    """Whether a part lies right behind a block and goes the same way."""
    if block.numbers[-1] != number - 1 or block.needers != needers:
        return False
    if max(parts[number].num_bytes, parts[block.numbers[-1]].num_bytes) >= _LARGE_BYTES:
        return False
    if sum(parts[known].num_bytes for known in block.numbers) + parts[number].num_bytes > BLOCK_BYTES:
        return False
    last = block.places[-1]
    if isinstance(place, InFile):
        return isinstance(last, InFile) and place.file == last.file
    return isinstance(last, InMemory) and place[:4] == last[:4]
