"""Traffic on which congestion controls differ, and the hot spot of a job's traffic, for all levels of models.

    incast        all hosts but one send to that host at the same moment
    many-to-one   an incast with many queue pairs for each host, more than the path holds packets, that lasts
                  long: each queue pair begins with one packet, not with all that its port can send
    all-to-all    each host sends to each other host, to some hosts seven times as much as to others (as in a
                  mixture of experts, whose experts are not chosen equally often)
    ring          each host sends to the next (ring all-reduce): no flows share a link
    victim        an incast from all other switches, and one flow from there to a host beside the target: it
                  shares links with the incast, but not the link that is full

The fabric has two tiers, hosts with one port of 200 Gbit/s, links of 1 us, and as many cables up as down.
Paths are chosen by least load, not by hash, so that results show congestion control and not hash conflicts.

The hot spot (`find_hot_spot`) is the part of a fabric where flows conflict most, small enough for the fluid
level. It starts at the link with the highest demand relative to its rate. It takes in the flows on that
link, and the flows that meet those on other overloaded links, until there are enough. `extract_subfabric`
keeps the cables that these flows use; each of their ports becomes a node. Other flows on these links are
left out, because the links carry them as well.

    flows    a ──┐                     a and b conflict on an uplink, b and c on a downlink: a, b and c are
             b ──┴─ uplink ──┐         the hot spot; flows that share only wide links with them are not
             c ──────────────┴─ downlink

Arrays: F flows, L links.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.config import FabricShape
from myriad.network.congestion_controls import PACKET_BYTES, Control, Hybrid, SwitchSettings
from myriad.network.fabric import Fabric, Flows, Numbers, Paths
from myriad.network.fabric_builder import build
from myriad.network.fluid.fluid_queues import base_round_trip_seconds, travel_seconds
from myriad.network.hash_conflicts import port_limited_rates
from myriad.network.max_min import finish_seconds
from myriad.network.routing import Routes, adaptive

__all__ = [
    "PORT_BYTES_PER_SECOND",
    "SCENARIOS",
    "CongestionScenario",
    "extract_subfabric",
    "fabric_of",
    "find_hot_spot",
    "scenario",
    "settings_for",
]

PORT_BYTES_PER_SECOND = 25e9


@dataclass(frozen=True, eq=False)
class CongestionScenario:
    """Flows on a fabric, their paths, and which flows are measured."""

    name: str
    title: str
    fabric: Fabric
    flows: Flows
    paths: Paths
    watched: npt.NDArray[np.bool_]
    """(F) Flows whose completion is measured."""
    start_packets: float | None = None
    """Packets of each sender in flight in its first round trip. Default: what its port can send in one."""

    def alone_seconds(self) -> Numbers:
        """Return (F) the time that each flow takes without other flows."""
        paths, rate = self.paths, self.fabric.bytes_per_second
        slowest = np.minimum.reduceat(rate[paths.link], paths.first[:-1])
        return (self.flows.num_bytes - PACKET_BYTES) / slowest + travel_seconds(self.fabric, paths)

    def fair_seconds(self) -> Numbers:
        """Return (F) when each flow is done if all flows have max-min fair rates at every moment."""
        return finish_seconds(self.fabric, self.flows, self.paths, tolerance=1e-3)


def fabric_of(num_hosts: int) -> Fabric:
    """Return the fabric of the scenarios. Raises `BadInputError`."""
    if num_hosts < 8 or num_hosts > 1024:
        raise BadInputError("hosts", num_hosts, "from 8 to 1024")
    shape = FabricShape(kind="clos2", nodes_per_switch=_hosts_per_switch(num_hosts))
    rate = PORT_BYTES_PER_SECOND
    return build(shape, name="scenario", num_nodes=num_hosts, ports_per_node=1, nic_bytes_per_second=rate)


def _hosts_per_switch(num_hosts: int) -> int:
    """Eight hosts, but at least four switches: flows of several switches meet above the target's."""
    return min(8, num_hosts // 4)


def settings_for(control: Control, fabric: Fabric, paths: Paths) -> SwitchSettings:
    """Return the settings of HPCC's simulator for this port. For the hybrid, packets are marked from the
    queue length that makes a round trip as long as its target, so marks and delay agree."""
    settings = SwitchSettings.simulator(PORT_BYTES_PER_SECOND)
    if not isinstance(control, Hybrid):
        return settings
    path_bytes = PORT_BYTES_PER_SECOND * float(base_round_trip_seconds(fabric, paths).max())
    return settings.step_at((control.base_target_ratio - 1) * path_bytes)


def scenario(name: str, num_hosts: int = 32, scale: float = 1.0) -> CongestionScenario:
    """Return a scenario by name; ``scale`` multiplies all sizes. Raises `BadInputError`."""
    if name not in SCENARIOS:
        raise BadInputError("scenario", name, "one of " + ", ".join(SCENARIOS))
    if name == "all-to-all" and num_hosts > 128:
        raise BadInputError("hosts", num_hosts, "at most 128 for all-to-all: a flow for each pair")
    fabric = fabric_of(num_hosts)
    title, source, target, num_bytes, watched = SCENARIOS[name](num_hosts)
    flows = Flows(
        source=source.astype(np.int32),
        target=target.astype(np.int32),
        num_bytes=num_bytes * scale,
        start_seconds=np.zeros(len(source)),
        entropy=np.arange(len(source), dtype=np.uint16),
    )
    paths = adaptive(Routes(fabric), flows)
    start = 1.0 if name == "many-to-one" else None
    return CongestionScenario(name, title, fabric, flows, paths, watched, start)


_Ends = tuple[str, npt.NDArray[np.int64], npt.NDArray[np.int64], Numbers, npt.NDArray[np.bool_]]


def _incast(num_hosts: int, queue_pairs: int = 1, num_bytes: float = 2e6) -> _Ends:
    source = np.repeat(np.arange(1, num_hosts), queue_pairs)
    count = len(source)
    size = f"{num_bytes / 1e6:g} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e3:g} kB"
    title = f"{count} to 1, {size} each"
    everyone = np.ones(count, dtype=np.bool_)
    return title, source, np.zeros(count, dtype=np.int64), np.full(count, num_bytes), everyone


def _many_to_one(num_hosts: int) -> _Ends:
    return _incast(num_hosts, queue_pairs=32, num_bytes=64e3)


def _all_to_all(num_hosts: int) -> _Ends:
    source, target = np.divmod(np.arange(num_hosts * num_hosts), num_hosts)
    shifted = (source + target) % num_hosts
    apart = source != shifted
    count = int(apart.sum())
    chosen = np.random.default_rng(0).uniform(64e3, 448e3, num_hosts)
    title = f"{num_hosts} hosts, 64 to 448 kB to each"
    return title, source[apart], shifted[apart], chosen[shifted[apart]], np.ones(count, dtype=np.bool_)


def _ring(num_hosts: int) -> _Ends:
    source = np.arange(num_hosts)
    num_bytes = 2 * (num_hosts - 1) / num_hosts * 16e6
    title = f"{num_hosts} hosts, all-reduce of 16 MB"
    everyone = np.ones(num_hosts, dtype=np.bool_)
    return title, source, (source + 1) % num_hosts, np.full(num_hosts, num_bytes), everyone


def _victim(num_hosts: int) -> _Ends:
    near = _hosts_per_switch(num_hosts)
    source = np.arange(near, num_hosts)
    target = np.zeros(len(source), dtype=np.int64)
    target[0] = 1
    num_bytes = np.full(len(source), 2e6)
    num_bytes[0] = 8e6
    title = f"8 MB beside {len(source) - 1} to 1"
    return title, source, target, num_bytes, np.arange(len(source)) == 0


SCENARIOS = {
    "incast": _incast,
    "many-to-one": _many_to_one,
    "all-to-all": _all_to_all,
    "ring": _ring,
    "victim": _victim,
}


_Ints = npt.NDArray[np.int64]
_FULL = 1 + 1e-9


def find_hot_spot(fabric: Fabric, flows: Flows, paths: Paths, most: int) -> _Ints:
    """Return at most ``most`` flows that conflict; none if all links carry all flows at full rate."""
    rate, owner = fabric.bytes_per_second, np.repeat(np.arange(len(paths)), np.diff(paths.first))
    asked = port_limited_rates(fabric, flows)[owner]
    load: Numbers = np.bincount(paths.link, weights=asked, minlength=len(rate)) / rate
    if not np.any(load > _FULL):
        return np.empty(0, dtype=np.int64)
    chosen: dict[int, None] = {}
    links, seen = deque([int(np.argmax(load))]), {int(np.argmax(load))}
    while links and len(chosen) < most:
        for flow in owner[paths.link == links.popleft()].tolist()[: most - len(chosen)]:
            chosen[flow] = None
            narrow = [int(link) for link in paths.of(flow) if load[link] > _FULL and int(link) not in seen]
            seen.update(narrow)
            links.extend(narrow)
    return np.array(sorted(chosen), dtype=np.int64)


def extract_subfabric(
    fabric: Fabric, flows: Flows, paths: Paths, chosen: _Ints
) -> tuple[Fabric, Flows, Paths]:
    """Return the chosen flows on the part of the fabric that they use."""
    own = [paths.of(int(flow)) for flow in chosen]
    used = np.concatenate(own)
    links = (2 * np.unique(used // 2)[:, None] + np.arange(2)).reshape(-1)
    vertices = np.unique(np.stack([fabric.source[links], fabric.target[links]]))
    piece = Fabric(
        name=fabric.name,
        num_nodes=int((vertices < fabric.num_ports).sum()),
        ports_per_node=1,
        tier=fabric.tier[vertices],
        source=np.searchsorted(vertices, fabric.source[links]).astype(np.int32),
        target=np.searchsorted(vertices, fabric.target[links]).astype(np.int32),
        bytes_per_second=fabric.bytes_per_second[links],
        latency_seconds=fabric.latency_seconds[links],
    )
    inside = Flows(
        source=np.searchsorted(vertices, flows.source[chosen]).astype(np.int32),
        target=np.searchsorted(vertices, flows.target[chosen]).astype(np.int32),
        num_bytes=flows.num_bytes[chosen],
        start_seconds=flows.start_seconds[chosen],
        entropy=flows.entropy[chosen],
    )
    first = np.cumsum([0, *map(len, own)]).astype(np.int64)
    return piece, inside, Paths(first, np.searchsorted(links, used).astype(np.int32))
