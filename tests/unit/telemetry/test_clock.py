"""If these fail, spans of two nodes are laid over each other wrongly, with an error bar that lies."""

from hypothesis import given
from hypothesis import strategies as st

from myriad.telemetry.shipping.clock_offset import ClockOffset, compare

SECOND = 10**9
WAYS = st.integers(1, SECOND)


@given(st.integers(-(10**18), 10**18), st.lists(st.tuples(WAYS, WAYS, WAYS), min_size=1, max_size=8))
def test_the_true_offset_lies_within_the_error_however_uneven_the_ways_are(
    ahead: int, trips: list[tuple[int, int, int]]
) -> None:
    offset, now = ClockOffset(), 10**18
    for there, thinking, back in trips:
        asked, heard, told = now, now + there + ahead, now + there + thinking + ahead
        now += there + thinking + back
        offset.add(compare(asked, heard, told, now))
    known = offset.at(now)
    assert known is not None
    assert abs(known[0] - ahead) <= known[1] * SECOND + 1


def test_the_shortest_round_trip_is_used_until_it_is_old() -> None:
    offset = ClockOffset()
    offset.add(compare(0, 5_000, 5_000, 10_000))
    offset.add(compare(SECOND, SECOND + 10**6, SECOND + 10**6, SECOND + 2 * 10**6))
    assert offset.at(SECOND) == (0, (5_001 + int(50e-6 * (SECOND - 10_000))) / SECOND)
    later = offset.at(10**6 * SECOND)
    assert later is not None and later[1] > 49, "an error bar that nobody renews grows"


def test_a_clock_that_is_set_is_followed() -> None:
    offset = ClockOffset()
    offset.add(compare(0, 5_000, 5_000, 10_000))
    jump = 3 * SECOND
    offset.add(compare(SECOND, SECOND + 10**6 + jump, SECOND + 10**6 + jump, SECOND + 2 * 10**6))
    known = offset.at(SECOND)
    assert known is not None and abs(known[0] - jump) <= known[1] * SECOND


def test_an_offset_is_unknown_before_a_comparison_and_zero_on_one_machine() -> None:
    offset = ClockOffset()
    assert offset.at(0) is None
    offset.add(compare(0, 5_000, 5_000, 10_000))
    offset.same()
    assert offset.at(10**18) == (0, 0.0)
