"""The windows that the tokens of a corpus are cut into. A sample is one window.

    joined    | a a a a b b | b c c d d d | ...        documents end to end, cut every ``sequence`` tokens
    packed    | a a a a . . | b b b d d d | ...        whole documents, as many as fit; . is padding

A joined window shares one token with its neighbour, so every token but the first is predicted once in an
epoch, and a position attends to all earlier ones of its window.

A packed window holds whole documents, chosen by best-fit decreasing (Ding et al., arXiv 2404.10830): the
longest document first, each into the window whose free space exceeds it least. A document of ``n`` tokens has
``n - 1`` positions: its first token is no target, and its last one no input. A document with more positions
than a window is split into whole windows and a rest, which is packed as a document of its own. The packing
depends on the lengths of the documents and on the sequence alone.

Row of a packed window, int32: ``sequence`` inputs, as many targets, as many positions in the document, and
the words of `BatchWords`. A target without a loss is ``~token``, a negative number.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from myriad.data.config import Documents

__all__ = [
    "BatchWords",
    "JoinedWindows",
    "PackedRows",
    "PackedWindows",
    "Packing",
    "Windows",
    "attended_pairs",
    "balanced_order",
    "digest_rows",
    "fill_padding",
    "pack_documents",
    "row_width",
]

_MANY_PIECES = 50_000
"""Pieces from which on it pays to compile the packing, about a second."""
ReadTokens = Callable[[int, NDArray[np.int32]], None]
"""Fill an array with the tokens of a corpus from a number on."""


ReadLosses = Callable[[int, int], NDArray[np.bool_]]
"""Return whether the tokens [start, stop) of a corpus have a loss."""


class Windows(Protocol):
    """The windows of one split of one corpus."""

    @property
    def count(self) -> int:
        """Number of windows in one epoch."""
        ...

    @property
    def width(self) -> int:
        """Words of the row of one window."""
        ...

    def ranges(self, window: int) -> Sequence[tuple[int, int]]:
        """Return the tokens [start, stop) that a window reads."""
        ...

    def read(self, read: ReadTokens, window: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` ``[width]`` with a window's row."""
        ...


