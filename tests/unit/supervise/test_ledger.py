"""If these fail, the account of a run's time leaves seconds out, or counts some twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.supervise.accounting.ledger import KINDS, Ledger

shares = st.dictionaries(st.sampled_from(KINDS), st.integers(1, 9), min_size=1).map(
    lambda weights: {kind: weight / sum(weights.values()) for kind, weight in weights.items()}
)
entries = st.lists(st.tuples(st.floats(0, 1e5), shares, st.floats(0, 1), st.integers(0, 3)), max_size=30)


@given(entries)
def test_every_second_is_in_one_class_and_they_sum_to_the_wall_time(entries):
    ledger, spares = Ledger(5.0), 0.0
    for seconds, what, lost, spare in entries:
        ledger.until(ledger.now + seconds, what, spares=spare)
        spares += spare * seconds
        trained = ledger.seconds()["training"]
        ledger.lose(lost * trained)
        ledger.attempt += lost > 0.5
        assert ledger.seconds()["training"] == pytest.approx((1 - lost) * trained, abs=1e-4)
        ends = [stretch.stop for stretch in ledger.stretches]
        assert [stretch.start for stretch in ledger.stretches] == [5.0, *ends[:-1]][: len(ends)]
    assert sum(ledger.seconds().values()) == pytest.approx(ledger.wall_seconds)
    attempts = {stretch.attempt for stretch in ledger.stretches}
    of_attempts = sum(sum(ledger.seconds(attempt).values()) for attempt in attempts)
    assert of_attempts == pytest.approx(ledger.wall_seconds)
    assert ledger.spare_node_seconds == pytest.approx(spares, rel=1e-6, abs=1e-4)


def test_what_is_lost_is_the_newest_training_and_nothing_else():
    ledger = Ledger()
    ledger.until(10.0, "training")
    ledger.until(14.0, "restarting")
    ledger.until(24.0, {"training": 0.5, "slow": 0.5})
    ledger.lose(8.0)
    found = ledger.seconds()
    assert (found["training"], found["lost"], found["slow"], found["restarting"]) == (7.0, 8.0, 5.0, 4.0)
    assert [stretch.stop for stretch in ledger.stretches] == [7.0, 10.0, 14.0, 24.0]
    assert ledger.effective_ratio == pytest.approx(7 / 24)


def test_a_ledger_of_nothing_has_lost_nothing():
    assert Ledger().effective_ratio == 1.0
