"""The order of documents in a streamed corpus: a pure function of the list of files and a seed.

    files  ──►  pieces: byte ranges of plain files, small files together, whole compressed or Parquet files
    epoch  ──►  the pieces in random order, 16 at a time: a bundle
    bundle ──►  groups: the next documents of each of its pieces that is not at its end, as much text of each
    group  ──►  its documents in random order, tokenized, cut into windows, and these in random order

A piece is read from its start to its end, which a compressed file needs. A group is what is shuffled
together, and is read and tokenized by itself once the positions in its pieces are known (`GroupStart`).
Windows do not cross groups: the rest of a group, less than a window, is left out of the epoch.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from myriad.data.records import RecordForm
from myriad.data.sampler import permute
from myriad.data.text_sources import Piece, SourceFile, cut_pieces

__all__ = ["Cursor", "GroupOrder", "GroupStart", "shuffled"]

_BUNDLE_PIECES = 16
_PIECE_BYTES = 4 << 20
_MOST_PIECES = 1 << 16
"""Pieces of a corpus of large plain files, which are longer in a larger corpus."""


class Cursor(NamedTuple):
    """A position in a piece."""

    span: int = 0
    """Number of the piece's file range; after its end, the number of ranges."""
    next: int | None = None
    """`Found.next` of the last document that was read there; ``None``: none was."""


class GroupStart(NamedTuple):
    """Where a group begins."""

    epoch: int = 0
    bundle: int = 0
    number: int = 0
    """Number of the group in its bundle."""
    cursors: tuple[Cursor, ...] = ()
    """Position in each piece of the bundle; empty: their starts."""


class GroupOrder:
    """The pieces of a corpus, and the order in which groups are taken from them."""

    def __init__(self, sources: Sequence[SourceFile], form: RecordForm, seed: int) -> None:
        """Raises `BadInputError` for a file that cannot have the form's fields."""
        total = sum(one.size_bytes for one in sources)
        size = max(_PIECE_BYTES, total // _MOST_PIECES)
        self.pieces = cut_pieces(sources, form, size, cuts_parquet=False)
        self._seed, self.num_bundles = seed, -(-len(self.pieces) // _BUNDLE_PIECES)
        self._order = lru_cache(maxsize=2)(lambda epoch: shuffled(len(self.pieces), seed, epoch))

    def bundle(self, start: GroupStart) -> list[Piece]:
        """Return the pieces of a group's bundle."""
        order: NDArray[np.int64] = self._order(start.epoch)
        first, stop = ((start.bundle + more) * len(self.pieces) // self.num_bundles for more in (0, 1))
        return [self.pieces[number] for number in order[first:stop]]

    def cursors(self, start: GroupStart) -> tuple[Cursor, ...]:
        """Return the position in each piece of a group's bundle."""
        return start.cursors or tuple(Cursor() for _ in self.bundle(start))

    def next_start(self, start: GroupStart, cursors: Sequence[Cursor]) -> GroupStart:
        """Return where the group after one that ends at these positions begins."""
        pieces = self.bundle(start)
        if any(cursor.span < len(piece.spans) for cursor, piece in zip(cursors, pieces, strict=True)):
            return GroupStart(start.epoch, start.bundle, start.number + 1, tuple(cursors))
        if start.bundle + 1 < self.num_bundles:
            return GroupStart(start.epoch, start.bundle + 1)
        return GroupStart(start.epoch + 1)

    def shuffled(self, size: int, start: GroupStart, what: str) -> NDArray[np.int64]:
        """Return the order of ``what`` in a group."""
        return shuffled(size, self._seed, *start[:3], what)


def shuffled(size: int, *key: int | str) -> NDArray[np.int64]:
    """Return the numbers below ``size`` in the order that a key selects."""
    number = xxhash.xxh3_64_intdigest(repr(key).encode())
    return permute(np.arange(size, dtype=np.uint64), size, number).astype(np.int64)
