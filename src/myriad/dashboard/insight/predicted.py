"""A simulated iteration as records, so that one code looks at what was predicted and at what was measured.

A simulation of replicas that are alike has spans of one of them; tensor-parallel exchanges that nothing hides
are part of its computes and stand here inside of them, at the end.
"""

from collections.abc import Iterator

import numpy as np

from myriad.comm.layout import Layout
from myriad.dashboard.insight.losses import Losses, losses
from myriad.dashboard.insight.needs import step_programs
from myriad.dashboard.insight.phase_table import phase_table
from myriad.dashboard.insight.ranks import Ranks
from myriad.dashboard.insight.step_spans import step_spans
from myriad.planner.costs import Costs, StageCosts
from myriad.planner.operators import peak_flops
from myriad.planner.outlook import tensor_seconds
from myriad.planner.simulator import Prediction, simulate
from myriad.program.actions import COMPUTE, Action, Kind, chunk_of
from myriad.telemetry.records import RECORD, Records

__all__ = ["predicted_losses", "predicted_records"]

_Row = tuple[float, float, int, str, int, int, int]


def predicted_records(
    prediction: Prediction, costs: Costs, step: int = 1, origin_ns: int = 0
) -> tuple[Records, tuple[str, ...]]:
    """Of one iteration that begins at ``origin_ns``, and the names of their spans; of ranks that share
    matrices all, of replicas those that were simulated."""
    layout = costs.work.layout
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
    sharers = layout.cp * layout.tp * layout.ep
    everyone = np.repeat(records[None], sharers, axis=0)
    everyone["rank"] += np.arange(sharers, dtype=np.int32)[:, None]
    flat = everyone.reshape(-1)
    return flat[np.argsort(flat["rank"], kind="stable")], names


def _rows(prediction: Prediction, costs: Costs, shift: float) -> Iterator[_Row]:
    """Start, end, rank, name, stage, micro-batch, chunk."""
    layout, recompute = costs.work.layout, costs.work.recompute
    first = _first_free(prediction, layout)
    for span in prediction.spans:
        replica = first if span.replica < 0 else span.replica
        rank = (replica * layout.pp + span.rank) * layout.cp * layout.tp * layout.ep
        action, begin = span.action, span.start + shift
        end = begin + span.duration
        chunk = chunk_of(action, prediction.program.num_stages)
        yield begin, end, rank, str(action.kind), action.stage, action.micro_batch, chunk
        if action.kind in COMPUTE and layout.tp > 1:
            stage = costs.stages[action.stage]
            tensor = tensor_seconds(stage, action, recompute) / _planned_seconds(stage, action)
            inside = min(1.0, tensor) * (span.duration - span.waited)
            yield end - inside, end, rank, "tensor_comm", action.stage, -1, -1


def _planned_seconds(stage: StageCosts, action: Action) -> float:
    return {
        Kind.FORWARD: stage.forward,
        Kind.BACKWARD: stage.backward,
        Kind.BACKWARD_INPUT: stage.backward_input,
        Kind.BACKWARD_WEIGHT: stage.backward_weight,
    }[action.kind]


def _first_free(prediction: Prediction, layout: Layout) -> int:
    taken = {span.replica for span in prediction.spans}
    return next(replica for replica in range(layout.dp + 1) if replica not in taken)


def predicted_losses(costs: Costs) -> Losses:
    """Of one iteration of a job on a cluster, all ranks as planned."""
    work = costs.work
    prediction = simulate(costs)
    records, names = predicted_records(prediction, costs)
    # What was simulated is one replica, or one for each number of micro-batches: a smaller world.
    replicas = np.unique(records["rank"] // (work.layout.world // work.layout.dp))
    layout = work.layout.model_copy(update={"dp": len(replicas), "shares": None})
    within = work.layout.world // work.layout.dp
    records["rank"] = np.searchsorted(replicas, records["rank"] // within) * within + records["rank"] % within
    ranks = Ranks(layout, layout.world)
    shares = [work.shares[int(replica)] for replica in replicas]
    programs = step_programs(
        work.layout, work.overlap, shares, tied=work.model.tied, num_chunks=costs.num_chunks
    )
    ideal = work.model_flops / (work.layout.world * peak_flops(costs.cluster.accelerator, work.value_bytes))
    found = losses(
        phase_table(records, names, layout.world),
        [step_spans(records, names, ranks, programs)],
        ideal_seconds=ideal,
        step_seconds=prediction.seconds,
    )
    assert found is not None, "a program has spans"
    return found
