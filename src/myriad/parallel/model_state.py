"""The parameters and optimizer state that one rank holds: which of them other ranks hold as well, which rank
counts and writes them, and under which names they are stored.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from myriad.comm.collectives import all_reduce
from myriad.comm.groups import Group, Groups
from myriad.model.tensor_shard import TensorShard, shards_of_flat
from myriad.optim.region import Region
from myriad.parallel.chunk import Chunk
from myriad.parallel.parameter_table import Row
from myriad.parallel.rank_model import RankModel

__all__ = ["ModelState", "ParameterSums"]


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
        copies = self._layout.cp if trains_alone else self._layout.num_shard_groups
        self.is_replicated = copies > 1
        """Whether several ranks hold the same state: with ZeRO 0 all data-parallel ones, or those of a
        replica that trains alone, else those of different groups."""
        self.replica = self._grid.index("dp") if trains_alone else 0
        """Index of this rank's replica, among the replicas that have their own gradients at the step."""
        counts = [self._counts_row(*row) for row in self.rows]
        self.counts = torch.tensor(counts, dtype=torch.float64).to(device)
        """1 where this rank counts its part of a row in the global norm, else 0, so that each element counts
        once."""

    def stored_values(self) -> list[torch.Tensor]:
        """Return the master values of each region where they rest between updates: host memory, or the
        device."""
        found = []
        for chunk in self.regions_of:
            places = [_offset(region, chunk) for region in chunk.regions]
            sizes = [region.values.numel() for region in chunk.regions]
            found += [chunk.stored[at : at + size] for at, size in zip(places, sizes, strict=True)]
        return found or [self.regions[0].values]

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
        self, states: Mapping[str, Sequence[torch.Tensor]], *, owned_only: bool, copy: int | None = None
    ) -> Iterator[TensorShard]:
        """Yield shards of whole tensors, named ``STATE.PARAMETER``, as views of ``states``. Each state has
        one tensor per region, shaped like the region's values, or empty. ``owned_only``: a tensor that
        several ranks hold is yielded by one of them only; data-parallel replicas yield one share each.
        ``copy``: yield the shares of this one of the ranks that hold the same; default: this rank's."""
        for index, region in enumerate(self.regions):
            for piece in region.pieces:
                chunk, row = self.rows[piece.parameter]
                low, high = _share(region, chunk, copy) if owned_only else (0, region.values.numel())
                first, stop = max(piece.start, low), min(piece.stop, high)
                if first >= stop or (owned_only and self._is_copy(chunk, row)):
                    continue
                entry = row.entry
                start = chunk.start + _offset(region, chunk) + first - chunk.start_of(entry)
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


class ParameterSums:
    """Sums over ranks by parameter: from what each rank holds of the parameters, those of whole ones. Each
    element counts once."""

    def __init__(self, state: ModelState, groups: Groups) -> None:
        """A collective call of all ranks."""
        device = state.counts.device
        copies = torch.tensor([state.is_copy_over_tp(row) for _, row in state.rows], dtype=torch.bool)
        self._copies = copies[:, None].to(device) if groups.grid.index("tp") > 0 else None
        """``[rows, 1]``: whether an earlier tensor-parallel rank holds the row's elements too."""
        self._parts = _row_groups(state, groups)
        first: dict[str, int] = {}
        names = [row.entry.name for _, row in state.rows]
        firsts = [first.setdefault(name, number) for number, name in enumerate(names)]
        self._firsts = torch.tensor(firsts).to(device) if len(first) < len(names) else None
        """``[rows]``: the first row of each row's parameter, if a parameter has several rows."""

    def __call__(self, table: torch.Tensor) -> torch.Tensor:
        """Return the sums for a table with what this rank holds of each row of the table of parameters. All
        rows of a parameter get the parameter's sum."""
        if self._copies is not None:
            table.masked_fill_(self._copies, 0.0)
        for rows, group in self._parts:
            table[rows] = all_reduce(table[rows], group)
        if self._firsts is None:
            return table
        return torch.zeros_like(table).index_add_(0, self._firsts, table)[self._firsts]


def _row_groups(state: ModelState, groups: Groups) -> list[tuple[torch.Tensor, Group | None]]:
    """Return the rows of the table of parameters that ranks share alike, with the group of these ranks: those
    of experts that not all replicas hold, and all others."""
    layout, found = groups.grid.layout, []
    for of_experts in (False, True) if layout.folds_experts else (False,):
        rows = [row for row, (chunk, _) in enumerate(state.rows) if chunk.sharing.of_experts == of_experts]
        shard, width = ("expert_shard", "etp") if of_experts else ("dp_shard", "tp")
        group = groups.along(*((shard,) if layout.zero else ()), width)
        found.append((torch.tensor(rows, dtype=torch.int64).to(state.counts.device), group))
    return found


def _share(region: Region, chunk: Chunk, copy: int | None) -> tuple[int, int]:
    """Return the span of a chunk's region that one of the ranks that hold the same writes, by default this
    one."""
    size, copies = region.values.numel(), chunk.sharing.num_copies
    copy = chunk.sharing.copy if copy is None else copy
    return size * copy // copies, size * (copy + 1) // copies


def _offset(region: Region, chunk: Chunk) -> int:
    """Return the first element of a region in this rank's slice of its chunk."""
    return int(region.values.storage_offset()) - int(chunk.master.storage_offset())


def _nothing(device: torch.device) -> Region:
    """Return an empty region, for the optimizer of a rank without parameters."""
    return Region(torch.zeros(0, device=device), torch.zeros(0, device=device), decays=False, pieces=())
