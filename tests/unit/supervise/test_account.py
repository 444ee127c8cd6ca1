"""If these fail, the report of a real run leaves seconds out, counts some twice, or puts them where they did
not go."""

from itertools import dropwhile
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.supervise.accounting.accounting import account_of
from myriad.supervise.accounting.ledger import Account, Kind, Moment, in_order

NAMES = (
    "import", "corpus", "launch", "attempt", "restart", "start", "resume", "step", "validation",
    "check", "checkpoint", "spares", "diagnosis", "eviction", "fault", "interrupted", "finish", "end",
    "who knows",
)  # fmt: skip
small = st.one_of(st.integers(-2, 12), st.floats(0, 50), st.sampled_from([None, "x", float("nan"), True, []]))
fields = st.fixed_dictionaries(
    {},
    optional={
        "step": small,
        "nodes": small,
        "seconds": small,
        "step_seconds": small,
        "checkpoint_wait_seconds": small,
        "resumed_from": small,
        "epoch": small,
        "first_epoch": small,
        "tokens": small,
        "outcome": st.sampled_from(["finished", "interrupted", "failed", None]),
        "cause": st.sampled_from(["killed", "hang", "node", ""]),
        "evidence": st.one_of(st.none(), st.fixed_dictionaries({"idle_seconds": small})),
    },
)
moments = st.lists(st.tuples(st.sampled_from(NAMES), st.floats(0, 40), fields), max_size=40)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(moments, st.one_of(st.none(), st.floats(0, 100)))
def test_for_any_files_the_classes_sum_to_the_wall_time(drawn: Any, later: float | None) -> None:
    at, found = 1.8e9, []
    for name, seconds, told in drawn:
        at += seconds
        found.append(Moment(at, name, told))
    account = account_of(found, None if later is None else at + later)
    spent = account.ledger.seconds()
    wall = account.ledger.wall_seconds
    known = list(dropwhile(lambda moment: moment.what == "import", found))
    ends = at + (later if later is not None and account.running else 0.0)
    assert wall == pytest.approx(ends - known[0].time if known else 0.0, abs=1e-3)
    assert sum(spent.values()) == pytest.approx(wall, abs=1e-3)
    assert min(spent.values()) >= -1e-9 and account.ledger.spare_node_seconds >= 0
    of_attempts = account.ledger.by_attempt().values()
    assert sum(sum(one.values()) for one in of_attempts) == pytest.approx(wall, abs=1e-3)


@given(st.lists(st.fixed_dictionaries({"time": small, "event": st.sampled_from(NAMES)}), max_size=20))
def test_lines_whose_times_are_torn_or_go_backward_are_in_order(lines: Any) -> None:
    times = [moment.time for moment in in_order(lines, lines, [{"plan": 3, "time": 4}, {"actions": [7]}])]
    assert times == sorted(times)


