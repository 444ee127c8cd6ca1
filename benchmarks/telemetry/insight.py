"""What spans say, at the size of the largest published run: steps of every rank of a job, simulated, with one
slow rank; how long each answer takes, and whether it is right.

    python benchmarks/telemetry/insight.py [--job megascale-175b-12288] [--cluster megascale-12288xa100]
                                 [--micro-batches 8] [--steps 1] [--json]

One replica is simulated and stands for all but that of the slow rank, as they are alike. Micro-batches are
fewer than the job's, so that the spans of all ranks fit into memory. Records come in 97 parts, the last one
first, as batches do.
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from myriad.dashboard.insight.arrivals import arrows, held_up
from myriad.dashboard.insight.critical_path import critical_path
from myriad.dashboard.insight.losses import losses
from myriad.dashboard.insight.needs import step_programs
from myriad.dashboard.insight.nesting import nested
from myriad.dashboard.insight.phase_table import table_of
from myriad.dashboard.insight.predicted_step import predicted_records
from myriad.dashboard.insight.rank_arrays import Ranks
from myriad.dashboard.insight.step_spans import StepSpans
from myriad.dashboard.insight.straggler_report import stragglers
from myriad.dashboard.insight.what_if import what_if
from myriad.forecasts.iteration_forecast import costs_of
from myriad.job import load_job
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.simulation.simulator import simulate
from myriad.recipes.cluster import load_cluster
from myriad.telemetry.span_io.span_records import Records

NODE_SIZE, FACTOR = 8, 1.11


def all_ranks(costs: Costs, lane: tuple[int, int], num_steps: int) -> tuple[Records, tuple[str, ...], float]:
    """Spans of every rank over some steps, their names, and the seconds of a step."""
    layout = costs.workload.layout
    within = layout.world // layout.dp
    prediction = simulate(costs, slower={lane: FACTOR})
    records, names = predicted_records(prediction, costs, 1, 1_700_000_000 * 10**9)
    _no_span_without_length(records, names)
    slow = records["rank"] // within == lane[0]
    one = records[~slow]
    one["rank"] %= within
    parts = []
    for replica in range(layout.dp):
        part = records[slow] if replica == lane[0] else one.copy()
        part["rank"] = part["rank"] % within + replica * within
        parts.append(part)
    step = np.concatenate(parts)
    steps = []
    for number in range(num_steps):
        later = step.copy()
        later["step"] += number
        later["start_ns"] += round(number * prediction.seconds * 1e9)
        steps.append(later)
    return np.concatenate(steps), names, prediction.seconds


def _no_span_without_length(records: Records, names: tuple[str, ...]) -> None:
    """As of real ranks. A span more costs each 600 ns; what is inside of a span moves with it."""
    outer = np.array([name != "tensor_comm" for name in names])[records["name"]]
    edges = np.flatnonzero(np.diff(records["rank"], prepend=-1))
    turn = np.cumsum(outer)
    turn -= np.repeat(turn[edges], np.diff([*edges, len(records)]))
    records["start_ns"] += 600 * turn
    records["duration_ns"] = np.maximum(records["duration_ns"], 600)


def timed(rows: list[tuple[str, float, str]], what: str, call: Callable[[], Any], note: str = "") -> Any:
    """Does it, and notes how long it took."""
    began = time.perf_counter()
    found = call()
    rows.append((what, time.perf_counter() - began, note))
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--job", default="megascale-175b-12288")
    parser.add_argument("--cluster", default="megascale-12288xa100")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    job = load_job(options.job, [])
    batch = options.micro_batches * job.layout.dp * job.layout.micro_batch
    job = load_job(options.job, [f"train.global_batch={batch}"])
    costs, layout = costs_of(job, load_cluster(options.cluster)), job.layout
    lane = layout.dp // 3, layout.pp // 2
    ranks = Ranks(layout, NODE_SIZE)
    slow = int(ranks.first_of_pipeline[lane])
    rows: list[tuple[str, float, str]] = []
    records, names, seconds = timed(rows, "simulate, spread", lambda: all_ranks(costs, lane, options.steps))
    records = np.concatenate(np.array_split(records, 97)[::-1])
    count = len(records)

    spans = timed(rows, "order, nesting", lambda: nested(records))
    table = timed(rows, "phases", lambda: table_of(spans, names, ranks.world))
    rows[-1] = (
        rows[-1][0],
        rows[-1][1],
        f"{count / (rows[-1][1] + rows[-2][1]) / 1e6:.1f} M spans/s, with nesting",
    )
    ordered = spans.records
    timed(rows, "both, in order", lambda: table_of(nested(ordered), names, ranks.world))
    rows[-1] = (*rows[-1][:2], f"{count / rows[-1][1] / 1e6:.1f} M spans/s, as a span file has them")
    found = timed(rows, "slow ranks", lambda: stragglers(table, ranks))
    rows[-1] = (*rows[-1][:2], found[0].sentence if found else "nobody")
    work = costs.workload
    programs = timed(
        rows,
        "program",
        lambda: step_programs(
            layout,
            work.overlap,
            work.micro_batches_per_replica,
            tied=work.model.shares_embedding,
            num_chunks=costs.num_chunks,
        ),
    )
    last = records[records["step"] == options.steps]
    step = timed(rows, "spans to actions", lambda: _matched(StepSpans(ranks, names, nested(last), programs)))
    timed(rows, "who came last", lambda: held_up(step))
    lost = timed(rows, "losses", lambda: losses(table, [step], ideal_seconds=seconds / 2))
    rows[-1] = (*rows[-1][:2], f"parts sum to {sum(lost.shares.values()) + lost.mfu:.12f}")
    path = timed(rows, "critical path", lambda: critical_path(step))
    most = next(iter(path.by_rank()))
    rows[-1] = (
        *rows[-1][:2],
        f"{len(path.links)} links; rank {most} is {path.by_rank()[most] / path.seconds:.0%} of it",
    )
    members = range(slow, slow + ranks.sharers)
    answer = timed(rows, "what if", lambda: what_if(step, members, seconds))
    healthy = simulate(costs, spans=False).seconds
    rows[-1] = (*rows[-1][:2], f"{answer.sentence}; truth {healthy:.4g} s" if answer else "not known")
    drawn = timed(rows, "arrows of 64 ranks", lambda: arrows(step, np.arange(64)))
    rows[-1] = (*rows[-1][:2], f"{len(drawn.kind):,} arrows")
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    if options.json:
        table_rows = [{"what": what, "seconds": took, "note": note} for what, took, note in rows]
        print(json.dumps({"ranks": ranks.world, "spans": count, "memory_gib": memory, "rows": table_rows}))
        return
    print(f"{ranks.world:,} ranks, {options.steps} steps, {count:,} spans; memory {memory:.1f} GiB")
    for what, took, note in rows:
        print(f"{what:<20} {took:8.3f} s   {note}")


def _matched(step: StepSpans) -> StepSpans:
    """Looked up before others need it."""
    assert step.matched.all()
    return step


if __name__ == "__main__":
    main()
