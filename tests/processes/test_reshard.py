"""If these fail, a checkpoint that was cut anew is not the one it was, or no run can resume from it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from same_run import train_rank
from tiny_corpora import make_corpus
from typer.testing import CliRunner

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder, verify
from myriad.cli.main import build_app
from myriad.errors import BadInputError, RunFailedError
from myriad.job import load_job
from myriad.run import Run

SMALL = [
    "model.layers=3", "model.hidden=32", "model.sequence=32", "train.threads=1", "train.steps=4",
    "layout.micro_batch=2", "model.activation=swiglu", "model.kv_heads=1", "model.heads=4",
    "model.vocabulary=513",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Trained by two tensor-parallel ranks, with copies of a key/value head and padding."""
    folder = tmp_path_factory.mktemp("reshard")
    made = Run(folder / "run")
    corpus = make_corpus(tmp_path_factory.mktemp("corpus"), count=300)
    made.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL, "layout.tp=2"]))
    assert run_ranks(2, train_rank, [str(made.path)]) == [0, 0]
    return made


def command(*arguments: object) -> str:
    result = CliRunner().invoke(build_app(), ["checkpoint", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize(
    "layout",
    [
        {"dp": 1, "tp": 1},
        {"dp": 2, "tp": 2, "pp": 2},
        {"dp": 4, "tp": 1, "pp": 2, "virtual_stages": 2, "micro_batch": 1},
        {"dp": 1, "tp": 1, "pp": 2, "schedule": "zero-bubble-v", "virtual_stages": 2},
    ],
    ids=str,
)
def test_a_checkpoint_cut_for_another_layout_is_the_same_to_the_bit(layout, run, tmp_path):
    keys = [word for key, value in layout.items() for word in (f"--layout.{key}", value)]
    done = json.loads(command("reshard", run.path, tmp_path / "out", *keys, "--json"))
    folder = CheckpointFolder(tmp_path / "out")
    world = layout["dp"] * layout["tp"] * layout.get("pp", 1)
    assert (done["step"], done["ranks"]) == (4, world) and verify(folder.at_step(4)) == []
    assert len(list(folder.of_step(4).glob("*.distcp"))) == world
    before = load_model(CheckpointFolder(run.checkpoints_path).of_step(4), "")
    after = load_model(folder.of_step(4), "")
    assert before.keys() == after.keys()
    for name, values in before.items():
        np.testing.assert_array_equal(after[name].numpy(), values.numpy(), err_msg=name)
    assert folder.at_step(4).manifest().layout["dp"] == layout["dp"]


def test_a_run_continues_from_what_was_cut_for_it(run, tmp_path):
    command("reshard", run.path, tmp_path / "out", "--layout.tp", "1", "--layout.pp", "2")
    other = Run(tmp_path / "other")
    keys = [f"data.corpus={run.job().data.corpus}", *SMALL, "layout.pp=2"]
    other.create_or_resume(load_job("tiny", [*keys, f"checkpoint.url={tmp_path / 'out'}", "train.steps=6"]))
    assert run_ranks(2, train_rank, [str(other.path)]) == [0, 0]
    (resumed,) = (event for event in other.read_events() if event["event"] == "resume")
    assert (resumed["step"], resumed["source"]) == (4, "storage")


def test_what_is_there_already_is_not_written_over(run, tmp_path):
    command("reshard", run.path, tmp_path / "out")
    kept = (tmp_path / "out" / "step-4" / "manifest.json").read_bytes()
    with pytest.raises(BadInputError, match=r"OUT = .*must not exist"):
        command("reshard", run.path, tmp_path / "out", "--layout.tp", "1")
    assert (tmp_path / "out" / "step-4" / "manifest.json").read_bytes() == kept
    with pytest.raises(BadInputError, match=r"train\.global_batch"):
        command("reshard", run.path, tmp_path / "more", "--layout.dp", "3")
    with pytest.raises(BadInputError, match=r"train\.steps = \"9\": only layout"):
        command("reshard", run.path, tmp_path / "more", "--train.steps", "9")
    assert not (tmp_path / "more").exists()


def test_damage_in_the_source_is_reported_and_nothing_counts(run: Run, tmp_path: Path):
    copy = tmp_path / "copy" / "step-4"
    shutil.copytree(CheckpointFolder(run.checkpoints_path).of_step(4), copy)
    path = copy / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    with pytest.raises(RunFailedError, match=r"__1_0\.distcp.*changed after it was written"):
        command("reshard", copy, tmp_path / "out", "--layout.tp", "1")
    assert CheckpointFolder(tmp_path / "out").steps() == []
