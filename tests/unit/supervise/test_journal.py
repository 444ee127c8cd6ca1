"""If these fail, a new driver forgets what the last one had decided."""

from dataclasses import replace
from pathlib import Path

import pytest

from myriad.supervise.driver.journal import Journal, Leftovers
from myriad.supervise.observations import RankExited
from myriad.supervise.policy.incidents import Incident
from myriad.supervise.policy.nan_trial import NanTrial
from myriad.supervise.policy.policy_actions import EndRun, StartAttempt
from myriad.supervise.policy.run_state import RunPlan, RunState

PLAN = RunPlan(world=4, nodes=2, first_epoch=3, patience=0.5)
ENDED = RankExited(0, 3, 1, 1, "user", 7, "ValueError: moon", "a.log")
STATE = RunState(
    "ending",
    3,
    placement={0: (0, 1), 1: (2, 3)},
    exits={1: ENDED.code},
    incident=Incident.of_exit(ENDED, "a rank ended", after_stop=False),
    repeats={"user at step 7: ValueError: moon": 1},
    newest_step=40,
    wrong_on={1: 2},
    trial=NanTrial(8, 3, 1, "moved"),
    skipped_steps=(8, 30),
)
START = StartAttempt(rule="all are there", epoch=3, placement={0: (0, 1)}, again=False)


def test_the_newest_plan_and_state_come_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.begin(PLAN)
    assert journal.replay() == (PLAN, None)
    journal.write([START], RunState("running", 3))
    journal.write([EndRun(rule="done", outcome="finished", reason="")], STATE)
    assert journal.replay() == (PLAN, STATE)
    journal.begin(RunPlan(world=2, nodes=1, first_epoch=4))
    assert journal.replay() == (RunPlan(world=2, nodes=1, first_epoch=4), None)


def test_a_torn_last_line_counts_as_unwritten_and_is_written_over(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.begin(PLAN)
    journal.write([START], STATE)
    whole = journal.path.read_bytes()
    journal.write([START], RunState("running", 4))
    longer = journal.path.read_bytes()
    for size in range(len(whole), len(longer)):
        journal.path.write_bytes(longer[:size])
        assert journal.replay() == (PLAN, STATE)
    journal.write([START], RunState("running", 5))
    assert journal.replay() == (PLAN, RunState("running", 5))


def test_without_a_plan_there_is_nothing_to_drive(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no plan"):
        Journal(tmp_path / "journal.jsonl").replay()


def test_a_start_that_ended_before_its_rollback_passes_the_target_and_the_skipped_steps_on(
    tmp_path: Path,
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    assert journal.left_over() == Leftovers()
    journal.begin(PLAN)
    journal.write([START], STATE)
    assert journal.left_over() == Leftovers(40, (8, 30))
    journal.begin(replace(PLAN, newest_step=40, skipped_steps=(8,)))
    assert journal.left_over() == Leftovers(40, (8,)), "that one did not begin either"
    journal.write([START], RunState("running", 3, skipped_steps=(8,)))
    assert journal.left_over() == Leftovers(None, (8,))


EVENTS = [
    {"event": "start"},
    {"event": "restart", "newest_step": 40, "skipped_steps": [8]},
    {"event": "start", "skipped_steps": [8]},
    {"event": "restart", "newest_step": 60, "skipped_steps": [8, 70]},
]


@pytest.mark.parametrize("damage", ["lost", "empty", "other", "torn in the middle", "a line is gone"])
def test_what_a_damaged_journal_forgets_is_reported_and_read_from_the_events(
    tmp_path: Path, damage: str
) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    journal.begin(PLAN)
    journal.write([START], replace(STATE, newest_step=None, skipped_steps=(8,)))
    journal.write([START], replace(STATE, newest_step=60, skipped_steps=(8, 70)))
    journal.write([START], replace(STATE, newest_step=60, skipped_steps=(8, 70)))
    lines = journal.path.read_bytes().splitlines(keepends=True)
    assert journal.left_over(EVENTS, was_driven=True) == Leftovers(60, (8, 70))
    if damage == "lost":
        journal.path.unlink()
    else:
        damaged = {
            "empty": [],
            "other": [b'{"plan": {"world": "many"}}\n'],
            "torn in the middle": [*lines[:2], lines[2][:50] + b"\n", lines[3][:50] + b"\n"],
            "a line is gone": [lines[0], *lines[2:]],
        }
        journal.path.write_bytes(b"".join(damaged[damage]))
    left = journal.left_over(EVENTS, was_driven=True)
    assert (left.newest_step, left.skipped_steps) == (60, (8, 70)) and left.problem
    assert "skips the batches of steps 8, 70, goes back to step 60" in left.text()
    assert "\n" not in left.text()


def test_a_run_that_never_had_a_journal_has_lost_none(tmp_path: Path) -> None:
    assert Journal(tmp_path / "journal.jsonl").left_over(EVENTS) == Leftovers()
