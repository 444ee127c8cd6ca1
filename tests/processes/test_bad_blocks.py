"""If these fail, a run trains on corrupt tokens, or one that skips them cannot be trained twice."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from same_run import tensors_at, train_rank
from tiny_corpora import flip

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.data.prepare import PrepareOptions, prepare
from myriad.job import load_job
from myriad.reports.run_report.run_facts import facts_of
from myriad.run import Run

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "model.vocabulary=300", "train.threads=1",
         "train.steps=6", "checkpoint.every=3", "checkpoint.keep=9",
         "checkpoint.linger_seconds=0"]  # fmt: skip
BAD = 65536
"""Byte at which the second block of the shard begins, in which a bit is another."""


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of a few blocks with one flipped bit."""
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "a.txt").write_text("\n".join(f"line {number} of {number**2}" for number in range(20_000)))
    prepare([str(folder / "a.txt")], folder / "corpus", PrepareOptions(vocabulary=300, validation=0.02))
    tokens = folder / "corpus" / "train-00000.bin"
    assert tokens.stat().st_size > 3 * BAD
    flip(tokens, BAD + 4321)
    return folder / "corpus"


def bad_blocks(run: Run) -> list[tuple[str, int, str]]:
    found = (event for event in run.read_events() if event["event"] == "bad_block")
    return [(event["file"], event["offset"], event["action"]) for event in found]


def test_a_run_stops_with_the_file_and_byte_in_one_line(damaged: Path, tmp_path: Path) -> None:
    keys = [f"--{key}" for key in (*SMALL, f"data.corpus={damaged}")]
    command = [
        sys.executable,
        "-m",
        "myriad.cli.main",
        "train",
        "tiny",
        "--run",
        str(tmp_path / "run"),
        *keys,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    [line] = done.stderr.strip().splitlines()
    assert done.returncode == 1 and f"{damaged}/train-00000.bin: the 65536 bytes from byte {BAD} on" in line
    run = Run(tmp_path / "run")
    assert bad_blocks(run) == [(f"{damaged}/train-00000.bin", BAD, "stop")]
    assert [event["cause"] for event in run.read_events() if "cause" in event] == ["data"], "no second try"
    assert any(f"from byte {BAD} on" in doubt for doubt in facts_of(run).doubts), "in the report too"


def test_a_run_that_skips_it_has_the_same_bits_after_a_resume_and_in_another_layout(
    damaged: Path, tmp_path: Path
) -> None:
    """The last checkpoint is lost, so that steps are trained a second time; the files were restored since."""
    losses = {}
    for replicas in (2, 1):
        run = Run(tmp_path / str(replicas))
        keys = [f"data.corpus={damaged}", "data.on_bad_block=skip", f"layout.dp={replicas}"]
        run.create_or_resume(load_job("tiny", [*SMALL, *keys]))
        assert run_ranks(replicas, train_rank, [str(run.path)]) == [0] * replicas
        losses[replicas] = [line["loss"] for line in run.read_metrics()]
        assert set(bad_blocks(run)) == {(f"{damaged}/train-00000.bin", BAD, "skip")}
    np.testing.assert_allclose(losses[1], losses[2], rtol=1e-5)
    tensors = tensors_at(run, 6)
    CheckpointFolder(run.checkpoints_path).storage.remove("step-6")
    flip(damaged / "train-00000.bin", BAD + 4321)
    try:
        assert run_ranks(1, train_rank, [str(run.path)]) == [0]
    finally:
        flip(damaged / "train-00000.bin", BAD + 4321)
    assert [line["loss"] for line in run.read_metrics()] == losses[1]
    assert [event["step"] for event in run.read_events() if event["event"] == "resume"] == [3]
    for name, tensor in tensors_at(run, 6).items():
        np.testing.assert_array_equal(tensor, tensors[name], err_msg=name)
