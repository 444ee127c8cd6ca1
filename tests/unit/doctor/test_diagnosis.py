"""A verdict that is too hard takes good nodes out, one that is too soft lets a slow one hold up all others;
and a baseline that cannot be read must be said before anything is measured."""

import pytest

from myriad.doctor import examine
from myriad.doctor.baseline import merge, read_baseline, summarize, write_baseline
from myriad.doctor.diagnosis import Diagnosis, Reading, evaluate
from myriad.errors import BadInputError

BASELINE = {"cpu": {"bandwidth": 100.0, "bits": "abc", "version of torch": "2.13"}}


def rate(value: float, **more) -> Reading:
    return Reading(name="bandwidth", value=value, unit="bytes/s", hardware="cpu", floor=10.0, **more)


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(120.0, "ok"), (80.0, "ok"), (79.0, "slow"), (50.0, "slow"), (49.0, "bad"), (0.0, "bad")],
)
def test_a_rate_is_held_against_the_baseline(value, verdict):
    item = evaluate(rate(value), BASELINE)
    assert (item.verdict, item.expected) == (verdict, 100.0)


def test_a_low_rate_is_measured_again_and_wrong_bits_are_not(tmp_path, monkeypatch):
    asked = []

    def run_probe(name, folder):
        asked.append(name)
        value = 30.0 if name == "memory" and len(asked) == 1 else 95.0
        return [rate(value), Reading(name="bits", value="abd", hardware="cpu")]

    monkeypatch.setattr(examine, "run_probe", run_probe)
    found = examine.diagnose(tmp_path, BASELINE, probes=("memory", "disk"))
    assert asked == ["memory", "memory", "disk"]
    assert [(item.name, item.verdict) for item in found.complaints] == [("bits", "bad")] * 2


@pytest.mark.parametrize(("value", "verdict"), [(11.0, "ok"), (9.0, "slow"), (4.0, "bad")])
def test_without_a_baseline_the_absolute_floor_counts_and_the_text_names_it(value, verdict):
    item = evaluate(rate(value, remedy="look at it"), {})
    assert item.verdict == verdict and "its floor" in item.words
    assert ("look at it" in item.words) == (verdict != "ok")


def test_other_hardware_does_not_count():
    assert evaluate(rate(30.0), {"another cpu": {"bandwidth": 100.0}}).verdict == "ok"


def test_other_bits_or_versions_are_bad_and_reported_beside_the_right_ones():
    reading = Reading(name="mini-model", measure="bits", value="abd", hardware="cpu", remedy="run it again")
    item = evaluate(reading, BASELINE)
    assert item.verdict == "bad" and item.expected == "abc"
    assert item.words == "the baseline has abc; run it again"
    assert evaluate(reading, {}).verdict == "ok"


def test_a_problem_is_bad_whatever_the_value_and_a_skip_gives_the_reason():
    assert evaluate(rate(1e9, problem="arrived different"), BASELINE).words == "arrived different"
    assert evaluate(Reading(name="GPU", skipped="none here"), BASELINE).verdict == "skipped"


def test_what_is_advisory_makes_no_node_unfit():
    clock = evaluate(Reading(name="clock", problem="not synchronized", advisory=True), {})
    assert clock.verdict == "bad" and Diagnosis([clock]).healthy
    found = Diagnosis([clock, evaluate(rate(60.0), BASELINE)])
    assert not found.healthy and found.words == "do not use this node: bandwidth (slow)"


def test_a_baseline_is_the_median_and_keeps_other_hardware(tmp_path):
    path = tmp_path / "folder" / "baseline.json"
    rounds = [
        [rate(value), Reading(name="bits", value="abc", hardware="cpu")] for value in (90.0, 100.0, 500.0)
    ]
    write_baseline(path, merge({"gpu": {"x": 1.0}}, summarize(rounds)))
    assert read_baseline(path) == {"gpu": {"x": 1.0}, "cpu": {"bandwidth": 100.0, "bits": "abc"}}


def test_a_node_that_gives_other_bits_each_time_is_no_baseline():
    rounds = [[Reading(name="bits", value=value, hardware="cpu")] for value in ("abc", "abd")]
    with pytest.raises(BadInputError, match="bits"):
        summarize(rounds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"format": 2, "hardware": {}}',
        '{"format": 1, "hardware": {"a": {"b": []}}}',
        "[" * 100_000,
    ],
)
def test_what_is_no_baseline_is_refused_in_one_line(tmp_path, text):
    path = tmp_path / "baseline.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match="--baseline") as refused:
        read_baseline(path)
    assert "\n" not in str(refused.value)


def test_a_baseline_that_is_not_there_or_cannot_be_written_is_refused(tmp_path):
    with pytest.raises(BadInputError, match="No such file"):
        read_baseline(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInputError, match="cannot be written"):
        write_baseline(tmp_path / "file" / "baseline.json", {})
