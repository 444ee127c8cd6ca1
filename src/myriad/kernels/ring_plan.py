"""Which queries meet which keys where a ring of ranks shares sequences, and what the ranks send each other.

A sequence of 2 r chunks is shared so that causal attention is equal work for all r ranks (zigzag, Zhu,
"ring-flash-attention", 2024): rank i has the chunks i and 2 r - 1 - i. In every step but the first, half of
the pairs of chunks are seen, all of them whole:

    r = 2      chunks of rank 0: 0 3      of rank 1: 1 2
    step 0     rank 0: 0x0 3x0 3x3        rank 1: 1x1 2x1 2x2
    step 1     rank 0: 3x1 3x2            rank 1: 1x0 2x0

A step computes only the `Piece` s that windows and documents leave. With packed documents each document is
cut into 2 r chunks of its own, so that ranks have equal work whatever the documents' lengths are. A window
shortens the work of a document's first chunks. So where layers have one, the chunks with most work go to the
rank with least so far, and documents of one to eight windows are cut into 4 r chunks, of which a rank has
two pairs: an outer and an inner one.

Keys travel in one of two ways. All ranks choose the same one (`sends_what_is_seen`):

    around     whole shares go from rank to rank, r - 1 times
    direct     each rank gets from each other one only the positions that its queries see, if there are any

A short window sees the end of the chunk before. In zigzag order that is a chunk of rank i - 1 for one half of
rank i, and of rank i + 1 for the other, so every rank exchanges with two others:

    r = 4      chunks of the ranks: 0 7 | 1 6 | 2 5 | 3 4      rank 1 gets the ends of chunk 0 and of chunk 5

This module does not import torch, because the planner asks it what travels.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from myriad.kernels.documents import Documents

__all__ = [
    "Message",
    "Piece",
    "RingPlan",
    "document_parts",
    "pairs_of_steps",
    "received_positions",
    "ring_plan",
    "ring_ranges",
    "sends_what_is_seen",
]

_Range = tuple[int, int]
"""First position and the one after the last."""
_MOST_SHARES = 8
"""What a rank receives directly is all in memory at once: at most so many times its own share."""
_MOST_FINE_WINDOWS = 8
"""Documents longer than one window, and not longer than so many, are cut finely. In shorter documents the
window hides nothing, in longer ones it changes little of the work."""


class Piece(NamedTuple):
    """Queries and keys that meet. A query sees a key at its own position and before, if it is less than
    ``window`` positions away."""

    rows: slice
    """Sequences of the batch."""
    queries: slice
    """Places of the queries in this rank's share of the sequence."""
    keys: slice
    """Places of the keys in what the other rank sent."""
    offset: int
    """Position of the first query minus position of the first key."""
    window: int

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of queries and keys."""
        return self.queries.stop - self.queries.start, self.keys.stop - self.keys.start

    @property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        queries, keys = self.sizes
        return self.offset >= keys - 1 and self.offset + queries <= self.window

    @property
    def is_causal(self) -> bool:
        """Whether queries and keys are at the same positions, and the window is not shorter."""
        queries, keys = self.sizes
        return self.offset == 0 and queries == keys and queries <= self.window

    @property
    def num_pairs(self) -> int:
        """Number of pairs of a query and a key that it sees, in each sequence."""
        queries, _ = self.sizes
        return self._pairs_before(self.offset + queries) - self._pairs_before(self.offset)

    def _pairs_before(self, stop: int) -> int:
        """Return the pairs of all queries less than ``stop`` positions after the first key."""
        keys = self.sizes[1]
        stop = min(max(0, stop), keys + self.window - 1)
        causal, hidden = min(stop, keys), max(0, stop - self.window)
        return causal * (causal + 1) // 2 + (stop - causal) * keys - hidden * (hidden + 1) // 2


def ring_ranges(sequence: int, index: int, size: int) -> tuple[_Range, ...]:
    """Return the positions of rank ``index`` of a ring of ``size``, in order. Raises no error: the sequence
    must be divisible into two chunks for each rank."""
    if size == 1:
        return ((0, sequence),)
    chunk = sequence // (2 * size)
    last = 2 * size - 1 - index
    return (index * chunk, (index + 1) * chunk), (last * chunk, (last + 1) * chunk)


_Parts = tuple[tuple[int, _Range], ...]
"""Ranges of positions, each with its first place among all positions of a rank."""


@lru_cache(maxsize=256)
def document_parts(
    lengths: tuple[int, ...], size: int, window: int | None = None
) -> tuple[tuple[_Parts, ...], ...]:
    """Return the parts of each document of a packed sequence that each rank of a ring has, as
    ``[rank][document]``. ``lengths``: those of the documents. ``window``: that of the layers in which the
    ranks' work is to be equal; layers without one have equal work in any case.

    Ranks have equally many positions if ``size`` divides the sum of the lengths.
    """
    totals, start = [0] * size, 0
    found: list[list[_Parts]] = [[] for _ in range(size)]
    for length, chunks in zip(lengths, _chunks_of_ranks(lengths, size, window), strict=True):
        borders = list(accumulate(_chunk_sizes(length, totals, chunks), initial=start))
        for rank, numbers in enumerate(chunks):
            ends = ((borders[number], borders[number + 1]) for number in numbers)
            own = _merged((first, stop) for first, stop in ends if first < stop)
            places = accumulate((stop - first for first, stop in own), initial=totals[rank])
            found[rank].append(tuple(zip(places, own, strict=False)))
            totals[rank] += sum(stop - first for first, stop in own)
        start += length
    return tuple(map(tuple, found))


_Chunks = tuple[int, ...]
"""Numbers of the chunks of a document that one rank has."""


def _chunks_of_ranks(lengths: Sequence[int], size: int, window: int | None) -> list[list[_Chunks]]:
    """Return the chunks of each document that each rank has, as ``[document][rank]``. Without a window any
    rank may have any pair: document d begins on rank d modulo ``size``."""
    if window is None:
        pairs = [(first, 2 * size - 1 - first) for first in range(size)]
        return [[pairs[(rank - number) % size] for rank in range(size)] for number in range(len(lengths))]
    shares = [_shares(length, size, window) for length in lengths]
    found: list[list[_Chunks]] = [[()] * size for _ in lengths]
    work = [0] * size
    for number in sorted(range(len(lengths)), key=lambda one: shares[one][-1][0] - shares[one][0][0]):
        ranks = sorted(range(size), key=work.__getitem__)
        for rank, (num_pairs, chunks) in zip(ranks, shares[number], strict=True):
            found[number][rank] = chunks
            work[rank] += num_pairs
    return found


def _shares(length: int, size: int, window: int) -> list[tuple[int, _Chunks]]:
    """Return the shares of a document, one for each rank: the pairs of a query and a key that it computes in
    a window, and its chunks. The share with most pairs comes first."""
    count = _num_chunks(length, size, window)
    seen = [_windowed_pairs(number * length // count, window) for number in range(count + 1)]
    shares = []
    for first in range(size):
        inner = () if count == 2 * size else (2 * size - 1 - first, 2 * size + first)
        chunks = (first, *inner, count - 1 - first)
        shares.append((sum(seen[number + 1] - seen[number] for number in chunks), chunks))
    return sorted(shares, key=lambda share: -share[0])


def _num_chunks(length: int, size: int, window: int | None) -> int:
    is_fine = window is not None and window < length <= _MOST_FINE_WINDOWS * window
    return (4 if is_fine else 2) * size


def _windowed_pairs(stop: int, window: int) -> int:
    """Return the pairs of a query and a key of the first ``stop`` positions."""
    short = min(stop, window)
    return short * (short + 1) // 2 + (stop - short) * window


def _chunk_sizes(length: int, totals: Sequence[int], chunks: Sequence[_Chunks]) -> list[int]:
    """Return the sizes of a document's chunks. What is left over goes to the ranks with the fewest positions
    so far (``totals``)."""
    count = sum(map(len, chunks))
    base, more = divmod(length, count)
    sizes, given = [base] * count, [0] * len(totals)
    for _ in range(more):
        rank = min(range(len(totals)), key=lambda one: (totals[one] + given[one], given[one], one))
        sizes[chunks[rank][given[rank]]] += 1
        given[rank] += 1
    return sizes


class MessagePart(NamedTuple):
    """Consecutive positions in a message."""

    rows: slice
    """Sequences of the batch."""
    places: slice
    """Places in the sender's share."""
    at: slice
    """Places in the message."""


