"""Numbers that are wrong on real ranks: who made them is named, nothing that follows from them is kept, and
the weights at the end are those of a run that nothing happened to."""

import json
from pathlib import Path

import pytest
from same_run import assert_same_run, train_undisturbed
from test_recovery import SMALL, events, make_run
from tiny_corpora import make_corpus

from myriad.errors import RunFailedError
from myriad.faults.rank_faults import ARMED
from myriad.launchers.local import run_local
from myriad.run import Run

THREE = [
    *SMALL,
    "model.layers=1",
    "train.steps=40",
    "layout.dp=3",
    "layout.micro_batch=2",
    "train.global_batch=6",
    "checkpoint.memory_seconds=0",
    "resilience.verify_every=4",
]

TWO = [*THREE, "layout.dp=2", "layout.micro_batch=3"]
"""Enough where no replica has to be told from two others."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    return train_undisturbed(make_run(tmp_path_factory.mktemp("undisturbed") / "run", corpus, *THREE))


def plan(run: Run, monkeypatch: pytest.MonkeyPatch, *faults: dict) -> None:
    """What ranks are to do to themselves."""
    folder = run.path / "faults"
    folder.mkdir()
    told = [{"number": number, "during": None, "group": None, **one} for number, one in enumerate(faults)]
    (folder / "planned.json").write_text(json.dumps(told))
    monkeypatch.setenv(ARMED, str(folder / "planned.json"))


def verdicts(run: Run) -> list[tuple[str, int, int]]:
    """Verdict, step and rank of each diagnosis of a number; others are of the pace of a busy machine."""
    told = (one for one in events(run, "diagnosis") if "verdict" in one)
    return [(one["verdict"], one["step"], one["rank"]) for one in told]


def test_wrong_numbers_are_found_their_rank_is_named_and_the_end_is_as_if_they_had_not_been(
    tmp_path: Path, corpus: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One run with four faults: a gradient that is not a number once, a bit that flips in the middle, a spike
    when enough steps are known to compare with, and a bit that flips in the last step."""
    how = ("checkpoint.every=4", "checkpoint.keep=11", "resilience.on_spike=skip")
    run = make_run(tmp_path / "run", corpus, *THREE, *how)
    faults = (("nan-once", 2, 2), ("flip", 1, 6), ("spike", 1, 39), ("flip", 2, 40))
    plan(run, monkeypatch, *({"kind": kind, "rank": rank, "step": step} for kind, rank, step in faults))
    assert run_local(run, 3) == "finished"
    nan, flip, last = (one for one in events(run, "fault") if "cause" in one)
    assert (nan["cause"], nan["rank"], nan["step"]) == ("nan", 2, 2)
    assert (flip["cause"], flip["rank"], flip["node"]) == ("corruption", 1, 0)
    assert flip["step"] in (8, 12), "found when replicas were compared next"
    assert (last["cause"], last["rank"], last["step"]) == ("corruption", 2, 40), "when all ranks were gone"
    assert verdicts(run)[0] == ("transient", 2, 2)
    (spike,) = events(run, "spike")
    assert (spike["step"], spike["verdict"]) == (39, "transient") and "gradient norm" in spike["problem"]
    assert not events(run, "skip") and len(events(run, "start")) == 4, "a spike is computed again in place"
    after_nan, after_flip, after_last = (resume["step"] for resume in events(run, "resume"))
    assert after_nan == 1, "nothing had moved in the step"
    assert 1 <= after_flip <= flip["evidence"]["agreed_step"] <= 5
    assert after_last <= last["evidence"]["agreed_step"] <= 39
    assert_same_run(run, undisturbed)


def test_a_batch_that_is_never_a_number_stops_the_run_with_the_reason_and_the_rank(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", corpus, *TWO)
    plan(run, monkeypatch, {"kind": "nan-always", "rank": 1, "step": 3})
    with pytest.raises(RunFailedError, match=r"on rank 1 .*; it came again on replay, and there is no other"):
        run_local(run, 2)
    assert verdicts(run) == [("deterministic", 3, 1)]
    assert len(events(run, "start")) == 2 and not events(run, "eviction")
    assert run.read_metrics()[-1]["step"] == 2, "nothing moved by numbers that are none"


def test_bad_batches_are_skipped_if_the_job_allows_it_in_later_attempts_too(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """First a batch whose gradient is never a number; then a spike that stays, before which the run goes
    back, to skip the batches that led to it."""
    how = ("resilience.on_nan=skip", "resilience.on_spike=rollback", "checkpoint.every=10")
    run = make_run(tmp_path / "run", corpus, *TWO, *how, "checkpoint.keep=11")
    monkeypatch.setattr("myriad.launchers.supervised_run.SPIKE_STEPS_BEFORE", 10)
    monkeypatch.setattr("myriad.launchers.supervised_run.SPIKE_STEPS_AFTER", 1)
    faults = [("nan-always", 2), ("spike-always", 37)]
    plan(run, monkeypatch, *({"kind": kind, "rank": 1, "step": step} for kind, step in faults))
    assert run_local(run, 2) == "finished"
    nan, *_, spike = (one for one in events(run, "fault") if one.get("cause") in ("nan", "spike"))
    assert (nan["cause"], nan["rank"], nan["step"]) == ("nan", 1, 2)
    assert verdicts(run) == [("deterministic", 2, 1)]
    assert (spike["cause"], spike["step"]) == ("spike", 37) and "rank" not in spike, "nobody is to blame"
    resumed, *_ = (one["step"] for one in events(run, "resume") if one["time"] > spike["time"])
    assert 20 <= resumed <= 26, "stored, or in memory as the last that was compared"
    lines, skipped = run.read_metrics(), [2, *range(27, 39)]
    assert [line["step"] for line in lines if line.get("skipped")] == skipped and len(lines) == 40
    assert lines[1]["loss"] is not None and lines[1]["grad_norm"] is None
    assert {one["step"] for one in events(run, "skip")} == set(skipped) and not events(run, "eviction")
    assert lines[-1]["loss"] < lines[0]["loss"] - 1
