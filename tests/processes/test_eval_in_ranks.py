"""If these break: `myriad eval` in ranks gives other scores or texts than one process, holds more of the
model in a rank than its share, or leaves a rank behind."""

import gc
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from same_run import train_rank
from tiny_corpora import make_corpus
from watching import descendants, is_alive, wait_until

from myriad.checkpoint.foreign.hugging_face import write_folder
from myriad.comm.layout import Layout
from myriad.evaluation.full_model import FullModel
from myriad.evaluation.task_files import read_tasks
from myriad.evaluation.task_requests import TaskRequests
from myriad.evaluation.token_requests import RequestEncoder
from myriad.job import load_job
from myriad.job.scoring_layout import scoring_layout
from myriad.run import Run
from myriad.train import rank_evaluation
from myriad.train.checkpoint_tools.whole_model import describe_weights, open_model
from myriad.train.rank_evaluation import EvaluationRequest, EvaluationResult, check_tasks

TASKS: list[dict[str, Any]] = [
    *({"task": "choice", "arguments": [[a, " one"], [a, " two"]], "target": 0} for a in ("a", "x", "in the")),
    *({"task": "word", "arguments": [a, " the"]} for a in ("of", "in")),
    *({"task": "text", "arguments": [f"{a} text, longer than a window. " * 6]} for a in ("one", "two")),
    *({"task": "made", "arguments": [a, {"max_gen_toks": 9}], "target": ""} for a in ("a", "the " * 40, "")),
    {"task": "made", "arguments": ["longer than a window", {"max_gen_toks": 40}], "target": ""},
]  # fmt: skip
SMALL = (
    *("model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "layout.tp=2"),
    *("train.steps=3", "checkpoint.every=2", "optimizer.warmup_steps=1", "optimizer.learning_rate=0.05"),
    "optimizer.ema_decay=0.5",
)
"""Keys of the run, which has checkpoints of steps 2 and 3."""


class Case(NamedTuple):
    folder: Path
    run: Path
    tasks: Path

    def command(self, *words: str) -> "subprocess.Popen[str]":
        """The command, in the run's own layout of two ranks."""
        line = [sys.executable, "-m", "myriad.cli.main", "eval", str(self.run), "--tasks", str(self.tasks)]
        return subprocess.Popen(
            [*line, "--own-layout", "--oversubscribe", *words],
            env=os.environ | {"TMPDIR": str(self.folder / "tmp")},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A run of two ranks, with a moving average of the weights, and tasks."""
    folder = tmp_path_factory.mktemp("eval")
    corpus, run = make_corpus(folder, count=300), Run(folder / "run")
    run.create_or_resume(load_job("tiny", [f"data.corpus={corpus}", *SMALL]))
    assert run_ranks(2, train_rank, [str(run.path)]) == [0, 0]
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(one) + "\n" for one in TASKS))
    (folder / "tmp").mkdir()
    return Case(folder, run.path, tasks)


def alone(name: str, case: Case, *, ema: bool) -> EvaluationResult:
    """What one process finds."""
    found = open_model(name, "PATH", ema=ema)
    model = FullModel(found.layers, found.tokenizer, found.config.sequence)
    requests = TaskRequests(read_tasks([str(case.tasks)]), model.encoder)
    scores, texts = model.score(requests.pieces, 64), model.generate(requests.prompts, 64)
    return EvaluationResult(found.where, scores, texts)


def request_of(name: str, case: Case, layout: Layout, *, ema: bool) -> EvaluationRequest:
    found = describe_weights(name, "PATH", ema=ema)
    tasks = read_tasks([str(case.tasks)])
    check_tasks(found.model, layout, tasks)
    encoder = RequestEncoder(found.tokenizer, found.model.sequence)
    return EvaluationRequest.of(name, "PATH", found, TaskRequests(tasks, encoder), layout, 64, ema=ema)


def evaluate_and_measure(data: bytes) -> tuple[EvaluationResult, int]:
    """One rank's result, and the bytes of the tensors that it has after the load."""
    gc.collect()
    before, held = {id(one) for one in gc.get_objects()}, []
    load = rank_evaluation._load

    def measured(*arguments: Any) -> str:
        where = load(*arguments)
        tensors = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and id(one) not in before]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        held.append(sum(storages.values()))
        return where

    rank_evaluation._load = measured
    return rank_evaluation.evaluate_rank(rank_evaluation._REQUEST.validate_json(data)), held[0]


@pytest.mark.parametrize(
    ("kind", "keys", "share"),
    [
        ("run", ("tp=2",), 0.6),
        ("checkpoint", ("pp=2", "virtual_stages=2"), 0.8),
        ("average", ("cp=2", "zero=3"), 0.55),
        ("hugging face", ("pp=2", "tp=2"), 0.4),
    ],
    ids=[
        "tp 2, a run",
        "pp 2 x 2 stages, a URL",
        "cp 2 with ZeRO 3, an average",
        "pp 2 x tp 2, Hugging Face",
    ],
)
def test_ranks_have_the_scores_and_texts_of_one_process_and_only_their_part_of_the_model(
    kind: str, keys: tuple[str, ...], share: float, case: Case
) -> None:
    name = {
        "checkpoint": f"file://{case.run}/checkpoints/step-3",
        "hugging face": str(case.folder / "exported"),
    }.get(kind, str(case.run))
    if kind == "hugging face":
        found = describe_weights(str(case.run), "PATH")
        write_folder(found.weights, found.model, Path(name), found.tokenizer)
    ema, layout = kind == "average", scoring_layout([f"layout.{key}" for key in keys])
    expected, request = alone(name, case, ema=ema), request_of(name, case, layout, ema=ema)
    results = run_ranks(layout.world, evaluate_and_measure, request.encode())
    whole = 4 * request.model.num_parameters()
    for result, held in results:
        assert result.texts == expected.texts and result.where == expected.where
        assert [one.is_greedy for one in result.scores] == [one.is_greedy for one in expected.scores]
        found_sums = [one.log_likelihood for one in result.scores]
        assert found_sums == pytest.approx([one.log_likelihood for one in expected.scores], rel=1e-5)
        assert held < share * whole, "gradients, optimizer state, or parameters of other ranks"
    assert len(set(expected.texts)) > 1 and any(expected.texts)


def test_a_damaged_checkpoint_is_replaced_by_an_older_one_on_all_ranks(case: Case, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(case.run, run)
    newest = run / "checkpoints" / "step-3"
    file = max(newest.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    for place in range(0, len(data), 512):
        data[place] ^= 1
    file.write_bytes(data)
    request = request_of(str(run), case, scoring_layout(["layout.tp=2"]), ema=False)
    assert request.where.endswith("step-3")
    results = run_ranks(2, evaluate_and_measure, request.encode())
    assert {result.where.rpartition("/")[2] for result, _ in results} == {"step-2"}


def test_the_command_prints_the_scores_of_one_process(case: Case) -> None:
    expected = alone(str(case.run), case, ema=False)
    found = describe_weights(str(case.run), "PATH")
    requests = TaskRequests(
        read_tasks([str(case.tasks)]), RequestEncoder(found.tokenizer, found.model.sequence)
    )
    scores = {one.task: one.scores for one in requests.scores(expected.scores, expected.texts)}
    output, errors = (command := case.command("--json")).communicate(timeout=120)
    assert command.returncode == 0, errors
    shown = json.loads(output)
    assert shown["model"] == expected.where
    for task in shown["tasks"]:
        values = {name: score["value"] for name, score in task["scores"].items()}
        assert values == pytest.approx(
            {name: score.value for name, score in scores[task["task"]].items()}, rel=1e-5
        )


def _num_sockets(pid: int) -> int:
    try:
        return sum(os.readlink(one).startswith("socket:") for one in Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return 0


def test_a_killed_rank_ends_the_command_with_one_line_that_names_it(case: Case) -> None:
    command = case.command("--batch-tokens", "1")
    computing: list[int] = []

    def both_have_peers() -> bool:
        computing[:] = [pid for pid in descendants(command.pid) if _num_sockets(pid) >= 2]
        return len(computing) == 2

    wait_until(both_have_peers)
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in computing}
    killed = next(pid for pid, lines in environments.items() if b"RANK=1" in lines)
    os.kill(killed, signal.SIGKILL)
    output, errors = command.communicate(timeout=60)
    assert command.returncode == 1
    assert errors.splitlines()[-1] == "myriad: error: rank 1 was killed by SIGKILL"
    assert output == "" and "Traceback" not in errors
    assert not any(map(is_alive, computing))
    assert list((case.folder / "tmp").iterdir()) == []
