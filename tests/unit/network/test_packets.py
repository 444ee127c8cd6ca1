"""What is known without a simulation comes out of the packet level: times of one flow and of a ring, fair
shares, lossless pauses, where every packet went. Else nobody could believe it where nothing is known."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packet_fabrics import DEEP, LATENCY, PACKET_SECONDS, RATE, WIRE, dumbbell, send, star

from myriad.errors import BadInputError
from myriad.network.congestion_controls import CONTROLS, Control, Dcqcn, Hpcc, Hybrid, Swift, SwitchSettings
from myriad.network.fabric import Paths
from myriad.network.packets.packet_engine import PacketResult, simulate_packets
from myriad.network.packets.packet_problem import Faults, Series, Transport, outage_of_cable


def test_a_flow_alone_runs_at_line_rate_and_each_event_is_known() -> None:
    fabric = star(2)
    for num_packets in (1, 2, 100):
        flows, paths = send(fabric, [(0, 1)], 4096 * num_packets)
        result = simulate_packets(fabric, flows, paths, None, DEEP)
        # The switch stores the last packet before it forwards it.
        seconds = (num_packets + 1) * PACKET_SECONDS + 2 * LATENCY
        assert result.finish_seconds[0] == pytest.approx(seconds, rel=1e-9)
        # One start; the NIC falls free before all but the first; each packet at the switch; each answer.
        assert result.num_events == 1 + (num_packets - 1) + num_packets + num_packets
        assert result.sent_bytes[[0, 3]].tolist() == [num_packets * WIRE] * 2


def test_a_ring_all_reduce_takes_twice_n_less_one_steps() -> None:
    num, num_packets = 6, 20
    fabric = star(num)
    steps = range(2 * (num - 1))
    pairs = [(host, (host + 1) % num) for _ in steps for host in range(num)]
    # A host sends in a step what its neighbour before it sent in the step before.
    after = [step * num - num + (host - 1) % num if step else -1 for step in steps for host in range(num)]
    flows, paths = send(fabric, pairs, 4096 * num_packets)
    result = simulate_packets(fabric, flows, paths, None, DEEP, after=np.array(after, dtype=np.int32))
    step_seconds = (num_packets + 1) * PACKET_SECONDS + 2 * LATENCY
    assert np.max(result.finish_seconds) == pytest.approx(len(steps) * step_seconds, rel=1e-9)
    wire_bytes = num * num_packets * WIRE
    whole = 2 * (num - 1) / num * wire_bytes / RATE
    assert np.max(result.finish_seconds) - whole == pytest.approx(
        len(steps) * (PACKET_SECONDS + 2 * LATENCY), rel=1e-9
    )


FAIR_HPCC = replace(Hpcc.published(), additive_bytes=5e-6 * RATE * 0.05 / 8)
"""What the paper's section 3.3 takes for eight flows: base round trip x rate x (1 - eta) / N."""


@pytest.mark.parametrize("control", [None, FAIR_HPCC, Swift.published(), Hybrid.ours()])
def test_senders_to_one_share_its_link_fairly(control: Control | None) -> None:
    num = 8
    fabric = star(num + 1)
    flows, paths = send(fabric, [(host, 0) for host in range(1, num + 1)], 2e7)
    result = simulate_packets(fabric, flows, paths, control, SwitchSettings.simulator(RATE, num + 1))
    whole = num * np.ceil(2e7 / 4096) * WIRE / RATE
    assert whole <= np.max(result.finish_seconds) <= 1.1 * whole
    assert np.min(result.finish_seconds) > 0.85 * whole
    assert result.num_drops.sum() == 0


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 12), st.integers(10, 200), st.integers(0, 3))
def test_with_pauses_and_room_for_what_is_under_way_nothing_is_dropped(
    num_left: int, num_kilobytes: int, num_right: int
) -> None:
    fabric = dumbbell(num_left, num_right + 1)
    pairs = [(host, num_left) for host in range(num_left + num_right + 1) if host != num_left]
    flows, paths = send(fabric, pairs, 4e5)
    # A frame's way, the data's way, the packet being sent, the one that crossed the line.
    headroom = RATE * (2 * LATENCY + 84 / RATE) + 2 * WIRE
    xoff = num_kilobytes * 1e3
    switch = replace(DEEP, pfc_xoff_bytes=xoff, pfc_xon_bytes=xoff / 2, pfc_headroom_bytes=headroom)
    # On either switch so many links bring something.
    num_ports = max(num_left, num_right + 1)
    lossless = replace(switch, buffer_bytes=num_ports * (xoff + headroom))
    result = simulate_packets(fabric, flows, paths, None, lossless)
    assert result.num_drops.sum() == 0
    assert result.num_resent.sum() == 0
    assert np.all(np.isfinite(result.finish_seconds))


