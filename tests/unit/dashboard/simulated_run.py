"""Spans of whole runs whose truth is known: simulated iterations of small jobs, one after the other."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from myriad.comm.layout import Layout
from myriad.dashboard.insight.needs import step_programs
from myriad.dashboard.insight.predicted_step import predicted_records
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.dashboard.insight.step_spans import StepSpans, step_spans
from myriad.model.config import ModelConfig
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.simulation.simulator import simulate
from myriad.planner.workload import Workload
from myriad.recipes.cluster import load_cluster
from myriad.telemetry.span_io.span_records import Records

MODEL = ModelConfig(layers=8, hidden=1024, heads=8, sequence=512, vocabulary=8192)
EPOCH_NS = 1_700_000_000 * 10**9


@dataclass(frozen=True)
class SimulatedRun:
    records: Records
    names: tuple[str, ...]
    ranks: Ranks
    costs: Costs
    step_seconds: dict[int, float]

    def step(self, step: int) -> StepSpans:
        layout, work = self.ranks.layout, self.costs.workload
        programs = step_programs(
            layout,
            work.overlap,
            work.micro_batches_per_replica,
            tied=work.model.tied,
            num_chunks=self.costs.num_chunks,
            orthogonalizes=work.orthogonalizes,
        )
        return step_spans(self.records[self.records["step"] == step], self.names, self.ranks, programs)


@cache
def costs_of(layout: Layout, micro_batches: int = 4) -> Costs:
    """With ZeRO 2 the optimizer is Muon, whose matrices travel between the ranks of a stage."""
    batch, optimizer = layout.dp * micro_batches * layout.micro_batch, "muon" if layout.zero == 2 else "adamw"
    work = Workload(MODEL, layout, batch, optimizer=optimizer)
    return Costs(work, load_cluster("megascale-256xa100"))


def simulated_run(
    layout: Layout,
    *,
    steps: int = 1,
    micro_batches: int = 4,
    node_size: int = 4,
    slower: Mapping[tuple[int, int], float] | None = None,
    since: int = 1,
    jitter: float = 0.0,
) -> SimulatedRun:
    """``slower``: factor on the compute of (replica, place in the pipeline), from step ``since`` on."""
    costs = costs_of(layout, micro_batches)
    parts, names, begin, took = [], (), EPOCH_NS, {}
    kept = {}
    for step in range(1, steps + 1):
        slow = dict(slower or {}) if step >= since else {}
        key = step if jitter else bool(slow)
        if key not in kept:
            kept[key] = simulate(costs, slower=slow, jitter=jitter, seed=step, every_replica=True)
        records, names = predicted_records(kept[key], costs, step, begin)
        parts.append(records)
        took[step] = kept[key].seconds
        begin += round(kept[key].seconds * 1e9)
    return SimulatedRun(np.concatenate(parts), names, Ranks(layout, node_size), costs, took)


def as_recorded(run: SimulatedRun) -> SimulatedRun:
    """As real ranks have it: no span takes no time. A span more costs each rank 600 ns."""
    records = run.records.copy()
    outer = records["name"] != (run.names.index("tensor_comm") if "tensor_comm" in run.names else -1)
    edges = np.flatnonzero(np.diff(records["rank"], prepend=-1) | np.diff(records["step"], prepend=-1))
    turn = np.cumsum(outer)
    turn -= np.repeat(turn[edges], np.diff([*edges, len(records)]))
    records["start_ns"] += 600 * turn
    records["duration_ns"] = np.maximum(records["duration_ns"], 600)
    return replace(run, records=records)


def records_of(*rows: tuple[int, int, str, float, float]) -> tuple[Records, tuple[str, ...]]:
    """Step, rank, name, start and duration in seconds."""
    from myriad.telemetry.span_io.span_records import RECORD

    names = tuple(dict.fromkeys(row[2] for row in rows))
    records = np.zeros(len(rows), dtype=RECORD)
    for at, (step, rank, name, start, duration) in enumerate(rows):
        records[at] = (round(start * 1e9), round(duration * 1e9), step, rank, names.index(name), -1, -1, -1)
    return records, names
