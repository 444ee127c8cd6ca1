"""If these fail, two drivers may act on one run at the same time, or one stops repairing it without need."""

from hypothesis import given
from hypothesis import strategies as st

from myriad.supervise.driver.journal import Journal, NewestEntries
from myriad.supervise.driver.redis_leadership import LeaseDeadline

SECONDS = 3.0


def test_a_watched_driver_stops_before_its_lease_runs_out_counted_from_when_it_asked() -> None:
    hold = LeaseDeadline(SECONDS, asked_at=100.0)
    assert hold.may_act(102.6) and not hold.may_act(102.8)
    hold.renewed(102.0, is_watched=True)
    assert hold.may_act(104.6) and not hold.may_act(104.8)
    hold.renewed(101.0, is_watched=True)  # an answer that was under way for longer shortens nothing
    assert hold.may_act(104.6)


def test_while_no_standby_waits_a_driver_may_act_without_redis_for_as_long_as_it_likes() -> None:
    hold = LeaseDeadline(SECONDS, asked_at=0.0)
    hold.renewed(0.6, is_watched=False)
    assert hold.may_act(1e6)
    hold.lose()
    assert not hold.may_act(0.7)


class Server:
    """What the scripts in Redis do, on a clock of its own; it is unreachable while it is away."""

    def __init__(self) -> None:
        self.owner, self.until, self.watched, self.stands_until = "", 0.0, False, 0.0

    def take(self, owner: str, now: float) -> bool:
        free = now >= self.until
        if self.owner == owner or (free and (self.watched or not self.owner)):
            self.owner, self.until, self.watched = owner, now + SECONDS, True
            return True
        self.stands_until = now + 2 * SECONDS
        return False

    def renew(self, owner: str, knows: bool, now: float) -> bool | None:
        """Whether there is a standby; ``None``: the lease is lost."""
        if self.owner != owner:
            return None
        self.until, stands = now + SECONDS, now < self.stands_until
        if not stands or knows:
            self.watched = stands
        return stands


ACTS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from(["ask", "ask", "answer lost", "nothing"]),
        st.floats(0.05, 2.0),
    ),
    max_size=80,
)


@given(acts=ACTS, rate=st.floats(0.95, 1.05))
def test_two_drivers_are_never_both_allowed_to_act(acts: list[tuple[str, str, float]], rate: float) -> None:
    """Whatever questions and answers are lost; the server's clock runs a little faster or slower than
    theirs."""
    server, holds, now = Server(), dict[str, LeaseDeadline](), 0.0
    for who, act, seconds in acts:
        now += seconds
        hold = holds.get(who)
        if hold is not None and not hold.may_act(now):
            hold = holds.pop(who, None) and None  # that driver ends: another one waits
        if act == "nothing":
            continue
        if hold is None:
            if server.take(who, now * rate) and act == "ask":
                holds[who] = LeaseDeadline(SECONDS, now)
        else:
            answer = server.renew(who, hold.is_watched, now * rate)
            if act == "ask" and answer is None:
                hold.lose()
            elif act == "ask":
                hold.renewed(now, is_watched=bool(answer))
        assert sum(one.may_act(now) for one in holds.values()) <= 1


def line(term: int, number: int, state: str) -> dict[str, object]:
    return {"term": term, "number": number, "state": {"phase": state}}


def test_what_a_driver_wrote_that_had_lost_its_lease_counts_for_nothing() -> None:
    """On a file anybody can write at any time."""
    plan = {"term": 1, "plan": {}}
    lines = [plan, line(2, 1, "a"), line(3, 1, "b"), line(2, 2, "late")]
    assert NewestEntries.of(lines).state == line(3, 1, "b")
    assert NewestEntries.of(lines[:2]).mark == (2, 1)


def test_a_start_without_a_lease_after_one_with_it_starts_again() -> None:
    lines = [{"term": 4, "plan": {"of": 4}}, line(4, 1, "a"), {"plan": {"of": 0}}]
    assert NewestEntries.of(lines).plan == {"plan": {"of": 0}} and NewestEntries.of(lines).state is None
    assert NewestEntries.of([*lines, {"state": {"phase": "b"}}]).state == {"state": {"phase": "b"}}


def test_the_newer_of_two_journals_counts(tmp_path) -> None:
    journal = Journal(tmp_path / "journal.jsonl")
    for record in ({"term": 1, "plan": {}}, line(1, 1, "a"), line(1, 2, "only here: Redis was away")):
        journal.append(record)
    newest = journal.newest([{"term": 1, "plan": {}}, line(1, 1, "a")]).state
    assert newest == line(1, 2, "only here: Redis was away") | {"sequence": 3}
    elsewhere = line(2, 1, "only there: this disk was full")
    assert journal.newest([{"term": 1, "plan": {}}, elsewhere]).state == elsewhere
    assert journal.newest([]).mark == (1, 2)
