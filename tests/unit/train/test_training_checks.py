"""If these fail, checks between steps cost more than a thousandth of a run, or a rank that computes wrong
bits goes on unseen."""

import random
import time

import pytest
import torch

from myriad.comm.groups import Groups, open_world
from myriad.comm.layout import Layout
from myriad.job import load_job
from myriad.supervise.agent.rank_processes import troubles_of
from myriad.telemetry.progress.progress_page import ProgressPage, ProgressRow
from myriad.telemetry.spans import Recorder
from myriad.train.training_checks import RATIO, TrainingChecks


@pytest.fixture
def groups(monkeypatch) -> Groups:
    """Groups of one rank alone."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    return open_world(Layout(), torch.device("cpu"))


def checks_of(groups: Groups, row: ProgressRow, *overrides: str) -> tuple[TrainingChecks, list[dict]]:
    events: list[dict] = []
    job = load_job("tiny", ["train.steps=100000", *overrides])
    device = torch.device("cpu")
    checks = TrainingChecks(job, groups, device, row, Recorder(), lambda name, **how: events.append(how))
    return checks, events


@pytest.mark.parametrize("seed", range(3))
def test_checks_take_a_thousandth_of_the_time_whatever_they_cost(groups, monkeypatch, seed):
    now, random_generator = [1000.0], random.Random(seed)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    checks, events = checks_of(groups, ProgressRow.unseen(), "train.validate_every=10", "checkpoint.every=7")

    def slow() -> bool:
        now[0] += random_generator.choice([0.002, 0.005, 0.05])
        return True

    checks._checks = dict.fromkeys(checks._checks, slow)
    longest, began = 0.0, now[0] + 0.5
    for step in range(1, 5000):
        now[0] += 0.5
        due = checks.is_due(step, save_due=False)
        assert not due or step % 10 == 0 or step % 7 == 0, "only in gaps"
        assert not due or step > 3, "never in the first steps"
        checks.after_step(step, due=due)
        if due:
            longest = max(longest, events[-1]["seconds"])
        cost = sum(event["seconds"] for event in events)
        assert cost <= RATIO * (now[0] - began) + longest
    assert len(events) > 20 and events[-1]["ratio"] <= 1.1 * RATIO
    assert {name for event in events for name in event["checks"]} == set(checks._checks)


def test_hours_without_a_gap_and_off_take_effect(groups, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    hourly, _ = checks_of(groups, ProgressRow.unseen(), "resilience.check_hours=1")
    never, _ = checks_of(groups, ProgressRow.unseen(), "resilience.check_hours=off", "train.validate_every=1")
    due = []
    for minute in range(1, 200):
        now[0] += 60.0
        assert not never.is_due(minute, save_due=True)
        if is_due := hourly.is_due(minute, save_due=False):
            due.append(minute)
        for checks in (hourly, never):
            checks.after_step(minute, due=is_due and checks is hourly)
    assert due == [61, 121, 181]


def test_a_wrong_product_is_trouble_of_the_ranks_node(groups, monkeypatch):
    page = ProgressPage(1)
    monkeypatch.setenv("MYRIAD_PROGRESS", page.address(0))
    row = ProgressRow(memoryview(page._memory))
    row.begin(4)
    checks, events = checks_of(groups, row)
    checks.after_step(1, due=True)
    assert "failed" not in events[-1] and page.read(0).failed_checks == ()
    right = torch.Tensor.__matmul__

    def off_by_one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        found = right(a, b)
        if found.dim() == 2:
            found[100, 17] += 1
        return found

    monkeypatch.setattr(torch.Tensor, "__matmul__", off_by_one)
    for step in range(2, 6):
        checks.after_step(step, due=True)
    assert events[-1]["failed"] == ["product"]
    (trouble,) = troubles_of({7: page.read(0)}, epoch=4)
    assert (trouble.rank, trouble.blame, trouble.can_wait, trouble.epoch) == (7, "hardware", True, 4)
    assert "product" in trouble.words
    row.checked(1 << 3, 1, 0)  # a sum that is wrong may be any rank's fault
    assert troubles_of({7: page.read(0)}, epoch=4)[0].blame == "unknown"


def test_a_bubble_that_is_long_enough_hides_a_check(groups, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    checks, _ = checks_of(groups, ProgressRow.unseen(), "layout.pp=2")
    assert checks.uses_bubbles
    made: list[str] = []
    checks._checks = dict.fromkeys(checks._checks, lambda: not made.append("made"))
    for name in checks._costs:
        checks._costs[name].append(0.001)
    checks._costs["product"].clear()
    checks._costs["product"].append(0.001)
    checks._take_turn("product")
    assert not made

    def wait(seconds: float) -> torch.Tensor:
        now[0] += seconds
        return torch.zeros(1)

    checks.wait("short", lambda: wait(0.0))
    checks.wait("short", lambda: wait(0.0))
    assert not made, "no bubble is long enough"
    checks.wait("long", lambda: wait(0.02))
    checks.wait("long", lambda: wait(0.02))
    checks.wait("long", lambda: wait(0.02))
    assert made == ["made"] and checks._spent == 0
