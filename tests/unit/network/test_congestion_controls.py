"""If these break: a control is simulated with unpublished parameters, or that do not go together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.network.congestion_controls import CONTROLS, Dcqcn, Hpcc, Hybrid, Swift, SwitchSettings, control
from myriad.network.fluid.fluid_queues import mark_probability

RATES = st.floats(25e9 / 8, 800e9 / 8)


def test_an_unknown_control_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadInputError, match='control = "cubic": one of dcqcn-paper, dcqcn'):
        control("cubic")


def test_each_kind_of_control_is_offered() -> None:
    assert {type(control(name)) for name in CONTROLS} == {Dcqcn, Swift, Hpcc, Hybrid}


def test_rates_are_bytes_as_published_in_bits() -> None:
    assert Dcqcn.paper().additive_bytes_per_second == 5e6  # 40 Mbit/s
    assert Dcqcn.connectx().increase_bytes == 2_097_088  # 2 MB, as testers' profiles of it say
    assert Dcqcn.simulator(100e9 / 8).hyper_bytes_per_second == pytest.approx(25e6)  # 50 x 100 / 25 Mbit/s


def test_the_gain_of_a_connectx_is_that_of_its_fraction_of_1024() -> None:
    assert Dcqcn.connectx().gain == pytest.approx(1 / 205, rel=2e-3)


@given(RATES, st.integers(2, 64))
def test_a_switch_marks_before_it_pauses_and_has_room_for_what_is_under_way(rate: float, ports: int) -> None:
    settings = SwitchSettings.simulator(rate, ports)
    assert 0 < settings.pfc_xon_bytes < settings.pfc_xoff_bytes
    assert settings.pfc_headroom_bytes > 2 * rate * 1e-6
    assert ports * (settings.pfc_xoff_bytes + settings.pfc_headroom_bytes) <= settings.buffer_bytes
    if ports <= 32:
        assert settings.ecn_min_bytes < settings.pfc_xoff_bytes


@given(st.floats(0, 1e8), st.floats(0, 1e8))
def test_a_longer_queue_is_never_marked_less(one: float, other: float) -> None:
    settings = SwitchSettings.simulator(25e9)
    shorter, longer = sorted([one, other])
    marked = mark_probability.py_func
    assert 0 <= marked(settings, shorter) <= marked(settings, longer) <= 1


def test_with_one_threshold_all_or_nothing_is_marked() -> None:
    settings = SwitchSettings.simulator(25e9).step_at(1000.0)
    assert [mark_probability.py_func(settings, size) for size in (0, 1000, 1001)] == [0, 0, 1]
