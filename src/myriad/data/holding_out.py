"""Which text of a corpus is held out: documents by their content, or where those are too few, the text's end.

    many documents      each by its own hash: equal documents never stand on both sides, and a corpus that
                        grows keeps its split
    a few, or one       where by their hashes none would be held out, or all: the end of the last ones, from a
                        line's begin on, as long as the share asks for

The rule follows from the inputs alone, so whoever makes a corpus again makes the same one.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from myriad.data.manifest import Split
from myriad.data.sources import Piece, read_documents

__all__ = ["HoldingOut", "Tail", "holding_out"]


class Tail(NamedTuple):
    """Where the end of a corpus begins."""

    piece: int
    document: int
    """Of the piece."""
    start: int
    """Characters of it before."""


class HoldingOut(NamedTuple):
    """What is held out of one corpus."""

    share: float
    tail: Tail | None = None
    """``None``: documents are held out by their hashes."""

    def splits(
        self, piece: Piece, key: str, skipped: "Counter[str] | None" = None
    ) -> Iterator[tuple[Split, str]]:
        """The documents of a piece and where they belong; one of them may be in two parts.

        Records without text are counted in ``skipped``."""
        for number, document in enumerate(_documents(piece, key, skipped)):
            if self.tail is None:
                yield _split_of(document, self.share), document
            elif (piece.number, number) != self.tail[:2]:
                yield ("validation" if (piece.number, number) > self.tail[:2] else "train"), document
            else:
                train, validation = document[: self.tail.start], document[self.tail.start :]
                if train:
                    yield "train", train
                yield "validation", validation


def holding_out(
    pieces: Sequence[Piece], key: str, share: float, progress: Callable[[int], None] = lambda _: None
) -> HoldingOut:
    """The rule of a corpus. Reads until a document stands on each side: all of it where there are few.

    ``progress`` gets the size of each piece before it is read."""
    seen: set[Split] = set()
    lengths: list[tuple[int, int, int]] = []
    for piece in pieces if share else ():
        progress(piece.size_bytes)
        for number, document in enumerate(_documents(piece, key)):
            seen.add(_split_of(document, share))
            if len(seen) == 2:
                return HoldingOut(share)
            lengths.append((piece.number, number, len(document)))
    left = int(share * sum(length for _, _, length in lengths))
    for at, number, length in reversed(lengths):
        if 0 < left <= length:
            return HoldingOut(share, Tail(at, number, _line_before(pieces[at], key, number, left)))
        left -= length
    return HoldingOut(share)


def _line_before(piece: Piece, key: str, number: int, held: int) -> int:
    """Where the last ``held`` characters of a document begin; or the line or word that they are in, where it
    begins not far before."""
    document = next(text for at, text in enumerate(_documents(piece, key)) if at == number)
    start = len(document) - held
    for mark in ("\n", " "):
        if (found := document.rfind(mark, max(0, start - held), start)) >= 0:
            return found + 1
    return start


def _documents(piece: Piece, key: str, skipped: "Counter[str] | None" = None) -> Iterator[str]:
    return (document for span in piece.spans for document in read_documents(span, key, skipped))


def _split_of(document: str, share: float) -> Split:
    return "validation" if xxhash.xxh3_64_intdigest(document.encode()) < share * 2**64 else "train"
