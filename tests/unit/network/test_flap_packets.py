"""The closed forms of `retransmission` against the packet level with the same timers: who sets a timeout by
`myriad network flap` gets what packets do."""

import numpy as np
import pytest
from packet_fabrics import DEEP, PACKET_SECONDS, send, star

from myriad.network.link_flaps import Timers, lost_probability, mean_wait_seconds
from myriad.network.packets.packet_engine import PacketResult, simulate_packets
from myriad.network.packets.packet_problem import Faults, Transport, outage_of_cable

NOMINAL = (1.0, 1.0)
START = 40 * PACKET_SECONDS


def packets(transport: Transport, down: float, num_hosts: int = 2) -> PacketResult:
    """Everybody sends to the last host, whose cable goes down on the way."""
    fabric = star(num_hosts)
    flows, paths = send(fabric, [(host, num_hosts - 1) for host in range(num_hosts - 1)], 4096 * 100)
    faults = Faults(outages=outage_of_cable(num_hosts - 1, START, START + down) if down else ())
    return simulate_packets(fabric, flows, paths, None, DEEP, transport=transport, faults=faults, seed=1)


def longer(transport: Transport, down: float) -> float:
    """Than without the flap."""
    return float(packets(transport, down).finish_seconds[0] - packets(transport, 0.0).finish_seconds[0])


@pytest.mark.parametrize("recovery", ["go-back-n", "selective-repeat"])
@pytest.mark.parametrize("share", [0.4, 1.5, 3.3, 6.9])
def test_a_flap_lengthens_a_flow_by_the_wait_that_is_predicted(recovery, share) -> None:
    timers = Timers(8, longer=NOMINAL)
    transport = Transport(recovery, timeout_seconds=timers.interval_seconds, retries=timers.retries)
    down = share * timers.interval_seconds
    wait = mean_wait_seconds(timers, np.array([down]))[0]
    assert longer(transport, down) == pytest.approx(wait, rel=0.05)


@pytest.mark.parametrize("share", [0.3, 2.0, 5.0, 20.0])
def test_intervals_that_double_do_the_same(share) -> None:
    """Adaptive retransmission before its intervals reach the timeout."""
    first = 4.096e-6 * 2**7
    timers = Timers(14, adaptive=True, first_seconds=first, longer=NOMINAL)
    transport = Transport(timeout_seconds=first, backoff=2.0, retries=7)
    wait = mean_wait_seconds(timers, np.array([share * first]))[0]
    assert longer(transport, share * first) == pytest.approx(wait, rel=0.05)


@pytest.mark.parametrize("retries", [2, 7])
def test_flows_fail_exactly_where_it_is_predicted(retries) -> None:
    timers = Timers(8, retries, longer=NOMINAL)
    transport = Transport(timeout_seconds=timers.interval_seconds, retries=retries)
    for share in (0.95, 1.05):
        down = share * timers.patience_seconds
        predicted = lost_probability(timers, np.array([down]), 3)[0]
        assert packets(transport, down, 4).is_aborted.tolist() == [predicted == 1] * 3
