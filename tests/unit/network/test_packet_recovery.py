"""Loss costs what theory says: go-back-N a round trip of packets, selective repeat one; and a link that is
down kills a flow exactly when it is down for longer than the queue pair tries."""

import numpy as np
import pytest
from packet_fabrics import DEEP, LATENCY, PACKET_SECONDS, RATE, send, star

from myriad.network.packets.packet_engine import PacketResult, simulate_packets
from myriad.network.packets.packet_problem import Faults, Transport, outage_of_cable

ROUND_TRIP = 2 * PACKET_SECONDS + 4 * LATENCY + 2 * 84 / RATE
"""Of a packet and its answer over a switch, in an empty network."""
WASTED = int(np.ceil((PACKET_SECONDS + ROUND_TRIP) / PACKET_SECONDS))
"""Packets sent from the lost one until the refusal of its successor is heard."""


def run(num_packets: int, transport: Transport, faults: Faults, seed: int = 1) -> PacketResult:
    fabric = star(2)
    flows, paths = send(fabric, [(0, 1)], 4096 * num_packets)
    return simulate_packets(fabric, flows, paths, None, DEEP, transport=transport, faults=faults, seed=seed)


def loss_of(packet: int) -> Faults:
    """While that packet is being sent, and no other."""
    return Faults(outages=((0, (packet + 0.25) * PACKET_SECONDS, (packet + 0.75) * PACKET_SECONDS),))


@pytest.mark.parametrize("packet", [0, 1, 17, 60])
def test_one_loss_costs_go_back_n_a_round_trip_and_selective_repeat_one_packet(packet: int) -> None:
    whole = run(100, Transport(), Faults()).finish_seconds[0]
    back = run(100, Transport("go-back-n"), loss_of(packet))
    selective = run(100, Transport("selective-repeat"), loss_of(packet))
    assert back.num_losses.sum() == selective.num_losses.sum() == 1
    assert back.num_resent[0] == WASTED
    assert back.num_discarded[0] == WASTED - 1
    assert selective.num_resent[0] == 1
    assert selective.num_discarded[0] == 0
    assert back.num_timeouts[0] == selective.num_timeouts[0] == 0
    assert back.finish_seconds[0] == pytest.approx(whole + WASTED * PACKET_SECONDS, rel=1e-9)
    assert selective.finish_seconds[0] == pytest.approx(whole + PACKET_SECONDS, rel=1e-9)


@pytest.mark.parametrize("recovery", ["go-back-n", "selective-repeat"])
def test_the_last_packet_is_missed_only_by_the_timer(recovery: str) -> None:
    transport = Transport(recovery, timeout_seconds=1e-3)  # type: ignore[arg-type]
    result = run(100, transport, loss_of(99))
    assert result.num_timeouts[0] == 1
    assert result.num_resent[0] == 1
    assert 1e-3 < result.finish_seconds[0] < 1.1e-3


def test_random_loss_is_paid_per_loss() -> None:
    faults = Faults(np.array([1e-3, 0, 0, 0]))
    back = run(30_000, Transport("go-back-n"), faults)
    selective = run(30_000, Transport("selective-repeat"), faults)
    assert selective.num_resent[0] == selective.num_losses.sum()
    assert selective.num_losses.sum() == pytest.approx(30, abs=17)  # three standard deviations
    assert back.num_timeouts[0] == 0
    # A loss within the round trip after another costs nothing more.
    assert 0.8 * WASTED * back.num_losses.sum() <= back.num_resent[0] <= WASTED * back.num_losses.sum()


@pytest.mark.parametrize("recovery", ["go-back-n", "selective-repeat"])
@pytest.mark.parametrize("backoff", [1.0, 2.0])
def test_a_flap_is_survived_if_it_is_shorter_than_the_time_to_give_up(recovery: str, backoff: float) -> None:
    transport = Transport(recovery, timeout_seconds=1e-4, retries=4, backoff=backoff)  # type: ignore[arg-type]
    start = 20 * PACKET_SECONDS
    tries = 1e-4 * sum(backoff**n for n in range(4))
    for cable in (0, 1):
        # Until the last try is sent; the first timeout counts from the last progress, just after the start.
        for share, is_aborted in ((0.97, False), (1.1, True)):
            down = outage_of_cable(cable, start, start + share * tries)
            result = run(100, transport, Faults(outages=down))
            assert result.is_aborted[0] == is_aborted
            assert np.isnan(result.finish_seconds[0]) == is_aborted
            assert result.num_timeouts[0] == (5 if is_aborted else 4)
    given_up = start + tries + 1e-4 * backoff**4
    assert result.end_seconds == pytest.approx(given_up, rel=0.05)


def test_a_flow_that_gives_up_leaves_others_alone() -> None:
    fabric = star(4)
    flows, paths = send(fabric, [(0, 1), (2, 3)], 4e5)
    transport = Transport(timeout_seconds=1e-4, retries=2)
    faults = Faults(outages=outage_of_cable(0, 5e-6, 1.0))
    result = simulate_packets(fabric, flows, paths, None, DEEP, transport=transport, faults=faults)
    assert result.is_aborted.tolist() == [True, False]
    alone = simulate_packets(fabric, *send(fabric, [(2, 3)], 4e5), None, DEEP)
    assert result.finish_seconds[1] == alone.finish_seconds[0]
