"""The prediction of a run's step as span records, so that one code analyses predicted and measured steps.

If replicas are equal, the simulation has the spans of one of them: a rank represents the ranks at its place
in all replicas. Exposed tensor-parallel communication is part of the simulated compute actions; here it is a
separate span inside them, at the end."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from myriad.comm.layout import Layout
from myriad.dashboard.insight.losses import Losses, losses
from myriad.dashboard.insight.needs import step_programs
from myriad.dashboard.insight.phase_table import phase_table
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.dashboard.insight.step_spans import step_spans
from myriad.planner import Costs, Prediction, simulate
from myriad.planner.cost.operator_costs import peak_flops
from myriad.planner.simulation.spans_in_layers import SpansInLayers
from myriad.program.actions import chunk_of
from myriad.telemetry.span_io.span_records import RECORD, Records

if TYPE_CHECKING:
    from myriad.planner import Costs

__all__ = ["Plan", "predicted_losses", "predicted_records"]

_Row = tuple[float, float, int, str, int, int, int]


def predicted_records(
    prediction: Prediction, costs: Costs, step: int = 1, origin_ns: int = 0
) -> tuple[Records, tuple[str, ...]]:
    """Return the records of one iteration that begins at ``origin_ns``, and the names of the spans. They
    include all tensor-parallel ranks, and the replicas that were simulated."""
    layout = costs.workload.layout
    start = max(span.start + span.duration for span in prediction.spans) - prediction.seconds
    rows = list(_rows(prediction, costs, -start))
    names = tuple(dict.fromkeys(row[3] for row in rows))
    code = {name: at for at, name in enumerate(names)}
    records = np.zeros(len(rows), dtype=RECORD)
    begin = np.array([round(row[0] * 1e9) for row in rows], dtype=np.int64)
    records["start_ns"] = begin + origin_ns
    records["duration_ns"] = np.array([round(row[1] * 1e9) for row in rows], dtype=np.int64) - begin
    for field, at in (("rank", 2), ("stage", 4), ("micro_batch", 5), ("chunk", 6)):
        records[field] = [row[at] for row in rows]
    records["name"] = [code[row[3]] for row in rows]
    records["step"] = step
    sharers = layout.cp * layout.tp
    everyone = np.repeat(records[None], sharers, axis=0)
    everyone["rank"] += np.arange(sharers, dtype=np.int32)[:, None]
    flat = everyone.reshape(-1)
    return flat[np.argsort(flat["rank"], kind="stable")], names


def _rows(prediction: Prediction, costs: Costs, shift: float) -> Iterator[_Row]:
    """Yield start, end, rank, name, stage, micro-batch and chunk of each span."""
    layout, in_layers = costs.workload.layout, SpansInLayers(costs)
    first = _first_free(prediction, layout)
    for span in prediction.spans:
        replica = first if span.replica < 0 else span.replica
        rank = (replica * layout.pp + span.rank) * layout.cp * layout.tp
        action, begin = span.action, span.start + shift
        end = begin + span.duration
        chunk = chunk_of(action, prediction.program.num_stages)
        yield begin, end, rank, str(action.kind), action.stage, action.micro_batch, chunk
        for one in in_layers.of(action, begin + span.waited, span.duration - span.waited):
            yield one.start, one.start + one.seconds, rank, one.name, action.stage, -1, one.step


def _first_free(prediction: Prediction, layout: Layout) -> int:
    taken = {span.replica for span in prediction.spans}
    return next(replica for replica in range(layout.dp + 1) if replica not in taken)


def predicted_losses(costs: Costs) -> Losses:
    """Return the time losses of one predicted iteration of a job on a cluster."""
    work = costs.workload
    prediction = simulate(costs)
    records, names = predicted_records(prediction, costs)
    # What was simulated is one replica, or one for each number of micro-batches: a smaller world.
    replicas = np.unique(records["rank"] // (work.layout.world // work.layout.dp))
    layout = work.layout.model_copy(update={"dp": len(replicas), "shares": None})
    within = work.layout.world // work.layout.dp
    records["rank"] = np.searchsorted(replicas, records["rank"] // within) * within + records["rank"] % within
    ranks = Ranks(layout, layout.world)
    shares = [work.micro_batches_per_replica[int(replica)] for replica in replicas]
    programs = step_programs(
        work.layout,
        work.overlap,
        shares,
        tied=work.model.shares_embedding,
        num_chunks=costs.num_chunks,
        orthogonalizes=work.orthogonalizes,
    )
    ideal = work.model_flops / (work.layout.world * peak_flops(costs.cluster.accelerator, work.value_bytes))
    found = losses(
        phase_table(records, names, layout.world),
        [step_spans(records, names, ranks, programs)],
        ideal_seconds=ideal,
        step_seconds=prediction.seconds,
        timed_seconds=prediction.seconds,
    )
    assert found is not None, "a program has spans"
    return found


@dataclass(frozen=True)
class Plan:
    """The prediction of one job on one cluster, computed once."""

    costs: "Costs"

    @cached_property
    def losses(self) -> Losses:
        """Time losses from the peak down to the predicted MFU."""
        return predicted_losses(self.costs)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the predicted spans."""
        return self._step[1]

    @cached_property
    def _step(self) -> tuple[Records, tuple[str, ...]]:
        return predicted_records(simulate(self.costs), self.costs)

    @cached_property
    def _first_replica(self) -> Records:
        records, within = self._step[0], self._within
        replica = records["rank"] // within
        found: Records = records[replica == replica.min()]
        found["rank"] %= within
        return found

    @property
    def _within(self) -> int:
        """Number of ranks per replica."""
        layout = self.costs.workload.layout
        return layout.world // layout.dp

    def spans_of(self, rank: int, begin_ns: int) -> Records:
        """Return the predicted spans of one rank's step that begins at ``begin_ns``."""
        records = self._first_replica
        found: Records = records[records["rank"] == rank % self._within]
        found["start_ns"] += begin_ns
        found["rank"] = rank
        return found
