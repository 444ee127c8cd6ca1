"""A timeout that is wrong by a factor ends a job of thousands of GPUs at the next flap, or lets it wait for
minutes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.network.link_flaps import (
    DownTimes,
    FlapScenario,
    Timers,
    best_timers,
    delivered_probability,
    flap_cost,
    lost_probability,
    mean_wait_seconds,
)

NOMINAL = (1.0, 1.0)
timers = st.builds(
    Timers,
    st.integers(10, 22),
    st.integers(1, 7),
    adaptive=st.booleans(),
    longer=st.sampled_from([NOMINAL, (1.0, 4.0), (2.0, 3.0)]),
)
down_times = st.lists(st.floats(0.01, 100), min_size=1, max_size=5).map(np.array)


@pytest.mark.parametrize(("timeout", "seconds"), [(14, 0.47), (18, 7.5), (20, 30.0)])
def test_the_outage_that_a_queue_pair_survives_matches_the_papers(timeout, seconds):
    assert Timers(timeout).patience_seconds == pytest.approx(seconds, rel=0.01)


def test_with_nominal_timers_a_link_is_survived_until_the_last_resend_and_no_longer():
    found = Timers(18, longer=NOMINAL)
    last = found.patience_seconds
    lost = lost_probability(found, np.array([0.5, last * 0.999, last * 1.001]), 1000)
    assert lost.tolist() == [0, 0, 1]


def test_all_wait_for_the_first_resend_after_the_link_is_up():
    found, step = Timers(18, longer=NOMINAL), Timers(18).interval_seconds
    waits = mean_wait_seconds(found, np.array([0.1, 1.5, 3.5]) * step)
    assert waits == pytest.approx(np.array([1, 2, 4]) * step, rel=0.02)


def test_adaptive_resends_come_in_milliseconds_and_never_further_apart_than_the_timeout():
    found = Timers(18, adaptive=True)
    apart = np.diff(found.resends, prepend=0.0)
    assert apart[0] < 0.01
    assert np.all(np.diff(apart) >= 0)
    assert apart[-1] == pytest.approx(found.interval_seconds)
    assert found.resends[-1] <= found.patience_seconds * (1 + 1e-9)
    short = np.array([0.05])
    assert mean_wait_seconds(found, short)[0] < 0.2 < mean_wait_seconds(Timers(18), short)[0]


def drawn(found: Timers, down: float, num_queue_pairs: int) -> tuple[float, float]:
    """The same by lot: how often one of the queue pairs fails, and how long they wait where none does."""
    longer = np.random.default_rng(3).uniform(*found.longer, (20_000, num_queue_pairs))
    times = longer[:, :, None] * found.resends
    survives = (times[:, :, -1] >= down).all(axis=1)
    first = np.where(times >= down, times, np.inf).min(axis=2).max(axis=1)
    return float(1 - survives.mean()), float(first[survives].mean()) if survives.any() else 0.0


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(
    ("timeout", "down", "pairs"), [(14, 1.0, 1), (18, 1.0, 16), (18, 9.0, 4), (20, 8.0, 16)]
)
def test_closed_forms_agree_with_what_is_drawn(adaptive, timeout, down, pairs):
    found = Timers(timeout, adaptive=adaptive)
    lost, wait = drawn(found, down, pairs)
    at = np.array([down])
    assert lost_probability(found, at, pairs)[0] == pytest.approx(lost, abs=0.015)
    assert mean_wait_seconds(found, at, pairs)[0] == pytest.approx(wait, rel=0.02)


@settings(max_examples=60, deadline=None)
@given(timers, down_times, st.integers(1, 64))
def test_longer_flaps_and_more_queue_pairs_never_end_a_job_less_often(found, down, pairs):
    one = lost_probability(found, np.sort(down), pairs)
    assert np.all((one >= 0) & (one <= 1))
    assert np.all(np.diff(one) >= -1e-9)
    assert np.all(lost_probability(found, np.sort(down), pairs + 1) >= one - 1e-9)


@settings(max_examples=60, deadline=None)
@given(timers, down_times, st.integers(1, 64))
def test_packets_are_lost_while_the_link_is_down_and_surviving_queue_pairs_resume(found, down, pairs):
    before, late = down[:, None] * 0.999, np.full((len(down), 1), found.resends[-1] * found.longer[1] * 1.001)
    assert delivered_probability(found, down, before, pairs).max() == 0
    survives = 1 - lost_probability(found, down, pairs)
    assert delivered_probability(found, down, late, pairs)[:, 0] == pytest.approx(survives, abs=1e-9)
    waits = mean_wait_seconds(found, down, pairs)
    assert np.all((waits >= down * 0.999) | (survives < 1e-9))


def habits(
    down: str = "lognormal:2:1", driver_seconds: float = np.inf, dead_per_month: float = 0.001
) -> FlapScenario:
    return FlapScenario(DownTimes.parse(down), 10_000, 0.01, dead_per_month, 16, 65.0, driver_seconds)


def test_a_driver_that_gives_up_on_links_ends_the_job_whatever_the_timers():
    """Longer timeouts are worth nothing there: the advice must not say otherwise."""
    patient, alone = flap_cost(Timers(22), habits(driver_seconds=3.0)), flap_cost(Timers(22), habits())
    assert patient.lost == pytest.approx(float((DownTimes.parse("lognormal:2:1").seconds > 3).mean()))
    assert alone.lost == pytest.approx(0, abs=0.01)
    assert patient.dead_seconds == 3.0 < alone.dead_seconds
    assert best_timers(Timers(18), habits(driver_seconds=3.0)).timers.timeout < 20


def test_one_flap_of_twenty_holds_everybody_up_for_longer_than_the_95th_percentile():
    found, rng = Timers(18), np.random.default_rng(5)
    down = habits().down.seconds[rng.integers(0, 500, 20_000)]
    times = rng.uniform(*found.longer, (20_000, 16))[:, :, None] * found.resends
    survives = (times[:, :, -1] >= down[:, None]).all(axis=1)
    waits = np.where(times >= down[:, None, None], times, np.inf).min(axis=2).max(axis=1)[survives]
    assert flap_cost(found, habits()).wait_p95_seconds == pytest.approx(
        float(np.quantile(waits, 0.95)), rel=0.03
    )


def test_advice_follows_how_long_links_are_down():
    found = [best_timers(Timers(18), habits(down)).timers.timeout for down in ("0.2", "2", "20")]
    assert found == sorted(found)
    assert found[0] < found[-1]
    assert flap_cost(Timers(found[-1]), habits("20")).lost < 0.05


def test_what_dies_often_calls_for_shorter_timeouts_than_what_flaps_often():
    flapping, dying = (best_timers(Timers(18), habits("10", dead_per_month=rate)) for rate in (0.0, 1.0))
    assert dying.timers.timeout < flapping.timers.timeout


def test_half_of_lognormal_down_times_are_below_the_median():
    found = DownTimes.parse("lognormal:2:1.5").seconds
    assert float((found < 2).mean()) == 0.5
    assert float(np.exp(np.log(found).std())) == pytest.approx(np.exp(1.5), rel=0.02)


@pytest.mark.parametrize(
    "text", ["", "2,x", "0", "-1", "nan", "lognormal:2", "lognormal:0:1", "lognormal:1:x", "inf"]
)
def test_down_times_that_mean_nothing_are_refused(text):
    with pytest.raises(BadInputError, match="--down"):
        DownTimes.parse(text)
