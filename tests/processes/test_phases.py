"""If these fail, a run with a batch ramp or phases depends on its layout, or on where it was killed."""

import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from ranks import run_ranks
from same_run import assert_same_run, train_rank
from tiny_corpora import flip, make_corpus

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.run import Run
from myriad.train.checkpoint_tools.named_weights import open_weights
from myriad.train.checkpoint_tools.whole_model import open_checkpoint_model
from myriad.train.data_certificate import certify

KEYS = [
    *("model.layers=2", "model.hidden=32", "model.sequence=32", "model.dropout=0.1", "train.threads=1"),
    *("train.precision=float32", "optimizer.epsilon=1e-6", "train.steps=12", "train.validate_every=6"),
    *("train.batch_ramp.start=4", "train.batch_ramp.increment=2", "train.batch_ramp.until_samples=18"),
    *("checkpoint.every=4", "checkpoint.keep=9", "checkpoint.linger_seconds=0", "data.validation_batches=1"),
]
TWO = ("layout.dp=2", "layout.zero=1")
PIPELINE = ("layout.dp=1", "layout.zero=0", "layout.pp=2")


def phases(first: Path, second: Path) -> str:
    """A long phase with another mixture, sequence, batch and schedule, and one with the batch alone."""
    mixture = f'[{{path = "{first}", weight = 1}}, {{path = "{second}", weight = 2}}]'
    long = (
        f'{{name = "long", at_step = 5, data.mixture = {mixture}, model.sequence = 64, '
        'train.global_batch = 4, optimizer = {decay = "linear", weight_decay = 0.01}}'
    )
    return f'phases=[{long}, {{name = "wide", at_tokens = 1850, train.global_batch = 8}}]'


def start(run: Run, *overrides: str) -> Run:
    run.create_or_resume(load_job("tiny", [*KEYS, *overrides]))
    return run


def train(run: Run, world: int) -> None:
    assert run_ranks(world, train_rank, [str(run.path)]) == [0] * world


def continued(run: Run, path: Path, *overrides: str) -> Run:
    """A copy of a run that has lost what it stored after step 4, with changed keys."""
    shutil.copytree(run.path, path)
    copy = Run(path)
    for step in (8, 12):
        for file in CheckpointFolder(copy.checkpoints_path).of_step(step).glob("*.distcp"):
            flip(file, 100)
    copy.create_or_resume(load_job(str(copy.job_path), list(overrides)))
    return copy


def assert_agree(run: Run, reference: Run) -> None:
    for line, expected in zip(run.read_metrics(), reference.read_metrics(), strict=True):
        assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5), line["step"]
        assert (line["tokens"], line["data_digest"]) == (expected["tokens"], expected["data_digest"])


def test_phases_are_those_of_one_process_and_of_a_run_that_was_not_killed(tmp_path: Path) -> None:
    first = make_corpus(tmp_path, count=300)
    second = make_corpus(tmp_path, "second", count=200, seed=2, tokenizer=first)
    keys = (f"data.corpus={first}", phases(first, second))
    one, two = start(Run(tmp_path / "one"), *keys), start(Run(tmp_path / "two"), *keys, *TWO)
    train(one, 1)
    train(two, 2)
    tokens = [line["tokens"] for line in one.read_metrics()]
    assert tokens[:5] == [128, 256, 384, 576, 832], "batches of 4, 4, 4, 6 and 8 sequences"
    assert [after - before for before, after in pairwise(tokens[4:])] == [256] * 4 + [512] * 3
    assert_agree(two, one)
    events = [(event["step"], event["name"]) for event in one.read_events() if event["event"] == "phase"]
    assert events == [(6, "long"), (10, "wide")]
    again, pipeline = continued(two, tmp_path / "again"), continued(two, tmp_path / "pp", *PIPELINE)
    train(again, 2)
    assert_same_run(again, two)
    train(pipeline, 2)
    assert_agree(pipeline, one)
    for run in (one, pipeline):
        found = certify(run)
        assert (found.is_whole, found.compared, found.samples) == (True, 12, 26 + 16 + 24), found.problems
    for step, sequence in ((4, 32), (8, 64)):
        checkpoint = str(CheckpointFolder(one.checkpoints_path).of_step(step))
        assert open_checkpoint_model(checkpoint).config.sequence == sequence, "sampled and evaluated"
        model = open_weights(checkpoint, "PATH").model
        assert model is not None
        assert model.sequence == sequence, "exported"
    with pytest.raises(BadInputError, match="samples of the 12 steps that are done; add a phase"):
        one.create_or_resume(load_job(str(one.job_path), ["train.global_batch=16", "train.steps=20"]))
