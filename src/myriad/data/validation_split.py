"""Choose the held-out text of a corpus: documents by their content or, if there are too few, the text's end.

    many documents      each by its own hash: equal documents are never in both splits, and a corpus that
                        grows keeps its split
    a few, or one       where by their hashes none would be held out, or all: the end of the last ones, from a
                        line's begin on, as long as the share asks for

The rule follows from the inputs alone, so that making a corpus again gives the same split.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import xxhash

from myriad.data.corpus_manifest import Split
from myriad.data.file_documents import read_documents
from myriad.data.records import PartedText, RecordForm
from myriad.data.text_sources import Piece

__all__ = ["HoldingOut", "Tail", "holding_out", "split_of"]


class Tail(NamedTuple):
    """The position where the held-out end of a corpus begins."""

    piece: int
    document: int
    """Index of the document in the piece."""
    start: int
    """Characters of the document before the held-out part."""


class HoldingOut(NamedTuple):
    """The rule for the held-out text of one corpus."""

    share: float
    tail: Tail | None = None
    """Begin of the held-out end; ``None`` if documents are held out by their hashes."""

    def splits(
        self, piece: Piece, form: RecordForm, skipped: "Counter[str] | None" = None
    ) -> Iterator[tuple[Split, str]]:
        """Yield each document of a piece with its split. The document in which the held-out end begins is
        yielded in two parts.

        Records without text are counted in ``skipped``.
        """
        for number, document in enumerate(_documents(piece, form, skipped)):
            if self.tail is None:
                yield split_of(document, self.share), document
            elif (piece.number, number) != self.tail[:2]:
                yield ("validation" if (piece.number, number) > self.tail[:2] else "train"), document
            elif isinstance(document, PartedText):  # not cut
                yield "validation", document
            else:
                train, validation = document[: self.tail.start], document[self.tail.start :]
                if train:
                    yield "train", train
                yield "validation", validation


def holding_out(
    pieces: Sequence[Piece], form: RecordForm, share: float, progress: Callable[[int], None] = lambda _: None
) -> HoldingOut:
    """Return the rule of a corpus.

    Reads until both splits have a document, so the whole corpus if it has few. ``progress`` gets the size of
    each piece before it is read.
    """
    seen: set[Split] = set()
    lengths: list[tuple[int, int, int]] = []
    for piece in pieces if share else ():
        progress(piece.size_bytes)
        for number, document in enumerate(_documents(piece, form)):
            seen.add(split_of(document, share))
            if len(seen) == 2:
                return HoldingOut(share)
            lengths.append((piece.number, number, len(document)))
    left = int(share * sum(length for _, _, length in lengths))
    for at, number, length in reversed(lengths):
        if 0 < left <= length:
            return HoldingOut(share, Tail(at, number, _line_before(pieces[at], form, number, left)))
        left -= length
    return HoldingOut(share)


def _line_before(piece: Piece, form: RecordForm, number: int, held: int) -> int:
    """Return where the last ``held`` characters of a document begin, or the start of their line or word if
    it is near."""
    document = next(text for at, text in enumerate(_documents(piece, form)) if at == number)
    start = len(document) - held
    for mark in ("\n", " "):
        if (found := document.rfind(mark, max(0, start - held), start)) >= 0:
            return found + 1
    return start


def _documents(piece: Piece, form: RecordForm, skipped: "Counter[str] | None" = None) -> Iterator[str]:
    return (document for span in piece.spans for document in read_documents(span, form, skipped))


def split_of(document: str, share: float) -> Split:
    """Return the split of a document by its hash; ``share`` of all are held out."""
    return "validation" if xxhash.xxh3_64_intdigest(document.encode()) < share * 2**64 else "train"
