"""If these fail, the page calls a healthy run hung or a dead one training, mixes two runs of one folder,
or hides the one step that went wrong among a million."""

import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from myriad.dashboard import watched_run as watched_run_module
from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api.run_api import sentence
from myriad.dashboard.run_files import Curves, RunFiles
from myriad.dashboard.run_page import Follower
from myriad.dashboard.store.span_store import SpanStore
from myriad.dashboard.watched_run import Freshness, WatchedRun
from myriad.job import load_job
from myriad.run import Run
from myriad.run.run_lines import StepCount, count_steps
from myriad.run.run_speed import Peaks
from myriad.run.run_status import state_sentence
from myriad.system.jsonl import JsonlTail


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that have passed, as a test sets them."""
    passed = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: 50.0 + passed[0])
    monkeypatch.setattr(time, "time", lambda: 1e9 + passed[0])
    return passed


def test_a_reading_that_takes_long_is_no_hang(clock: list[float]) -> None:
    freshness = Freshness()
    clock[0] = 30.0
    freshness.looked(1, newest=1e9 - 0.3, began=50.0)
    assert freshness.quiet_seconds(1e9 - 0.3) == pytest.approx(0.3)


@pytest.mark.parametrize("offset", [-3600.0, 0.0, 3600.0])
def test_clocks_of_ranks_may_be_ahead_or_behind(clock: list[float], offset: float) -> None:
    freshness = Freshness()
    for second in range(60):
        clock[0] = float(second)
        newest = 1e9 + offset + min(second, 30)
        freshness.looked(min(second, 30), newest)
        if 10 <= second <= 30:
            assert freshness.quiet_seconds(newest) < 5.0, second
    assert freshness.quiet_seconds(1e9 + offset + 30) == pytest.approx(29.0, abs=2.0)


def test_what_is_sent_late_is_as_old_as_it_is(clock: list[float]) -> None:
    freshness = Freshness()
    freshness.looked(0, 0.0)
    for second in range(3):
        clock[0] = float(second)
        freshness.looked(second, newest=1e9 - 120.0 - 10 * (3 - second))
    assert freshness.quiet_seconds(1e9 - 120.0) == pytest.approx(122.0)


def test_one_bad_step_of_a_million_is_in_the_chart() -> None:
    curves = Curves()
    lines = [
        {"step": step, "time": 1.0 * step, "loss": 2.0, "step_seconds": 1.0} for step in range(1, 200_001)
    ]
    lines[70_001]["loss"], lines[123_457]["loss"], lines[150_003]["step_seconds"] = 9.0, None, 77.0
    curves.add(lines)
    found = curves.thinned(2000, Peaks())
    assert len(found["step"]) <= 2000 and (found["step"][0], found["step"][-1]) == (1, 200_000)
    at = {step: place for place, step in enumerate(found["step"])}
    assert found["loss"][at[70_002]] == 9.0 and found["step_seconds"][at[150_004]] == 77.0
    assert found["loss"][at[123_458]] != found["loss"][at[123_458]]
    curves.add([{"step": 5, "loss": 1.0}])
    assert curves.thinned(2000, Peaks())["step"] == [1, 2, 3, 4, 5]
    assert Curves().thinned(2, Peaks())["loss"] == []


def test_a_part_of_the_steps_is_exact_and_has_every_figure_of_the_lines() -> None:
    curves = Curves()
    lines = [{"step": step, "time": 10.0 * step, "loss": 1 / step, "flops": 2.0} for step in range(1, 10_001)]
    for line in lines[5000:]:
        line |= {"user": {"temperature": line["step"] / 2, "bad": "x"}, "mine": 3}
    curves.add(lines)
    found = curves.thinned(100, Peaks(), first=4999, last=5004)
    assert found["step"] == [4999, 5000, 5001, 5002, 5003, 5004]
    assert found["total_flops"][-1] == 2.0 * 5004 and found["loss"][0] == pytest.approx(1 / 4999, rel=1e-6)
    known = found["user/temperature"]
    assert known[2:] == [2500.5, 2501, 2501.5, 2502] and known[0] != known[0], (
        "of earlier steps it is unknown"
    )
    assert found["mine"][-1] == 3 and "user/bad" not in found
    assert curves.steps_at([0.0, 45.0, 1e9]) == [1, 5, 10_000]
    assert Curves().steps_at([1.0]) == [0]


@pytest.mark.parametrize("points", [2, 3, 7, 50])
@pytest.mark.parametrize("length", [1, 2, 9, 51, 1000])
def test_charts_get_about_as_many_points_as_they_ask_for(points: int, length: int) -> None:
    curves = Curves()
    curves.add({"step": step, "loss": 1.0 / step} for step in range(1, length + 1))
    steps = curves.thinned(points, Peaks())["step"]
    assert steps[0] == 1 and steps[-1] == length and steps == sorted(set(steps))
    assert len(steps) <= max(points, 6)


def test_a_clock_that_jumps_back_loses_no_step() -> None:
    """By an hour, at step 60 of 120: the run has begun after its newest line."""
    lines = [{"step": step, "time": 1e9 + step - (3600 if step > 60 else 0)} for step in range(1, 121)]
    start, again = {"event": "start", "time": 1e9}, {"event": "start", "time": 1e9 + 200, "resumed_from": 100}
    assert count_steps(lines, [start]) == StepCount(120, 0)
    assert count_steps(lines, [start, again]) == StepCount(100, 0)
    more = [*lines[:100], {"step": 101, "time": 1e9 + 201}]
    assert count_steps(more, [start, again]) == StepCount(101, 0)


def test_lines_share_their_keys(tmp_path: Path) -> None:
    """Each line with strings of its own would double the memory of a page that shows a long run."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"tokens_per_second": 1}\n' * 2)
    (one,), (other,) = JsonlTail(path).poll()
    assert one == "tokens_per_second" and one is other


