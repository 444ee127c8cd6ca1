"""The lease on driving a run, in a real Redis. If these fail, two machines drive one run, or a driver that
was cut off writes over what the next one has decided."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest

from myriad.comm.rendezvous.redis_address import redis_address
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.launchers.external_nodes import check_standby
from myriad.launchers.run_start import begin_journal, check_journal
from myriad.run import Run
from myriad.supervise.driver.journal import Journal
from myriad.supervise.driver.leadership import boot_seconds
from myriad.supervise.policy.run_state import RunPlan, RunState
from myriad.wire.message_codec import plain

redis_lease = pytest.importorskip("myriad.supervise.driver.redis_lease", reason="needs the package redis")

LONG = 60.0
"""Of a lease that nothing here waits for."""


def lease_of(server, run: Path, owner: str, seconds: float = LONG):
    return redis_lease.RedisLease(redis_address(server.url), run, owner, seconds)


def decision(term: int, number: int) -> dict[str, object]:
    return {"term": term, "number": number, "actions": [], "state": {}}


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_one_has_the_lease_and_a_driver_of_the_same_launcher_follows_it_at_once(server, tmp_path) -> None:
    a, b = (lease_of(server, tmp_path, owner) for owner in "ab")
    assert a.take(by_force=True).term == 1 and a.inspect() == ("a", True)
    refused = b.take(by_force=True)
    assert (refused.term, refused.owner) == (0, "a")
    again = lease_of(server, tmp_path, "a")
    assert again.take().term == 2
    assert again.append(decision(2, 1)) and not a.append(decision(1, 1)), "the one before can write no more"
    with pytest.raises(redis_lease.LeaseLostError):
        a.renew(knows=True)
    assert again.read() == [decision(2, 1)]


def test_runs_of_one_name_do_not_meet(server, tmp_path) -> None:
    for folder in ("one", "other"):
        (tmp_path / folder / "run").mkdir(parents=True)
        assert lease_of(server, tmp_path / folder / "run", folder).take(by_force=True).term == 1


def test_a_lease_cannot_be_taken_before_its_driver_was_notified_of_the_standby(server, tmp_path) -> None:
    """Otherwise it would continue to act without Redis, while another driver may act."""
    a, b = lease_of(server, tmp_path, "a", 0.2), lease_of(server, tmp_path, "b", 0.2)
    a.take(by_force=True)
    assert a.renew(knows=True) == (False, False), "nobody stands by, and it may know that"
    time.sleep(0.3)
    taken = b.take()
    assert (taken.term, taken.owner, taken.is_watched) == (0, "", False)
    assert a.renew(knows=False) == (True, False)  # here its answer may be lost
    time.sleep(0.3)
    assert b.take().term == 0
    assert a.renew(knows=True) == (True, False)
    time.sleep(0.3)
    assert b.take().term == 2
    assert b.take(by_force=True).term == 3, "its own it has at any time"


def test_a_driver_renews_a_lease_that_redis_has_lost_and_a_late_request_changes_nothing(
    server, tmp_path
) -> None:
    a = lease_of(server, tmp_path, "a")
    a.take(5, by_force=True)
    server.client.flushall()
    assert not a.append(decision(5, 1)), "first it is renewed"
    assert a.renew(knows=False) == (False, True)
    assert a.append(decision(5, 2)) and a.read() == [decision(5, 2)]
    b = lease_of(server, tmp_path, "b")
    b.take()
    late, a._asked = a._asked - 1, a._asked + 1
    assert a.renew(knows=False) == (True, False)
    a._asked = late
    a.renew(knows=True)
    assert server.client.hget(a.keys["term"], "watched") != b"1", "asked before the newest answer was known"


def test_the_plan_of_a_new_start_forgets_the_decisions_of_the_one_before(server, tmp_path) -> None:
    a = lease_of(server, tmp_path, "a")
    a.take(by_force=True)
    for number in range(100):
        assert a.append(decision(1, number))
    assert [line["number"] for line in a.read()] == list(range(84, 100)), "as many as a driver may want"
    a.append({"plan": {}, "term": 1})
    assert a.read() == [{"plan": {}, "term": 1}]


def test_drivers_that_contend_write_one_after_the_other(server, tmp_path) -> None:
    """Each takes what it gets, sleeps longer than its lease at times, and writes as long as it is let."""
    told: list[tuple[int, int]] = []

    def contend(lease) -> None:
        moves = random.Random(lease.owner)
        for _ in range(60):
            if not lease.take(by_force=True).term:
                time.sleep(moves.uniform(0, 0.03))
                continue
            for number in range(moves.randrange(1, 12)):
                time.sleep(moves.choice((0, 0, 0, 0.01, 0.08)))
                if lease.append(decision(lease.term, number)):
                    told.append((lease.term, number))

    leases = [lease_of(server, tmp_path, name, 0.05) for name in "abc"]
    threads = [threading.Thread(target=contend, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    reader = lease_of(server, tmp_path, "reader")
    written = [(line["term"], line["number"]) for line in reader.read()]
    assert len(told) > 16 and len({term for term, _ in told}) > 10, "they did contend"
    assert written == sorted(set(written)), "nobody wrote once another had begun"
    assert set(written) <= set(told) and sorted(told)[-16:] == written, "what was told to be written is"


@pytest.fixture
def leased(server, tmp_path):
    """A driver's lease, kept by its thread."""
    module = pytest.importorskip("myriad.supervise.driver.redis_leadership")
    lease = lease_of(server, tmp_path, "a", 1.5)
    asked_at = boot_seconds()
    term = lease.take(by_force=True).term
    journal = Journal(tmp_path / "journal.jsonl")
    lease.append(journal.begin(RunPlan(1, 1, first_epoch=1), term))
    leadership = module.LeasedLeadership(lease, journal, asked_at)
    yield leadership
    leadership._deadline.lose()


