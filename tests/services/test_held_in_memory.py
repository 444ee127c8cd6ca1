"""If these fail, a run whose last checkpoint finds no room loses it, though every bit of it is in memory."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mounted import SmallDisk, small_disk
from same_run import assert_same_run, slow_steps, train_undisturbed
from typer.testing import CliRunner, Result
from watched_runs import (
    TWO_REPLICAS,
    events,
    kill_snapshot_server,
    make_run,
    train,
    wait_for_event,
    wait_for_snapshot_server_to_end,
    wait_until,
)

from myriad.checkpoint.snapshots.server_start import server_names
from myriad.checkpoint.snapshots.snapshot_client import held_steps
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli.main import build_app
from myriad.errors import BadInputError, RunFailedError
from myriad.faults.rank_faults import ARMED
from myriad.job import load_job

TWO_NODES = [*TWO_REPLICAS, "layout.zero=3", "resilience.nodes=2", "train.steps=20"]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path, 2**24) as made:
        yield made


def checkpoint(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["checkpoint", *map(str, arguments)])


def myriad(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "myriad.cli.main", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_a_run_that_ends_on_a_full_disk_is_saved_elsewhere_and_continues_to_the_same_bits(
    tmp_path: Path, corpus: Path, small: SmallDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two nodes, each with a snapshot server of its own. Steps are slow: the disk is full before the last."""
    undisturbed = train_undisturbed(make_run(tmp_path / "undisturbed", corpus, *TWO_NODES))
    keys = [f"checkpoint.url={small.path}/kept", "checkpoint.timeout_seconds=3"]
    run = make_run(tmp_path / "a run #1 %20 é", corpus, *TWO_NODES, *keys)
    for name, value in slow_steps(tmp_path / "faults", 20.0).items():
        monkeypatch.setenv(name, value)
    at_work = myriad("train", run.path, "--oversubscribe")
    wait_until(run.read_metrics, "a step")
    refused = checkpoint("save", run.path, "--to", tmp_path / "x")
    assert isinstance(refused.exception, BadInputError) and "is being trained" in str(refused.exception)
    small.fill()
    monkeypatch.delenv(ARMED)
    told, _ = at_work.communicate(timeout=120)
    assert at_work.returncode == 1, told
    assert "stopped at step 20, held in memory only: checkpoint not stored: [Errno 28]" in told
    assert "checkpoint save" in told and told.count("retrying to store it") == 1
    assert events(run, "restart", "finish") == [] and {event["step"] for event in events(run, "fault")} == {
        20
    }
    (held,) = events(run, "held")
    assert [server["node"] for server in held["servers"]] == [0, 1]
    assert all(Path(f"/proc/{server['pid']}").is_dir() for server in held["servers"])
    rows = json.loads(checkpoint("list", run.path, "--json").stdout)["checkpoints"]
    assert [(row["tier"], row["state"]) for row in rows if row["step"] == 20] == [("memory", "held")]

    assert isinstance(checkpoint("save", run.path, "--to", small.path / "b").exception, BadInputError)
    with small_disk(tmp_path / "a run #1 %20 é", 2**16) as tiny:
        failed = checkpoint("save", run.path, "--to", tiny.path)
        assert isinstance(failed.exception, RunFailedError) and "still in memory" in str(failed.exception)
        assert os.listdir(tiny.path) == ["attempt"], "nothing that could be taken for a checkpoint"
    other = checkpoint("save", run.path, "--to", undisturbed.checkpoints_path)
    assert isinstance(other.exception, BadInputError) and "must hold no checkpoints" in str(other.exception)
    assert held_steps(run.path) == {20}

    elsewhere = tmp_path / "else where #2 %20 é"
    saved = checkpoint("save", run.path, "--to", elsewhere)
    assert saved.exit_code == 0 and "step 20 is stored and verified" in saved.stdout
    wait_until(lambda: not server_names(run.path), "the end of the snapshot servers")
    older = CheckpointFolder(run.checkpoints()).trained_steps()
    refused = CliRunner().invoke(build_app(), ["train", str(run.path), "--oversubscribe"]).exception
    newest = max(older, default=0)
    told = f"step 20 of {run.path} is in {elsewhere}, and the newest here is step {newest}; resume"
    assert isinstance(refused, BadInputError) and told in str(refused)
    run.create_or_resume(load_job(str(run.job_path), [f"checkpoint.url={elsewhere}"]))
    assert_same_run(train_undisturbed(run), undisturbed)


def test_room_that_comes_in_time_is_used_and_memory_can_be_given_up(
    tmp_path: Path, corpus: Path, small: SmallDisk
) -> None:
    keys = [*TWO_REPLICAS, "train.steps=10"]
    url = f"checkpoint.url={small.path}"
    run = make_run(tmp_path / "in-time", corpus, *keys, f"{url}/one", "checkpoint.timeout_seconds=60")

    def make_room() -> None:
        wait_for_event(run, "retry", step=10)
        small.make_room()

    person = threading.Thread(target=make_room)
    person.start()
    assert train(run, {9: small.fill}) == [0, 0]
    person.join()
    assert CheckpointFolder(run.checkpoints()).newest() == (10, [])
    wait_for_snapshot_server_to_end(run)

    run = make_run(tmp_path / "too-late", corpus, *keys, f"{url}/two", "checkpoint.timeout_seconds=0.2")
    try:
        assert train(run, {9: small.fill}) == [1, 1]
        assert held_steps(run.path) == {10}
        # The server refuses until it has seen that the ranks, which have ended, are gone.
        wait_until(
            lambda: "released from memory: step" in checkpoint("release", run.path).stdout, "the release"
        )
        wait_for_snapshot_server_to_end(run)
    finally:
        kill_snapshot_server(run)
    nothing = checkpoint("save", run.path, "--to", tmp_path / "x")
    assert isinstance(nothing.exception, BadInputError) and "no state in the memory" in str(nothing.exception)