class Message(NamedTuple):
    """The positions that one rank sends another. Sequences with fewer of them end in padding."""

    parts: tuple[MessagePart, ...] = ()
    length: int = 0
    """Positions of each sequence."""


class RingPlan(NamedTuple):
    """The pieces of each step of one rank. In step s it has keys of the rank s places before it."""

    steps: tuple[tuple[Piece, ...], ...]
    sent: tuple[Message, ...] | None = None
    """What this rank sends directly to the rank s places after it; ``None``: shares travel around."""
    received: tuple[int, ...] = ()
    """`Message.length` of what it gets from the rank s places before it."""

    def num_pairs(self, batch: int) -> int:
        """Return the pairs of a query and a key that this rank computes for ``batch`` sequences."""
        return sum(
            piece.num_pairs * len(range(*piece.rows.indices(batch))) for step in self.steps for piece in step
        )


def sends_what_is_seen(
    lengths: Iterable[int], window: int, size: int, documents_window: int | None = None
) -> bool:
    """Return whether the ranks of a ring send each other only the positions that are seen, instead of whole
    shares around the ring: if that is at most half as much, and fits in memory. ``lengths``: those of the
    documents of all sequences. ``documents_window``: ``window`` of `document_parts`."""
    total = seen = 0
    for length in lengths:
        num_chunks = min(_num_chunks(length, size, documents_window), length)
        seen += sum(min(window - 1, chunk * length // num_chunks) for chunk in range(num_chunks))
        total += length
    return size > 1 and 2 * seen <= total * min(size - 1, 2 * _MOST_SHARES)


def ring_plan(
    sequence: int, window: int | None, rank: int, size: int, documents: "Documents | None" = None
) -> RingPlan:
    """Return the pieces of rank ``rank`` of a ring for sequences of ``sequence`` positions. With
    ``documents``, positions attend inside their document only."""
    how = (sequence, window or sequence, rank, size)
    if documents is None:
        return _plan(*how)
    plans = _PLANS.setdefault(documents, {})
    if how not in plans:
        plans[how] = _plan_of_documents(*how[1:], documents)
    return plans[how]


_PLANS: "WeakKeyDictionary[Documents, dict[tuple[int, int, int, int], RingPlan]]" = WeakKeyDictionary()
"""The plans of the micro-batches in flight: all layers with the same window have the same one."""


def received_positions(sequence: int, window: int | None, size: int) -> int | None:
    """Return the positions of each sequence that the busiest rank of a ring receives from all others.
    ``None``: whole shares travel around the ring."""
    plan = _plan(sequence, window or sequence, size // 2, size)
    return None if plan.sent is None else sum(plan.received)


@lru_cache(maxsize=256)
def pairs_of_steps(sequence: int, window: int | None, size: int) -> tuple[int, ...]:
    """Return the pairs of a query and a key of each sequence that the busiest rank of a ring computes in each
    step."""
    plan = _plan(sequence, window or sequence, size // 2, size)
    return tuple(sum(piece.num_pairs for piece in step) for step in plan.steps)


@lru_cache(maxsize=64)
def _plan(sequence: int, window: int, rank: int, size: int) -> RingPlan:
    parts = [_placed(ring_ranges(sequence, one, size)) for one in range(size)]

    def pieces(queries: int, keys: int) -> list[Piece]:
        return list(_pieces(slice(None), parts[queries], parts[keys], window))

    return _plan_of(pieces, rank, size, direct=sends_what_is_seen((sequence,), window, size))


def _plan_of_documents(window: int, rank: int, size: int, documents: "Documents") -> RingPlan:
    lengths, balanced = documents.lengths, documents.window
    rows = [document_parts(own, size, balanced) for own in lengths]

    def pieces(queries: int, keys: int) -> list[Piece]:
        return [
            piece
            for row, parts in enumerate(rows)
            for both in zip(parts[queries], parts[keys], strict=True)
            for piece in _pieces(slice(row, row + 1), *both, window)
        ]

    direct = sends_what_is_seen((length for own in lengths for length in own), window, size, balanced)
    return _plan_of(pieces, rank, size, direct=direct)


def _plan_of(pieces: Callable[[int, int], list[Piece]], rank: int, size: int, *, direct: bool) -> RingPlan:
    """Return the plan of a rank. ``pieces``: those of the queries of one rank and the keys of another."""
    steps = [pieces(rank, (rank - step) % size) for step in range(size)]
    if not direct:
        return RingPlan(tuple(map(tuple, steps)))
    sent = [_message(pieces((rank + step) % size, rank))[0] for step in range(1, size)]
    received = [_message(step) for step in steps[1:]]
    found = (tuple(steps[0]), *(own for _, own in received))
    return RingPlan(found, (Message(), *sent), (0, *(message.length for message, _ in received)))


def _message(pieces: Sequence[Piece]) -> tuple[Message, tuple[Piece, ...]]:
    """Return the keys that the pieces need of another rank's share, and the pieces with their places in that
    message. Pieces of a sequence are consecutive."""
    parts: list[MessagePart] = []
    found: list[Piece] = []
    length = 0
    for rows, group in groupby(pieces, key=lambda piece: piece.rows):
        own = list(group)
        ranges = _merged((piece.keys.start, piece.keys.stop) for piece in own)
        places = list(accumulate((stop - start for start, stop in ranges), initial=0))
        parts += (
            MessagePart(rows, slice(start, stop), slice(place, place + stop - start))
            for place, (start, stop) in zip(places, ranges, strict=False)
        )
        length = max(length, places[-1])
        for piece in own:
            at = bisect_right(ranges, piece.keys.start, key=itemgetter(0)) - 1
            shift = places[at] - ranges[at][0]
            keys = slice(piece.keys.start + shift, piece.keys.stop + shift)
            found.append(piece._replace(keys=keys))
    return Message(tuple(parts), length), tuple(found)


def _merged(ranges: Iterable[_Range]) -> list[_Range]:
    """Return the union of ranges, in order."""
    found: list[_Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found


def _placed(ranges: Sequence[_Range]) -> _Parts:
    """Return the ranges, each with its first place among all of their positions."""
    places = accumulate((stop - start for start, stop in ranges), initial=0)
    return tuple(zip(places, ranges, strict=False))


def _pieces(rows: slice, queries: _Parts, keys: _Parts, window: int) -> Iterator[Piece]:
    """Yield a piece for each pair of ranges of which a query sees a key: only the queries that see one, and
    the keys that are seen."""
    for query_place, (first, stop) in queries:
        for key_place, (key_first, key_stop) in keys:
            seen, last = max(key_first, first - window + 1), min(stop, key_stop + window - 1)
            if stop > key_first and seen < key_stop:
                yield Piece(
                    rows,
                    slice(query_place, query_place + last - first),
                    slice(key_place + seen - key_first, key_place + key_stop - key_first),
                    first - seen,
                    window,
                )
