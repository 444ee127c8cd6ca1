"""If this breaks: an imported checkpoint cannot be trained on, or trains from step 1 as if it were new."""

from pathlib import Path

import pytest
from foreign_case import GPT, megatron_state, write_megatron
from ranks import run_ranks
from same_run import train_rank
from tiny_corpora import make_corpus
from typer.testing import CliRunner

from myriad.cli.main import build_app
from myriad.job import load_job
from myriad.run import Run


def test_an_imported_run_continues_with_the_next_step_in_another_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _, theirs = megatron_state(GPT)
    small = {name: 0.05 * values for name, values in theirs["weights"].items()}
    write_megatron(tmp_path / "from", GPT, theirs | {"weights": small}, tp=2, pp=2)
    done = CliRunner().invoke(build_app(), ["checkpoint", "import", "from", "run"])
    assert done.exit_code == 0, done.output
    assert "optimizer state of step 6" in done.output and "--run run" in done.output
    corpus = make_corpus(tmp_path, count=300)
    run = Run(tmp_path / "run")
    changes = [f"data.corpus={corpus}", "train.steps=8", "train.threads=1", "layout.tp=2"]
    run.create_or_resume(load_job(str(run.path / "job.toml"), changes))
    assert run_ranks(2, train_rank, [str(run.path)]) == [0, 0]
    assert [line["step"] for line in run.read_metrics()] == [7, 8]
    resumed = [event for event in run.read_events() if event["event"] == "resume"]
    assert [event["step"] for event in resumed] == [6]
