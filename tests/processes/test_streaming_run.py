"""If these fail, a run that streams its text is another run after a restart."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from ranks import lost_ranks, run_ranks
from same_run import assert_same_run, train_rank
from tiny_corpora import lines

from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.data.tokenizer import Tokenizer
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.run import Run
from myriad.train import worker
from myriad.train.data_certificate import certify
from myriad.train.inputs import check_streams, open_inputs

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "model.vocabulary=300", "train.threads=1",
         "layout.micro_batch=4",
         "train.steps=40", "checkpoint.every=20", "checkpoint.keep=9", "checkpoint.linger_seconds=0",
         "train.validate_every=40", "data.validation_batches=1", "data.held_out=0.2",
         "data.shuffle_bytes=64 KiB"]  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of JSONL of which 40 steps read several groups, and a tokenizer."""
    folder = tmp_path_factory.mktemp("streamed") / "texts"
    folder.mkdir()
    for number in range(3):
        records = (json.dumps({"text": line}) + "\n" for line in lines(300, seed=number))
        (folder / f"{number}.jsonl").write_text("".join(records))
    Tokenizer.train(lines(200), 300).save(folder.parent)
    return folder


def make_run(path: Path, texts: Path, *keys: str) -> Run:
    run = Run(path)
    data = [f"data.corpus={texts}/*.jsonl", f"data.tokenizer={texts.parent}"]
    run.create_or_resume(load_job("tiny", [*SMALL, *data, *keys]))
    return run


def kill_loaders(run: Run, killed: list[int]) -> None:
    """Kill the first two loader processes of this process's children that have made a group."""
    deadline = time.monotonic() + 120
    while len(killed) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
        if not list(run.streams_path.glob("*/*-0.jsonl")):
            continue
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                environment = (path.parent / "environ").read_bytes()
                is_loader = b"myriad.data.loader_process" in path.read_bytes()
                if (
                    is_loader
                    and str(run.path).encode() in environment
                    and int(path.parent.name) not in killed
                ):
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    killed.append(int(path.parent.name))
            except OSError:
                continue


def train_node(arguments: list[str]) -> int:
    """Train as the only rank of a node, which has a loader of its own."""
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    return train_rank(arguments)


def lose_node(run: Run) -> None:
    """Train as such a node, which is lost with its loader some steps after a checkpoint."""

    def end() -> None:
        folder = CheckpointFolder(run.checkpoints_path)
        while not folder.steps() or len(run.read_metrics()) < folder.steps()[0] + 4:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, daemon=True).start()
    with suppress(BaseException):  # as when the other node was lost a moment before
        train_node([str(run.path)])
    time.sleep(60)


def test_killed_loaders_another_layout_and_a_resume_change_no_bit(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = make_run(tmp_path / "whole", texts)
    assert run_ranks(1, train_rank, [str(whole.path)]) == [0]
    run = make_run(tmp_path / "disturbed", texts)
    monkeypatch.setenv("DISTURBED", str(run.path))
    killed: list[int] = []
    killer = threading.Thread(target=kill_loaders, args=(run, killed))
    killer.start()
    assert run_ranks(1, worker.main, [str(run.path)]) == [0]
    killer.join()
    faults = [event["problem"] for event in run.read_events() if event["event"] == "fault"]
    assert killed and len(faults) == len(killed), "each was replaced"
    assert_same_run(run, whole)

    CheckpointFolder(run.checkpoints_path).storage.remove("step-40")
    assert run_ranks(1, train_rank, [str(run.path)]) == [0]
    assert [event["step"] for event in run.read_events() if event["event"] == "resume"] == [20]
    assert_same_run(run, whole)

    two = make_run(tmp_path / "two", texts, "layout.dp=2")
    lost_ranks(2, lose_node, two)
    first = {line["step"]: line for line in two.read_metrics()}
    assert len(first) >= 24
    assert run_ranks(2, train_node, [str(two.path)]) == [0, 0]
    assert [event["step"] for event in two.read_events() if event["event"] == "resume"] == [20]
    again = {line["step"]: line for line in two.read_metrics()}
    for key in ("loss", "grad_norm", "data_digest"):
        assert [again[step][key] for step in first] == [line[key] for line in first.values()], key
    made = [set(path.read_text().split("\n")) for path in sorted(two.streams_path.glob("*/*-[01].jsonl"))]
    assert len(made) % 2 == 0 and made[::2] == made[1::2], "each node has made all groups, and the same ones"
    losses, digests = ([[line[key] for line in one.read_metrics()] for one in (whole, two)]
                       for key in ("loss", "data_digest"))  # fmt: skip
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert digests[0] == digests[1]
    validated = [
        [event["loss"] for event in one.read_events() if event["event"] == "validation"]
        for one in (whole, two)
    ]
    np.testing.assert_allclose(*validated, rtol=1e-5)
    assert certify(two, every=7).is_whole

    (texts / "1.jsonl").write_text("{}\n")
    corpora = open_inputs(whole.job(), lambda stage: None, whole)
    with pytest.raises(BadInputError, match=r"1.jsonl has 3 bytes instead of \d+ since the run began"):
        check_streams(whole, whole.job(), corpora)
