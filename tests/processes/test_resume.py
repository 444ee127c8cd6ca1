"""If these fail, a resume changes more or less than it says, or a run that has trained starts over."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from ranks import RankPool, run_ranks
from same_run import assert_same_run, train_rank
from tiny_corpora import make_corpus

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.job import load_job
from myriad.run import Run
from myriad.train import worker
from myriad.train.data_certificate import certify
from myriad.train.trainer import Trainer

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "model.dropout=0.1"]
TWO = [
    "layout.dp=2",
    "layout.zero=1",
    "checkpoint.every=5",
    "checkpoint.keep=9",
    "checkpoint.linger_seconds=0",
]
CHANGES = ["optimizer.learning_rate=3e-3", "optimizer.decay=linear", "optimizer.beta2=0.9",
           "optimizer.clip_norm=off", "optimizer.weight_decay=0", "train.steps=16",
           "train.global_batch=6"]  # fmt: skip


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two corpora with one tokenizer."""
    folder = tmp_path_factory.mktemp("corpora")
    first = make_corpus(folder, count=300)
    return [first, make_corpus(folder, "second", count=200, seed=2, tokenizer=first)]


@pytest.fixture
def start(tmp_path: Path, corpora: list[Path]) -> Callable[..., Run]:
    def make(name: str, *overrides: str) -> Run:
        run = Run(tmp_path / name)
        run.create_or_resume(load_job("tiny", [f"data.corpus={corpora[0]}", *SMALL, *TWO, *overrides]))
        return run

    return make


def train(run: Run, world: int = 2) -> list[int]:
    return run_ranks(world, train_rank, [str(run.path)])


