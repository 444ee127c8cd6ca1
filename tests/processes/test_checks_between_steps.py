"""If this breaks, checks between steps change what a run learns, or ranks disagree about when they come."""

from pathlib import Path

from ranks import run_ranks
from same_run import train_rank
from tiny_corpora import make_corpus

from myriad.job import load_job
from myriad.run import Run
from myriad.train import training_checks

SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "train.steps=16"]
LAYOUT = ["layout.dp=2", "layout.pp=2", "train.validate_every=8", "train.sample_prompt=off"]


def rank(path: str) -> int:
    """One rank; so short a run has a thousandth for no check."""
    training_checks.RATIO = 1.0
    return train_rank([path])


def trained(folder: Path, corpus: str, hours: str) -> Run:
    overrides = [f"data.corpus={corpus}", *SMALL, *LAYOUT, f"resilience.check_hours={hours}"]
    job, run = load_job("tiny", overrides), Run(folder / hours)
    run.create_or_resume(job)
    assert run_ranks(4, rank, str(run.path)) == [0] * 4
    return run


def test_checks_between_steps_leave_every_bit_of_a_run(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, count=300)
    checked, plain = (trained(tmp_path, corpus, hours) for hours in ("0", "off"))
    found = [event for event in checked.read_events() if event["event"] == "check"]
    names = {name for event in found for name in event["checks"]}
    assert names == {"product", "memory", "all-reduce", "all-to-all"}
    assert not any("failed" in event for event in found)
    assert min(event["step"] for event in found) > 3 and max(event["step"] for event in found) < 16
    assert not [event for event in plain.read_events() if event["event"] == "check"]
    losses = [[(line["loss"], line["grad_norm"]) for line in run.read_metrics()] for run in (checked, plain)]
    assert losses[0] == losses[1]
