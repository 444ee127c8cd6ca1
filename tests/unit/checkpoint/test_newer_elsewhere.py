"""If these fail, a run that was saved to another place trains from an older step, and nothing says so."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from myriad.checkpoint.checkpoint_files import save
from myriad.checkpoint.load.start_over import history_of
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli.main import build_app
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.model.tensor_shard import TensorShard
from myriad.run import Run

PART = [TensorShard("model.w", (4,), (0,), torch.ones(4))]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """That stored step 10, and whose step 20 was saved from memory to another place. Its corpus is missing:
    none of these tests trains."""
    made = Run(tmp_path / "a run")
    made.create_or_resume(load_job("tiny", [f"data.corpus={tmp_path / 'none'}"]))
    save(CheckpointFolder(made.checkpoints_path), 10, PART, {"step": 10})
    made.append_event("checkpoint", step=10, path="step-10")
    save(CheckpointFolder(tmp_path / "else where"), 20, PART, {"step": 20})
    made.append_event("checkpoint", step=20, path="step-20", url=str(tmp_path / "else where"))
    return made


def train(*arguments: object) -> str:
    """The refusal."""
    done = CliRunner().invoke(build_app(), ["train", *map(str, arguments)])
    assert isinstance(done.exception, BadInputError), done.output
    return str(done.exception)


def test_a_start_that_would_continue_from_an_older_step_prints_what_to_type(run: Run, tmp_path: Path) -> None:
    told = train(run.path)
    assert f"step 20 of {run.path} is in {tmp_path / 'else where'}, and the newest here is step 10" in told
    assert f"--checkpoint.url '{tmp_path / 'else where'}'`; or from step 10: --checkpoint.url off" in told
    assert "\n" not in told


def test_whoever_types_the_place_has_decided(run: Run, tmp_path: Path) -> None:
    for place in ("off", tmp_path / "else where"):
        assert "data.corpus" in train(run.path, "--checkpoint.url", place)


def test_a_step_that_is_not_there_any_more_holds_nothing_up(run: Run, tmp_path: Path) -> None:
    CheckpointFolder(tmp_path / "else where").storage.remove("step-20")
    assert "data.corpus" in train(run.path)


def test_a_start_that_continued_from_an_earlier_step_has_given_up_the_later_ones() -> None:
    events = [
        {"event": "checkpoint", "step": 10},
        {"event": "checkpoint", "step": 20, "url": "b"},
        {"event": "job_changed", "key": "checkpoint.url", "before": None, "after": "c"},
        {"event": "checkpoint", "step": 30},
    ]
    assert history_of(events, 30, "a", "c").stored_in == (("c", 30), ("b", 20), ("a", 10))
    back = [*events, {"event": "start", "resumed_from": 15}, {"event": "checkpoint", "step": 16}]
    assert history_of(back, 16, "a", "c").stored_in == (("c", 16), ("b", 15), ("a", 10))
    assert history_of(events[:2], 20, "a").stored_in == (("b", 20), ("a", 10))