def entry(leadership, epoch: int) -> dict[str, object]:
    return leadership.mark(Journal.entry((), RunState("running", epoch)))


def test_unreachable_redis_delays_nothing_and_gets_all_entries_when_it_is_back(server, leased) -> None:
    """Without a disk of its own: it has forgotten everything."""
    leased.replay()
    wait_until(lambda: not leased._deadline.is_watched)
    assert leased.allows(entry(leased, 1))
    server.kill()
    for epoch in (2, 3):
        assert leased.allows(entry(leased, epoch)), "nobody else can have the lease"
    server.start()
    reader = leased._lease
    wait_until(lambda: [line.get("number") for line in reader.read()][-1:] == [3])
    plan, state = leased.replay()
    assert plan == RunPlan(1, 1, first_epoch=1) and state is not None and state.epoch == 3
    assert "plan" in reader.read()[0]


def test_a_decision_brings_the_plan_that_the_server_forgot_with_it(server, leased) -> None:
    """Whoever takes over in that instant reads both, or neither."""
    leased.replay()
    assert leased.allows(entry(leased, 1))
    server.client.delete(leased._lease.keys["plan"], leased._lease.keys["entries"])
    assert leased.allows(entry(leased, 2))
    plan, decision = leased._lease.read()
    assert "plan" in plan and decision["number"] == 2


def test_the_plan_of_an_earlier_start_goes_with_its_decisions(server, leased) -> None:
    """The server kept them; the file has a newer start that it never heard of."""
    assert leased.allows(entry(leased, 1))
    leased._journal.begin(RunPlan(2, 1, first_epoch=5), leased.term + 1)
    plan, state = leased.replay()
    assert plan == RunPlan(2, 1, first_epoch=5) and state is None
    leased._disk_writer.wait_written()
    assert [line["plan"]["first_epoch"] for line in leased._lease.read()] == [5]


