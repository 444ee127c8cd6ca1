"""A run from its folder to its end, on real ranks: what it leaves, and that nothing stops it for good."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import run_ranks
from same_run import assert_same_run, train_rank
from seen_sockets import GLOO, LOCAL, STORE, TORCHRUN, Watch, assert_in_table
from tiny_corpora import make_corpus

from myriad.checkpoint.checkpoint_files import load_model
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.attempt_layout import ATTEMPT_LAYOUT, AttemptLayout
from myriad.data.indexed import IndexedWriter
from myriad.job import load_job
from myriad.run import Run
from myriad.train import worker

METRICS = {
    "time", "step", "loss", "grad_norm", "learning_rate", "tokens", "tokens_per_second", "step_seconds",
    "flops", "mfu", "memory_bytes", "data_wait_seconds", "checkpoint_wait_seconds", "exposed_comm_seconds",
    "data_digest",
}  # fmt: skip
SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1"]
TWO_RANKS = ["layout.dp=2", "layout.zero=3", "layout.micro_batch=2"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


@pytest.fixture
def start(tmp_path: Path, corpus: Path) -> Callable[..., Run]:
    """Makes the run folder of a small job with these overrides."""

    def make(name: str, *overrides: str) -> Run:
        run = Run(tmp_path / name)
        run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL, *overrides]))
        return run

    return make


def train(run: Run, world: int = 1) -> list[int]:
    """Runs the worker on forked ranks; their exit codes."""
    return run_ranks(world, train_rank, [str(run.path)])


def events(run: Run, *names: str) -> list[dict[str, Any]]:
    return [event for event in run.read_events() if event["event"] in names]


def wait_until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def final_tensors(run: Run) -> dict[str, np.ndarray]:
    step = run.job().train.steps
    folder = CheckpointFolder(run.checkpoints_path)
    assert folder.newest() == (step, [])
    return {name: tensor.numpy() for name, tensor in load_model(folder.of_step(step), "").items()}


def test_a_run_leaves_the_files_that_others_read(start: Callable[..., Run]) -> None:
    run = start(
        "run", "train.steps=12", "train.validate_every=5", "checkpoint.every=5", "train.sample_prompt=a"
    )
    assert train(run) == [0]
    lines = run.read_metrics()
    assert [line["step"] for line in lines] == list(range(1, 13))
    for line in lines:
        assert line.keys() == METRICS
        assert line["tokens"] == line["step"] * 8 * 32
        assert 0 < line["loss"] < 10 and line["grad_norm"] > 0 and line["learning_rate"] > 0
        assert line["tokens_per_second"] == pytest.approx(8 * 32 / line["step_seconds"])
        assert 0 < line["mfu"] < 1 and line["memory_bytes"] > 2**20
        assert 0 <= line["data_wait_seconds"] <= line["step_seconds"]
    assert lines[-1]["loss"] < lines[0]["loss"]
    steps, happened = [5, 10, 12], [(event["event"], event.get("step")) for event in run.read_events()]
    steps_of = {name: [step for event, step in happened if event == name] for name, _ in happened}
    skipped = [fault["step"] for fault in events(run, "fault") if "still being stored" in fault["problem"]]
    stored = steps_of.pop("checkpoint")
    assert steps_of.pop("fault", []) == skipped, "on a slow disk, a step is skipped"
    assert sorted(stored + skipped) == steps and stored[-1] == 12
    steps_of.pop("peak", None)  # other programs may have used the cores when it was measured first
    once = {"corpus": [None], "start": [None], "sample": [None]}
    assert steps_of == {**once, "validation": steps, "finish": [12]}
    names = [event for event, _ in happened]
    assert names[:2] == ["corpus", "start"] and names[-1] == "finish", "a disk may take its time in between"
    (began,) = events(run, "start")
    assert (began["world"], began["device"], began["precision"]) == (1, "cpu", "float32")
    assert began["parameters"] == run.job().model.num_parameters() and began["peak_flops"] > 0
    for event in events(run, "validation"):
        assert 0 < event["bits_per_byte"] < 10 and 0 < event["loss"] < 10
    assert CheckpointFolder(run.checkpoints_path).steps() == sorted(stored)[-2:], "two are kept"


def interrupted(run: Run, at_step: int) -> int:
    """One rank's side: the last rank alone gets a Ctrl-C when the run has come to a step."""

    def watch() -> None:
        while not (lines := run.read_metrics()) or lines[-1]["step"] < at_step:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        threading.Thread(target=watch, daemon=True).start()
    return worker.main([str(run.path)])


