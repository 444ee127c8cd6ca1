"""If these break: queues, pauses or rates over time are not what the formulas say."""

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from myriad.errors import BadInputError
from myriad.network.config import FabricShape
from myriad.network.congestion_controls import CONTROLS, Control, Dcqcn, Swift, SwitchSettings
from myriad.network.congestion_scenarios import scenario, settings_for
from myriad.network.fabric import Fabric, Flows, Paths
from myriad.network.fabric_builder import build
from myriad.network.fluid.fluid_engine import FluidResult, simulate_fluid
from myriad.network.fluid.fluid_senders import approximate_mark_probability, fixed_point_bytes
from myriad.network.routing import Routes, adaptive

RATE = 25e9


def star(num_hosts: int, rate: float = RATE) -> Fabric:
    """Hosts on one switch."""
    return build(FabricShape(), name="star", num_nodes=num_hosts, ports_per_node=1, nic_bytes_per_second=rate)


def sending(fabric: Fabric, pairs: list[tuple[int, int]], num_bytes: list[float]) -> tuple[Flows, Paths]:
    ends = np.array(pairs, dtype=np.int32)
    flows = Flows(
        source=ends[:, 0],
        target=ends[:, 1],
        num_bytes=np.array(num_bytes),
        start_seconds=np.zeros(len(ends)),
        entropy=np.arange(len(ends), dtype=np.uint16),
    )
    return flows, adaptive(Routes(fabric), flows)


def incast(control: Control, count: int, num_bytes: float, seconds: float = 1.0) -> FluidResult:
    fabric = star(count + 1)
    flows, paths = sending(fabric, [(n + 1, 0) for n in range(count)], [num_bytes] * count)
    settings = settings_for(control, fabric, paths)
    return simulate_fluid(fabric, flows, paths, control, settings, horizon_seconds=seconds)


@pytest.mark.parametrize("name", CONTROLS)
def test_alone_a_flow_has_its_whole_link(name: str) -> None:
    found = incast(CONTROLS[name], 1, 10e6)
    whole = 10e6 / RATE + 2e-6
    slower = 0.07 if name == "hpcc" else 0.01  # eta = 95 %
    assert found.finish_seconds[0] == pytest.approx(whole, rel=slower)
    assert found.queue_p99_bytes < 30e3 and found.pause_seconds.sum() == 0


@pytest.mark.parametrize("name", ["swift", "hybrid"])
def test_n_to_1_is_shared_evenly_and_fills_the_link(name: str) -> None:
    found = incast(CONTROLS[name], 8, 100e6, seconds=4e-3)
    rates = found.arrived_bytes / found.seconds
    assert rates.sum() == pytest.approx(RATE, rel=0.01)
    assert rates == pytest.approx(np.full(8, RATE / 8), rel=0.05)


def test_no_byte_is_lost_or_made() -> None:
    found = incast(CONTROLS["dcqcn"], 5, 1e6)
    assert found.arrived_bytes == pytest.approx(np.full(5, 1e6), rel=1e-9)
    assert found.excess_bytes == 0


def test_a_queue_serves_in_order_of_arrival() -> None:
    """What is put behind a long queue waits for all of it, not for its share."""
    fabric = star(4)
    flows, paths = sending(fabric, [(1, 0), (2, 0), (3, 0)], [1e6, 1e6, 4096.0])
    flows = replace(flows, start_seconds=np.array([0.0, 0.0, 30e-6]))
    settings = SwitchSettings.simulator(RATE)
    settings = replace(settings, ecn_min_bytes=inf, ecn_max_bytes=inf, pfc_xoff_bytes=inf)
    found = simulate_fluid(fabric, flows, paths, Dcqcn.paper(), settings, horizon_seconds=1.0)
    queued = 30e-6 * RATE  # two senders at full rate for 30 us, half of it served
    assert found.finish_seconds[2] - 30e-6 == pytest.approx(queued / RATE + 2.3e-6, rel=0.1)


def test_a_pause_holds_what_is_behind_it_and_goes_nowhere_near() -> None:
    """Head-of-line blocking: without pauses the victim shares a link for a while, with them it waits for a
    queue that it does not go to."""
    case = scenario("victim", 16)
    marks_off = replace(SwitchSettings.simulator(RATE), ecn_min_bytes=inf, ecn_max_bytes=inf)
    slowdown = {}
    for xoff in (1e5, inf):
        settings = replace(marks_off, pfc_xoff_bytes=xoff, pfc_xon_bytes=0.9 * xoff)
        found = simulate_fluid(
            case.fabric, case.flows, case.paths, Dcqcn.paper(), settings, horizon_seconds=0.1
        )
        slowdown[xoff] = float(found.finish_seconds[0] / case.alone_seconds()[0])
        assert (found.pause_seconds.sum() > 0) == (xoff < inf)
        assert found.excess_bytes == 0
    assert slowdown[inf] < 1.6 and slowdown[1e5] > 1.5 * slowdown[inf]


def test_dcqcn_settles_at_the_queue_of_its_published_analysis() -> None:
    """CoNEXT 2016: the machine's mean queue, which swings, is near the queue of the mean."""
    rate, count = 5e9, 4
    settings = replace(SwitchSettings.paper(), ecn_max_ratio=0.1, pfc_xoff_bytes=inf)
    fabric = star(count + 1, rate)
    flows, paths = sending(fabric, [(n + 1, 0) for n in range(count)], [1e12] * count)
    found = simulate_fluid(fabric, flows, paths, Dcqcn.paper(), settings, horizon_seconds=0.2)
    later = found.queue_bytes[len(found.queue_bytes) // 2 :]
    assert later.mean() == pytest.approx(fixed_point_bytes(Dcqcn.paper(), settings, count, rate), rel=0.35)
    assert found.arrived_bytes.sum() == pytest.approx(rate * found.seconds, rel=0.03)


def test_the_fixed_point_agrees_with_its_closed_form_where_marks_are_rare() -> None:
    control = replace(
        Dcqcn.paper(), increase_bytes=40960.0, increase_timer_seconds=1e-6, fast_recovery_steps=0,
        additive_bytes_per_second=1.0, alpha_timer_seconds=50e-6,
    )  # fmt: skip
    settings = replace(SwitchSettings.paper(), ecn_max_ratio=1.0)
    closed = approximate_mark_probability(control, 2, 5e9)
    span = settings.ecn_max_bytes - settings.ecn_min_bytes
    found = (fixed_point_bytes(control, settings, 2, 5e9) - settings.ecn_min_bytes) / span
    assert closed < 1e-3 and found == pytest.approx(closed, rel=0.02)


def test_swift_holds_its_target() -> None:
    """With few flows the round trip comes to rest at the target: base + hops + what windows add."""
    found = incast(Swift.published(), 4, 100e6, seconds=4e-3)
    waited = float(np.median(found.queue_bytes[len(found.queue_bytes) // 2 :])) / RATE
    control = Swift.published()
    least = control.base_target_seconds + control.hop_target_seconds - 5e-6  # an empty network's round trip
    assert least < waited < least + 0.2 * control.scaling_range_seconds


def test_more_flows_than_memory_are_refused_before_they_are_simulated() -> None:
    fabric = star(3)
    flows, paths = sending(fabric, [(1, 0), (2, 0)], [1e9, 1e9])
    settings = SwitchSettings.simulator(RATE)
    with pytest.raises(BadInputError, match="GB at the fluid level"):
        simulate_fluid(fabric, flows, paths, Dcqcn.paper(), settings, horizon_seconds=1.0, max_bytes=1000.0)
