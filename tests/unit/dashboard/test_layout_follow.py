"""If these fail, a page that stays open while a run continues in another layout shows ranks at places that
they had before, or refuses what they tell."""

from pathlib import Path

import numpy as np
import pytest

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.run_files import RunFiles
from myriad.dashboard.run_page import Follower
from myriad.dashboard.run_view import RunReader, attempt_of
from myriad.dashboard.store.span_store import SpanStore
from myriad.dashboard.watched_run import WatchedRun
from myriad.job import load_job
from myriad.run import Run
from myriad.telemetry.span_io.span_batch import SpanBatch
from myriad.telemetry.span_io.span_files import write_span_file
from myriad.telemetry.span_io.span_records import RECORD

EPOCH = 1_700_000_000


def begin(run: Run, at: float, *overrides: str) -> None:
    """A person starts it, in this layout."""
    job = load_job("tiny", ["train.global_batch=48", "model.layers=4", *overrides])
    run.create_or_resume(job)
    tell(run, at, "start", world=job.layout.world)


def tell(run: Run, at: float, event: str, **fields: object) -> None:
    from myriad.system.jsonl import append_line

    append_line(run.events_path, {"time": EPOCH + at, "event": event, **fields})


def write_spans(run: Run, at: float, world: int, attempt: int, step: int) -> None:
    records = np.zeros(world, RECORD)
    records["rank"], records["step"] = range(world), step
    records["start_ns"] = round((EPOCH + at) * 1e9) + np.arange(world)
    records["duration_ns"] = 10**8
    run.spans_path.mkdir(exist_ok=True)
    path = run.spans_path / f"attempt-{attempt}-node-0-{step}.parquet"
    write_span_file(path, SpanBatch(0, attempt, ("forward",), records))


def watched(run: Run) -> WatchedRun:
    files = RunFiles(run)
    return WatchedRun(files, SpanStore(files.job.layout.world, files.job.train.steps), dict)


def shown(page: WatchedRun) -> tuple[int, list[int], dict[str, int]]:
    """Ranks, steps, and the layout's axes of more than one rank."""
    axes = {axis: getattr(page.ranks.layout, axis) for axis in ("dp", "pp", "tp")}
    return page.store.world, page.store.steps(), {axis: size for axis, size in axes.items() if size > 1}


def test_a_run_that_continues_in_another_layout_is_shown_in_that_one(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    begin(run, 0, "layout.dp=4")
    write_spans(run, 5, 4, attempt=1, step=1)
    page = watched(run)
    follower, analyst = Follower(page), Analyst(page)
    follower.poll()
    assert shown(page) == (4, [1], {"dp": 4}) and analyst.step(1) is not None
    kept = page.store.counts.kept

    reader = RunReader(run)
    assert reader.read().job.layout.dp == 4
    begin(run, 100, "layout.dp=2", "layout.pp=2", "layout.tp=2")
    assert reader.read().job.layout.world == 8
    write_spans(run, 105, 8, attempt=2, step=2)
    follower.poll()
    assert shown(page) == (8, [2], {"dp": 2, "pp": 2, "tp": 2})
    assert page.store.counts.kept == kept + 8 and page.store.counts.refused_files == 0
    assert page.heat.heat("forward", 2, 2).missing == 0 and page.last_step == 2
    step = analyst.step(2)
    assert step is not None and step.ranks.world == 8

    tell(run, 200, "interrupted")
    begin(run, 300, "layout.tp=2", "layout.pp=4")  # as many ranks, at other places
    write_spans(run, 305, 8, attempt=3, step=3)
    follower.poll()
    assert shown(page) == (8, [3], {"pp": 4, "tp": 2})
    assert page.ranks.coordinates(7)["pp"] == 3


def test_a_run_that_has_lost_a_node_is_shown_with_the_ranks_that_it_has(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    begin(run, 0, "layout.dp=4", "resilience.nodes=4")
    write_spans(run, 5, 4, attempt=1, step=1)
    page = watched(run)
    follower = Follower(page)
    follower.poll()
    tell(run, 50, "restart", dp=3)
    write_spans(run, 55, 3, attempt=2, step=2)
    follower.poll()
    assert shown(page) == (3, [2], {"dp": 3}) and page.last_step == 2
    tell(run, 60, "start", world=3)
    tell(run, 70, "restart")
    write_spans(run, 75, 4, attempt=3, step=3)
    follower.poll()
    assert shown(page) == (4, [3], {"dp": 4})


def test_a_page_that_is_opened_later_leaves_out_what_ranks_of_another_layout_did(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    begin(run, 0, "layout.dp=4")
    write_spans(run, 5, 4, attempt=1, step=1)
    begin(run, 100, "layout.dp=2")
    write_spans(run, 105, 2, attempt=2, step=2)
    begin(run, 200, "layout.dp=2")
    write_spans(run, 205, 2, attempt=3, step=3)
    page = watched(run)
    Follower(page).poll()
    assert shown(page) == (2, [2, 3], {"dp": 2})
    assert (page.store.counts.refused_files, page.store.counts.too_old) == (0, 4)


@pytest.mark.parametrize(
    ("events", "dp"),
    [
        ([{"event": "restart", "dp": 3}], 3),
        ([{"event": "restart", "dp": 3}, {"event": "start", "world": 3}, {"event": "interrupted"}], 3),
        ([{"event": "restart", "dp": 3}, {"event": "interrupted"}, {"event": "start", "world": 4}], 4),
        ([{"event": "restart", "dp": 3}, {"event": "start", "world": 3}, {"event": "start", "world": 4}], 4),
        ([{"event": "restart", "dp": 3}, {"event": "restart"}], 4),
        ([{"event": "restart", "dp": "three"}], 4),
    ],
)
def test_a_run_that_an_operator_restarts_has_the_layout_of_the_job(
    events: list[dict[str, object]], dp: int
) -> None:
    job = load_job("tiny", ["layout.dp=4", "train.global_batch=48"])
    assert attempt_of(job, events).layout.dp == dp
