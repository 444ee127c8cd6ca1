"""If these fail, a person gets a thousand messages for one fault, none for another, or never hears that it is
over."""

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.alerts.conditions import alarm_of, level_of
from myriad.alerts.config import event_levels
from myriad.alerts.grouping import AlarmGroups, Message, message_from
from myriad.alerts.outbox import Outbox
from myriad.run.event_text import event_text


def groups_of() -> AlarmGroups:
    return AlarmGroups("run-7", group_seconds=10.0, repeat_seconds=300.0)


def add_event(groups: AlarmGroups, now: float, **event: Any) -> None:
    event = {"time": now, **event}
    for alarm in alarm_of(event, event_text(event)):
        groups.add(alarm, now)


LINK = {"event": "health", "what": "link", "node": 3, "evidence": {"interface": "eth0"}}
DOWN = {**LINK, "problem": "link eth0 of node 3 is down"}
UP = {**LINK, "problem": "link eth0 of node 3 is up again after 2.0 s"}
FAULT = {"event": "fault", "cause": "killed", "problem": "rank 3 was killed (SIGKILL)", "rank": 3, "step": 40}


@pytest.mark.parametrize(
    ("event", "level"),
    [
        ({"event": "failed", "problem": "too often"}, "critical"),
        ({"event": "held"}, "critical"),
        ({"event": "health", "what": "driver", "problem": "no driver"}, "critical"),
        ({"event": "fault", "problem": "rank 3 was killed"}, "warning"),
        ({"event": "fault", "problem": "no save in an hour", "alarm": True}, "critical"),
        ({"event": "health", "what": "gpu", "problem": "thermal slowdown"}, "warning"),
        ({"event": "log_match", "what": "Xid"}, "warning"),
        ({"event": "eviction", "node": 1}, "warning"),
        ({"event": "finish"}, "info"),
        ({"event": "restart"}, "info"),
        ({"event": "corpus"}, None),
        ({"event": "of a later version", "level": "critical"}, "critical"),
        ({"event": "fault", "level": "off"}, None),
    ],
)
def test_each_event_has_its_level(event: dict[str, Any], level: str | None) -> None:
    assert level_of(event, {}) == level


def test_a_job_sets_levels_of_its_own() -> None:
    levels = event_levels(("finish=critical", "health/link=off", "spike=info"))
    assert level_of({"event": "finish"}, levels) == "critical"
    assert level_of(DOWN, levels) is None
    assert level_of({"event": "health", "what": "gpu"}, levels) == "warning"
    assert alarm_of({"event": "corpus"}, "", levels) == []


def test_a_fault_is_one_message_with_what_the_run_did_and_its_end() -> None:
    groups = groups_of()
    add_event(groups, 100.0, **FAULT)
    add_event(groups, 101.0, event="diagnosis", verdict="blamed", rank=3)
    add_event(groups, 102.0, event="restart", epoch=2)
    assert groups.due(105.0) == []
    (message,) = groups.due(110.0)
    assert (message.kind, message.level, message.count) == ("alarm", "warning", 3)
    assert message.title == "fault: rank 3 was killed (SIGKILL) (step 40) (and 2 more events of fault)"
    add_event(groups, 120.0, event="start", world=8, device="cpu")
    assert groups.due(121.0) == []
    over, begun = groups.due(131.0)
    assert (over.kind, over.level) == ("resolved", "warning") and over.lines[-1].startswith(
        "ended after 20 s"
    )
    assert (begun.cause, begun.level) == ("start", "info")
    assert groups.due(10_000.0) == []


def test_what_ends_before_its_message_is_due_is_one_message() -> None:
    groups = groups_of()
    add_event(groups, 100.0, **DOWN)
    add_event(groups, 102.0, **UP)
    assert groups.due(105.0) == []
    (message,) = groups.due(112.5)
    assert message.kind == "alarm" and message.lines[-1].startswith("ended after 2 s")
    assert groups.due(1000.0) == []


def test_a_link_that_flaps_is_a_few_messages() -> None:
    groups, messages = groups_of(), list[Message]()
    for second in range(600):
        add_event(groups, 100.0 + second, **(UP if second % 2 else DOWN))
        messages += groups.due(100.0 + second)
    messages += groups.due(1000.0)
    assert [one.kind for one in messages] == ["alarm", "update", "resolved"]
    assert sum(one.count for one in messages[:2]) >= 150


def test_ten_thousand_ranks_with_one_error_are_one_message() -> None:
    groups = groups_of()
    for rank in range(10_000):
        add_event(
            groups, 100.0, event="log_match", what="NCCL", rank=rank, problem=f"NCCL WARN timeout {rank}"
        )
    (message,) = groups.due(110.0)
    assert message.count == 10_000 and len(message.lines) == 1 and "(10000 times)" in message.lines[0]


def test_two_links_are_over_when_both_are() -> None:
    groups = groups_of()
    other = {"node": 4, "problem": "link eth0 of node 4 is down"}
    add_event(groups, 100.0, **DOWN)
    add_event(groups, 100.0, **{**DOWN, **other})
    assert len(groups.due(110.0)) == 1
    add_event(groups, 120.0, **UP)
    assert groups.due(200.0) == []
    add_event(groups, 210.0, **{**UP, "node": 4})
    assert [one.kind for one in groups.due(220.0)] == ["resolved"]