def test_a_run_stopped_by_a_signal_to_one_rank_saves_and_continues_to_the_same_bits(
    start: Callable[..., Run],
) -> None:
    keys = ["layout.pp=2", "layout.micro_batch=4", "model.dropout=0.1", "train.steps=24"]
    run, undisturbed = start("stopped", *keys), start("undisturbed", *keys)
    assert run_ranks(2, interrupted, run, 7) == [0, 0]
    (stopped,) = events(run, "interrupted")
    assert 7 <= stopped["step"] < 24
    assert CheckpointFolder(run.checkpoints_path).newest() == (stopped["step"], [])
    assert train(run, 2) == train(undisturbed, 2) == [0, 0]
    assert [event["step"] for event in events(run, "resume")] == [stopped["step"]]
    assert_same_run(run, undisturbed)


def test_a_run_continues_in_another_layout(start: Callable[..., Run]) -> None:
    keys = ["train.steps=20", "checkpoint.every=10", "layout.micro_batch=4"]
    run, undisturbed = start("moved", *keys), start("undisturbed", *keys)
    assert run_ranks(1, interrupted, run, 10) == [0]
    job = run.job()
    run.create_or_resume(job.model_copy(update={"layout": load_job("tiny", ["layout.tp=2", *keys]).layout}))
    assert train(run, 2) == [0, 0] and train(undisturbed) == [0]
    found, expected = ([line["loss"] for line in each.read_metrics()] for each in (run, undisturbed))
    assert found == pytest.approx(expected, rel=1e-5)


def test_attempts_continue_with_other_shares_and_fewer_replicas(
    start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is in the data does not depend on who worked on what: nothing is skipped or seen twice."""
    keys = ["train.steps=20", "checkpoint.every=10", "layout.dp=2", "layout.zero=1", "model.dropout=0.1"]
    run, undisturbed = start("moved", *keys, "layout.shares=[6, 2]"), start("undisturbed", *keys)
    assert run_ranks(2, interrupted, run, 10) == [0, 0]
    monkeypatch.setenv(ATTEMPT_LAYOUT, AttemptLayout(shares=(3, 5)).text)
    assert run_ranks(2, interrupted, run, 14) == [0, 0]
    monkeypatch.setenv(ATTEMPT_LAYOUT, AttemptLayout(dp=1, shares=(8,)).text)
    assert train(run, 1) == [0]
    monkeypatch.delenv(ATTEMPT_LAYOUT)
    assert train(undisturbed, 2) == [0, 0]
    first, second = (event["step"] for event in events(run, "resume"))
    assert 10 <= first < second < 20
    found, expected = ([line["loss"] for line in each.read_metrics()] for each in (run, undisturbed))
    assert found == pytest.approx(expected, rel=1e-5)


def test_a_damaged_checkpoint_is_passed_over_and_reported(start: Callable[..., Run]) -> None:
    run = start("run", "train.steps=20", "checkpoint.every=5", "layout.micro_batch=8")
    assert train(run) == [0]
    expected = final_tensors(run)
    damaged = CheckpointFolder(run.checkpoints_path).of_step(20) / "__0_0.distcp"
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    assert train(run) == [0]
    faults = events(run, "fault")
    assert all("step-20/__0_0.distcp" in fault["problem"] for fault in faults) and faults
    assert faults[0]["set_aside"] == ["step-20.damaged"] and events(run, "resume")[0]["step"] == 15
    for name, tensor in final_tensors(run).items():
        np.testing.assert_array_equal(tensor, expected[name], err_msg=name)


def test_a_loss_that_is_not_a_number_stops_the_run_in_one_line_and_harms_no_file(
    start: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    run = start(
        "run", *TWO_RANKS, "optimizer.learning_rate=1e30", "optimizer.clip_norm=off", "checkpoint.every=1"
    )
    assert run_ranks(2, worker.main, [str(run.path)]) == [1, 1]
    done = len(run.read_metrics())
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("myriad: error:")]
    pattern = (
        rf"myriad: error: step {done + 1}: loss is \S+; first bad tensor is the \w+ of \S+, on rank [01]"
    )
    assert len(told) == 2 and all(re.fullmatch(pattern, line) for line in told), told
    (fault,) = events(run, "fault")
    assert fault["step"] == done + 1 and told[0].endswith(fault["problem"])
    wait_until(
        lambda: done in CheckpointFolder(run.checkpoints_path).steps()
    )  # its snapshot server still stores it
    assert CheckpointFolder(run.checkpoints_path).newest() == (done, [])


def tokens_without_tokenizer(path: Path, largest: int) -> Path:
    with IndexedWriter(path, np.dtype(np.uint16)) as writer:
        writer.add([number % (largest + 1) for number in range(8192)])
    return path


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (lambda path: path / "nowhere", r"data\.corpus = \".*nowhere\": no such corpus"),
        (lambda path: tokens_without_tokenizer(path / "big", 511), None),
        (
            lambda path: tokens_without_tokenizer(path / "big", 600),
            r"model\.vocabulary = 512: the corpus holds token [56]\d\d;",
        ),
    ],
    ids=["missing", "fits", "too large"],
)
def test_ranks_that_another_launcher_starts_refuse_a_corpus_that_does_not_fit(
    prepare: Callable[[Path], Path],
    told: str | None,
    start: Callable[..., Run],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With a vocabulary cut over ranks a token that none of them has would pass as nothing at all."""
    run = start("run", "layout.micro_batch=8", "train.steps=4", f"data.corpus={prepare(tmp_path)}")
    code = train(run)
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("myriad: error:")]
    if told is None:
        assert code == [0] and errors == []
    else:
        assert code == [2] and len(errors) == 1 and re.search(told, errors[0])


