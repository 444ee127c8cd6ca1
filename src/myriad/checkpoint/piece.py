"""A rectangle of a tensor as it lies in memory and in a file. No torch here.

    files of one rank   head data tail | head data tail | ...      data: the bytes of one piece, in C order
    snapshot in memory       data      |      data      | ...

Head and tail make what ``torch.save`` would have written of each (see `myriad.checkpoint.dcp`). They depend
on shape and type only, so they are made once, and whoever writes a file needs no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

__all__ = ["Piece", "files_of_rank", "join_pieces", "place_in_file", "snapshot_bytes", "split_pieces"]

Shape = tuple[int, ...]

FILE_BYTES = 2**26
"""Of a file with more than one piece."""


@dataclass(frozen=True)
class Piece:
    """Part of a tensor that one rank keeps."""

    tensor: str
    full_shape: Shape
    """Of the whole tensor."""
    dtype: str
    """As torch calls it: ``float32``."""
    offsets: Shape
    """Where the part stands in the whole."""
    shape: Shape
    num_bytes: int
    memory_start: int
    """Its first byte in the rank's snapshot."""
    head: bytes
    tail: bytes

    @property
    def file_bytes(self) -> int:
        """With head and tail."""
        return len(self.head) + self.num_bytes + len(self.tail)


def files_of_rank(rank: int, pieces: Sequence[Piece]) -> list[tuple[str, list[Piece]]]:
    """Names of the files that a rank's pieces are in, and those in each, in their order. There are several so
    that one can be read back while the next is written."""
    files: list[list[Piece]] = [[]]
    size = 0
    for piece in pieces:
        if files[-1] and size + piece.file_bytes > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(piece)
        size += piece.file_bytes
    return [(f"__{rank}_{number}.distcp", own) for number, own in enumerate(files)]


def place_in_file(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, int]]:
    """Each piece of one file with its first byte there."""
    return zip(pieces, accumulate((piece.file_bytes for piece in pieces), initial=0), strict=False)


def snapshot_bytes(pieces: Sequence[Piece]) -> int:
    """Memory that a snapshot of one rank needs."""
    return max((piece.memory_start + piece.num_bytes for piece in pieces), default=0)


def join_pieces(pieces: Sequence[Piece]) -> tuple[list[dict[str, Any]], bytes]:
    """As JSON values and one run of bytes, for the way to another process."""
    values = [asdict(piece) | {"head": len(piece.head), "tail": len(piece.tail)} for piece in pieces]
    return values, b"".join(piece.head + piece.tail for piece in pieces)


def split_pieces(values: Sequence[dict[str, Any]], envelopes: bytes) -> list[Piece]:
    """`join_pieces` undone."""
    found, at = [], 0
    for value in values:
        middle, end = at + value["head"], at + value["head"] + value["tail"]
        shapes = {key: tuple(value[key]) for key in ("full_shape", "offsets", "shape")}
        found.append(Piece(**value | shapes | {"head": envelopes[at:middle], "tail": envelopes[middle:end]}))
        at = end
    return found
