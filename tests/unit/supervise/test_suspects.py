"""If these fail, the wrong rank is named when a run hangs."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from myriad.supervise.observations import CommStatus, RankStatus
from myriad.supervise.policy.step_work import StepWork
from myriad.supervise.policy.suspects import find_suspects
from myriad.telemetry.progress.operation_counters import COUNTERS


def row(rank: int, step: int, entered: int, left: int, state: str = "S") -> RankStatus:
    activity = "reduce" if entered > left else "backward"
    return RankStatus(rank, 1, state, "step", activity, step, entered, left, 20.0, 1.0)


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


WORK = StepWork(1, 2, 4, (), (4,), 4, 10, "report")
"""Two pipeline stages of two tensor-parallel ranks: 0 and 1, 2 and 3."""
SEATS = {rank: WORK.seat(rank, 4) for rank in range(4)}


def counted(
    rank: int, counters: dict[str, int], *waits: str, activity: str = "", on_device: bool = True
) -> RankStatus:
    """A rank with operations begun, in the newest of ``waits``; with none it is outside."""
    numbers = tuple(counters.get(name, 0) for name in COUNTERS)
    mask = sum(1 << COUNTERS.index(name) for name in waits)
    entered = sum(count for name, count in counters.items() if "sent" not in name)
    comm = CommStatus(numbers, mask, on_device)
    left = entered - bool(waits)
    return RankStatus(rank, 1, "S", "step", activity or "wait", 5, entered, left, 20.0, 1.0, comm=comm)


DOWN, UP = "gradient down received", "activation up received"
SENT_UP, SENT_DOWN = "activation up sent", "gradient down sent"


def test_the_stage_with_the_shortest_program_is_not_named_for_it() -> None:
    """The GPU of rank 3 hangs in a product; the hosts of all ranks wait at the end of the step."""
    hosts = [
        counted(rank, {"world": 5, "tp": 90 + 10 * (rank // 2), "dp": rank}, "world", activity="all_reduce")
        for rank in range(4)
    ]
    assert find_suspects(hosts, SEATS).ranks == (0, 1, 2, 3), "by the hosts nobody can be named"
    devices = [
        counted(0, {"tp": 41, DOWN: 3, SENT_UP: 6}, DOWN),
        counted(1, {"tp": 41, DOWN: 3, SENT_UP: 6}, DOWN),
        counted(2, {"tp": 57, UP: 5, SENT_DOWN: 2}, "tp", activity="tensor_comm"),
        counted(3, {"tp": 56, UP: 5, SENT_DOWN: 2}, activity="backward"),
    ]
    found = find_suspects(devices, SEATS)
    assert found.ranks == (3,)
    assert found.why == 'its GPU is in "backward" of step 5, has not entered communication 62; 3 waiting'


@given(st.integers(0, 3), st.data())
def test_a_gpu_that_hangs_is_named_wherever_its_peers_have_got_to(stuck: int, data: st.DataObject) -> None:
    """Of the numbers of different stages any may be the smaller one."""
    base = [data.draw(st.integers(1, 1000)) for _ in range(2)]
    other = stuck ^ 1
    ranks = {stuck: counted(stuck, {"tp": base[stuck // 2], SENT_UP: 3, SENT_DOWN: 2}, activity="forward")}
    ranks[other] = counted(other, {"tp": base[stuck // 2] + 1, SENT_UP: 3, SENT_DOWN: 2}, "tp")
    for rank in range(4):
        if rank // 2 != stuck // 2:
            waited = {UP: 4} if rank >= 2 else {DOWN: 3}
            ranks[rank] = counted(rank, {"tp": base[rank // 2], SENT_UP: 3, SENT_DOWN: 2, **waited}, *waited)
    found = find_suspects(data.draw(st.permutations(list(ranks.values()))), SEATS)
    assert found.ranks == (stuck,) and found.why.startswith('its GPU is in "forward"')


def test_a_link_that_carries_nothing_is_reported_by_the_ranks_at_its_ends() -> None:
    """Rank 0 has sent what rank 2 waits for; all others wait for one of the two."""
    rows = [
        counted(0, {"tp": 10, DOWN: 1, SENT_UP: 4}, DOWN),
        counted(1, {"tp": 11, DOWN: 1, SENT_UP: 4}, "tp"),
        counted(2, {"tp": 8, UP: 4}, UP),
        counted(3, {"tp": 9, UP: 4}, "tp"),
    ]
    found = find_suspects(rows, SEATS)
    assert found.ranks == (0, 2) and not found.is_of_the_program
    assert "number 4 of activation up received: one of them or a link between them" in found.why


def test_of_a_collective_that_all_have_entered_those_that_have_not_left_it_are_named() -> None:
    rows = [
        counted(0, {"tp": 10, DOWN: 1, SENT_UP: 4}, DOWN),
        counted(1, {"tp": 10, DOWN: 1, SENT_UP: 4}, DOWN),
        counted(2, {"tp": 31}, "tp"),
        counted(3, {"tp": 30}, "tp"),
    ]
    assert find_suspects(rows, SEATS).ranks == (3,), "rank 2 has its 30th behind it"
    rows[3] = counted(3, {"tp": 31}, "tp")
    assert find_suspects(rows, SEATS).ranks == (2, 3)


def test_operations_in_different_orders_are_reported_as_such_and_no_node_is_named() -> None:
    rows = [
        counted(0, {"tp": 7, "world": 2}, "tp", activity="tensor_comm"),
        counted(1, {"tp": 6, "world": 3}, "world", activity="all_reduce"),
        counted(2, {"tp": 9, "world": 3}, "world", activity="all_reduce"),
        counted(3, {"tp": 9, "world": 3}, "world", activity="all_reduce"),
    ]
    found = find_suspects(rows, SEATS)
    assert found.ranks == (0, 1) and found.is_of_the_program
    assert 'rank 0 in "tensor_comm" for rank 1, rank 1 in "all_reduce" for rank 0' in found.why
    assert "different orders" in found.why


def test_ranks_between_the_stages_that_share_parameters_are_not_waited_for() -> None:
    """The sum of tied gradients hangs between the first and the last of three stages."""
    seats = {rank: (0, rank, 0) for rank in range(3)}
    rows = [
        counted(0, {"tied": 1, "world": 2}, "tied"),
        counted(1, {"tied": 0, "world": 3}, "world", activity="all_reduce"),
        counted(2, {"tied": 1, "world": 2}, "tied"),
    ]
    found = find_suspects(rows, seats)
    assert found.ranks == (0, 2) and not found.is_of_the_program


def test_a_host_that_stalls_is_named_as_on_a_cpu() -> None:
    """Its GPU has done everything that it was asked for."""
    rows = [counted(rank, {"tp": 10, "world": 3}, "world") for rank in range(4)]
    rows[2] = counted(2, {"tp": 10, "world": 2}, activity="load", on_device=False)
    found = find_suspects(rows, SEATS)
    assert found.ranks == (2,) and found.why.startswith('in "load" of step 5')


def test_a_coupled_exchange_waits_for_both_its_ends() -> None:
    """Rank 0 waits until its message has arrived: rank 2, outside, has not asked for it."""
    rows = [
        counted(0, {"tp": 4, SENT_UP: 2}, SENT_UP),
        counted(1, {"tp": 4, SENT_UP: 2}, SENT_UP),
        counted(2, {"tp": 6, UP: 1}, activity="backward"),
        counted(3, {"tp": 7, UP: 1}, "tp"),
    ]
    assert find_suspects(rows, SEATS).ranks == (2,)


def test_peers_inside_a_captured_graph_cannot_be_distinguished() -> None:
    """Its tensor-parallel collectives count nothing: both may be where one waits for the other."""
    rows = [
        counted(0, {DOWN: 1, SENT_UP: 2}, DOWN),
        counted(1, {DOWN: 1, SENT_UP: 2}, DOWN),
        counted(2, {UP: 2}, activity="backward"),
        counted(3, {UP: 2}, activity="backward"),
    ]
    found = find_suspects(rows, SEATS)
    assert found.ranks == (2, 3) and "one of them or a link between them" in found.why
    rows[2] = counted(2, {UP: 3}, UP)
    assert find_suspects(rows, SEATS).ranks == (3,)


def test_of_an_unknown_wait_the_rank_itself_is_named() -> None:
    rows = [counted(rank, {"tp": 4}, "tp") for rank in range(2)]
    rows = [replace(one, comm=replace(one.comm, waits=1 << 62)) for one in rows if one.comm is not None]
    assert find_suspects(rows, SEATS).ranks == (0,)


@given(st.integers(0, 2**20), st.permutations(range(4)))
def test_any_rows_end_in_a_suspicion(number: int, order: list[int]) -> None:
    """Rows are read while ranks write them: a look may find what cannot be."""
    names = [COUNTERS[number >> 4 * rank & 7] for rank in range(4)]
    counts = [number >> rank & 3 for rank in range(4)]
    rows = [counted(rank, {names[rank]: counts[rank] + 1}, names[order[rank]]) for rank in range(4)]
    assert find_suspects(rows, SEATS).ranks
