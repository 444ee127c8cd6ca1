"""If these fail, `myriad runs` shows wrong figures of runs, hides a difference, or deletes what must stay."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from ended_runs import AT, make_run, write_lines

from myriad.cli.command_line import run_command
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.many_runs.run_pruning import PruneRules, plan_pruning, prune
from myriad.many_runs.run_row import find_runs, read_row
from myriad.run import Run
from myriad.run.run_removal import remove_run


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs, one of them below a sweep's folder, and folders that are not runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "runs"
    make_run(folder / "base", loss=4.0)
    make_run(folder / "sweep" / "fast", "optimizer.learning_rate=0.01", loss=3.0, at=AT + 1000)
    make_run(folder / "broken", "layout.dp=2", loss=5.0, end="", at=AT + 2000, steps=3)
    (folder / "notes").mkdir()
    make_run(folder / ".hidden")
    return folder


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    capsys.readouterr()
    assert run_command(["runs", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def names_of(found: dict[str, Any]) -> list[str]:
    return [row["name"] for row in found["runs"]]


def test_the_list_has_each_run_with_its_figures_and_what_differs(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = output_of(capsys, "list")
    assert names_of(found) == ["broken", "fast", "base"], "newest first"
    assert found["differing_keys"] == ["layout.dp", "optimizer.learning_rate"]
    broken, fast, base = found["runs"]
    assert (broken["state"], fast["state"], base["state"]) == ("failed", "finished", "finished")
    assert (broken["layout"]["dp"], broken["steps"], broken["loss"]) == (2, 3, 5.0)
    assert (base["best_validation"], base["best_validation_step"]) == (4.25, 4), "not the newest one"
    assert (base["tokens_per_second"], base["mfu"]) == (10.0, 0.5)
    assert (base["started"], base["seconds"], base["tokens"]) == (AT, 70.0, 600)
    assert fast["differs"] == {"layout.dp": 1, "optimizer.learning_rate": 0.01}
    assert names_of(output_of(capsys, "list", "runs/sweep")) == ["fast"]
    assert names_of(output_of(capsys, "list", "runs/base", "runs", "--sort", "name")) == names_of(
        output_of(capsys, "list", "--sort", "name")
    ), "each run once"


def test_runs_are_sorted_and_filtered_by_columns_and_keys_of_the_job(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def listed(*arguments: str) -> list[str]:
        return names_of(output_of(capsys, "list", *arguments))

    assert listed("--sort", "loss") == ["fast", "base", "broken"]
    assert listed("--sort", "-validation") == ["broken", "base", "fast"]
    assert listed("--sort", "-optimizer.learning_rate")[0] == "fast"
    assert listed("--filter", "state=failed") == ["broken"]
    assert listed("--filter", "optimizer.learning_rate=1e-2") == ["fast"], "numbers, not their spelling"
    assert listed("--filter", "loss>=4", "--filter", "name!=b*e") == ["broken"]
    assert listed("--filter", "name=*a*", "--sort", "name") == ["base", "fast"]


@pytest.mark.parametrize(
    ("option", "value"), [("--sort", "los"), ("--filter", "loss"), ("--filter", "optimiser.name=x")]
)
def test_a_wrong_key_is_refused(
    option: str, value: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = output_of(capsys, "list", option, value, code=2)["error"]
    assert (error["key"], error["value"]) == (option, value)
    if "." in value:
        assert "optimizer.name" in error["allowed"]


def test_states_of_runs_that_go_on_stopped_or_cannot_be_read(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(runs / "stopped", end="interrupted")
    make_run(runs / "elsewhere", end="", at=time.time() - 30, steps=3)
    Run(runs / "imported").create_or_resume(load_job("tiny"))
    make_run(runs / "damaged").job_path.write_text("[train")
    with Run(make_run(runs / "held", end="", steps=3).path).lock():
        found = {row["name"]: row["state"] for row in output_of(capsys, "list")["runs"]}
        going = output_of(capsys, "list", "--filter", "state=running")["runs"]
    assert {row["name"] for row in going} == {"elsewhere", "held"}
    assert found == {
        "base": "finished",
        "broken": "failed",
        "damaged": "unreadable",
        "elsewhere": "training",
        "fast": "finished",
        "held": "hangs",
        "imported": "new",
        "stopped": "interrupted",
    }


def test_no_run_at_all_is_said_and_a_missing_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert output_of(capsys, "list") == {"runs": [], "differing_keys": []}
    assert run_command(["runs", "list"]) == 0
    assert capsys.readouterr().out == "runs/: no run found\n"
    assert output_of(capsys, "list", "rums", code=2)["error"]["value"] == "rums"


@pytest.mark.parametrize("columns", [50, 80, 200])
def test_the_table_fits_the_terminal_and_hides_no_run(
    columns: int, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run_command(["runs", "list"]) == 0
    out = capsys.readouterr().out
    table = [line for line in out.splitlines() if ":" not in line or "20" in line]
    assert max(len(line.rstrip()) for line in table if "too narrow" not in line) <= max(columns, 50)
    for name in ("broken", "fast", "base"):
        assert sum(line.startswith(f"{name} ") for line in out.splitlines()) == 1
    assert "optimizer.learning_rate=0.01" in out
    assert ("too narrow" in out) == (columns < 200)


def test_control_characters_in_a_name_do_not_reach_the_terminal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "base").rename(runs / "ba\x1b[2Jse")
    assert run_command(["runs", "list"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_difference_of_jobs_environments_and_resumes_is_shown(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = Run(runs / "base")
    nodes = base.nodes_path
    nodes.mkdir()
    fact = {"node": 0, "host": "left", "address": "", "pod": "", "cpu": "Xeon", "memory_bytes": 7}
    fact |= {"gpus": [], "nics": [], "versions": {"kernel": "6.1"}}
    (nodes / "node-0.json").write_text(json.dumps(fact))
    base.create_or_resume(load_job("tiny", ["train.steps=8"]))
    software = {"torch": "2.11", "commit": "0" * 40}
    start = Run(runs / "broken").read_events()[0] | {"software": software, "host": "right"}
    write_lines(runs / "broken" / "events.jsonl", [start])
    found = output_of(capsys, "diff", "base", "runs/broken")
    assert found["job"] == {"layout.dp": [1, 2], "train.steps": [8, 6]}
    assert found["environment"] == {
        "software.torch": [None, "2.11"],
        "software.commit": [None, "0" * 40],
        "hosts": ["left", "right"],
        "cpu": ["Xeon", None],
        "memory_bytes": [7, None],
        "versions.kernel": ["6.1", None],
    }
    first, second = found["changed_by_resumes"]
    assert first == [{"step": 6, "key": "train.steps", "before": 6, "after": 8}] and second == []
    assert run_command(["runs", "diff", "base", "runs/broken"]) == 0
    out = capsys.readouterr().out
    assert "layout.dp" in out and "versions.kernel" in out and "after step 6: train.steps = 6 -> 8" in out
    assert output_of(capsys, "diff", "base", "nothing", code=2)["error"]["value"] == "nothing"
    equal = output_of(capsys, "diff", "base", "base")
    assert not equal["job"] and not equal["environment"]


def test_runs_are_compared_over_the_range_that_all_have(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = output_of(capsys, "compare", "base", "runs/sweep/fast", "broken", "--rows", "2")
    assert (found["by"], found["end"]) == ("steps", 3), "the third run has three steps"
    assert found["rows"] == [{"at": 2, "values": [8.5, 7.5, 6.5]}, {"at": 3, "values": [7, 6, 5]}]
    assert [one["best_validation"] for one in found["runs"]] == [7, 6, 8], "not the later ones"
    assert [one["train_seconds"] for one in found["runs"]] == [30, 30, 30]
    twice = make_run(runs / "twice", "train.global_batch=16")
    lines = [line | {"tokens": 200 * line["step"]} for line in twice.read_metrics()]
    write_lines(twice.metrics_path, lines)
    found = output_of(capsys, "compare", "base", "twice", "--by", "tokens", "--rows", "1")
    assert found["end"] == 600, "of twice, half of its steps"
    assert [one["train_seconds"] for one in found["runs"]] == [60, 30]
    values = found["rows"][0]["values"]
    assert values == [pytest.approx((8 + 7 + 6 + 5 + 4) / 5), 8], "from 200 to 600 tokens"


def test_the_comparison_draws_each_run_and_any_metric(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["runs", "compare", "base", "runs/sweep/fast"]) == 0
    lines = capsys.readouterr().out.splitlines()
    chart = [line for line in lines if "┤" in line]
    assert [line.split()[-1] for line in chart if line.split()[-1] in "AB"] == ["A", "B"], "A ends higher"
    assert chart[0].split()[0] == "9" and chart[-1].split()[0] == "3"
    base = Run(runs / "base")
    write_lines(base.metrics_path, [line | {"user": {"mine": 7.0}} for line in base.read_metrics()])
    found = output_of(capsys, "compare", "base", "base", "--metric", "mine")
    assert found["runs"][0]["value"] == 7
    assert (
        "mine" in output_of(capsys, "compare", "base", "base", "--metric", "mein", code=2)["error"]["allowed"]
    )


def test_runs_that_cannot_be_compared_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Run(runs / "imported").create_or_resume(load_job("tiny"))
    later = make_run(runs / "later")
    write_lines(later.metrics_path, [line | {"step": 100 + line["step"]} for line in later.read_metrics()])
    for other in ("imported", "later", "nothing"):
        assert "error" in output_of(capsys, "compare", "base", other, code=2)
    assert output_of(capsys, "compare", "base", code=2)["error"]["key"] == "RUN"


def test_prune_shows_first_and_deletes_only_when_told(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = output_of(capsys, "prune", "--state", "failed")
    assert [row["name"] for row in found["selected"]] == ["broken"] and found["deleted"] == []
    assert run_command(["runs", "prune", "--state", "failed"]) == 0, "no terminal, no answer"
    assert "nothing was deleted" in capsys.readouterr().out and (runs / "broken").is_dir()
    assert output_of(capsys, "prune", "--state", "failed", "--yes")["deleted"] == ["runs/broken"]
    assert sorted(path.name for path in runs.iterdir()) == [".hidden", "base", "notes", "sweep"]


@pytest.mark.parametrize(("answer", "stays"), [("y\n", False), ("n\n", True)])
def test_prune_asks_in_a_terminal(
    answer: str,
    stays: bool,
    runs: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    assert run_command(["runs", "prune", "--filter", "name=broken"]) == 0
    assert "delete 1 run," in capsys.readouterr().out
    assert (runs / "broken").exists() == stays


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--state", "training"],
        ["--state", "fialed"],
        ["--filter", "nothing=1"],
        ["--keep-best", "0"],
        ["--older-than", "-1"],
        ["nothing", "--state", "failed"],
    ],
)
def test_prune_refuses_wrong_conditions_before_it_deletes(
    arguments: list[str], runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(runs.rglob("*"))
    assert "error" in output_of(capsys, "prune", *arguments, "--yes", code=2)
    assert sorted(runs.rglob("*")) == before


def test_prune_keeps_the_best_and_the_recent(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(runs / "recent", loss=9.0, at=time.time() - 7200)

    def selected(*arguments: str) -> list[str]:
        return sorted(row["name"] for row in output_of(capsys, "prune", *arguments)["selected"])

    assert selected("--keep-best", "2") == ["broken", "recent"]
    assert selected("--keep-best", "1", "--filter", "name!=fast") == ["broken", "recent"]
    assert selected("--older-than", "1") == ["base", "broken", "fast"]
    assert selected("--older-than", "1", "--state", "finished", "--keep-best", "1") == ["base"]


def test_prune_leaves_runs_that_are_needed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    held = make_run(runs / "held", end="interrupted")
    write_lines(held.events_path, [*held.read_events(), {"event": "held", "time": AT + 80, "step": 6}])
    for name, problem in (("queued", "a fault"), ("refused", "a fault; not requeued: no slurmctld")):
        waits = make_run(runs / name, end="interrupted")
        requeue = {"event": "requeue", "time": AT + 80, "job": 7, "problem": problem}
        write_lines(waits.events_path, [*waits.read_events(), requeue])
    make_run(runs / "outer", end="interrupted")
    make_run(runs / "outer" / "inner", end="interrupted")
    (runs / "link").symlink_to(runs / "base")
    make_run(runs / "child", "train.init_from=runs/sweep/fast", end="", steps=2)
    outside = runs.parent / "outside"
    make_run(outside / "other")
    (runs / "sweep" / "link").symlink_to(outside / "other")
    with Run(runs / "base").lock():
        found = output_of(capsys, "prune", "--filter", "name!=child", "--older-than", "1", "--yes")
        assert (runs / "base" / "job.toml").is_file()
    assert found["deleted"] == ["runs/broken", "runs/refused"]
    reasons = {Path(path).name: why for path, why in found["stay"].items()}
    assert "requeued" in reasons["queued"]
    assert "memory" in reasons["held"] and "another run" in reasons["outer"]
    assert reasons["base"] == "is running" and "train.init_from" in reasons["fast"]
    assert reasons["link"] == "is a symbolic link" and (outside / "other" / "job.toml").is_file()


def test_a_run_that_starts_after_the_list_is_not_deleted(runs: Path) -> None:
    rows = [read_row(run) for run in find_runs([runs])]
    plan = plan_pruning(rows, PruneRules(states=["failed", "finished"]))
    assert len(plan.delete) == 3
    Run(runs / "broken").append_event("start", world=1)
    with Run(runs / "base").lock():
        deleted, problems = prune(plan)
    assert [path.name for path in deleted] == ["fast"]
    assert {path.name for path in problems} == {"base", "broken"}
    with Run(runs / "base").lock(), pytest.raises(BadInputError, match="being trained"):
        remove_run(runs / "base")
    assert (runs / "base" / "job.toml").is_file()


def test_what_cannot_be_deleted_is_reported_with_the_exit_code(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("myriad.run.run_removal.shutil.rmtree", refuse)
    found = output_of(capsys, "prune", "--state", "failed", "--yes", code=1)
    assert found["deleted"] == [] and "Permission denied" in found["problems"]["runs/broken"]


def test_notes_tags_and_the_archive(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(Path("runs") / "base")
    found = output_of(capsys, "note", "base", "--text", "best", "--tag", "paper", "--tag", "old")["runs"]
    assert found == {base: {"note": "best", "tags": ["old", "paper"], "archived": False}}
    output_of(capsys, "note", "base", "runs/broken", "--untag", "old", "--archive")
    assert names_of(output_of(capsys, "list")) == ["fast"]
    (row,) = output_of(capsys, "list", "--archived", "--filter", "tags=pap*")["runs"]
    assert (row["name"], row["note"], row["tags"], row["archived"]) == ("base", "best", ["paper"], True)
    monkeypatch.setenv("COLUMNS", "200")
    assert run_command(["runs", "list", "--archived"]) == 0
    assert "paper" in capsys.readouterr().out
    assert output_of(capsys, "note", "base", "--tag", "two words", code=2)["error"]["key"] == "tags"
    assert run_command(["runs", "note", "base", "runs/broken"]) == 0
    assert capsys.readouterr().out == f"{base}: paper, archived, best\nruns/broken: archived\n"
