"""If these break: scores in training depend on the layout, or are not those of the model that is saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from same_run import train_rank
from tiny_corpora import make_corpus

from myriad.errors import BadInputError
from myriad.evaluation.full_model import FullModel
from myriad.evaluation.task_files import read_tasks
from myriad.evaluation.task_requests import TaskRequests
from myriad.job import load_job
from myriad.run import Run
from myriad.train.checkpoint_tools.whole_model import open_model
from myriad.train.inputs import open_inputs

TASKS: list[dict[str, Any]] = [
    *({"task": "choice", "arguments": [[a, " one"], [a, " two"]], "target": 0} for a in ("a", "x", "in the")),
    *({"task": "word", "arguments": [a, " the"]} for a in ("of", "in")),
    *({"task": "made", "arguments": [a, {"max_gen_toks": 1}], "target": ""} for a in ("a", "the")),
    *({"task": "text", "arguments": [f"{a} text, longer than a window. " * 6]} for a in ("one", "two")),
]  # fmt: skip
STEPS = ("train.steps=2", "optimizer.warmup_steps=1")
TURNS = ("overlap.tensor=turns", "overlap.tensor_message=1")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


@pytest.fixture
def load(tmp_path: Path, corpus: Path) -> Callable[..., Any]:
    def make(*overrides: str, tasks: list[dict[str, Any]] = TASKS) -> Any:
        file = tmp_path / "tasks.jsonl"
        file.write_text("".join(json.dumps(one) + "\n" for one in tasks))
        small = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", *STEPS]
        return load_job("tiny", [f"data.corpus={corpus}", *small, f"eval.tasks={file}", *overrides])

    return make


@pytest.mark.parametrize(
    ("layout", "world"),
    [
        (("layout.pp=2", "layout.tp=2", "layout.micro_batch=1", *TURNS), 4),
        (("layout.dp=2", "layout.tp=2", "layout.micro_batch=2", "layout.zero=3", *TURNS), 4),
    ],
    ids=["pp x tp, parts of positions", "dp x tp, parts of sequences"],
)
def test_a_run_in_any_layout_has_the_scores_of_one_process(
    layout: tuple[str, ...], world: int, load: Callable[..., Any], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    run.create_or_resume(load(*layout, "eval.every=1"))
    assert run_ranks(world, train_rank, [str(run.path)]) == [0] * world
    first, last = [event for event in run.read_events() if event["event"] == "evaluation"]
    assert (first["step"], last["step"]) == (1, 2)
    assert first["scores"] != last["scores"]

    found = open_model(str(run.path), "PATH")
    model = FullModel(found.layers, found.tokenizer, found.config.sequence)
    requests = TaskRequests(read_tasks([str(tmp_path / "tasks.jsonl")]), model.encoder)
    made = model.generate(requests.prompts, 64)
    expected = requests.scores(model.score(requests.pieces, 64), made)
    scores = {f"{one.task}/{name}": score.value for one in expected for name, score in one.scores.items()}
    assert last["scores"] == pytest.approx(scores, rel=1e-5)
    assert last["documents"] == {"choice": 3, "word": 2, "made": 2, "text": 2}


def test_tasks_of_generated_text_alone_are_scored(load: Callable[..., Any], tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    run.create_or_resume(load(tasks=[one for one in TASKS if one["task"] == "made"]))
    assert run_ranks(1, train_rank, [str(run.path)]) == [0]
    (found,) = [event for event in run.read_events() if event["event"] == "evaluation"]
    assert found["documents"] == {"made": 2} and found["scores"].keys() == {"made/exact_match"}


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ({"arguments": ["a", " word" * 99]}, "at most model.sequence = 32 tokens"),
    ],
)
def test_what_training_cannot_score_is_refused_before_any_rank_starts(
    task: dict[str, Any], expected: str, load: Callable[..., Any]
) -> None:
    with pytest.raises(BadInputError, match=expected):
        open_inputs(load(tasks=[task]), lambda stage: None)
    with pytest.raises(BadInputError, match=r"eval\.every"):
        load("eval.tasks=[]", "eval.every=5")