def new_run(path: Path, *keys: str, loss: float) -> Run:
    run = Run(path)
    run.create_or_resume(load_job("tiny", list(keys)))
    run.append_event("start", time=time.time() - 60 + loss, world=run.job().layout.world)
    for step in (1, 2, 3):
        run.append_metrics({"time": time.time() - 5, "step": step, "loss": loss, "tokens": step})
    return run


def watched_run(run: Run) -> tuple[WatchedRun, Follower]:
    files = RunFiles(run)
    watched = WatchedRun(files, SpanStore(files.job.layout.world, files.job.train.steps), dict)
    return watched, Follower(watched)


def test_a_run_that_is_removed_and_trained_again_is_another_run(tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", "layout.dp=2", "train.steps=3", "optimizer.warmup_steps=1", loss=2.0)
    run.append_event("finish", step=3)
    watched, follower = watched_run(run)
    follower.poll()
    seen = watched.changes
    assert watched.state == "finished" and not watched.files.is_gone
    shutil.rmtree(run.path)
    follower.poll()
    assert watched.files.is_gone and watched.files.metrics and watched.changes != seen
    new_run(run.path, "train.steps=7", loss=3.0)
    follower.poll()
    files = watched.files
    assert not files.is_gone and [event["event"] for event in files.events] == ["start"]
    assert files.curves.thinned(9, Peaks())["loss"] == [3.0] * 3
    assert files.job.train.steps == 7 and watched.store.world == watched.ranks.world == 1
    assert watched.state == "training"


def test_a_run_is_not_judged_before_its_files_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("myriad.dashboard.watched_run.is_at_work", lambda run, sends: True)
    run = new_run(tmp_path / "run", loss=2.0)
    run.append_metrics({"time": time.time() - 600, "step": 4, "loss": 2.0})
    watched, follower = watched_run(run)
    assert watched.state == "reading"
    watched.files.poll()  # steps are known, and spans are not read yet
    assert watched.state == "reading"
    told = state_sentence("reading", 4, 20, 1.0, quiet_seconds=600.0)
    assert told == "its files are being read: step 4 of 20 so far, 10 min 00 s behind"
    follower.poll()
    assert watched.state == "hangs"


def test_a_copy_that_is_written_again_is_the_same_run(tmp_path: Path) -> None:
    """As rsync does with a run of another machine; also one that was cut short meanwhile."""
    run = new_run(tmp_path / "run", loss=2.0)
    watched, follower = watched_run(run)
    follower.poll()
    lines = run.events_path.read_text()
    for text in (lines + json.dumps({"time": time.time(), "event": "finish", "step": 3}) + "\n", lines):
        draft = run.path / ".events"
        draft.write_text(text)
        draft.rename(run.events_path)
        follower.poll()
        assert watched.files.num_runs == 1
        assert [event["event"] for event in watched.files.events] == ["start", "finish"][: text.count("\n")]


def test_a_disk_that_hangs_is_news_and_one_that_is_read_is_not(tmp_path: Path, clock: list[float]) -> None:
    watched, follower = watched_run(new_run(tmp_path / "run", loss=2.0))
    follower.poll()
    clock[0], seen = 60.0, watched.changes
    assert watched.behind_seconds == 0 and sentence(watched, Analyst(watched)).count("read") == 0
    with watched.reading():
        clock[0] = 85.0
        assert watched.changes != seen
        assert "its files have been read for 25.0 s" in sentence(watched, Analyst(watched))
    assert watched.changes == seen


def test_that_a_run_is_dead_is_news_though_nothing_comes(tmp_path: Path, clock: list[float]) -> None:
    watched, follower = watched_run(new_run(tmp_path / "run", loss=2.0))
    follower.poll()
    clock[0] = 1.0
    seen = watched.changes
    assert watched.state == "training"
    clock[0] = 80.0
    follower.poll()
    assert watched.state == "failed" and watched.changes != seen


def test_no_request_waits_for_the_account_of_a_long_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched_run_module, "_MOST_STEPS_AT_ONCE", 1)
    run, asked, done = Run(tmp_path / "run"), threading.Event(), threading.Event()
    run.create_or_resume(load_job("tiny"))
    for step in (1, 2):
        run.append_metrics({"time": 1e9 + step, "step": step, "loss": 1.0})

    def make() -> dict[str, float]:
        asked.set()
        assert done.wait(60)
        return {"effective_ratio": 0.5}

    watched = WatchedRun(RunFiles(run), SpanStore(1, 100), make)
    watched.files.poll()
    assert watched.account == {} and asked.wait(60)
    before = watched.changes
    assert watched.account == {} and watched.changes == before
    done.set()
    while watched.changes == before:
        time.sleep(0.01)
    assert watched.account == {"effective_ratio": 0.5}, "and pages were notified"
