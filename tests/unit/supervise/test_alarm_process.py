"""If these fail, an alarm is lost or comes again and again when a driver is replaced, or a place that hangs
holds up the others."""

import errno
import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from myriad.alerts.config import AlertsConfig, Level
from myriad.alerts.grouping import Message
from myriad.config import dump_toml
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.run import Run
from myriad.run.run_folder import _HEADER
from myriad.supervise.driver.alarm_process import AlarmDelivery, _Lock

QUICK = AlertsConfig(group_seconds=0.0, repeat_seconds=1.0)


class Place:
    def __init__(self, name: str = "webhook", level: Level = "warning") -> None:
        self.name, self.level = name, level
        self.sent: list[Message] = []
        self.problem: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()

    def send(self, message: Message) -> None:
        self.goes_on.wait(60)
        if self.problem is not None:
            raise self.problem
        self.sent.append(message)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    found = Run(tmp_path / "gpt")
    found.path.mkdir()
    found.logs_path.mkdir()
    return found


@pytest.fixture
def places() -> Iterator[tuple[Place, Place]]:
    found = Place(), Place("mail")
    yield found
    for one in found:
        one.goes_on.set()


def delivery_of(run: Run, *places: Place, since: float = 0.0) -> AlarmDelivery:
    return AlarmDelivery(run, QUICK, places, since, first_wait_seconds=0.01)


