"""The parameters and optimizer state that one rank holds: which of them other ranks hold as well, which rank
counts and writes them, and under which names they are stored.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from myriad.comm.groups import Groups
from myriad.model.tensor_shard import TensorShard, shards_of_flat
from myriad.optim.region import Region
from myriad.parallel.chunk import Chunk
from myriad.parallel.parameter_table import Row
from myriad.parallel.rank_model import RankModel

__all__ = ["ModelState"]


class ModelState:
    """The table of this rank's parameters (``rows``) and the flat regions that hold them."""

    def __init__(
        self, pieces: RankModel, groups: Groups, device: torch.device, *, trains_alone: bool
    ) -> None:
        """``trains_alone``: data-parallel replicas have different parameters between agreements."""
        self._pieces, self._grid, self._layout = pieces, groups.grid, groups.grid.layout
        self.rows = [(chunk, row) for chunk in pieces.chunks for row in chunk.rows]
        self.regions: list[Region] = []
        self.regions_of: dict[Chunk, range] = {}
        for chunk in pieces.chunks:
            self.regions += chunk.regions
            self.regions_of[chunk] = range(len(self.regions) - len(chunk.regions), len(self.regions))
        self.regions = self.regions or [_nothing(device)]
        self.is_replicated = self._layout.num_shard_groups > 1 and not trains_alone
        """Whether several data-parallel ranks hold the same state: all of them with ZeRO 0, else those of
        different groups."""
        self.replica = self._grid.index("dp") if trains_alone else 0
        """Index of this rank's replica, among the replicas that have their own gradients at the step."""
        counts = [self._counts_row(*row) for row in self.rows]
        self.counts = torch.tensor(counts, dtype=torch.float64).to(device)
        """1 where this rank counts its part of a row in the global norm, else 0, so that each element counts
        once."""

    def _counts_row(self, chunk: Chunk, row: Row) -> float:
        return 0.0 if chunk.sharing.copy > 0 or self._is_copy(chunk, row) else 1.0

    def _is_copy(self, chunk: Chunk, row: Row) -> bool:
        """Return whether another tensor- or pipeline-parallel rank holds the same elements and counts
        them."""
        return self.is_copy_over_tp(row) or (chunk is self._pieces.tied and not self._pieces.counts_tied)

    def is_copy_over_tp(self, row: Row) -> bool:
        """Return whether an earlier tensor-parallel rank holds the same elements."""
        return row.is_copy or (row.entry.cut is None and self._grid.index("tp") > 0)

    def shards(
        self, states: Mapping[str, Sequence[torch.Tensor]], *, owned_only: bool
    ) -> Iterator[TensorShard]:
        """Yield shards of whole tensors, named ``STATE.PARAMETER``, as views of ``states``. Each state has
        one tensor per region, shaped like the region's values, or empty. ``owned_only``: a tensor that
        several ranks hold is yielded by one of them only; data-parallel replicas yield one share each."""
        for index, region in enumerate(self.regions):
            for piece in region.pieces:
                chunk, row = self.rows[piece.parameter]
                low, high = _share(region, chunk) if owned_only else (0, region.values.numel())
                first, stop = max(piece.start, low), min(piece.stop, high)
                if first >= stop or (owned_only and self._is_copy(chunk, row)):
                    continue
                entry = row.entry
                offset = int(region.values.storage_offset()) - int(chunk.master.storage_offset())
                start = chunk.start + offset + first - chunk.start_of(entry)
                held = {prefix: tensors for prefix, tensors in states.items() if tensors[index].numel()}
                for prefix, tensors in held.items():
                    yield from shards_of_flat(
                        f"{prefix}.{entry.name}",
                        entry.shape,
                        start,
                        tensors[index][first:stop],
                        entry.cut,
                        entry.rank,
                        entry.size,
                    )


def _share(region: Region, chunk: Chunk) -> tuple[int, int]:
    """Return the span of a chunk's region that this rank writes: the whole region, or its share if other
    ranks hold the same."""
    size, copy, copies = region.values.numel(), chunk.sharing.copy, chunk.sharing.num_copies
    return size * copy // copies, size * (copy + 1) // copies


def _nothing(device: torch.device) -> Region:
    """Return an empty region, for the optimizer of a rank without parameters."""
    return Region(torch.zeros(0, device=device), torch.zeros(0, device=device), decays=False, pieces=())
