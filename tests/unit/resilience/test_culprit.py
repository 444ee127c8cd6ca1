"""If these fail, the wrong rank is named when a run hangs."""

from hypothesis import given
from hypothesis import strategies as st

from myriad.resilience.decide.culprit import find_suspects
from myriad.resilience.facts import RankSeen


def row(rank: int, step: int, entered: int, left: int, state: str = "S") -> RankSeen:
    activity = "reduce" if entered > left else "backward"
    return RankSeen(rank, 1, state, "step", activity, step, entered, left, 20.0, 1.0)


@given(st.integers(2, 64), st.integers(0, 10**6), st.data())
def test_the_rank_that_stays_outside_is_named_wherever_the_others_wait(
    n: int, number: int, data: st.DataObject
) -> None:
    """All of a group do the same communication in the same order; asynchronous ones let some run ahead."""
    stuck = data.draw(st.integers(0, n - 1))
    ahead = data.draw(st.lists(st.integers(1, 3), min_size=n, max_size=n))
    rows = [row(rank, 5, number + ahead[rank], number + ahead[rank] - 1) for rank in range(n)]
    rows[stuck] = row(stuck, 5, number, number)
    found = find_suspects(data.draw(st.permutations(rows)))
    assert found.ranks == (stuck,) and f"communication {number + 1}" in found.why


@given(st.integers(2, 16), st.data())
def test_of_several_outside_the_first_by_step_and_communication_is_named(n: int, data: st.DataObject) -> None:
    places = data.draw(
        st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99)), min_size=n, max_size=n, unique=True)
    )
    rows = [row(rank, step, entered, entered) for rank, (step, entered) in enumerate(places)]
    rows.append(row(n, 9, 100, 99))
    assert find_suspects(rows).ranks == (places.index(min(places)),)


@given(st.integers(2, 16), st.data())
def test_when_all_wait_those_in_the_earliest_communication_are_named(n: int, data: st.DataObject) -> None:
    entered = data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n))
    rows = [row(rank, 5, count, count - 1) for rank, count in enumerate(entered)]
    first = min(entered)
    assert find_suspects(rows).ranks == tuple(rank for rank, count in enumerate(entered) if count == first)


def test_a_stopped_rank_is_named_whatever_it_was_doing() -> None:
    rows = [row(0, 5, 3, 2), row(1, 5, 3, 2, "T"), row(2, 5, 2, 2)]
    assert find_suspects(rows).ranks == (1,)