def until(delivery: AlarmDelivery, seen: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not seen():
        assert time.monotonic() < deadline
        delivery.poll()
        time.sleep(0.005)
    delivery.poll()


def fault(run: Run, rank: int) -> None:
    run.append_event("fault", cause="killed", rank=rank, problem=f"rank {rank} was killed")


def test_events_of_before_raise_no_alarm_and_new_ones_do(run: Run, places: tuple[Place, Place]) -> None:
    run.append_event("fault", problem="last week")
    time.sleep(0.01)
    delivery = delivery_of(run, *places, since=time.time())
    fault(run, 3)
    until(delivery, lambda: bool(places[0].sent and places[1].sent))
    assert [one.title for one in places[0].sent] == ["fault: rank 3 was killed"]
    assert delivery.close(5) == 0


def test_the_process_of_another_driver_sends_what_waits_and_nothing_again(
    run: Run, places: tuple[Place, Place]
) -> None:
    webhook, mail = places
    mail.goes_on.clear()
    first = delivery_of(run, *places)
    fault(run, 3)
    until(first, lambda: bool(webhook.sent))
    # The driver is killed here: nothing is closed.
    webhook_again, mail_again = Place(), Place("mail")
    second = delivery_of(run, webhook_again, mail_again)
    until(second, lambda: bool(mail_again.sent))
    run.append_event("start", world=2)
    until(second, lambda: bool(webhook_again.sent) and len(mail_again.sent) == 2)
    assert [one.kind for one in webhook_again.sent] == ["resolved"]
    assert [one.kind for one in mail_again.sent] == ["alarm", "resolved"]
    assert mail_again.sent[0].id == webhook.sent[0].id
    assert second.close(5) == 0


def test_a_place_that_hangs_holds_up_no_other_and_not_the_reading(
    run: Run, places: tuple[Place, Place]
) -> None:
    webhook, mail = places
    mail.goes_on.clear()
    delivery = delivery_of(run, *places)
    for rank in range(3):
        fault(run, rank)
        run.append_event("start", world=2)
        before = time.monotonic()
        until(delivery, lambda rank=rank: len(webhook.sent) >= rank + 1)
        assert time.monotonic() - before < 10
    before = time.monotonic()
    assert delivery.close(0.3) >= 3, "of the place that hangs"
    assert time.monotonic() - before < 10


def test_a_place_that_fails_is_reported_to_the_others_and_not_to_itself(
    run: Run, places: tuple[Place, Place]
) -> None:
    webhook, mail = places
    mail.problem = OSError("the mail server replied with code 535")
    delivery = delivery_of(run, *places)
    fault(run, 3)
    until(delivery, lambda: len(webhook.sent) == 2)
    assert webhook.sent[1].title == "alert: alarms to mail: the mail server replied with code 535"
    (event,) = [one for one in run.read_events() if one["event"] == "alert"]
    assert event["sink"] == "mail"
    mail.problem = None
    until(delivery, lambda: any(one.kind == "resolved" for one in webhook.sent))
    until(delivery, lambda: len(mail.sent) == 1)
    assert delivery.close(5) == 0 and [one.cause for one in mail.sent] == ["fault"]


@pytest.mark.parametrize("state", ["{", "[]", '{"groups": 3}', '{"offset": -1, "groups": {}, "places": []}'])
def test_a_damaged_state_starts_again(run: Run, places: tuple[Place, Place], state: str) -> None:
    (run.path / "alerts").mkdir()
    (run.path / "alerts" / "state.json").write_text(state)
    delivery = delivery_of(run, *places, since=time.time() - 1)
    fault(run, 3)
    until(delivery, lambda: bool(places[0].sent))
    assert delivery.close(5) == 0
    assert json.loads((run.path / "alerts" / "state.json").read_text())["offset"] > 0


def test_what_is_left_at_the_end_is_sent_at_once(run: Run, places: tuple[Place, Place]) -> None:
    slow = AlertsConfig(group_seconds=3600, repeat_seconds=3600)
    delivery = AlarmDelivery(run, slow, places)
    fault(run, 3)
    run.append_event("failed", problem="rank 3 was killed 3 times")
    assert delivery.close(10) == 0
    assert [(one.level, one.cause) for one in places[0].sent] == [
        ("warning", "fault"),
        ("critical", "failed"),
    ]


def process_of(run: Run, *options: str) -> "subprocess.Popen[bytes]":
    words = [sys.executable, "-m", "myriad.supervise.driver.alarm_process", str(run.path)]
    with (run.logs_path / "alerts.log").open("ab") as log:
        return subprocess.Popen([*words, "0", *options], stdin=subprocess.PIPE, stdout=log, stderr=log)


def test_one_process_at_a_time_sends_alarms_and_the_last_reports_that_the_run_is_unsupervised(
    run: Run, tmp_path: Path
) -> None:
    """Two drivers are killed, and then no other comes."""
    out, script = tmp_path / "out", tmp_path / "page.py"
    script.write_text(f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read())")
    job = load_job(
        "tiny", [f"alerts.exec.command=['{sys.executable}', '{script}']", "alerts.group_seconds=0"]
    )
    run.job_path.write_text(dump_toml(job))

    def told() -> list[dict[str, Any]]:
        return [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []

    def wait(count: int) -> None:
        deadline = time.monotonic() + 60
        while len(told()) < count:
            assert time.monotonic() < deadline, (run.logs_path / "alerts.log").read_text()
            time.sleep(0.02)

    fault(run, 3)
    with process_of(run, "1.5") as first, process_of(run, "0.1") as second:
        assert first.stdin is not None and second.stdin is not None
        wait(1)
        first.stdin.close()
        run.append_event("start", world=2)
        wait(2)
        assert first.wait(60) == 0 and second.poll() is None
        second.stdin.close()
        assert second.wait(60) == 0
    assert [(one["kind"], one["cause"]) for one in told()] == [
        ("alarm", "fault"),
        ("resolved", "fault"),
        ("alarm", "unsupervised"),
    ]
    with process_of(run, "0.1") as third:
        assert third.stdin is not None
        third.stdin.write(b"stopping\n")
        third.stdin.close()
        assert third.wait(60) == 0
    assert len(told()) == 3, "a person has stopped the run"


def test_a_run_of_before_there_were_alarms_continues_and_a_cut_job_file_does_not(run: Run) -> None:
    text = _HEADER + dump_toml(load_job("tiny"))
    sections = text.split("\n[")
    run.job_path.write_text("\n[".join(one for one in sections if not one.startswith("alerts")))
    assert run.job().alerts == AlertsConfig()
    run.job_path.write_text(
        "\n[".join(sections[: next(at for at, one in enumerate(sections) if "alerts" in one)])
    )
    with pytest.raises(BadInputError, match="is damaged"):
        run.job()


def test_events_between_two_drivers_raise_their_alarms(run: Run, places: tuple[Place, Place]) -> None:
    first = delivery_of(run, Place(), Place("mail"))
    run.append_event("checkpoint", step=1)
    first.poll()
    # The driver is killed here, and another starts after the fault.
    fault(run, 3)
    time.sleep(0.01)
    second = delivery_of(run, *places, since=time.time())
    until(second, lambda: bool(places[0].sent))
    assert [one.title for one in places[0].sent] == ["fault: rank 3 was killed"]
    assert second.close(5) == 0


@pytest.mark.slow
def test_a_run_that_ends_while_the_process_before_still_sends_loses_no_alarm(
    run: Run, tmp_path: Path
) -> None:
    """The run is started again and fails within seconds, while the place is slow."""
    out, script = tmp_path / "out", tmp_path / "page.py"
    script.write_text(f"import sys; open({str(out)!r}, 'a').write(sys.stdin.read())")
    options = [f"alerts.exec.command=['{sys.executable}', '{script}']", "alerts.group_seconds=0"]
    run.job_path.write_text(dump_toml(load_job("tiny", options)))
    (run.path / "alerts").mkdir()
    before = os.open(run.path / "alerts" / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(before, fcntl.LOCK_EX)
    run.append_event("failed", problem="rank 3 was killed 3 times")
    with process_of(run) as process:
        assert process.stdin is not None
        process.stdin.write(b"over\n")
        process.stdin.close()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        os.close(before)
        assert process.wait(60) == 0
    assert [json.loads(line)["cause"] for line in out.read_text().splitlines()] == ["failed"]


def test_without_locks_the_process_of_an_older_driver_does_not_take_over(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it says that nothing watches the run, half a minute after each change of the driver."""

    def no_locks(handle: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    first = _Lock(run.path)
    assert first.take() and first.take()
    second = _Lock(run.path)
    assert second.take()
    first.leave()
    assert not first.take() and second.take()
