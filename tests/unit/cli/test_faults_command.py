"""If these fail, one scenario that breaks takes the whole matrix with it."""

import json
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from myriad.cli import faults_command
from myriad.cli.main import main
from myriad.errors import RunFailedError
from myriad.faults import trial
from myriad.faults.fault_grades import Grade, Report
from myriad.faults.scenario import load_scenario
from myriad.launchers.launcher import Observer
from myriad.run import Run
from myriad.system.jsonl import append_lines

SCENARIO = 'job = "tiny"\n[[faults]]\nkind = "kill"\nrank = 0\nstep = 5\n'


@pytest.fixture
def scenarios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Three, of which the second raises."""

    def pretend(name: str, *_: object) -> Report:
        if name == "second":
            raise RunFailedError("the executor does not stay alive")
        return Report(
            scenario=name,
            grades=[Grade(fault="kill rank 0 at step 5", aim_seconds=0.25, names=True, culprit_right=True)],
            outcome="finished",
            equal=True,
            evicted_healthy=0,
            false_alarms=0,
            missed=[],
        )

    monkeypatch.setattr(trial, "try_scenario", pretend)
    monkeypatch.setattr(faults_command, "_check", lambda *_: None)
    paths = [tmp_path / f"{name}.toml" for name in ("first", "second", "third")]
    for path in paths:
        path.write_text(SCENARIO)
    return list(map(str, paths))


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["faults", "run", *arguments])
    return int(ended.value.code or 0)


def test_a_scenario_that_breaks_is_a_row_and_the_others_are_tried(
    scenarios: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert run(*scenarios, "--markdown", str(page)) == 1
    told = capsys.readouterr().out
    assert page.read_text() == told
    assert "| first" in told and "| third" in told
    assert "- second: it could not be tried: the executor does not stay alive" in told
    last = "3 incidents, 66.7% handled without a person; culprit right 2 of 2 (100.0%); "
    assert told.splitlines()[-1].startswith(last)


def test_ctrl_c_ends_them_all_and_reports_what_was_tried(
    scenarios: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = trial.try_scenario

    def until_the_second(name: str, *rest: Any) -> Report:
        if name == "second":
            raise KeyboardInterrupt
        return tried(name, *rest)

    monkeypatch.setattr(trial, "try_scenario", until_the_second)
    assert run(*scenarios) == 130
    told = capsys.readouterr().out
    assert "| first" in told and "third" not in told


@pytest.mark.parametrize("undisturbed", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_a_person_ends_is_not_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: bool, fails: bool
) -> None:
    """Also where it fails on its way to the end: its ranks hang, as they were to."""

    def stopped(run: Run, world: int, *, threads: int = 0, observer: Observer | None = None) -> str:
        if observer is None and not undisturbed:
            return "finished"
        if observer is not None:
            observer.stopping()
            if fails:
                raise RunFailedError("rank 0 hung")
        return "interrupted"

    monkeypatch.setattr(trial, "run_local", stopped)
    (tmp_path / "one.toml").write_text(SCENARIO)
    with pytest.raises(KeyboardInterrupt):
        trial.try_scenario("one", load_scenario(str(tmp_path / "one.toml")), tmp_path, print)


def test_progress_states_which_run_is_under_way_and_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """slow-rank trains for minutes: without its steps on the screen it looks as if it hung."""
    monkeypatch.setattr(faults_command, "_POLL_SECONDS", 0.02)
    shown: list[tuple[str, int, int]] = []
    run = Run(tmp_path / "run")
    run.path.mkdir()
    with closing(faults_command._Follower(lambda *what: shown.append(what))) as follower:
        follower.title = "slow-rank (1 of 2)"
        follower("run with faults", run, 500)
        for step in range(1, 4):
            append_lines(run.metrics_path, [json.dumps({"step": step, "loss": 1.0})])
            time.sleep(0.5)
            deadline = time.monotonic() + 20
            while not (shown and shown[-1][1] == step) and time.monotonic() < deadline:
                time.sleep(0.01)
    assert [done for _, done, _ in shown][-1] == 3 and {total for *_, total in shown} == {500}
    stage = shown[-1][0]
    assert stage.startswith("slow-rank (1 of 2), run with faults, about") and "left" in stage


def test_programs_get_the_same_as_json(scenarios: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*scenarios, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["met"] for one in found["scenarios"]] == [True, False, True]
    assert found["tally"]["handled_ratio"] == pytest.approx(2 / 3) and found["met"] is False


@pytest.mark.parametrize("arguments", [[], ["--all", "--random", "3"], ["kill-rank", "--doubles", "1"]])
def test_scenarios_all_and_random_exclude_each_other(arguments: list[str]) -> None:
    assert run(*arguments) == 2