@dataclass(frozen=True)
class JoinedWindows:
    """Documents end to end, cut every ``sequence`` tokens."""

    num_tokens: int
    sequence: int

    @property
    def count(self) -> int:
        """Number of whole windows with one more token to predict."""
        return max(0, self.num_tokens - 1) // self.sequence

    @property
    def width(self) -> int:
        """Words of a row: the inputs, and the last target."""
        return row_width(self.sequence, "joined")

    def ranges(self, window: int) -> Sequence[tuple[int, int]]:
        """Return the one range of a window."""
        return ((window * self.sequence, window * self.sequence + self.width),)

    def read(self, read: ReadTokens, window: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with the window's tokens."""
        read(window * self.sequence, out)


class Packing(NamedTuple):
    """Pieces of documents, window by window."""

    starts: NDArray[np.int64]
    """First token of each piece in the corpus."""
    lengths: NDArray[np.int64]
    """Positions of each piece; it has one token more."""
    firsts: NDArray[np.int64]
    """First piece of each window, and the number of pieces at the end."""
    num_split: int
    """Documents that are longer than a window."""


def pack_documents(documents: NDArray[np.int64], sequence: int) -> Packing:
    """Pack documents, of the given numbers of tokens, into windows of ``sequence`` positions. Documents of
    fewer than two tokens have no position and are left out."""
    starts, lengths = _pieces(documents, sequence)
    order = np.argsort(-lengths, kind="stable")
    windows, num_windows = _place(lengths[order], sequence)
    by_window = order[np.argsort(windows, kind="stable")]
    firsts = np.concatenate([[0], np.cumsum(np.bincount(windows, minlength=num_windows))])
    num_split = int(np.count_nonzero(documents - 1 > sequence))
    return Packing(starts[by_window], lengths[by_window], firsts.astype(np.int64), num_split)


def _pieces(documents: NDArray[np.int64], sequence: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the first token and the positions of each piece, in the order of the corpus."""
    begins = np.cumsum(documents) - documents
    positions = np.maximum(documents - 1, 0)
    counts = -(-positions // sequence)
    document = np.repeat(np.arange(len(documents)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
    lengths = np.minimum(positions[document] - number * sequence, sequence)
    return begins[document] + number * sequence, lengths


def _place(lengths: NDArray[np.int64], sequence: int) -> tuple[NDArray[np.int64], int]:
    """Return the window of each piece, and the number of windows. ``lengths`` decrease."""
    if len(lengths) < _MANY_PIECES:
        return _best_fit(lengths, sequence)
    import numba

    found: tuple[NDArray[np.int64], int] = numba.njit(cache=True)(_best_fit)(lengths, sequence)
    return found


def _best_fit(lengths: NDArray[np.int64], sequence: int) -> tuple[NDArray[np.int64], int]:
    """Place the pieces, as Python or compiled by numba.

    The search for the least sufficient space goes on where that of the last piece ended, as long as pieces
    are of one length: smaller sufficient spaces are used up.
    """
    windows = np.empty(len(lengths), np.int64)
    latest = np.full(sequence + 1, -1)  # the last of the windows with each free space, and the one before
    before = np.empty(len(lengths), np.int64)
    num_windows, last, space = 0, 0, 0
    for piece in range(len(lengths)):
        length = lengths[piece]
        space = space if length == last else length
        while space < sequence and latest[space] < 0:
            space += 1
        window = latest[space]
        if window < 0:
            window, num_windows = num_windows, num_windows + 1
        else:
            latest[space] = before[window]
        windows[piece] = window
        left, last = space - length, length
        before[window], latest[left] = latest[left], window
        space = left if left >= length else space
    return windows, num_windows


def attended_pairs(lengths: NDArray[np.int64], window: int | None = None) -> NDArray[np.int64]:
    """Return the pairs of queries and keys in causal attention inside documents of these lengths. A query
    attends to the last ``window`` positions."""
    early = lengths if window is None else np.minimum(lengths, window)
    return early * (early + 1) // 2 + (lengths - early) * early


class BatchWords(NamedTuple):
    """The last words of a packed row: its place in the global batch, and what is counted over that batch."""

    offset: int
    """Number of the row's sample, from the step's first sample on."""
    num_tokens: int
    """Predicted tokens, without padding."""
    num_targets: int
    """Predicted tokens that have a loss."""
    num_pairs: int
    """Pairs of queries and keys in a layer without a window."""
    num_window_pairs: int
    """Pairs of queries and keys in a layer with a window."""

    def write(self, out: NDArray[np.int32]) -> None:
        """Write the words to the end of a row."""
        out[-2 * len(self) :].view(np.int64)[:] = self

    @classmethod
    def read(cls, row: NDArray[np.int32]) -> "BatchWords":
        """Read the words from the end of a row."""
        return cls(
            *(int(value) for value in np.ascontiguousarray(row[-2 * len(cls._fields) :]).view(np.int64))
        )


def digest_rows(rows: NDArray[np.int32], samples: Sequence[int], documents: Documents) -> int:
    """Return a hash of rows, with the numbers of their samples in the whole run.

    It is the sum of a hash for each row, modulo 2^64. So the digests of the replicas' rows add up to that of
    the global batch, in any layout and any order."""
    content = rows if documents == "joined" else rows[:, :-_WORDS]
    hashes = (
        xxhash.xxh3_64_intdigest(row.tobytes(), seed=sample)
        for row, sample in zip(content, samples, strict=True)
    )
    return sum(hashes) % 2**64


class PackedRows(NamedTuple):
    """Views of packed rows ``[rows, width]``."""

    inputs: NDArray[np.int32]
    targets: NDArray[np.int32]
    positions: NDArray[np.int32]

    @classmethod
    def of(cls, rows: NDArray[np.int32]) -> "PackedRows":
        """Split rows of any leading shape."""
        sequence = _sequence_of(rows.shape[-1])
        inputs, targets, positions = (rows[..., part * sequence : (part + 1) * sequence] for part in range(3))
        return cls(inputs, targets, positions)


_WORDS = 2 * len(BatchWords._fields)
_PADDING = 64
"""Positions of a document of padding: attention to a longer one would take time for nothing."""


def fill_padding(row: NDArray[np.int32], filled: int) -> None:
    """Fill a packed row from position ``filled`` on with documents without a loss."""
    inputs, targets, positions = PackedRows.of(row)
    inputs[filled:], targets[filled:] = 0, ~0
    positions[filled:] = np.arange(len(positions) - filled) % _PADDING


def row_width(sequence: int, documents: Documents) -> int:
    """Return the words of a window's row."""
    return sequence + 1 if documents == "joined" else 3 * sequence + _WORDS


def _sequence_of(width: int) -> int:
    return (width - _WORDS) // 3


def balanced_order(costs: Sequence[int], shares: Sequence[int], micro_batch: int, turn: int = 0) -> list[int]:
    """Return the order in which the rows of a global batch are computed, so that micro-batches take about
    equally long, and replicas too.

    ``costs``: cost of each row. ``shares``: micro-batches of each replica. Rows go to micro-batches, and
    these to replicas, from the most expensive one on, each to where the sum is least. A replica begins with
    its most expensive micro-batch, so that micro-batches of one number are alike on all replicas. With
    another ``turn`` another replica takes the most expensive one: a replica that always had it would seem
    slow.
    """
    groups = _balanced(costs, [micro_batch] * sum(shares))
    sums = [sum(costs[row] for row in group) for group in groups]
    replicas = _balanced(sums, shares, turn)
    return [row for replica in replicas for group in replica for row in groups[group]]


def _balanced(costs: Sequence[int], sizes: Sequence[int], turn: int = 0) -> list[list[int]]:
    """Distribute items to bins that take exactly ``sizes`` items (longest processing time first: Graham
    1969). A bin's load is relative to its size; of equal loads, bin ``turn`` comes first."""
    bins: list[list[int]] = [[] for _ in sizes]
    loads = [(0.0, (number - turn) % len(sizes), number) for number, size in enumerate(sizes) if size]
    heapify(loads)
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        load, place, number = heappop(loads)
        bins[number].append(item)
        if len(bins[number]) < sizes[number]:
            heappush(loads, (load + costs[item] / sizes[number], place, number))
    return bins


class PackedWindows:
    """Windows that hold whole documents, as many as fit."""

    def __init__(self, packing: Packing, sequence: int, read_losses: ReadLosses | None = None) -> None:
        """``read_losses`` returns which of the tokens [start, stop) of the corpus have a loss; ``None``:
        all."""
        self.packing, self.sequence, self._read_losses = packing, sequence, read_losses

    @property
    def count(self) -> int:
        """Number of windows in one epoch."""
        return len(self.packing.firsts) - 1

    @property
    def width(self) -> int:
        """Words of a row."""
        return row_width(self.sequence, "packed")

    def _pieces(self, window: int) -> Iterator[tuple[int, int]]:
        first, stop = self.packing.firsts[window : window + 2]
        pairs = zip(self.packing.starts[first:stop], self.packing.lengths[first:stop], strict=True)
        return ((int(start), int(length)) for start, length in pairs)

    def ranges(self, window: int) -> Sequence[tuple[int, int]]:
        """Return the tokens of each piece."""
        return [(start, start + length + 1) for start, length in self._pieces(window)]

    def read(self, read: ReadTokens, window: int, out: NDArray[np.int32]) -> None:
        """Fill the inputs, targets and positions of a row. Padding is further documents without a loss."""
        inputs, targets, positions = PackedRows.of(out)
        filled = 0
        for start, length in self._pieces(window):
            tokens = np.empty(length + 1, np.int32)
            read(start, tokens)
            place = slice(filled, filled + length)
            inputs[place], targets[place], positions[place] = tokens[:-1], tokens[1:], np.arange(length)
            if self._read_losses is not None:
                has_loss = self._read_losses(start + 1, start + length + 1)
                targets[place] = np.where(has_loss, tokens[1:], ~tokens[1:])
            filled += length
        fill_padding(out, filled)

    def counted(self, number: int, window: int | None) -> BatchWords:
        """Return what a window with this number adds to a batch's sums. ``window``: positions to which a
        query attends in a layer with a window."""
        first, stop = self.packing.firsts[number : number + 2]
        lengths = self.packing.lengths[first:stop]
        pairs = (int(attended_pairs(lengths, one).sum()) for one in (None, window))
        num_tokens = num_targets = int(lengths.sum())
        if self._read_losses is not None:
            ranges = ((start + 1, start + length + 1) for start, length in self._pieces(number))
            num_targets = sum(int(self._read_losses(*one).sum()) for one in ranges)
        return BatchWords(0, num_tokens, num_targets, *pairs)