def test_the_same_buffer_without_pauses_drops() -> None:
    fabric = star(13)
    flows, paths = send(fabric, [(host, 0) for host in range(1, 13)], 4e5)
    lossy = simulate_packets(fabric, flows, paths, None, replace(DEEP, buffer_bytes=12 * 60e3))
    assert lossy.num_drops.sum() > 0
    assert lossy.pause_seconds.sum() == 0
    assert np.all(np.isfinite(lossy.finish_seconds))
    paused = replace(DEEP, buffer_bytes=12 * 60e3, pfc_xoff_bytes=20e3, pfc_xon_bytes=10e3)
    lossless = simulate_packets(fabric, flows, paths, None, paused)
    assert lossless.num_drops.sum() == 0
    assert lossless.pause_seconds[2] > 0
    assert lossless.queue_max_bytes[1] <= 12 * 60e3


def test_a_victim_waits_behind_packets_that_are_not_its_own() -> None:
    """Five senders to one host pause the cable that a flow to another, idle host takes too."""
    fabric = dumbbell(6, 2)
    flows, paths = send(fabric, [(0, 7), *((host, 6) for host in range(1, 6))], 1e6)
    alone = simulate_packets(fabric, *send(fabric, [(0, 7)], 1e6), None, DEEP)
    paused = replace(DEEP, pfc_xoff_bytes=50e3, pfc_xon_bytes=40e3)
    both = simulate_packets(fabric, flows, paths, None, paused)
    cable = 2 * fabric.num_ports
    assert both.pause_seconds[cable] == 0  # the cable is as fast as the host behind it: senders wait instead
    assert both.finish_seconds[0] > 4 * alone.finish_seconds[0]
    to_right = send(fabric, [(0, 7), *((host, 6) for host in range(1, 6)), (7, 6)], 1e6)
    blocked = simulate_packets(fabric, *to_right, None, paused)
    assert blocked.pause_seconds[cable] > 0
    assert blocked.finish_seconds[0] > both.finish_seconds[0]
    with_control = simulate_packets(fabric, *to_right, Hpcc.published(), paused)
    assert with_control.pause_seconds.sum() < 0.1 * blocked.pause_seconds.sum()


def test_dcqcn_comes_to_rest_at_its_published_fixed_point() -> None:
    """Shares C / N; and a queue that marks with p of theorem 1 of Zhu et al., ECN or Delay, CoNEXT 2016:
    p^3 = R_AI / (tau' R^2) x (1 / B + 1 / (T R))^2, R = C / N. It swings around both."""
    control, rate = Dcqcn.paper(), 5e9
    switch = replace(SwitchSettings.paper(), pfc_xoff_bytes=np.inf, ecn_max_bytes=1e6, ecn_max_ratio=0.05)
    for num in (2, 4):
        fabric = star(num + 1, rate)
        flows, paths = send(fabric, [(host, 0) for host in range(1, num + 1)], 4096 * 4e5 / num)
        series = Series(2e-5, links=(1,))
        result = simulate_packets(fabric, flows, paths, control, switch, series=series)
        share = result.goodput_bytes_per_second * WIRE / 4096 / (rate / num)
        assert share == pytest.approx(1.0, abs=0.08)
        packets, added = rate / num / 4096, control.additive_bytes_per_second / 4096
        each = 4096 / control.increase_bytes + 1 / (control.increase_timer_seconds * packets)
        marked = (added / (control.alpha_timer_seconds * packets**2) * each**2) ** (1 / 3)
        theory = 5e3 + marked / 0.05 * (1e6 - 5e3)
        assert result.samples is not None
        half = len(result.samples.seconds) // 2
        assert np.mean(result.samples.queue_bytes[half:]) == pytest.approx(theory, rel=0.3)


def incast(num: int, name: str) -> PacketResult:
    fabric = star(num + 1)
    flows, paths = send(fabric, [(host, 0) for host in range(1, num + 1)], 4e5)
    return simulate_packets(fabric, flows, paths, CONTROLS[name], SwitchSettings.simulator(RATE, 32))


def test_controls_keep_their_published_order() -> None:
    hpcc, dcqcn = incast(16, "hpcc"), incast(16, "dcqcn")
    assert hpcc.queue_p50_bytes[1] < 0.1 * dcqcn.queue_p99_bytes[1]
    # Swift, section 5: below one packet a window must be paced, or the queue is one packet per sender.
    paced, whole = incast(600, "swift"), incast(600, "swift-whole-packets")
    assert whole.queue_p50_bytes[1] > 500 * WIRE
    assert paced.queue_p50_bytes[1] < 0.7 * whole.queue_p50_bytes[1]


