"""Numbers that are wrong on real ranks: who made them is named, nothing that follows from them is kept, and
the weights at the end are those of a run that nothing happened to."""

import json
from pathlib import Path

import pytest
from same_run import assert_same_run
from test_recovery import SMALL, events, make_run
from tiny_corpora import make_corpus

from myriad.errors import RunFailedError
from myriad.faults.rank_faults import ARMED
from myriad.launchers.local import run_local
from myriad.run import Run

THREE = [
    *SMALL,
    "layout.dp=3",
    "layout.micro_batch=1",
    "train.global_batch=6",
    "checkpoint.memory_seconds=0",
    "resilience.verify_every=4",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"), count=300)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Run:
    run = make_run(tmp_path_factory.mktemp("undisturbed") / "run", corpus, *THREE)
    assert run_local(run, 3) == "finished"
    assert not events(run, "fault"), "replicas that are healthy are never told to differ"
    return run


def plan(run: Run, monkeypatch: pytest.MonkeyPatch, *faults: dict) -> None:
    """What ranks are to do to themselves."""
    folder = run.path / "faults"
    folder.mkdir()
    told = [{"number": number, "during": None, "group": None, **one} for number, one in enumerate(faults)]
    (folder / "planned.json").write_text(json.dumps(told))
    monkeypatch.setenv(ARMED, str(folder / "planned.json"))


def test_a_flipped_bit_is_found_its_rank_named_and_the_end_is_as_if_it_had_not_been(
    tmp_path: Path, corpus: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", corpus, *THREE, "checkpoint.every=5", "checkpoint.keep=8")
    plan(run, monkeypatch, {"kind": "flip", "rank": 1, "step": 18})
    assert run_local(run, 3) == "finished"
    fault, *_ = events(run, "fault")
    assert (fault["cause"], fault["rank"], fault["node"]) == ("corruption", 1, 0)
    assert fault["step"] in (20, 24), "found when replicas were compared next"
    (resume,) = events(run, "resume")
    assert 1 <= resume["step"] <= fault["evidence"]["agreed_step"] <= 17
    assert_same_run(run, undisturbed)


def test_a_bit_that_flips_in_the_last_step_is_found_when_all_ranks_are_gone(
    tmp_path: Path, corpus: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", corpus, *THREE, "checkpoint.every=20")  # else no state is left to trust
    plan(run, monkeypatch, {"kind": "flip", "rank": 2, "step": 40})
    assert run_local(run, 3) == "finished"
    fault, *_ = events(run, "fault")
    assert (fault["cause"], fault["rank"], fault["step"]) == ("corruption", 2, 40)
    assert_same_run(run, undisturbed)


def test_a_gradient_that_is_not_a_number_once_costs_a_replay_and_is_reported_as_transient(
    tmp_path: Path, corpus: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", corpus, *THREE)
    plan(run, monkeypatch, {"kind": "nan-once", "rank": 2, "step": 12})
    assert run_local(run, 3) == "finished"
    (fault,) = (one for one in events(run, "fault") if "cause" in one)
    assert (fault["cause"], fault["rank"], fault["step"]) == ("nan", 2, 12)
    (diagnosis,) = events(run, "diagnosis")
    assert (diagnosis["verdict"], diagnosis["step"], diagnosis["rank"]) == ("transient", 12, 2)
    assert events(run, "resume")[0]["step"] in (10, 11), "nothing had moved in the step"
    assert_same_run(run, undisturbed)


def test_a_batch_that_is_never_a_number_stops_the_run_with_the_reason_and_the_rank(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", corpus, *THREE)
    plan(run, monkeypatch, {"kind": "nan-always", "rank": 1, "step": 12})
    with pytest.raises(RunFailedError, match=r"on rank 1 .*; it came again on replay, and there is no other"):
        run_local(run, 3)
    assert [one["verdict"] for one in events(run, "diagnosis")] == ["deterministic"]
    assert len(events(run, "start")) == 2 and not events(run, "eviction")
    assert run.read_metrics()[-1]["step"] == 11, "nothing moved by numbers that are none"


def test_a_bad_batch_is_skipped_if_the_job_allows_it_in_later_attempts_and_starts_too(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", corpus, *THREE, "resilience.on_nan=skip")
    faults = [{"kind": "nan-always", "rank": 1, "step": step} for step in (12, 30)]
    plan(run, monkeypatch, *faults)
    assert run_local(run, 3) == "finished"
    lines = run.read_metrics()
    assert [line["step"] for line in lines if line.get("skipped")] == [12, 30] and len(lines) == 40
    assert lines[11]["loss"] is not None and lines[11]["grad_norm"] is None
    assert {one["step"] for one in events(run, "skip")} == {12, 30}
    assert [one["verdict"] for one in events(run, "diagnosis")] == ["deterministic"] * 2
    assert lines[-1]["loss"] < lines[0]["loss"] - 1


def test_a_spike_is_computed_again_and_the_end_is_as_if_it_had_not_been_and_one_that_stays_is_skipped(
    tmp_path: Path, corpus: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Enough steps are known by then to compare with."""
    run = make_run(tmp_path / "run", corpus, *THREE, "resilience.on_spike=skip")
    plan(run, monkeypatch, {"kind": "spike", "rank": 1, "step": 36})
    assert run_local(run, 3) == "finished"
    (told,) = events(run, "spike")
    assert (told["step"], told["verdict"]) == (36, "transient") and "gradient norm" in told["problem"]
    assert len(events(run, "start")) == 1 and not events(run, "fault") and not events(run, "skip")
    assert_same_run(run, undisturbed)


def test_a_run_goes_back_before_a_spike_and_skips_the_batches_that_led_to_it(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how = ("resilience.on_spike=rollback", "checkpoint.every=10", "checkpoint.keep=11")
    run = make_run(tmp_path / "run", corpus, *THREE, *how)
    monkeypatch.setattr("myriad.launchers.supervised_run.SPIKE_STEPS_BEFORE", 10)
    monkeypatch.setattr("myriad.launchers.supervised_run.SPIKE_STEPS_AFTER", 1)
    plan(run, monkeypatch, {"kind": "spike-always", "rank": 1, "step": 36})
    assert run_local(run, 3) == "finished"
    (fault,) = (one for one in events(run, "fault") if "cause" in one)
    assert (fault["cause"], fault["step"]) == ("spike", 36) and "rank" not in fault, "nobody is to blame"
    (resume,) = events(run, "resume")
    assert resume["step"] == 20, "the newest that is stored of at most 25"
    assert {one["step"] for one in events(run, "skip")} == set(range(26, 38))
    assert run.read_metrics()[-1]["step"] == 40 and not events(run, "eviction")
