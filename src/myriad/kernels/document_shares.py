"""Which parts of the documents of a packed sequence each rank of a ring has.

Every rank has equally many positions. A document is shared in one of two ways:

    cut      into 2 r chunks, of which rank i has the chunks i and 2 r - 1 - i: equal work for all, whatever
             the documents' lengths are, but keys travel
    whole    on one rank, which needs no keys of others

A window shortens the work of a document's first chunks. So where layers have one, the chunks with most work
go to the rank with least so far, and documents of one to eight windows are cut into 4 r chunks, of which a
rank has two pairs: an outer and an inner one.

`DocumentSharing.whole` keeps documents whole that are not too long for it (dynamic context parallelism):
the longest first, each on the rank with the least work that has room. Documents for which no rank has room
are divided where a rank is full. "Too long" begins at the largest length with which no rank has more than
`MOST_ABOVE` the mean work.

    r = 2    documents a (8), b to g (2 each)        rank 0: a0 a3 b c | e       rank 1: a1 a2 d f | g

This module does not import torch, because the planner asks it what travels.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

__all__ = ["MOST_ABOVE", "DocumentSharing", "Parts", "Range", "document_parts", "merged", "part_counts"]

MOST_ABOVE = 0.05
"""Share by which the work of the busiest rank may exceed the mean, so that documents stay whole."""
_MOST_FINE_WINDOWS = 8
"""Documents longer than one window, and not longer than so many, are cut finely. In shorter documents the
window hides nothing, in longer ones it changes little of the work."""
_SHRINK = 0.75
"""Ratio of a length from which documents are cut to the one tried before."""

Range = tuple[int, int]
"""First position and the one after the last."""
Parts = tuple[tuple[int, Range], ...]
"""Ranges of positions, each with its first place among all positions of a rank."""
_Owned = tuple[tuple[Range, ...], ...]
"""The ranges of a document that each rank has, from the start of the document."""
_Chunks = tuple[int, ...]
"""Numbers of the chunks of a document that one rank has."""


class DocumentSharing(NamedTuple):
    """How the ranks of a ring share documents."""

    window: int | None = None
    """Window of the layers in which the ranks' work is to be equal; ``None``: no layer has one. Layers
    without one have equal work in any case."""
    whole: bool = False
    """Whether documents lie whole on one rank where that leaves equal work."""


@lru_cache(maxsize=256)
def document_parts(
    lengths: tuple[int, ...], size: int, sharing: DocumentSharing = DocumentSharing()
) -> tuple[tuple[Parts, ...], ...]:
    """Return the parts of each document of a packed sequence that each rank of a ring has, as
    ``[rank][document]``. ``lengths``: those of the documents.

    Ranks have equally many positions if ``size`` divides the sum of the lengths.
    """
    totals, start = [0] * size, 0
    found: list[list[Parts]] = [[] for _ in range(size)]
    for length, owned in zip(lengths, _shared(lengths, size, sharing), strict=True):
        for rank, ranges in enumerate(owned):
            places = accumulate((stop - first for first, stop in ranges), initial=totals[rank])
            moved = ((start + first, start + stop) for first, stop in ranges)
            found[rank].append(tuple(zip(places, moved, strict=False)))
            totals[rank] += sum(stop - first for first, stop in ranges)
        start += length
    return tuple(map(tuple, found))


def part_counts(lengths: tuple[int, ...], size: int, sharing: DocumentSharing) -> Iterator[int]:
    """Yield the number of parts that each document is cut into."""
    if not sharing.whole:  # no parts are made of sequences that a plan is only asked about
        yield from (min(_num_chunks(length, size, sharing.window), length) for length in lengths)
        return
    for length, owned in zip(lengths, _shared(lengths, size, sharing), strict=True):
        holders = sum(map(bool, owned))
        yield 1 if holders == 1 else min(_num_chunks(length, size, sharing.window), length)


@lru_cache(maxsize=256)
def _shared(lengths: tuple[int, ...], size: int, sharing: DocumentSharing) -> tuple[_Owned, ...]:
    """Return what each rank has of each document."""
    if sharing.whole and size > 1 and sum(lengths) % size == 0:
        for longest in _longest_whole(lengths, size):
            found = _keep_whole(lengths, size, sharing.window, longest)
            if found is not None:
                return found
    return tuple(_cut(lengths, size, sharing.window))


def _longest_whole(lengths: Sequence[int], size: int) -> Iterator[int]:
    """Yield lengths up to which documents may be whole, the largest first that a rank has room and work
    for."""
    most_pairs = (1 + MOST_ABOVE) * sum(map(_pairs, lengths)) / size
    longest, tried = sum(lengths) // size, 0
    while longest >= min(lengths):
        most = max(length for length in lengths if length <= longest)
        if most != tried and _pairs(most) <= most_pairs:
            tried = most
            yield most
        longest = int(longest * _SHRINK)


def _keep_whole(
    lengths: Sequence[int], size: int, window: int | None, longest: int
) -> tuple[_Owned, ...] | None:
    """Return what each rank has if documents of at most ``longest`` positions are whole; ``None``: the ranks'
    work would be uneven."""
    cut = [number for number, length in enumerate(lengths) if length > longest]
    found = dict(zip(cut, _cut([lengths[number] for number in cut], size, window), strict=True))
    room, work = [sum(lengths) // size] * size, [0] * size
    for owned in found.values():
        room = [left - _num_positions(ranges) for left, ranges in zip(room, owned, strict=True)]
    others = sorted(set(range(len(lengths))) - found.keys(), key=lambda number: -lengths[number])
    left_over = []
    for number in others:
        length = lengths[number]
        fitting = [rank for rank in range(size) if room[rank] >= length]
        if not fitting:
            left_over.append(number)
            continue
        rank = min(fitting, key=work.__getitem__)
        room[rank], work[rank] = room[rank] - length, work[rank] + _pairs(length)
        found[number] = tuple(((0, length),) if one == rank else () for one in range(size))
    for number in left_over:
        found[number] = _divide(lengths[number], room)
    is_even = _is_even(lengths, [found[number] for number in others], size, window)
    return tuple(found[number] for number in range(len(lengths))) if is_even else None


def _divide(length: int, room: list[int]) -> _Owned:
    """Share a document among the ranks with most room, and take that from ``room``."""
    found: list[tuple[Range, ...]] = [()] * len(room)
    start = 0
    while start < length:
        rank = max(range(len(room)), key=room.__getitem__)
        stop = min(length, start + room[rank])
        found[rank] = ((start, stop),)
        room[rank] -= stop - start
        start = stop
    return tuple(found)


def _is_even(lengths: Sequence[int], shared: Sequence[_Owned], size: int, window: int | None) -> bool:
    """Return whether documents that are not cut, ``shared``, leave no rank too much work, in layers with the
    window and in those without. ``lengths``: those of all documents; the others are equal work."""
    for seen in {window or max(lengths), max(lengths)}:
        work = [
            sum(_pairs(stop, seen) - _pairs(start, seen) for owned in shared for start, stop in owned[rank])
            for rank in range(size)
        ]
        above = max(work) - sum(work) / size
        if above > MOST_ABOVE * sum(_pairs(length, seen) for length in lengths) / size:
            return False
    return True


def _cut(lengths: Sequence[int], size: int, window: int | None) -> Iterator[_Owned]:
    """Yield what each rank has of each document if all are cut."""
    totals = [0] * size
    for length, chunks in zip(lengths, _chunks_of_ranks(lengths, size, window), strict=True):
        borders = list(accumulate(_chunk_sizes(length, totals, chunks), initial=0))
        owned = []
        for rank, numbers in enumerate(chunks):
            ends = ((borders[number], borders[number + 1]) for number in numbers)
            owned.append(tuple(merged((first, stop) for first, stop in ends if first < stop)))
            totals[rank] += _num_positions(owned[-1])
        yield tuple(owned)


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
    seen = [_pairs(number * length // count, window) for number in range(count + 1)]
    shares = []
    for first in range(size):
        inner = () if count == 2 * size else (2 * size - 1 - first, 2 * size + first)
        chunks = (first, *inner, count - 1 - first)
        shares.append((sum(seen[number + 1] - seen[number] for number in chunks), chunks))
    return sorted(shares, key=lambda share: -share[0])


def _num_chunks(length: int, size: int, window: int | None) -> int:
    is_fine = window is not None and window < length <= _MOST_FINE_WINDOWS * window
    return (4 if is_fine else 2) * size


def _pairs(stop: int, window: int | None = None) -> int:
    """Return the pairs of a query and a key of the first ``stop`` positions."""
    short = stop if window is None else min(stop, window)
    return short * (short + 1) // 2 + (stop - short) * (window or 0)


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


def _num_positions(ranges: Iterable[Range]) -> int:
    return sum(stop - first for first, stop in ranges)


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of ranges, in order."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        else:
            found.append((start, stop))
    return found
