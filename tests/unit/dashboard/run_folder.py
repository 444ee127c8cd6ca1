"""Run folders as a run leaves them, with spans of simulated steps."""

import json
import time
from pathlib import Path

import numpy as np
from simulated_run import EPOCH_NS, MODEL, SimulatedRun, as_recorded, simulated_run

from myriad.comm.layout import Layout
from myriad.job import dump_toml, load_job
from myriad.telemetry.span_io.span_batch import SpanBatch
from myriad.telemetry.span_io.span_files import write_span_file
from myriad.telemetry.span_io.span_records import Records

PEAK_FLOPS = 312e12


def slow_run(steps: int = 24) -> SimulatedRun:
    """32 ranks on 4 nodes, of which rank 22 is slow from step 15 on."""
    layout = Layout(dp=8, pp=4)
    return simulated_run(layout, steps=steps, slower={(5, 2): 1.2}, since=15, jitter=0.01, node_size=8)


def write_run(
    path: Path, run: SimulatedRun, records: Records | None = None, ended_ago: float = 1000.0, end: str = ""
) -> Path:
    """``ended_ago``: seconds since its last step; ``end``: the event it ended with, if any."""
    (path / "spans").mkdir(parents=True)
    layout, batch = run.ranks.layout, run.costs.workload.global_batch
    changes = [f"layout.dp={layout.dp}", f"layout.pp={layout.pp}", f"train.global_batch={batch}"]
    nodes = layout.world // run.ranks.node_size
    job = load_job("tiny", [*changes, "train.steps=40", f"resilience.nodes={nodes}", "model.layers=8"])
    (path / "job.toml").write_text(dump_toml(job.model_copy(update={"model": MODEL})))
    began = time.time() - ended_ago - sum(run.step_seconds.values())
    records = as_recorded(run).records if records is None else records
    records = records.copy()
    records["start_ns"] += round(began * 1e9) - EPOCH_NS
    for node in range(nodes):
        here = records[np.isin(records["rank"], run.ranks.ranks_of_node(node))]
        for part, some in enumerate(np.array_split(here[np.argsort(here["start_ns"], kind="stable")], 2)):
            file = path / "spans" / f"attempt-1-node-{node}-{part}.parquet"
            write_span_file(file, SpanBatch(node, 1, run.names, some, clock_error_seconds=1e-4))
    _write_lines(path, run, began, end)
    return path


def _write_lines(path: Path, run: SimulatedRun, began: float, end: str) -> None:
    peak, batch = PEAK_FLOPS * run.ranks.world, run.costs.workload.global_batch
    flops, now, lines = run.costs.workload.model_flops, began, []
    for step, seconds in run.step_seconds.items():
        now += seconds
        line = {"time": now, "step": step, "loss": 5 - step / 50, "tokens": step * batch * MODEL.sequence}
        mfu = flops / seconds / peak
        line |= {"step_seconds": seconds, "mfu": mfu, "tokens_per_second": batch * MODEL.sequence / seconds}
        lines.append(json.dumps(line))
    (path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    start = {"time": began, "event": "start", "world": run.ranks.world, "device": "cuda"}
    start |= {"precision": "bfloat16", "peak_flops": peak, "peak_source": "data sheet"}
    events = [start] + ([{"time": now, "event": end, "step": len(lines)}] if end else [])
    (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