def test_a_higher_level_is_reported_without_waiting_for_the_next_update() -> None:
    groups = groups_of()
    add_event(groups, 100.0, event="retry", problem="no room")
    assert [one.level for one in groups.due(110.0)] == ["warning"]
    add_event(groups, 120.0, event="held", problem="no room")
    assert [(one.kind, one.level) for one in groups.due(130.0)] == [("update", "critical")]
    add_event(groups, 140.0, event="checkpoint", step=9, seconds=1.0)
    assert [(one.kind, one.level) for one in groups.due(150.0) if one.cause == "checkpoint storage"] == [
        ("resolved", "critical")
    ]


def test_an_event_of_a_later_version_begins_and_ends_by_its_own_fields() -> None:
    groups = groups_of()
    traffic = {"event": "traffic", "what": "stalled", "node": 2, "place": "mlx5_0", "level": "warning"}
    add_event(groups, 100.0, **traffic, over=False, problem="mlx5_0 of node 2 sends nothing")
    assert [one.cause for one in groups.due(110.0)] == ["traffic/stalled"]
    add_event(groups, 120.0, **traffic, over=True, problem="mlx5_0 of node 2 sends again")
    assert [one.kind for one in groups.due(130.0)] == ["resolved"]


def test_the_end_of_a_run_ends_what_is_open_and_waits_for_nothing() -> None:
    groups = groups_of()
    add_event(groups, 100.0, **DOWN)
    groups.due(110.0)
    add_event(groups, 111.0, event="finish")
    assert [one.kind for one in groups.due(111.0, all_now=True)] == ["resolved", "alarm"]


events = st.sampled_from(
    [
        DOWN,
        UP,
        FAULT,
        {"event": "start", "world": 2},
        {"event": "held"},
        {"event": "checkpoint"},
        {"event": "telemetry", "place": "files", "problem": "no room"},
        {"event": "telemetry", "place": "files", "problem": ""},
        {"event": "log_match", "what": "Xid", "problem": "Xid 79"},
        {"event": "interrupted"},
    ]
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(events, st.floats(0.0, 200.0)), max_size=40), st.integers(0, 60))
def test_messages_are_bounded_matched_and_the_same_after_a_restart(
    steps: list[tuple[dict[str, Any], float]], restart_at: int
) -> None:
    """A process that stores and restores sends what one that lives on would; no cause gets more than one
    message in the waiting time; every end follows a beginning."""
    told = []
    for stops in (False, True):
        groups, now, messages = groups_of(), 100.0, list[tuple[float, Message]]()
        for number, (event, pause) in enumerate(steps):
            now += pause
            messages += [(now, one) for one in groups.due(now)]
            add_event(groups, now, **event)
            if stops and number == restart_at:
                stored = json.dumps(groups.as_json())
                groups = groups_of()
                groups.restore(json.loads(stored))
        messages += [(now, one) for one in groups.due(now + 1e6, all_now=True)]
        told.append(messages)
    assert told[0] == told[1]
    opened = set()
    for _, message in told[0]:
        if message.kind == "resolved":
            assert message.cause in opened
            opened.discard(message.cause)
        opened.add(message.cause) if message.kind == "alarm" else None
        assert message_from(json.loads(json.dumps(vars(message)))) == message
    for cause in {one.cause for _, one in told[0]}:
        times = [at for at, one in told[0] if one.cause == cause and one.kind != "resolved"]
        assert all(later - earlier >= 10.0 - 1e-6 for earlier, later in pairwise(times[:-1]))


class Recorder:
    name, level = "slack", "warning"

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.problem: OSError | None = None

    def send(self, message: Message) -> None:
        if self.problem is not None:
            raise self.problem
        self.sent.append(message)


def message_of(number: int, level: Any = "warning", cause: str = "health/link") -> Message:
    return Message(f"m{number}", "alarm", level, "run", cause, f"title {number}", (), 100.0)


def test_a_place_gets_no_more_than_its_rate_and_a_summary_of_the_rest() -> None:
    sender, reports = Recorder(), list[Any]()
    outbox = Outbox(sender, 5, lambda: None, lambda *told: reports.append(told))
    outbox.start()
    outbox.offer(message_of(0, "info"), 1000.0)
    for number in range(20):
        outbox.offer(
            message_of(number, "critical" if number == 19 else "warning", f"cause {number % 2}"), 1000.0
        )
        outbox.due(1000.0, "run")
    while outbox.as_json()["queue"]:
        time.sleep(0.001)
    outbox.due(1000.0 + 719.0, "run")
    outbox.due(1000.0 + 721.0, "run")
    outbox.due(1000.0 + 5000.0, "run")
    assert outbox.close(time.monotonic() + 30) == 0
    assert [one.title for one in sender.sent[:4]] == [f"title {number}" for number in range(4)]
    (summary,) = sender.sent[4:]
    assert (summary.kind, summary.level, summary.count) == ("summary", "critical", 16)
    assert set(summary.lines) == {"cause 0: 8", "cause 1: 8"} and reports == []
