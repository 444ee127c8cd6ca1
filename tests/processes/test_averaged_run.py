"""If these break: a run with a moving average of its parameters trains other parameters, or reports, exports
or resumes another average."""

from pathlib import Path

import numpy as np
import pytest
from ranks import run_ranks
from same_run import train_rank
from tiny_corpora import make_corpus

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.run import Run
from myriad.train.checkpoint_tools.foreign_checkpoints import export_hugging_face
from myriad.train.checkpoint_tools.whole_model import open_model

SMALL = [
    "model.layers=2",
    "model.hidden=32",
    "model.sequence=32",
    "train.threads=1",
    "optimizer.warmup_steps=0",
]
AVERAGE = ["optimizer.ema_decay=0.7"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=100)


def train(folder: Path, corpus: Path, *overrides: str) -> Run:
    """Start or resume a run, and train it."""
    run, job = Run(folder), load_job("tiny", [f"data.corpus={corpus}", *SMALL, *overrides])
    run.create_or_resume(job)
    assert run_ranks(job.layout.world, train_rank, [str(run.path)]) == [0] * job.layout.world
    return run


def tensors(run: Run, step: int) -> dict[str, np.ndarray]:
    where = CheckpointFolder(run.checkpoints_path).of_step(step)
    return {name: tensor.numpy() for name, tensor in load_model(where, "").items()}


def last_validation(run: Run) -> dict[str, float]:
    return [event for event in run.read_events() if event["event"] == "validation"][-1]


def test_the_average_is_validated_exported_and_leaves_training_as_it_is(tmp_path: Path, corpus: Path) -> None:
    two = ["layout.dp=2", "layout.zero=1", "train.steps=4", "train.global_batch=4", *AVERAGE]
    run = train(tmp_path / "run", corpus, *two, "train.validate_every=2", "train.validate_ema=true")
    other = train(tmp_path / "other", corpus, *two)
    found, plain = tensors(run, 4), tensors(other, 4)
    averages = [name for name in found if name.startswith("optimizer.ema.")]
    assert found.keys() == plain.keys() and averages
    for name in found:
        if not name.startswith("random."):
            np.testing.assert_array_equal(found[name], plain[name], err_msg=name)
    validation = last_validation(run)
    assert validation["loss"] == last_validation(other)["loss"] != validation["ema_loss"]

    # A run that starts with the exported average and learns nothing validates with the average's loss.
    export_hugging_face(str(run.path), tmp_path / "hf", "float32", ema=True)
    still = ["train.steps=1", "train.global_batch=4", "optimizer.learning_rate=1e-12"]
    begun = train(tmp_path / "begun", corpus, *still, f"train.init_from={tmp_path / 'hf'}")
    assert last_validation(begun)["loss"] == pytest.approx(validation["ema_loss"], rel=1e-6)


def test_the_average_is_turned_on_and_off_by_a_resume(tmp_path: Path, corpus: Path) -> None:
    run = train(tmp_path / "run", corpus, "train.steps=2")
    with pytest.raises(BadInputError, match=r"--ema = .*step-2.*optimizer\.ema_decay"):
        open_model(str(run.path), "PATH", ema=True)
    train(tmp_path / "run", corpus, "train.steps=3", "optimizer.ema_every=2", *AVERAGE)
    before, found = tensors(run, 2), tensors(run, 3)
    for name, values in before.items():
        if name.startswith("model."):  # step 3 updates no average
            np.testing.assert_array_equal(found[f"optimizer.ema.{name[6:]}"], values)
    model = open_model(str(run.path), "PATH", ema=True)
    average = found["optimizer.ema.embedding.tokens.weight"]
    np.testing.assert_array_equal(model.layers[0].state_dict()["tokens.weight"].numpy(), average)
    train(tmp_path / "run", corpus, "train.steps=4")
    assert not any(name.startswith("optimizer.ema.") for name in tensors(run, 4))
