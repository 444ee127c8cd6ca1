"""Tables of the tiles that the attention kernels compute (`myriad.kernels.triton.attention_tiles`), made of
pieces (`myriad.kernels.ring_plan`).

One launch computes all pieces of a list, hundreds of documents too. A tile is up to ``size`` neighbouring
queries (or keys) that belong to the same pieces, so a program has all there is to add up for them:

    pieces     queries 0 to 100 with keys 0 to 100, queries 0 to 30 with keys 200 to 229
    tiles      queries 0 to 30 with both ranges of keys | 30 to 94, 94 to 100 with the first      (size 64)

The tiles with the most to do come first, so that none of them is left over at the end. Tables are kept beside
their pieces: all layers of a model use the same ones.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from myriad.kernels.constant_tensors import note_constant
from myriad.kernels.ring_plan import Piece, Pieces

__all__ = ["TileTable", "are_short", "tile_table"]

_MOST_UNUSED = 1.25
"""Largest number of places in tiles of 128 queries, as a multiple of those in tiles of 64."""


class TileTable(NamedTuple):
    """The tiles of a launch, as the kernels read them."""

    tiles: torch.Tensor
    """Sequence, first position, end, first range and end of the ranges, int32 ``[T, 5]``."""
    ranges: torch.Tensor
    """First position, end and shift, int32 ``[R, 3]``: the distance is query - key + shift."""


class _Link(NamedTuple):
    """Positions of a tile's side, and those of the other side that a piece joins them to."""

    first: int
    end: int
    others: tuple[int, int, int]
    """An entry of `TileTable.ranges`."""


def tile_table(pieces: Pieces, batch: int, size: int, device: torch.device, *, of_keys: bool) -> TileTable:
    """Return the table of all pieces of ``batch`` sequences, with tiles of ``size`` queries or, if
    ``of_keys``, keys. The sequences of any two pieces are the same or disjoint."""
    key = batch, size, device, of_keys
    found: TileTable | None = pieces.derived.get(key)
    if found is None:
        found = pieces.derived[key] = TileTable(
            *(_on(device, rows) for rows in _lists(pieces, *key[:2], of_keys))
        )
    note_constant(found)
    return found


def are_short(pieces: Pieces) -> bool:
    """Return whether tiles of 64 queries fit the pieces much better than tiles of 128: a document that four
    ranks cut into eight chunks has 64 positions in each if it has 512."""
    found: bool | None = pieces.derived.get("are_short")
    if found is None:
        large, small = (sum(-(-piece.sizes[0] // size) * size for piece in pieces) for size in (128, 64))
        found = pieces.derived["are_short"] = large > _MOST_UNUSED * small
    return found


def _on(device: torch.device, rows: list[tuple[int, ...]]) -> torch.Tensor:
    found = torch.tensor(rows, dtype=torch.int32, device="cpu")
    return found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)


def _lists(
    pieces: Pieces, batch: int, size: int, of_keys: bool
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    by_sequences: dict[range, list[_Link]] = {}
    for piece in pieces:
        by_sequences.setdefault(range(batch)[piece.rows], []).append(_link(piece, of_keys=of_keys))
    tiles: list[tuple[int, tuple[int, ...]]] = []
    ranges: list[tuple[int, ...]] = []
    for sequences, links in by_sequences.items():
        for start, stop, others in _segments(links):
            span = len(ranges), len(ranges) + len(others)
            ranges += others
            for first in range(start, stop, size):
                end = min(stop, first + size)
                work = sum(_num_met(first, end, one, pieces[0].window, of_keys=of_keys) for one in others)
                tiles += [(work, (sequence, first, end, *span)) for sequence in sequences]
    tiles.sort(key=lambda one: -one[0])
    return [tile for _, tile in tiles], ranges


def _link(piece: Piece, *, of_keys: bool) -> _Link:
    queries, keys = piece.queries, piece.keys
    shift = piece.offset - queries.start + keys.start
    own, others = (keys, queries) if of_keys else (queries, keys)
    return _Link(own.start, own.stop, (others.start, others.stop, shift))


def _segments(links: list[_Link]) -> Iterator[tuple[int, int, list[tuple[int, ...]]]]:
    """Yield the longest ranges of positions that belong to the same links, with the other side of these."""
    ends = sorted({end for link in links for end in link[:2]})
    waiting, current = sorted(links, key=lambda link: -link.first), list[_Link]()
    for first, end in pairwise(ends):
        current = [link for link in current if link.end > first]
        while waiting and waiting[-1].first <= first:
            current.append(waiting.pop())
        if current:
            yield first, end, [link.others for link in current]


def _num_met(first: int, end: int, others: tuple[int, ...], window: int, *, of_keys: bool) -> int:
    """Return how many positions of the other side some position of the tile meets."""
    start, stop, shift = others
    low, high = (
        (first - shift, end - 1 - shift + window) if of_keys else (first + shift - window + 1, end + shift)
    )
    return max(0, min(stop, high) - max(start, low))
