"""If these fail, a user relies on a damaged checkpoint, or removes the one that was needed."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from myriad.checkpoint.checkpoint_files import save
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli.main import build_app
from myriad.dashboard.run_files import RunFiles
from myriad.dashboard.watched_run import Checkpoints
from myriad.errors import BadInputError, RunFailedError
from myriad.job import load_job
from myriad.model.tensor_shard import TensorShard
from myriad.run import Run

Command = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """With checkpoints after 10, 20 and 30 steps."""
    made = Run(tmp_path / "run")
    made.create_or_resume(load_job("tiny"))
    for step in (10, 20, 30):
        put(made, step, torch.full((4, 3), float(step)))
    return made


def put(run: Run, step: int, weights: torch.Tensor, **more: torch.Tensor) -> Path:
    values = {"w": weights, "same": torch.full((5,), float("nan"))} | more
    parts = [TensorShard(f"model.{k}", tuple(v.shape), (0,) * v.dim(), v) for k, v in values.items()]
    return save(CheckpointFolder(run.checkpoints_path), step, parts, {"step": step})


@pytest.fixture
def command() -> Command:
    def call(*arguments: object) -> Result:
        return CliRunner().invoke(build_app(), ["checkpoint", *map(str, arguments)])

    return call


def damage(run: Run, step: int) -> None:
    (path,) = CheckpointFolder(run.checkpoints_path).of_step(step).glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_the_list_states_step_time_and_size_and_reads_every_byte_when_asked(run, command):
    damage(run, 20)
    rows = json.loads(command("list", run.path, "--json").stdout)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [
        (10, "complete"),
        (20, "complete"),
        (30, "complete"),
    ]
    assert all(row["bytes"] > 0 for row in rows) and rows[0]["time"] <= rows[2]["time"]
    rows = json.loads(command("list", run.path, "--verify", "--json").stdout)["checkpoints"]
    assert [row["state"] for row in rows] == ["verified", "damaged", "verified"]
    shown = command("list", run.path, "--verify").stdout
    assert "damaged" in shown and "step-20/__0_0.distcp: chunk 2 (progress" in shown


def test_the_page_shows_what_is_there_and_what_is_not_whole(run):
    assert [(row["step"], row["tier"], row["state"]) for row in Checkpoints(RunFiles(run)).newest()] == [
        (step, "storage", "complete") for step in (10, 20, 30)
    ]
    (path,) = CheckpointFolder(run.checkpoints_path).of_step(20).glob("*.distcp")
    os.truncate(path, path.stat().st_size - 1)
    page = Checkpoints(RunFiles(run))
    rows = page.newest()
    assert [row["state"] for row in rows] == ["complete", "damaged", "complete"]
    assert rows[0]["bytes"] > 0 and "bytes instead of" in rows[1]["problems"][0]
    (run.checkpoints_path / "step-30" / "manifest.json").unlink()
    assert page.newest() == rows, "a folder is not looked at for every question"


def test_for_remote_checkpoints_the_page_shows_the_runs_events(tmp_path):
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny", ["checkpoint.url=s3://bucket/run"]))
    run.append_event("checkpoint", step=10, path="step-10", seconds=0.1, bytes=77)
    run.append_event("checkpoint", step="x", bytes=[])
    files = RunFiles(run)
    files.poll()
    (row,) = Checkpoints(files).newest()
    assert (row["step"], row["tier"], row["state"], row["bytes"]) == (10, "storage", "complete", 77)


def test_verify_names_every_bad_chunk_and_fails(run, command):
    whole = command("verify", run.path)
    assert whole.exit_code == 0 and whole.stdout.count(": whole") == 3
    damage(run, 10)
    damage(run, 30)
    found = command("verify", run.path)
    assert found.exit_code == 1
    assert [line for line in found.stdout.splitlines() if "changed" in line] == [
        f"step-{step}/__0_0.distcp: chunk 2 (progress[4096] at [0]): its bytes changed after it was written"
        for step in (10, 30)
    ]
    assert command("verify", run.checkpoints_path / "step-20").exit_code == 0


def test_a_half_copied_checkpoint_is_not_whole(run, command, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    original = run.checkpoints_path / "step-30"
    (copy / "manifest.json").write_bytes((original / "manifest.json").read_bytes())
    found = command("verify", copy)
    assert found.exit_code == 1 and found.stdout.count(": missing") == 2


def test_diff_states_which_tensors_differ_and_by_how_much(run, command):
    step = run.checkpoints_path / "step-20"
    assert command("diff", step, step).stdout.endswith("equal bits\n")
    changed = torch.full((4, 3), 20.0)
    changed[2, 1] = 21.0
    other = put(run, 40, changed, new=torch.ones(2))
    found = command("diff", step, other, "--json")
    differences = {one.pop("name"): one for one in json.loads(found.stdout)["differences"]}
    assert found.exit_code == 1
    assert differences == {
        "model.new": {"what": "only in the second", "largest": 0.0, "relative": 0.0},
        "model.w": {"what": None, "largest": 1.0, "relative": 0.05},
    }


def test_prune_keeps_the_newest_and_never_the_damaged_instead_of_the_good(run, command):
    assert command("prune", run.path, "--keep", 2).stdout == "removed 1, kept 20, 30\n"
    damage(run, 30)
    put(run, 25, torch.zeros(4, 3))
    command("prune", run.path, "--keep", 1)
    newest = CheckpointFolder(run.checkpoints_path).newest()
    assert newest is not None and newest[0] == 25
    damage(run, 25)
    failed = command("prune", run.path, "--keep", 1)
    assert isinstance(failed.exception, RunFailedError) and "no checkpoint verifies" in str(failed.exception)
    assert CheckpointFolder(run.checkpoints_path).steps() == [25, 30]


def test_what_was_set_aside_is_listed_and_goes_when_that_is_asked_for(run, command):
    damage(run, 20)
    aside = CheckpointFolder(run.checkpoints_path).set_aside(20)
    rows = json.loads(command("list", run.path, "--json").stdout)["checkpoints"]
    assert [(row["step"], row["state"]) for row in rows] == [
        (10, "complete"),
        (20, "set aside"),
        (30, "complete"),
    ]
    assert rows[1]["path"].endswith(aside)
    command("prune", run.path, "--keep", 2)
    assert (run.checkpoints_path / aside).is_dir()
    assert command("prune", run.path, "--keep", 2, "--damaged").stdout == "removed 1, kept 10, 30\n"
    assert not (run.checkpoints_path / aside).exists()


def test_a_run_at_work_is_not_pruned(run, command):
    with run.lock():
        refused = command("prune", run.path, "--keep", 1)
    assert isinstance(refused.exception, BadInputError) and "another process" in str(refused.exception)


@pytest.mark.parametrize("arguments", [("list",), ("verify",), ("prune", "--keep", "1")], ids=str)
def test_what_is_no_run_is_refused_in_one_line(command, tmp_path, arguments):
    refused = command(arguments[0], tmp_path, *arguments[1:])
    assert isinstance(refused.exception, BadInputError) and "\n" not in str(refused.exception)
    assert list(tmp_path.iterdir()) == []