def close(a: PacketResult, b: PacketResult) -> bool:
    return a.num_events == b.num_events and np.array_equal(a.finish_seconds, b.finish_seconds, equal_nan=True)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_every_packet_sent_is_somewhere_and_the_same_seed_sends_the_same(data: st.DataObject) -> None:
    num = data.draw(st.integers(2, 6))
    fabric = dumbbell(num, num)
    hosts = st.integers(0, 2 * num - 1)
    pairs = data.draw(
        st.lists(st.tuples(hosts, hosts).filter(lambda pair: pair[0] != pair[1]), min_size=1, max_size=8)
    )
    sizes = data.draw(st.lists(st.integers(0, 300_000), min_size=len(pairs), max_size=len(pairs)))
    flows, paths = send(fabric, pairs, sizes)
    transport = Transport(
        recovery=data.draw(st.sampled_from(["go-back-n", "selective-repeat"])),
        timeout_seconds=1e-4,
        retries=data.draw(st.integers(0, 7)),
        most_packets=data.draw(st.sampled_from([1, 7, 16384])),
    )
    name = data.draw(st.sampled_from([None, *CONTROLS]))
    switch = replace(DEEP, buffer_bytes=data.draw(st.sampled_from([20e3, 100e3, np.inf])))
    if data.draw(st.booleans()):
        switch = replace(switch, pfc_xoff_bytes=20e3, pfc_xon_bytes=10e3)
    faults = Faults(data.draw(st.sampled_from([0.0, 0.02])), outage_of_cable(2 * num, 2e-5, 6e-5))
    results = [
        simulate_packets(
            fabric, flows, paths, CONTROLS[name] if name else None, switch,
            seed=seed, transport=transport, faults=faults, max_seconds=0.05,
        )
        for seed in (1, 1)
    ]  # fmt: skip
    result = results[0]
    assert close(*results)
    gone = result.num_losses.sum() + result.num_drops.sum() + result.num_in_flight
    assert result.num_sent.sum() == result.num_arrived.sum() + result.num_discarded.sum() + gone
    num_packets = np.ceil(np.array(sizes) / 4096)
    assert np.all(result.num_arrived <= num_packets)
    assert np.array_equal(np.isfinite(result.finish_seconds), result.num_arrived == num_packets)
    assert np.array_equal(result.num_sent - result.num_resent >= result.num_arrived, [True] * len(pairs))
    assert np.all((result.finish_seconds >= 0) | result.is_aborted | (result.end_seconds > 0.04))


def test_another_seed_loses_other_packets() -> None:
    fabric = star(2)
    flows, paths = send(fabric, [(0, 1)], 4e6)
    one, other = (
        simulate_packets(fabric, flows, paths, None, DEEP, seed=seed, faults=Faults(0.01)) for seed in (1, 2)
    )
    assert one.finish_seconds[0] != other.finish_seconds[0]


def test_samples_stay_within_their_number() -> None:
    fabric = star(3)
    flows, paths = send(fabric, [(1, 0), (2, 0)], 4e6)
    series = Series(1e-6, links=(1,), flows=(0, 1), most_samples=64)
    samples = simulate_packets(fabric, flows, paths, None, DEEP, series=series).samples
    assert samples is not None
    assert 32 <= len(samples.seconds) <= 64
    assert samples.queue_bytes.shape == (len(samples.seconds), 1)
    assert np.all(np.diff(samples.seconds) > 0)
    assert np.all(np.diff(samples.arrived_bytes, axis=0) > 0)


def test_what_cannot_be_simulated_is_refused_before_it_begins() -> None:
    fabric = star(3)
    flows, paths = send(fabric, [(1, 0), (2, 0)], 4e9)
    with pytest.raises(BadInputError, match="flows = 2: too many"):
        simulate_packets(fabric, flows, paths, None, DEEP, max_bytes=1e6)
    with pytest.raises(BadInputError, match=r"transport\.backoff"):
        simulate_packets(fabric, flows, paths, None, DEEP, transport=Transport(backoff=0.5))
    through_a_port = Paths(np.array([0, 1, 3]), np.array([1, 2, 5], dtype=np.int32))
    with pytest.raises(BadInputError, match="paths = 0"):
        simulate_packets(fabric, flows, through_a_port, None, DEEP)
    with pytest.raises(BadInputError, match="start_seconds"):
        simulate_packets(fabric, replace(flows, start_seconds=np.full(2, 1e9)), paths, None, DEEP)
