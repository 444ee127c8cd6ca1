"""What one rank holds of a model's parameters and optimizer state: which of it others hold as well, who of
them counts and writes it, and under which names it is kept.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from myriad.comm.groups import Groups
from myriad.model.rectangle import Rectangle, whole_rectangles
from myriad.optim.region import Region
from myriad.parallel.chunk import Chunk, Entry
from myriad.parallel.pieces import Pieces

__all__ = ["Held"]


class Held:
    """The table of this rank's parameters (``entries``, one row each) and the flat regions they lie in."""

    def __init__(self, pieces: Pieces, groups: Groups, device: torch.device, *, trains_alone: bool) -> None:
        """``trains_alone``: data-parallel replicas differ between agreements."""
        self._pieces, self._grid, self._layout = pieces, groups.grid, groups.grid.layout
        self.entries = [(chunk, entry) for chunk in pieces.chunks for entry in chunk.entries]
        self.regions: list[Region] = []
        self.regions_of: dict[Chunk, range] = {}
        for chunk in pieces.chunks:
            self.regions += chunk.regions
            self.regions_of[chunk] = range(len(self.regions) - len(chunk.regions), len(self.regions))
        self.regions = self.regions or [_nothing(device)]
        self.is_replicated = self._layout.zero == 0 and not trains_alone
        """All data-parallel ranks hold the same, whole."""
        self.replica = self._grid.index("dp") if trains_alone else 0
        """This rank's, among those with gradients of their own at the step."""
        counts = [self._counts_row(*row) for row in self.entries]
        self.counts = torch.tensor(counts, dtype=torch.float64).to(device)
        """1 where this rank counts its part of a parameter in the global norm, so that each element counts
        once."""

    def _counts_row(self, chunk: Chunk, entry: Entry) -> float:
        copy_over_dp = self.is_replicated and self._grid.index("dp") > 0
        return 0.0 if copy_over_dp or self._is_copy(chunk, entry) else 1.0

    def _is_copy(self, chunk: Chunk, entry: Entry) -> bool:
        """Another tensor- or pipeline-parallel rank holds the same parameter, and counts."""
        over_tp = entry.cut is None and self._grid.index("tp") > 0
        return over_tp or (chunk is self._pieces.tied and not self._pieces.counts_tied)

    def rectangles(
        self, states: Mapping[str, Sequence[torch.Tensor]], *, owned_only: bool
    ) -> Iterator[Rectangle]:
        """Parts of whole tensors, named ``STATE.PARAMETER``, as views of ``states``: of each a tensor like
        each region's values. ``owned_only``: what several ranks hold alike comes from one of them only, each
        of data-parallel replicas giving its share."""
        for index, region in enumerate(self.regions):
            low, high = self._share(region) if owned_only else (0, region.values.numel())
            for piece in region.pieces:
                chunk, entry = self.entries[piece.parameter]
                first, stop = max(piece.start, low), min(piece.stop, high)
                if first >= stop or (owned_only and self._is_copy(chunk, entry)):
                    continue
                row_start = chunk.spans[piece.parameter - chunk.first_row][0]
                offset = int(region.values.storage_offset()) - int(chunk.master.storage_offset())
                start = chunk.start + offset + first - row_start
                for prefix, tensors in states.items():
                    yield from whole_rectangles(
                        f"{prefix}.{entry.name}",
                        entry.shape,
                        start,
                        tensors[index][first:stop],
                        entry.cut,
                        self._grid.index("tp"),
                        self._layout.tp,
                    )

    def _share(self, region: Region) -> tuple[int, int]:
        """Of a region, what this rank writes: all, or its part of what all replicas hold."""
        size, rank, ranks = region.values.numel(), self._grid.index("dp"), self._layout.dp
        return (size * rank // ranks, size * (rank + 1) // ranks) if self.is_replicated else (0, size)


def _nothing(device: torch.device) -> Region:
    """What a rank without parameters gives the optimizer."""
    return Region(torch.zeros(0, device=device), torch.zeros(0, device=device), decays=False, pieces=())
