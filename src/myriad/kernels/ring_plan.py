"""Which queries meet which keys where a ring of ranks shares sequences, and what the ranks send each other.

A sequence of 2 r chunks is shared so that causal attention is equal work for all r ranks (zigzag, Zhu,
"ring-flash-attention", 2024): rank i has the chunks i and 2 r - 1 - i. In every step but the first, half of
the pairs of chunks are seen, all of them whole:

    r = 2      chunks of rank 0: 0 3      of rank 1: 1 2
    step 0     rank 0: 0x0 3x0 3x3        rank 1: 1x1 2x1 2x2
    step 1     rank 0: 3x1 3x2            rank 1: 1x0 2x0

A step computes only the `Piece` s that windows and documents leave. Packed documents are shared one by one
(`myriad.kernels.document_shares`).

Keys travel in one of two ways. All ranks choose the same one (`sends_what_is_seen`):

    around     shares go from rank to rank, r - 1 times, each in two halves
    direct     each rank gets from each other one only the positions that its queries see, if there are any

Around a ring a half goes only as far as a rank sees any of it. The sums of its gradients begin at the first
rank that does, and end at its owner, which adds its own. In zigzag order the second half of rank i is seen by
ranks before i only:

    r = 4      the second half of rank 0, the last chunk, stays there; that of rank 2 goes to ranks 3, 0 and 1
               and its sums from 0 to 1 to 2

A short window sees the end of the chunk before. In zigzag order that is a chunk of rank i - 1 for one half of
rank i, and of rank i + 1 for the other, so every rank exchanges with two others:

    r = 4      chunks of the ranks: 0 7 | 1 6 | 2 5 | 3 4      rank 1 gets the ends of chunk 0 and of chunk 5

This module does not import torch, because the planner asks it what travels.
"""

from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate, groupby, product
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from myriad.kernels.document_shares import DocumentSharing, Parts, Range, document_parts, merged, part_counts

if TYPE_CHECKING:
    from myriad.kernels.documents import Documents

__all__ = [
    "Hop",
    "Message",
    "Piece",
    "Pieces",
    "RingPlan",
    "halves_sent",
    "pairs_of_steps",
    "received_positions",
    "ring_plan",
    "ring_ranges",
    "sends_what_is_seen",
    "sent_positions",
]

_MOST_SHARES = 8
"""What a rank receives directly is all in memory at once: at most so many times its own share."""


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
    def is_cut(self) -> bool:
        """Whether some query sees only some of the keys, apart from those after its own position."""
        return not (self.is_full or self.is_causal)

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


class Pieces(tuple[Piece, ...]):
    """The pieces of a step of a ring, or of any list that is computed together. All have the same window."""

    @cached_property
    def derived(self) -> dict[Hashable, Any]:
        """What was made of these pieces, by all that it also depends on: all layers use it again."""
        return {}

    @cached_property
    def are_cut(self) -> bool:
        """Whether some piece is cut."""
        return any(piece.is_cut for piece in self)

    @cached_property
    def halves(self) -> "tuple[Pieces, Pieces]":
        """The first half of the pieces, and the second."""
        half = len(self) // 2
        return Pieces(self[:half]), Pieces(self[half:])

    def by_keys(self, cut: int) -> "tuple[Pieces, Pieces, Pieces]":
        """Return the pieces with keys before place ``cut`` only, those with keys on both sides, and the
        others."""
        found: tuple[Pieces, Pieces, Pieces] | None = self.derived.get(cut)
        if found is None:
            early = Pieces(piece for piece in self if piece.keys.stop <= cut)
            across = Pieces(piece for piece in self if piece.keys.start < cut < piece.keys.stop)
            late = Pieces(piece for piece in self if piece.keys.start >= cut)
            found = self.derived[cut] = early, across, late
        return found


def ring_ranges(sequence: int, index: int, size: int) -> tuple[Range, ...]:
    """Return the positions of rank ``index`` of a ring of ``size``, in order. Raises no error: the sequence
    must be divisible into two chunks for each rank."""
    if size == 1:
        return ((0, sequence),)
    chunk = sequence // (2 * size)
    last = 2 * size - 1 - index
    return (index * chunk, (index + 1) * chunk), (last * chunk, (last + 1) * chunk)


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


class Hop(NamedTuple):
    """Which halves of a share a rank sends to the next one during a step."""

    keys: tuple[bool, bool]
    """Keys and values of this step, which are those of the next rank's next step."""
    sums: tuple[bool, bool]
    """Sums of the gradients of this step's keys and values."""