def test_a_checkpoint_of_another_model_is_refused(
    start: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    one = start("one", "train.steps=4")
    assert train(one) == [0]
    other = start("other", "train.steps=4", "model.ffn_hidden=64")
    other.checkpoints_path.rmdir()
    one.checkpoints_path.rename(other.checkpoints_path)
    assert train(other) == [1]
    assert "another model: model.blocks.0.mlp." in capfd.readouterr().err


def test_torchrun_starts_ranks_too(start: Callable[..., Run]) -> None:
    """Its own store listens on every address; rank 0's beside it does not."""
    run, ours = (start(name, *TWO_RANKS, "train.steps=4") for name in ("torchrun", "ours"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with Watch() as watch:
        done = subprocess.run(
            [*command, "-m", "myriad.train.worker", str(run.path)],
            capture_output=True,
            text=True,
            timeout=200,
            env=watch.environment | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert "2 ranks on cpu" in lines[0] and any(line.startswith("step 4/4 · loss") for line in lines), lines
    assert lines[-1] == f"finished at step 4 of 4: {run.path}"
    assert {STORE, TORCHRUN} <= assert_in_table(watch) <= {STORE, GLOO, LOCAL, TORCHRUN}
    assert train(ours, 2) == [0, 0]
    assert_same_run(run, ours)


def test_ranks_of_another_launcher_refuse_the_tokens_of_another_tokenizer(
    start: Callable[..., Run], corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = start("run", "train.steps=4")
    assert train(run) == [0]
    assert (run.path / "tokenizer.json").exists() and len(events(run, "corpus")) == 1
    other = make_corpus(tmp_path, "other", count=90, seed=2)
    text = run.job_path.read_text().replace(str(corpus), str(other)).replace("\nsteps = 4\n", "\nsteps = 8\n")
    run.job_path.write_text(text)
    assert train(run) == [2]
    assert "its tokenizer is not the one" in capfd.readouterr().err
    assert run.last_step() == 4


def test_the_worker_prints_its_usage(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert worker.main([]) == 2 and "usage" in capfd.readouterr().err
    assert worker.main([str(tmp_path)]) == 2
    assert "no run here" in capfd.readouterr().err