def change(run: Run, *overrides: str) -> None:
    run.create_or_resume(load_job(str(run.job_path), list(overrides)))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def test_a_changed_job_gives_the_bits_of_a_run_that_changed_at_that_step(
    start: Callable[..., Run], corpora: list[Path], tmp_path: Path
) -> None:
    """One is changed and trains on; the other is changed, loses what it has done since, and resumes."""
    run = start("run", "train.steps=10")
    assert train(run) == [0, 0]
    other = Run(tmp_path / "other")
    shutil.copytree(run.path, other.path)
    mixture = f'data.mixture=[{{path="{corpora[0]}", weight=1}}, {{path="{corpora[1]}", weight=2}}]'
    for each in (run, other):
        change(each, *CHANGES, mixture)
        keys = [event["key"] for event in each.read_events() if event["event"] == "job_changed"]
        assert sorted(keys) == sorted(one.partition("=")[0] for one in [*CHANGES, mixture])
    assert train(run) == train(other) == [0, 0]
    assert_same_run(run, other)
    rates = [line["learning_rate"] for line in run.read_metrics()]
    assert rates[10] > 1.2 * rates[9], "it falls from another height"
    tokens = [line["tokens"] // run.job().model.sequence for line in run.read_metrics()]
    assert tokens == [*range(8, 81, 8), *range(86, 117, 6)], "the samples of each step follow on"
    flip(CheckpointFolder(other.checkpoints_path).of_step(16) / "__1_0.distcp")
    flip(CheckpointFolder(other.checkpoints_path).of_step(15) / "__1_0.distcp")
    assert train(other) == [0, 0], "from step 10 again, with what was changed there"
    assert_same_run(run, other)
    found = certify(other)
    assert (found.is_whole, found.compared, found.samples) == (True, 16, 116), found.problems
    assert_no_certificate(other)


def assert_no_certificate(run: Run) -> None:
    """With lines that are lost or repeated, with other tokens, and without digests."""
    lines = run.read_metrics()
    for wrong, why in (
        ([*lines[:4], *lines[5:]], "steps 5 to 5: no lines"),
        ([lines[0] | {"tokens": 512}, *lines[1:]], "step 1: begins at sample 8"),
        ([line | {"data_digest": "0" * 16} for line in lines], "other tokens"),
        ([line | {"data_digest": None} for line in lines], "no digest"),
    ):
        run.metrics_path.write_text("".join(f"{json.dumps(line)}\n" for line in wrong))
        found = certify(run)
        assert not found.is_whole and any(why in one for one in found.problems), found.problems


def test_the_padding_of_the_vocabulary_may_change(start: Callable[..., Run], tmp_path: Path) -> None:
    """It is in no state: weights and moments of the real rows keep their bits, in another layout too."""
    run = start("run", "train.steps=5", "model.vocabulary=301", "layout.zero=0")
    assert train(run) == [0, 0]
    expected = load_model(CheckpointFolder(run.checkpoints_path).of_step(5), "")
    change(run, "model.vocabulary_multiple=7", "layout.dp=1", "layout.tp=2", "train.steps=6", "train.seed=1")
    found = run_ranks(2, tables_at_start, run)
    for rank, (weights, moments) in enumerate(found):
        rows = slice(rank * 151, min(rank * 151 + 151, 301))
        for name, table in (("model", weights), ("optimizer.exp_avg", moments)):
            whole = expected[f"{name}.embedding.tokens.weight"]
            assert whole.shape == (301, 32) and np.array_equal(table, whole[rows].numpy()), name
    assert train(run) == [0, 0] and len(run.read_metrics()) == 6


def tables_at_start(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """One rank's rows of the embedding and of their first moments, as a resumed run begins."""
    trainer = Trainer(run)
    parts = {part.name: part.values for part in trainer.engine.all_shards()}
    names = ("model", "optimizer.exp_avg")
    weights, moments = (parts[f"{name}.embedding.tokens.weight"].numpy().copy() for name in names)
    trainer.close()
    return weights, moments


def test_a_run_whose_checkpoints_are_all_damaged_stops_until_a_person_decides(
    start: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    run = start("run", "train.steps=10", "layout.dp=1", "layout.zero=0")
    assert train(run, 1) == [0]
    folder = CheckpointFolder(run.checkpoints_path)
    for step in folder.steps():
        flip(folder.of_step(step) / "__0_0.distcp")
    names = sorted(folder.storage.names())
    for _ in range(2):  # the second found an empty folder, and began at step 1
        assert train(run, 1) == [1]
        told = capfd.readouterr().err
        assert "myriad: error: no state to resume from: step-10/__0_0.distcp: its bytes changed" in told
        assert f"`myriad train {run.path} --checkpoint.restart-from-scratch`" in told
        assert sorted(folder.storage.names()) == names and len(run.read_metrics()) == 10
    run.allow_restart(allowed=True)
    assert train(run, 1) == [0]
    assert folder.damaged() == [5, 10] and folder.steps() == [5, 10]
    (event,) = (event for event in run.read_events() if event["event"] == "start_over")
    assert event["steps_done"] == 10 and event["allowed"] is True
    shutil.rmtree(run.checkpoints_path)
    assert train(run, 1) == [1], "it was allowed once"
    assert "holds no checkpoint, but step 10 was stored" in capfd.readouterr().err


def test_files_of_a_run_that_are_not_its_own_are_refused(
    start: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    """Tensors of two optimizers, or of two seeds, have the same names and shapes."""
    one = start("one", "train.steps=5", "layout.dp=1", "layout.zero=0")
    assert train(one, 1) == [0]
    for key, told in [("optimizer.name=lamb", '"adamw"'), ("train.seed=9", "train.seed = ")]:
        other = start(key, "train.steps=10", "layout.dp=1", "layout.zero=0", key)
        shutil.copytree(one.checkpoints_path, other.checkpoints_path, dirs_exist_ok=True)
        assert train(other, 1) == [1]
        error = capfd.readouterr().err
        assert f"checkpoint of another run: {key.partition('=')[0]} = " in error and told in error
    measured = start("measured", "train.steps=10", "layout.partition=profile", "layout.dp=1", "layout.zero=0")
    assert train(measured, 1) == [0]
    (measured.path / "profile.json").write_text('{"half')
    change(measured, "train.steps=11")
    assert train(measured, 1) == [2]
    assert 'profile.json": is damaged; restore it, or remove it' in capfd.readouterr().err


GEMMA = [
    "layout.tp=2",
    "layout.micro_batch=4",
    "model.kv_heads=2",
    "model.qk_norm=head",
    "model.norm_placement=both",
    "model.norm_zero_centered=true",
    "model.activation=geglu_tanh",
    "model.window=6",
    "model.window_pattern=[true, false]",
    "model.window_rotary_base=100",
    "model.rotary_scaling.kind=linear",
    "model.rotary_scaling.factor=8",
    "model.embedding_scale=5",
    "model.attention_scale=0.4",
    "model.attention_softcap=2",
    "model.logit_softcap=4",
    "model.z_loss=0.01",
]
NEOX = [
    "layout.pp=2",
    "layout.micro_batch=2",
    "layout.schedule=zero-bubble",
    "layout.recompute=selective",
    "optimizer.name=lamb",
    "data.documents=packed",
    "model.tied=false",
    "model.block=parallel",
    "model.parallel_norms=2",
    "model.norm=layer",
    "model.norm_bias=true",
    "model.qk_norm=all",
    "model.attention_bias=all",
    "model.attention_sinks=true",
    "model.rotary_fraction=0.5",
    "model.rotary_pattern=[true, false]",
    "model.rotary_scaling.kind=yarn",
    "model.rotary_scaling.original_sequence=8",
    "model.residual_scale=0.3",
    "model.logit_scale=0.25",
]


def train_until_killed(path: str, step: int) -> None:
    """A rank whose process ends without notice after a step."""

    def after_step() -> None:
        if trainer.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(Run(path), on_step=after_step)
    trainer.train()


@pytest.mark.parametrize("features", [GEMMA, NEOX], ids=["gemma", "neox"])
def test_a_killed_run_of_many_model_features_resumes_to_the_bit(
    start: Callable[..., Run], corpora: list[Path], features: list[str]
) -> None:
    more = f'data.validation_sets=[{{name="more", path="{corpora[1]}"}}]'
    job = ["layout.dp=1", "layout.zero=0", "train.steps=6", "checkpoint.every=2", more, *features]
    undisturbed, killed = (
        start(name, *job, "overlap.checkpoint=false") for name in ("undisturbed", "killed")
    )
    with RankPool(2) as ranks:
        assert ranks.run(worker.main, [str(undisturbed.path)]) == [0, 0]
        with pytest.raises((EOFError, ConnectionResetError)):
            ranks.run(train_until_killed, str(killed.path), 3)
        assert CheckpointFolder(killed.checkpoints_path).steps() == [2]
        assert ranks.run(worker.main, [str(killed.path)]) == [0, 0]
    assert_same_run(killed, undisturbed)
    losses = [
        [(event["name"], event["loss"]) for event in run.read_events() if event["event"] == "validation_set"]
        for run in (killed, undisturbed)
    ]
    assert certify(killed, every=4).compared == 3 and certify(killed).is_whole
    assert losses[0] == losses[1] and [name for name, _ in losses[0]] == ["more"]