class Story:
    """Pass the lines of a run one after the other."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.journal: list[dict[str, Any]] = []

    def launch(self, at: float, epoch: int) -> None:
        self.events.append({"time": at, "event": "corpus"})
        self.journal.append({"time": at + 0.5, "plan": {"first_epoch": epoch}})
        self.attempt(at + 1.0, epoch)

    def attempt(self, at: float, epoch: int) -> None:
        self.journal.append({"time": at, "actions": [{"kind": "StartAttempt", "epoch": epoch}]})

    def end(self, at: float, outcome: str) -> None:
        self.journal.append({"time": at, "actions": [{"kind": "EndRun", "outcome": outcome}]})

    def event(self, at: float, event: str, **fields: Any) -> None:
        self.events.append({"time": at, "event": event, **fields})

    def steps(self, begun: float, first: int, last: int, **fields: Any) -> None:
        """A second each."""
        for number, step in enumerate(range(first, last + 1), 1):
            line = {"time": begun + number, "step": step, "step_seconds": 1.0, "tokens": 10 * step}
            self.metrics.append(line | fields)

    def account(self, now: float | None = None) -> Account:
        return account_of(in_order(self.events, self.metrics, self.journal), now)


def spent(account: Account) -> dict[Kind, float]:
    assert sum(account.ledger.seconds().values()) == pytest.approx(account.ledger.wall_seconds)
    return {kind: round(value, 3) for kind, value in account.ledger.seconds().items() if value > 1e-6}


def broken() -> Story:
    """Ten steps, half of an eleventh; one rank hangs, and eight steps were saved."""
    story = Story()
    story.launch(100.0, 1)
    story.event(103.0, "start", world=2)
    story.steps(103.0, 1, 10)
    story.event(126.5, "diagnosis", ranks=[1])
    evidence = {"idle_seconds": 14.0}
    story.event(127.5, "fault", cause="hang", rank=1, node=0, step=11, problem="hung", evidence=evidence)
    story.attempt(128.0, 2)
    story.event(128.0, "restart", epoch=2)
    story.event(130.0, "start", resumed_from=8)
    story.event(130.0, "resume", step=8, seconds=0.5)
    return story


def test_a_hang_costs_its_detection_the_restart_and_the_steps_done_again() -> None:
    story = broken()
    story.steps(130.0, 9, 20)
    story.event(144.0, "finish", step=20)
    story.end(144.5, "finished")
    account = story.account()
    assert spent(account) == {
        "starting": 3.0, "restarting": 2.5, "training": 20.0, "lost": 2.5, "detecting": 13.0,
        "diagnosing": 1.0, "saving": 2.5,
    }  # fmt: skip
    assert account.effective_ratio == pytest.approx(20.0 / 44.5)
    (fault,) = account.faults
    assert (fault.cause, fault.rank, fault.steps_lost) == ("hang", 1, 2)
    assert fault.detected_seconds == pytest.approx(13.0) and fault.back_seconds == pytest.approx(2.5)
    assert fault.loading_seconds == pytest.approx(0.5) and fault.ending_seconds == pytest.approx(0.5)
    assert [(one.number, one.last_step, one.ended) for one in account.attempts] == [
        (1, 10, "hang"),
        (2, 20, "finished"),
    ]
    assert (account.steps, account.steps_lost, account.tokens) == (20, 2, 200)


def test_a_run_stopped_by_a_person_and_gone_on_with_days_later() -> None:
    story = Story()
    story.launch(0.0, 1)
    story.event(2.0, "start")
    story.steps(2.0, 1, 5)
    story.event(7.5, "interrupted", step=5)
    story.end(8.0, "interrupted")
    story.launch(200_000.0, 2)
    story.event(200_002.0, "start", resumed_from=5)
    story.steps(200_002.0, 6, 10)
    story.event(200_008.0, "finish", step=10)
    story.end(200_008.0, "finished")
    account = story.account()
    assert spent(account) == {"starting": 4.0, "training": 10.0, "saving": 2.0, "planned": 199_992.0}
    assert account.meant_ratio == pytest.approx(10 / 16)
    assert account.effective_ratio == pytest.approx(10 / 200_008)


@pytest.mark.parametrize("failed", [True, False])
def test_a_run_that_failed_or_was_killed_whole_waits_for_a_person(failed: bool) -> None:
    story = Story()
    story.launch(0.0, 1)
    story.event(2.0, "start")
    story.steps(2.0, 1, 4)
    story.event(6.5, "checkpoint", step=4)
    if failed:
        story.event(7.0, "fault", cause="user", rank=0, step=5, problem="wrong")
        story.end(7.0, "failed")
    story.launch(1000.0, 2)
    story.event(1002.0, "start", resumed_from=4)
    story.steps(1002.0, 5, 6)
    found = spent(story.account())
    assert found["training"] == 6.0 and found["starting"] == 4.0
    assert (found["lost"], found["person"]) == ((1.0, 993.0) if failed else (0.5, 993.5))


def test_a_node_that_is_missing_is_waited_for() -> None:
    story = Story()
    story.launch(0.0, 1)
    story.event(2.0, "start")
    story.steps(2.0, 1, 4)
    story.event(9.5, "eviction", node=0)
    story.event(9.5, "fault", cause="node", node=0, problem="gone", evidence={"silent_seconds": 3.5})
    story.attempt(60.0, 2)
    story.event(62.0, "start", resumed_from=4)
    assert spent(story.account()) == {
        "starting": 2.0, "restarting": 2.0, "training": 4.0, "detecting": 3.5, "waiting": 50.5,
    }  # fmt: skip
    assert story.account().faults[0].ending_seconds == pytest.approx(50.5)


def test_evaluation_and_saves_are_distinguished_from_training() -> None:
    story = Story()
    story.launch(0.0, 1)
    story.event(2.0, "start")
    story.steps(2.0, 1, 3)
    story.event(8.0, "validation", step=3, seconds=3.0)
    story.steps(9.0, 4, 4, checkpoint_wait_seconds=1.0)
    assert spent(story.account()) == {"starting": 2.0, "training": 4.0, "validating": 3.0, "saving": 1.0}


def test_checks_in_gaps_are_charged_to_the_step_that_they_delay() -> None:
    story = Story()
    story.launch(0.0, 1)
    story.event(2.0, "start")
    story.steps(2.0, 1, 3)
    story.event(5.5, "check", step=3, seconds=0.5)
    story.steps(5.5, 4, 4)
    assert spent(story.account()) == {"starting": 2.0, "training": 4.0, "checking": 0.5}


def test_a_run_at_work_is_reported_up_to_now_and_its_step_under_way_is_not_lost_yet() -> None:
    story = broken()
    story.steps(130.0, 9, 10)
    at_work = story.account(now=132.75)
    assert at_work.running and at_work.ledger.wall_seconds == pytest.approx(32.75)
    assert spent(at_work)["training"] == pytest.approx(10.75)
    killed = story.account()
    assert not killed.running and spent(killed)["training"] == pytest.approx(10.0)


def test_a_line_of_a_step_that_was_done_while_its_neighbour_died_counts() -> None:
    story = Story()
    story.launch(0.0, 1)
    story.event(2.0, "start")
    story.steps(2.0, 1, 4)
    story.event(6.9, "fault", cause="killed", rank=1, step=5, problem="killed")
    story.steps(6.0, 5, 5)
    story.attempt(7.5, 2)
    story.event(8.0, "start", resumed_from=5)
    account = story.account()
    assert spent(account) == {"starting": 2.0, "restarting": 1.0, "training": 5.0}
    assert account.faults[0].steps_lost == 0 and account.steps == 5


def test_ranks_that_others_start_have_no_journal() -> None:
    story = Story()
    story.event(5.0, "start")
    story.steps(5.0, 1, 4)
    story.event(12.0, "start", resumed_from=2)
    story.steps(12.0, 3, 6)
    account = story.account()
    assert spent(account) == {"training": 6.0, "lost": 2.0, "person": 3.0}
    assert [one.number for one in account.attempts] == [1, 2] and account.steps_lost == 2


def test_two_faults_before_one_start_lose_each_step_once() -> None:
    story = Story()
    story.launch(0.0, 1)
    story.event(2.0, "start")
    story.steps(2.0, 1, 4)
    story.event(6.0, "fault", cause="killed", rank=0, problem="first")
    story.attempt(6.5, 2)
    story.event(7.0, "fault", cause="killed", rank=1, problem="second")
    story.attempt(7.5, 3)
    story.event(9.0, "start", resumed_from=3)
    story.event(9.0, "resume", step=3, seconds=0.1)
    account = story.account()
    assert [fault.steps_lost for fault in account.faults] == [1, 0]
    assert [round(fault.back_seconds or -1, 3) for fault in account.faults] == [3.0, 2.0]


def test_spare_nodes_are_charged_beside_the_run_while_it_runs() -> None:
    story = Story()
    story.launch(0.0, 1)
    story.event(2.0, "start")
    story.event(3.0, "spares", nodes=2)
    story.steps(2.0, 1, 4)
    story.event(5.0, "spares", nodes=1)
    story.event(6.0, "interrupted", step=4)
    story.end(7.0, "interrupted")
    story.launch(1000.0, 2)
    story.event(1002.0, "start", resumed_from=4)
    account = story.account()
    assert account.ledger.spare_node_seconds == pytest.approx(2 * 2.0 + 2.0)
    assert sum(spent(account).values()) == pytest.approx(1002.0)


def test_a_run_that_has_not_begun_has_an_account() -> None:
    account = account_of([])
    assert account.ledger.wall_seconds == 0 and account.effective_ratio == 1.0 and account.goodput == 0.0
