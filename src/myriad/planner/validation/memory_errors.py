"""Predicted peak memory beside measured, row by row and framework by framework.

A row is predicted on the pipeline rank, and for the moment, that its framework reports
(`myriad.planner.memory.framework_memory`):

    allocated    tensors, at the peak or at the update
    reserved     what the allocator holds at the peak, at most the rest of the device: it frees unused blocks
                 before it runs out
    fits         whether the fullest rank is more likely to fit than not

Rows with a time did fit; those marked as out of memory did not. Where a row leaves values open, one with a
time has those of its predicted time, and one without a time those that need the least memory.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from myriad.planner.cost.layout_costs import Costs
from myriad.planner.memory.closed_form_memory import PeakMemory, fits_probability
from myriad.planner.memory.rank_memory import memory_at_update
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.validation.prediction_errors import TableResult
from myriad.planner.validation.published_rows import MeasuredMemory, PublishedRow
from myriad.planner.workload import Workload

__all__ = ["MemoryErrors", "PredictedMemory", "memory_errors", "predict_memory", "predict_memory_of"]


@dataclass(frozen=True)
class PredictedMemory:
    """Memory of one published row with its prediction."""

    row: PublishedRow
    workload: Workload
    allocated_bytes: float
    """Bytes of tensors on the reported rank, at the reported moment."""
    reserved_bytes: float
    """Bytes that the allocator of the reported rank holds at the peak."""
    needed_bytes: float
    """Bytes of the fullest rank at the peak, outside of the allocator too."""
    fit_probability: float

    @property
    def measured(self) -> MeasuredMemory:
        """What the row says of its memory."""
        return self.row.memory or MeasuredMemory()

    @property
    def allocated_error(self) -> float | None:
        """Relative error, positive if the prediction is too large; ``None``: not measured."""
        truth = self.measured.allocated_bytes
        return None if truth is None else self.allocated_bytes / truth - 1

    @property
    def reserved_error(self) -> float | None:
        """Relative error, positive if the prediction is too large; ``None``: not measured."""
        truth = self.measured.reserved_bytes
        return None if truth is None else self.reserved_bytes / truth - 1

    @property
    def fits(self) -> bool:
        """Whether the row is predicted to fit."""
        return self.fit_probability > 0.5

    @property
    def fits_as_measured(self) -> bool:
        """Whether that is right."""
        return self.fits != self.measured.ran_out


@dataclass(frozen=True)
class MemoryErrors:
    """Errors of one framework's rows."""

    framework: str
    rows: tuple[PredictedMemory, ...]

    @property
    def allocated(self) -> tuple[float, ...]:
        """Errors of allocated bytes, where they are measured."""
        return tuple(one.allocated_error for one in self.rows if one.allocated_error is not None)

    @property
    def reserved(self) -> tuple[float, ...]:
        """Errors of reserved bytes, where they are measured."""
        return tuple(one.reserved_error for one in self.rows if one.reserved_error is not None)

    @property
    def num_out_of_memory(self) -> int:
        """Number of rows that ran out of memory."""
        return sum(one.measured.ran_out for one in self.rows)

    @property
    def allocated_median(self) -> float | None:
        """Median absolute error of allocated bytes; ``None``: no row has them."""
        return _median(self.allocated)

    @property
    def reserved_median(self) -> float | None:
        """Median absolute error of reserved bytes; ``None``: no row has them."""
        return _median(self.reserved)

    @property
    def fits_right_ratio(self) -> float:
        """Share of the rows of which it is right whether they fit."""
        return float(np.mean([one.fits_as_measured for one in self.rows]))


def predict_memory(result: TableResult) -> list[PredictedMemory]:
    """Predict the memory of each row of a table that says something of it."""
    simulations = SimulationCache()
    timed = [(one.row, one.workload) for one in result.rows if one.row.memory is not None]
    alone = [(row, _smallest(row, simulations)) for row in result.table.memory_rows]
    return [predict_memory_of(row, workload, simulations) for row, workload in timed + alone]


def memory_errors(rows: Sequence[PredictedMemory]) -> list[MemoryErrors]:
    """Return the errors of each framework."""
    groups: dict[str, list[PredictedMemory]] = defaultdict(list)
    for one in rows:
        groups[one.row.framework].append(one)
    return [MemoryErrors(name, tuple(group)) for name, group in sorted(groups.items())]


def predict_memory_of(row: PublishedRow, workload: Workload, simulations: SimulationCache) -> PredictedMemory:
    """Predict the memory of a row as one of its workloads."""
    costs = Costs(workload, row.cluster)
    ranks, memory = simulations.memory(costs), workload.profile.memory
    fullest = max(ranks, key=_total)
    reported = ranks[0] if memory.reported_rank == "first" else fullest
    allocated = reported.allocated
    if memory.reports == "update":
        program = simulations.program(costs, workload.num_micro_batches, checks=False)
        updates = memory_at_update(workload, program, node_size=row.cluster.accelerators_per_node)
        allocated = (updates[0] if memory.reported_rank == "first" else max(updates, key=_total)).allocated
    capacity = float(row.cluster.accelerator.memory_bytes)
    probability = min(float(fits_probability(one, capacity)) for one in ranks)
    room = max(float(reported.allocated), capacity - float(reported.outside))
    reserved = min(float(reported.reserved), room)
    return PredictedMemory(row, workload, float(allocated), reserved, _total(fullest), probability)


def _smallest(row: PublishedRow, simulations: SimulationCache) -> Workload:
    """Return the workload of a row that needs the least memory."""
    if len(row.works) == 1:
        return row.works[0]
    return min(row.works, key=lambda one: predict_memory_of(row, one, simulations).needed_bytes)


def _median(errors: Sequence[float]) -> float | None:
    return float(np.median(np.abs(errors))) if errors else None


def _total(memory: PeakMemory) -> float:
    return float(memory.total)
