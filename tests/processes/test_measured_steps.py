"""If these break: real ranks record something else than their program's actions, and nobody can say any more
what they waited for, what decided a step, or who is silent."""

import os
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from same_run import train_rank
from tiny_corpora import make_corpus

from myriad.dashboard.insight.arrivals import SEND, arrows
from myriad.dashboard.insight.critical_path import critical_path
from myriad.dashboard.insight.findings import SpanAnalysis
from myriad.dashboard.insight.phase_table import phase_table
from myriad.job import Job, load_job
from myriad.program.actions import Kind
from myriad.run import Run
from myriad.run.run_speed import Speed
from myriad.telemetry.span_io.span_records import Records
from myriad.telemetry.span_io.span_ring import SPANS, SpanRings

SMALL = ["model.layers=4", "model.hidden=32", "model.sequence=32", "train.threads=1", "train.steps=4"]
LAYOUTS = [
    ["layout.dp=2", "layout.pp=2", "layout.zero=1", "layout.virtual_stages=2", "train.validate_every=2"],
    ["layout.dp=2", "layout.zero=3", "layout.shares=[3, 5]", "model.tied=false"],
]


def rank(addresses: list[str], path: str) -> int:
    """One rank, that records into its ring."""
    os.environ[SPANS] = addresses[int(os.environ["RANK"])]
    return train_rank([path])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_span_of_a_step_is_the_action_of_its_program(layout: list[str], tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, count=300)
    job = load_job("tiny", [f"data.corpus={corpus}", *SMALL, *layout])
    run, world = Run(tmp_path / "run"), job.layout.world
    run.create_or_resume(job)
    rings = SpanRings(world)
    addresses = [rings.address(row) for row in range(world)]
    assert run_ranks(world, rank, addresses, str(run.path)) == [0] * world
    drained = [rings.drain(row) for row in range(world)]
    names = tuple(dict.fromkeys(name for one in drained for name in one.names))
    parts = []
    for one in drained:
        codes = np.array([names.index(name) for name in one.names], dtype=np.int16)
        one.records["name"] = codes[one.records["name"]]
        parts.append(one.records)
    records = np.concatenate(parts)
    found = SpanAnalysis(records, names, job, Speed(1, 3, 0.1, None, 0.5))
    assert found.losses is not None and found.losses.split and found.losses.mfu is not None
    assert sum(found.losses.shares.values()) + found.losses.mfu == pytest.approx(1.0)
    for number in (1, 2, 3):
        step = found.step(number)
        assert step.matched.all()
        assert critical_path(step).seconds == pytest.approx((step.end_ns - step.begin_ns) * 1e-9)
        received = [
            transfer
            for one in step.programs
            for _, action in one.program
            for transfer in action.transfers
            if not transfer.sends and action.kind in (Kind.WAIT, Kind.EXCHANGE)
        ]
        assert np.count_nonzero(arrows(step).kind == SEND) == len(received), (
            "no message came before it was sent"
        )
    answer = found.without([0])
    assert answer is not None and 0 < answer.without_seconds <= 2 * answer.measured_seconds
    check_chunks(records, names, job)
    check_evaluations(records, names, world)


def check_chunks(records: Records, names: tuple[str, ...], job: Job) -> None:
    """Gathers and reductions name the chunk whose parameters they move, also of what two stages share."""
    stages = int(records["stage"].max()) + 1
    chunk_of = {name: set[tuple[int, int]]() for name in names}
    for name, stage, chunk in np.unique(records[["name", "stage", "chunk"]]).tolist():
        chunk_of[names[name]].add((stage, chunk))
    own = {(stage, stage) for stage in range(stages)}
    reduces = chunk_of.get("await_reduce", set()) | chunk_of.get("reduce", set())
    assert reduces and reduces <= own
    assert (chunk_of.get("await_gather", set()) | chunk_of.get("gather", set())) <= own
    assert {chunk for _, chunk in chunk_of["forward"]} == {-1}
    tied = {(0, stages), (stages - 1, stages)} if job.model.tied else set()
    assert chunk_of.get("gather_tied", set()) == tied == chunk_of.get("reduce_tied", set())


def check_evaluations(records: Records, names: tuple[str, ...], world: int) -> None:
    """A step after which a loss is evaluated has no more forwards than others: no rank looks slow by it."""
    counts = {
        step: np.bincount(records["rank"][forwards & (records["step"] == step)], minlength=world).tolist()
        for forwards in [records["name"] == names.index("forward")]
        for step in (1, 2, 3, 4)
    }
    assert counts[1] == counts[2] == counts[3] == counts[4]
    assert names.index("evaluate_forward") in records["name"]
    table = phase_table(records, names, world)
    times = np.count_nonzero(table.of_phase("evaluate") > 0, axis=0)
    assert set(times.tolist()) <= {1, 2}
