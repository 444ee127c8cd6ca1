"""Small fabrics for tests of the packet level: hosts on one switch, or on two with a cable between."""

from collections.abc import Sequence

import numpy as np

from myriad.network.congestion_controls import SwitchSettings
from myriad.network.fabric import Fabric, Flows, Paths

RATE, LATENCY = 12.5e9, 1e-6
WIRE = 4096 + 82
"""Bytes of a full packet on a wire."""
PACKET_SECONDS = WIRE / RATE
DEEP = SwitchSettings(
    ecn_min_bytes=100e3,
    ecn_max_bytes=400e3,
    ecn_max_ratio=0.2,
    pfc_xoff_bytes=np.inf,
    pfc_xon_bytes=np.inf,
    pfc_headroom_bytes=0,
    buffer_bytes=np.inf,
)
"""No pauses, and room for everything."""


def star(num_hosts: int, rate: float = RATE) -> Fabric:
    """Host i sends on link 2i and receives on 2i + 1."""
    return _fabric(num_hosts, 1, [(host, num_hosts) for host in range(num_hosts)], rate)


def dumbbell(num_left: int, num_right: int, rate: float = RATE) -> Fabric:
    """As `star`, the left ones on one switch, the right ones on another; between them cable num_hosts, whose
    first link goes to the right."""
    num = num_left + num_right
    ends = [(host, num if host < num_left else num + 1) for host in range(num)]
    return _fabric(num, 2, [*ends, (num, num + 1)], rate)


def _fabric(num_hosts: int, num_switches: int, cables: Sequence[tuple[int, int]], rate: float) -> Fabric:
    both = np.array([end for a, b in cables for end in ((a, b), (b, a))], dtype=np.int32)
    return Fabric(
        name="test",
        num_nodes=num_hosts,
        ports_per_node=1,
        tier=np.array([0] * num_hosts + [1] * num_switches, dtype=np.int8),
        source=both[:, 0],
        target=both[:, 1],
        bytes_per_second=np.full(len(both), rate),
        latency_seconds=np.full(len(both), LATENCY),
    ).check()


def send(
    fabric: Fabric, pairs: Sequence[tuple[int, int]], num_bytes: float | Sequence[float]
) -> tuple[Flows, Paths]:
    """Flows between hosts, all at the start, over the only way there is."""
    num_switches = fabric.num_vertices - fabric.num_ports
    left = [fabric.source[2 * host + 1] == fabric.num_ports for host in range(fabric.num_ports)]
    ways = []
    for source, target in pairs:
        middle = []
        if num_switches == 2 and left[source] != left[target]:
            middle = [2 * fabric.num_ports + (0 if left[source] else 1)]
        ways.append([2 * source, *middle, 2 * target + 1])
    flows = Flows(
        source=np.array([source for source, _ in pairs], dtype=np.int32),
        target=np.array([target for _, target in pairs], dtype=np.int32),
        num_bytes=np.broadcast_to(np.asarray(num_bytes, dtype=np.float64), len(pairs)).copy(),
        start_seconds=np.zeros(len(pairs)),
        entropy=np.zeros(len(pairs), dtype=np.uint16),
    )
    first = np.concatenate([[0], np.cumsum([len(way) for way in ways])]).astype(np.int64)
    return flows, Paths(first, np.array([link for way in ways for link in way], dtype=np.int32))
