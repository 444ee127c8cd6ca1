"""Sums of squares per parameter over flat memory, in one pass and in full precision.

`torch.linalg.vector_norm` adds float32 squares in float32 and is 0.2 to 1.6 % low over 30M elements on a CPU:
enough to break the parity of layouts. So the memory is read as rows of 1,024, each row's norm is float32
(1e-7) and everything above it float64, at the same speed. A piece that does not start or end with a row has
short edges, all taken in one call.

    rows      |----|----|----|----|----|
    pieces    aaaaaaaaabbcccccccccccccc        a: row 0, an edge    b: an edge    c: an edge, rows 3 and 4
"""

from collections.abc import Sequence

import torch

from myriad.optim.region import Piece

__all__ = ["add_squares", "sums_of_squares"]

_ROW = 1024


def sums_of_squares(
    flats: Sequence[torch.Tensor], pieces: Sequence[Sequence[Piece]], num_parameters: int
) -> torch.Tensor:
    """``[num_parameters]`` float64: for each parameter the sum of squares over its pieces; 0 where none is
    held.

    ``pieces[i]`` lie in ``flats[i]``, disjoint and rising. A non-finite element spoils its own row only.
    """
    assert flats, "a rank that holds nothing passes one empty region, which says on which device"
    # the extra last row takes the rows of memory in which pieces meet: their edges are counted apart
    table = torch.zeros(num_parameters + 1, dtype=torch.float64, device=flats[0].device)
    edges: list[tuple[int, torch.Tensor]] = []
    for flat, its_pieces in zip(flats, pieces, strict=True):
        runs: list[tuple[int, int]] = []
        position = 0
        for piece in its_pieces:
            first, last = -(-piece.start // _ROW), piece.stop // _ROW
            if first < last:
                runs += [(num_parameters, first - position), (piece.parameter, last - first)]
                position = last
                edges.append((piece.parameter, flat[piece.start : first * _ROW]))
                edges.append((piece.parameter, flat[last * _ROW : piece.stop]))
            else:
                edges.append((piece.parameter, flat[piece.start : piece.stop]))
        if runs:
            owners, lengths = torch.tensor(runs, device=flat.device).unbind(1)
            rows = torch.linalg.vector_norm(flat[: position * _ROW].view(position, _ROW), dim=1)
            _accumulate(table, torch.repeat_interleave(owners, lengths, output_size=position), rows)
    if edges := [(parameter, edge) for parameter, edge in edges if edge.numel()]:
        owners = torch.tensor([parameter for parameter, _ in edges], device=table.device)
        _accumulate(table, owners, torch.stack(torch._foreach_norm([edge for _, edge in edges])))
    return table[:num_parameters]


def _accumulate(table: torch.Tensor, owners: torch.Tensor, norms: torch.Tensor) -> None:
    add_squares(table, owners, norms.double().square())


def add_squares(table: torch.Tensor, owners: torch.Tensor, squares: torch.Tensor) -> None:
    """Adds row ``i`` of float64 ``squares`` to row ``owners[i]`` of ``table``, always in the same order."""
    # not index_add_: its order of additions varies on a GPU, and equal runs must give equal bits
    table.index_put_((owners,), squares, accumulate=True)
