"""If these break: lm-evaluation-harness cannot load a run, or finds other scores than `myriad eval` does."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from untrained_run import TEXT, make_run

from myriad.cli.main import build_app

lm_eval = pytest.importorskip("lm_eval", reason="needs the package lm-eval")

CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: choices
doc_to_target: gold
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ROLLING = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}, {{metric: word_perplexity}}]
"""
MADE = """
task: local_made
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 4}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The harness's results on local tasks; each document's samples are in files as it logs them."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    import myriad.lm_eval_model  # noqa: F401

    lines = TEXT.splitlines()
    data = tmp_path / "data.jsonl"
    documents = [
        {"text": f"{line} {TEXT[:number]}", "choices": ["in", "return x"], "gold": number % 2, "answer": "x"}
        for number, line in enumerate([*lines, *lines])
    ]
    data.write_text("".join(json.dumps(one) + "\n" for one in documents))
    (tmp_path / "tasks").mkdir()
    for number, text in enumerate((CHOICE, ROLLING, MADE)):
        (tmp_path / "tasks" / f"{number}.yaml").write_text(text.format(data=data))
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False)
    names = ["local_choice", "local_text", "local_made"]
    results = lm_eval.simple_evaluate(
        model="myriad", model_args={"run": str(make_run(tmp_path))}, tasks=names, task_manager=manager,
        bootstrap_iters=0,
    )  # fmt: skip
    (tmp_path / "logged").mkdir()
    for name, samples in results["samples"].items():
        logged = [
            one | {"arguments": _logged(one["arguments"]), "target": str(one["target"])} for one in samples
        ]
        text = "".join(json.dumps(one, default=str) + "\n" for one in logged)
        (tmp_path / "logged" / f"{name}.jsonl").write_text(text)
    return results["results"]


def _logged(arguments: Any) -> dict[str, Any]:
    """As the harness's `save_results_samples` writes them."""
    return {
        f"gen_args_{number}": {f"arg_{index}": value for index, value in enumerate(one)}
        for number, one in enumerate(arguments)
    }


def test_the_harness_and_myriad_eval_find_the_same_scores(found: dict[str, Any], tmp_path: Path) -> None:
    command = ["eval", str(tmp_path / "run"), "--tasks", str(tmp_path / "logged"), "--json"]
    done = CliRunner().invoke(build_app(), command, catch_exceptions=False)
    ours = {one["task"]: one["scores"] for one in json.loads(done.stdout)["tasks"]}
    for task, scores in (
        ("local_choice", ("acc", "acc_norm")),
        ("local_text", ("bits_per_byte", "word_perplexity")),
        ("local_made", ("exact_match",)),
    ):
        for score in scores:
            assert ours[task][score]["value"] == pytest.approx(found[task][f"{score},none"], rel=1e-5), score
