"""Partial gradients: those of elements that several tensor-parallel ranks hold, each with a part of the sum.

    norms, biases after a row-parallel product    all tensor-parallel ranks hold them
    heads of keys and values, if fewer than tp    `Row.copies` consecutive ranks hold copies

They are summed once a step, after the reduction over data-parallel ranks.
"""

from collections.abc import Sequence

import torch

from myriad.comm.collectives import start_all_reduce, sum_in_order
from myriad.comm.groups import Group, Groups
from myriad.parallel.chunk import Chunk
from myriad.parallel.parameter_table import Row

__all__ = ["PartialGradients"]


class PartialGradients:
    """Sums the partial gradients of one rank with those of other tensor-parallel ranks."""

    def __init__(self, rows: Sequence[Row], groups: Groups) -> None:
        """``rows``: the table of parameters. A collective call of all ranks."""
        self._group = groups.along("tp")
        self._copy_groups = {row.copies: _copy_group(groups, row.copies) for row in rows if row.copies > 1}
        """Groups of the ranks that hold the same copies, by their number."""

    def sum(self, chunks: Sequence[Chunk]) -> None:
        """Sum the partial gradients of these chunks, in place.

        Parameters that every rank holds whole are summed in one message. So are vectors of which some ranks
        hold copies; matrices are reduced in place, one by one, so that the bits of a sum do not depend on the
        chunks that are summed together.
        """
        partial = [one for chunk in chunks for one in chunk.partial_gradients()]
        _sum_in_one_message([part for row, part in partial if row.copies == 1], self._group)
        for copies, group in self._copy_groups.items():
            own = [(row, part) for row, part in partial if row.copies == copies]
            pending = [start_all_reduce(part, group) for row, part in own if row.entry.decays]
            for one in pending:
                one.wait()
            _sum_in_one_message([part for row, part in own if not row.entry.decays], group)


def _copy_group(groups: Groups, copies: int) -> Group | None:
    """Return the group of ``copies`` consecutive tensor-parallel ranks, which hold the same elements."""
    first = groups.grid.index("tp") // copies * copies
    return groups.of(groups.grid.peers("tp")[first : first + copies])


def _sum_in_one_message(parts: list[torch.Tensor], group: Group | None) -> None:
    """Sum vectors over the ranks of a group, in place."""
    if group is None or not parts:
        return
    flat = sum_in_order(torch.cat(parts), group)
    torch._foreach_copy_(parts, flat.split([len(part) for part in parts]))
