"""Sums of squares per parameter over flat memory, in one pass and in full precision.

`torch.linalg.vector_norm` adds float32 squares in float32 and is 0.2 to 1.6 % low over 30M elements on a CPU:
enough to break the parity of layouts. So the memory is read as rows of 1,024, each row's norm is float32
(1e-7) and everything above it float64, at the same speed. A piece that does not start or end with a row has
short edges, all taken in one call.

    rows      |----|----|----|----|----|
    pieces    aaaaaaaaabbcccccccccccccc        a: row 0, an edge    b: an edge    c: an edge, rows 3 and 4
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from myriad.optim.region import Piece

__all__ = ["add_squares", "sums_of_squares"]

_ROW = 1024


def sums_of_squares(
    flats: Sequence[torch.Tensor], pieces: Sequence[tuple[Piece, ...]], num_parameters: int
) -> torch.Tensor:
    """``[num_parameters]`` float64: for each parameter the sum of squares over its pieces; 0 where none is
    held.

    ``pieces[i]`` lie in ``flats[i]``, disjoint and rising. A non-finite element spoils its own row only.
    """
    assert flats, "a rank that holds nothing passes one empty region, which says on which device"
    # the extra last row takes the rows of memory in which pieces meet: their edges are counted apart
    table = torch.zeros(num_parameters + 1, dtype=torch.float64, device=flats[0].device)
    cut = _cut(tuple(pieces), num_parameters, flats[0].device)
    for flat, owners in zip(flats, cut.owners_of_rows, strict=True):
        if len(owners):
            rows = flat[: len(owners) * _ROW].view(-1, _ROW)
            _accumulate(table, owners, torch.linalg.vector_norm(rows, dim=1))
    if cut.edges:
        edges = [flats[index][start:stop] for index, start, stop in cut.edges]
        _accumulate(table, cut.owners_of_edges, torch.stack(torch._foreach_norm(edges)))
    return table[:num_parameters]


class _Cut(NamedTuple):
    """Whose the rows of some flats are, and what is not in whole rows."""

    owners_of_rows: list[torch.Tensor]
    """int64, of each flat."""
    edges: list[tuple[int, int, int]]
    """Flat, start, stop."""
    owners_of_edges: torch.Tensor


@lru_cache(maxsize=128)
def _cut(pieces: tuple[tuple[Piece, ...], ...], num_parameters: int, device: torch.device) -> _Cut:
    """Found once: what it puts on a device makes the host wait for all that this was given before."""
    rows, edges, owners_of_edges = [], [], []
    for index, its_pieces in enumerate(pieces):
        runs = [(num_parameters, 0)]
        position = 0
        for piece in its_pieces:
            first, last = -(-piece.start // _ROW), piece.stop // _ROW
            ends = [(piece.start, piece.stop)]
            if first < last:
                runs += [(num_parameters, first - position), (piece.parameter, last - first)]
                position = last
                ends = [(piece.start, first * _ROW), (last * _ROW, piece.stop)]
            edges += [(index, start, stop) for start, stop in ends if start < stop]
            owners_of_edges += [piece.parameter for start, stop in ends if start < stop]
        owners, lengths = torch.tensor(runs).unbind(1)
        rows.append(torch.repeat_interleave(owners, lengths).to(device))
    return _Cut(rows, edges, torch.tensor(owners_of_edges, dtype=torch.int64, device=device))


def _accumulate(table: torch.Tensor, owners: torch.Tensor, norms: torch.Tensor) -> None:
    add_squares(table, owners, norms.double().square())


def add_squares(table: torch.Tensor, owners: torch.Tensor, squares: torch.Tensor) -> None:
    """Adds row ``i`` of float64 ``squares`` to row ``owners[i]`` of ``table``, always in the same order."""
    # not index_add_: its order of additions varies on a GPU, and equal runs must give equal bits
    table.index_put_((owners,), squares, accumulate=True)