class RingPlan(NamedTuple):
    """The pieces of each step of one rank. In step s it has keys of the rank s places before it."""

    steps: tuple[Pieces, ...]
    leaving: tuple[Hop, ...] = ()
    """What it sends around the ring in each step; empty: it sends directly."""
    arriving: tuple[Hop, ...] = ()
    """What the rank before it sends in each step."""
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
    rows: Iterable[Sequence[int]], window: int, size: int, sharing: DocumentSharing = DocumentSharing()
) -> bool:
    """Return whether the ranks of a ring send each other only the positions that are seen, instead of whole
    shares around the ring: if that is at most half as much, and fits in memory. ``rows``: lengths of the
    documents of each sequence."""
    total = seen = 0
    for lengths in rows:
        total += sum(lengths)
        for length, num_parts in zip(lengths, part_counts(tuple(lengths), size, sharing), strict=True):
            seen += sum(min(window - 1, part * length // num_parts) for part in range(num_parts))
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


def sent_positions(sequence: int, window: int | None, size: int) -> list[list[int]]:
    """Return the positions of each sequence that rank i of a ring sends directly to rank j, as ``[i][j]``;
    empty: whole shares travel around the ring."""
    messages = [_plan(sequence, window or sequence, rank, size).sent for rank in range(size)]
    return [
        [sent[(target - rank) % size].length for target in range(size)]
        for rank, sent in enumerate(messages)
        if sent is not None
    ]


def halves_sent(sequence: int, window: int | None, size: int) -> list[tuple[int, int]]:
    """Return how many halves of keys and values each rank of a ring sends to the next one, and how many of
    the sums of their gradients, where shares travel around."""
    seen = _seen(sequence, window or sequence, size)
    hops = [_hops(rank, seen) for rank in range(size)]
    return [(sum(sum(hop.keys) for hop in own), sum(sum(hop.sums) for hop in own)) for own in hops]


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

    if sends_what_is_seen(((sequence,),), window, size):
        return _direct_plan(pieces, rank, size)
    return _plan_around(pieces, rank, _seen(sequence, window, size))


def _plan_of_documents(window: int, rank: int, size: int, documents: "Documents") -> RingPlan:
    lengths, sharing = documents.lengths, documents.sharing
    rows = [document_parts(own, size, sharing) for own in lengths]

    def pieces(queries: int, keys: int) -> list[Piece]:
        return [
            piece
            for row, parts in enumerate(rows)
            for both in zip(parts[queries], parts[keys], strict=True)
            for piece in _pieces(slice(row, row + 1), *both, window)
        ]

    if sends_what_is_seen(lengths, window, size, sharing):
        return _direct_plan(pieces, rank, size)
    everyone = ((frozenset(range(size)),) * 2,) * size  # halves hold positions of several documents
    return _plan_around(pieces, rank, everyone)


_Seen = tuple[tuple[frozenset[int], ...], ...]
"""The ranks that see any position of each half of each rank's share."""


@lru_cache(maxsize=64)
def _seen(sequence: int, window: int, size: int) -> _Seen:
    if window >= sequence:
        return tuple((frozenset(range(size)), frozenset(range(rank))) for rank in range(size))
    parts = [_placed(ring_ranges(sequence, one, size)) for one in range(size)]
    seen: list[tuple[set[int], set[int]]] = [(set(), set()) for _ in range(size)]
    for queries, keys in product(range(size), repeat=2):
        for piece in _pieces(slice(None), parts[queries], parts[keys], window):
            for half, halves in enumerate(seen[keys]):
                start = half * sequence // (2 * size)
                if piece.keys.start < start + sequence // (2 * size) and piece.keys.stop > start:
                    halves.add(queries)
    return tuple(tuple(map(frozenset, halves)) for halves in seen)


@lru_cache(maxsize=256)
def _hops(rank: int, seen: _Seen) -> tuple[Hop, ...]:
    """Return what a rank sends around the ring in each step."""
    size = len(seen)

    def met(first: int, last: int, owner: int) -> tuple[bool, bool]:
        """Return whether one of the ranks ``first`` to ``last`` places after the owner sees each half."""
        some = {(owner + place) % size for place in range(first, last + 1)}
        return not some.isdisjoint(seen[owner][0]), not some.isdisjoint(seen[owner][1])

    return tuple(
        Hop(met(step + 1, size - 1, (rank - step) % size), met(1, step, (rank - step) % size))
        for step in range(size)
    )


def _plan_around(pieces: Callable[[int, int], list[Piece]], rank: int, seen: _Seen) -> RingPlan:
    """Return the plan of a rank around which shares travel. ``pieces``: those of the queries of one rank and
    the keys of another."""
    size = len(seen)
    steps = tuple(Pieces(pieces(rank, (rank - step) % size)) for step in range(size))
    return RingPlan(steps, _hops(rank, seen), _hops((rank - 1) % size, seen))


def _direct_plan(pieces: Callable[[int, int], list[Piece]], rank: int, size: int) -> RingPlan:
    """Return the plan of a rank that sends what is seen. ``pieces``: those of the queries of one rank and the
    keys of another."""
    steps = [pieces(rank, (rank - step) % size) for step in range(size)]
    sent = [_message(pieces((rank + step) % size, rank))[0] for step in range(1, size)]
    received = [_message(step) for step in steps[1:]]
    found = (Pieces(steps[0]), *(own for _, own in received))
    lengths = (0, *(message.length for message, _ in received))
    return RingPlan(found, sent=(Message(), *sent), received=lengths)


def _message(pieces: Sequence[Piece]) -> tuple[Message, Pieces]:
    """Return the keys that the pieces need of another rank's share, and the pieces with their places in that
    message. Pieces of a sequence are consecutive."""
    parts: list[MessagePart] = []
    found: list[Piece] = []
    length = 0
    for rows, group in groupby(pieces, key=lambda piece: piece.rows):
        own = list(group)
        ranges = merged((piece.keys.start, piece.keys.stop) for piece in own)
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
    return Message(tuple(parts), length), Pieces(found)


def _placed(ranges: Sequence[Range]) -> Parts:
    """Return the ranges, each with its first place among all of their positions."""
    places = accumulate((stop - start for start, stop in ranges), initial=0)
    return tuple(zip(places, ranges, strict=False))


def _pieces(rows: slice, queries: Parts, keys: Parts, window: int) -> Iterator[Piece]:
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
