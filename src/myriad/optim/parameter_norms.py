"""Sums of squares per parameter over flat memory, in one pass and in full precision.

`torch.linalg.vector_norm` adds float32 squares in float32 and is 0.2 to 1.6 % low over 30M elements on a CPU:
enough to break the parity of layouts. The memory is therefore read as rows of 1,024. Each row's norm is
float32 (1e-7) and everything above it float64, at the same speed. A piece that does not start or end with a
row has short edges, which are all taken in one call.

    rows      |----|----|----|----|----|
    pieces    aaaaaaaaabbcccccccccccccc        a: row 0, an edge    b: an edge    c: an edge, rows 3 and 4
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple, Self

import torch

from myriad.optim.region import ParameterSlice, Region

__all__ = ["Runs", "add_runs", "clip_scale", "non_finite_rows", "squared_norms", "sums_of_squares"]

_ROW = 1024


def sums_of_squares(
    flats: Sequence[torch.Tensor], pieces: Sequence[tuple[ParameterSlice, ...]], num_parameters: int
) -> torch.Tensor:
    """Return ``[num_parameters]`` float64: each parameter's sum of squares over its pieces; 0 without pieces.

    ``pieces[i]`` lie in ``flats[i]``, disjoint and rising. A non-finite element affects its own row only.
    """
    assert flats, "a rank that holds nothing passes one empty region, which says on which device"
    # the extra last row takes the rows of memory that several pieces share: their edges are summed separately
    table = torch.zeros(num_parameters + 1, dtype=torch.float64, device=flats[0].device)
    cut = _cut(tuple(pieces), num_parameters, flats[0].device)
    for flat, runs in zip(flats, cut.runs, strict=True):
        if runs.num_rows:
            rows = flat[: runs.num_rows * _ROW].view(-1, _ROW)
            add_runs(table, runs, torch.linalg.vector_norm(rows, dim=1).double().square())
    if cut.edges:
        edges = [flats[index][start:stop] for index, start, stop in cut.edges]
        squares = torch.stack(torch._foreach_norm(edges)).double().square()
        table.index_put_((cut.owners_of_edges,), squares, accumulate=True)  # each owner has only a few edges
    return table[:num_parameters]


class Runs(NamedTuple):
    """Consecutive rows of numbers that belong to the same owner."""

    num_rows: int
    owners: torch.Tensor
    """``[runs]`` int64: rows of a table."""
    lengths: torch.Tensor
    """``[runs]`` int64: number of rows of each run."""

    @classmethod
    def on(cls, device: torch.device, runs: Sequence[tuple[int, int]]) -> Self:
        """Copy (owner, length) of each run to a device; the host waits for the device's earlier work."""
        owners, lengths = torch.tensor(runs, dtype=torch.int64).reshape(-1, 2).unbind(1)
        return cls(int(lengths.sum()), owners.to(device), lengths.contiguous().to(device))


def add_runs(table: torch.Tensor, runs: Runs, squares: torch.Tensor) -> None:
    """Add the sum of each run of float64 ``squares`` ``[rows, ...]`` to its owner's row of ``table``.

    The order is always the same. On a GPU one group of threads adds up a run. `index_add_` adds in an order
    that varies, and `index_put_` lets a single warp go through all rows of an owner, 512,000 for the largest
    matrices (https://github.com/pytorch/pytorch/issues/41162).
    """
    for column, values in zip(_columns(table), _columns(squares), strict=True):
        # unsafe: reading the lengths back for a check would make the host wait
        sums = torch.segment_reduce(values, "sum", lengths=runs.lengths, unsafe=True)
        column.index_put_((runs.owners,), sums, accumulate=True)


def _columns(table: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the columns as vectors, because a GPU adds up runs of a matrix with one thread for each
    column."""
    return (table,) if table.dim() == 1 else tuple(table.unbind(1))


class _Cut(NamedTuple):
    """The owners of the rows of some flats, and the parts outside whole rows."""

    runs: list[Runs]
    """Runs of each flat."""
    edges: list[tuple[int, int, int]]
    """Flat, start and stop of each edge."""
    owners_of_edges: torch.Tensor


@lru_cache(maxsize=128)
def _cut(pieces: tuple[tuple[ParameterSlice, ...], ...], num_parameters: int, device: torch.device) -> _Cut:
    """Compute the cut once, because copying it to a device makes the host wait for the device's earlier
    work."""
    runs_of_flats, edges, owners_of_edges = [], [], []
    for index, its_pieces in enumerate(pieces):
        runs = []
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
        runs_of_flats.append(Runs.on(device, [run for run in runs if run[1]]))
    return _Cut(runs_of_flats, edges, torch.tensor(owners_of_edges, dtype=torch.int64, device=device))


def squared_norms(regions: Sequence[Region], num_parameters: int) -> torch.Tensor:
    """Return ``[num_parameters]`` float64: sums of squares of the gradients that this rank holds."""
    gradients = [region.gradients for region in regions]
    return sums_of_squares(gradients, [region.pieces for region in regions], num_parameters)


def clip_scale(total_norm: float, limit: float | None) -> float:
    """Return the factor that reduces gradients of this (finite) global norm to at most ``limit``; 1
    without a limit."""
    assert math.isfinite(total_norm), "stop before the step: see non_finite_rows"
    return 1.0 if limit is None or total_norm <= limit else limit / total_norm


def non_finite_rows(table: torch.Tensor) -> list[int]:
    """Return the rows of the table of parameters with a NaN or an infinity, to name the parameter when a
    run must stop."""
    return (~torch.isfinite(table)).view(table.shape[0], -1).any(1).nonzero().flatten().tolist()