def test_a_watched_driver_that_cannot_reach_redis_acts_no_more(server, leased, tmp_path) -> None:
    other = lease_of(server, tmp_path, "b", 1.5)
    other.take()
    wait_until(lambda: other.inspect()[1])
    assert leased.allows(entry(leased, 1))
    server.kill()
    wait_until(lambda: not leased.holds())
    assert not leased.allows(entry(leased, 2))


def test_a_driver_that_was_paused_beyond_its_lease_notices_at_its_next_decision(
    server, leased, tmp_path
) -> None:
    """Its own clock stood still: nothing of it is done, as nothing of it is written."""
    other = lease_of(server, tmp_path, "b")
    with leased._renewing:
        server.client.delete(leased._lease.keys["lease"])  # it has run out
        leased._deadline.renewed(boot_seconds() + 3600, is_watched=True)
        assert other.take(by_force=True).term > leased.term
    assert not leased.allows(entry(leased, 1)) and not leased.holds()
    assert [list(line) for line in other.read()] == [["time", "plan", "term"]], "no decision"


def test_a_run_that_another_machine_drives_is_refused(server, tmp_path, monkeypatch) -> None:
    """The lock of the run's folder may be this machine's alone."""
    monkeypatch.setattr(redis_lease, "_LEASE_SECONDS", 0.3)
    job = load_job("tiny", ["resilience.engine=join", f"resilience.journal={server.url}"])
    how, run = job.resilience, Run(tmp_path)
    with pytest.raises(BadInputError, match="no driver leads this run"):
        check_standby(run, job)
    options = begin_journal(run, how, RunPlan(1, 1, first_epoch=1))
    assert options[:2] == ["--journal", server.url]
    check_journal(run, how)  # whoever began it is gone: its lease runs out
    begin_journal(run, how, RunPlan(1, 1, first_epoch=2))
    other = lease_of(server, tmp_path, "there:7:f00")
    other.take(by_force=True), time.sleep(0.4)
    assert other.take(by_force=True).term
    with pytest.raises(BadInputError, match="is driven by there:7:f00"):
        check_journal(run, how)
    check_standby(run, job)
    assert other.renew(knows=True)
    plan, state = Journal(tmp_path / "journal.jsonl").replay()
    assert (plan.first_epoch, state) == (2, None)


@pytest.fixture
def interrupts():
    """As they were, after a driver has waited here."""
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def test_a_standby_drives_when_redis_has_forgotten_the_run_and_it_is_not_notified(
    server, tmp_path, interrupts
) -> None:
    """It has no disk, and was started again; the driver had ended, as it could not know that it was alone."""
    candidates = pytest.importorskip("myriad.supervise.driver.redis_leadership")
    journal = Journal(tmp_path / "journal.jsonl")
    journal.begin(RunPlan(1, 1, first_epoch=1), 4)
    journal.append(decision(6, 1) | {"state": plain(RunState("running", 1))})
    candidate = candidates.StandbyDriver(Run(tmp_path), journal, server.url, "b", 0.5)
    leadership = candidate.wait(lambda message: None)
    assert leadership.term == 7 and leadership.replay()[1].epoch == 1
    reader = lease_of(server, tmp_path, "reader")
    wait_until(lambda: [line["term"] for line in reader.read()] == [4, 6])
    leadership.lose()


def test_a_ctrl_c_ends_the_standing_by_and_not_the_run(server, tmp_path, interrupts) -> None:
    candidates = pytest.importorskip("myriad.supervise.driver.redis_leadership")
    driving = lease_of(server, tmp_path, "a")
    driving.take(by_force=True)
    journal, told = Journal(tmp_path / "journal.jsonl"), list[dict]()
    candidate = candidates.StandbyDriver(Run(tmp_path), journal, server.url, "b", LONG)

    def tell(message: dict) -> None:
        told.append(message)
        if message == {}:
            os.kill(os.getpid(), signal.SIGINT)

    assert candidate.wait(tell) is None
    assert told[-1]["end"] == "left" and driving.inspect()[0] == "a"
