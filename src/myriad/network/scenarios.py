"""Traffic in which congestion controls differ, on one fabric: what all levels of the model are asked.

    incast        all hosts but one send to that one at the same moment
    many-to-one   the same with many queue pairs a host, more than the path holds packets, and under way for
                  long: each begins with one packet, not with all that its port can send
    all-to-all    each host sends to each other, to some seven times as much as to others (as a mixture of
                  experts does, whose experts are not chosen equally often)
    ring          each host sends to the next (all-reduce by a ring): nobody shares a link
    victim        an incast from all other switches, and one flow from there to a host beside the incast's
                  target: it shares links with the incast, but not the link that is full

The fabric: two tiers, hosts of one port of 200 Gbit/s, links of 1 us, as many cables up as down. Paths are
chosen by least load, not by hash, so that what is seen is congestion control, and not luck with a hash.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.network.controls import Control, Hybrid
from myriad.network.fabric import Fabric, Numbers
from myriad.network.flows import Flows, Paths
from myriad.network.fluid.state import base_round_trip_seconds, travel_seconds
from myriad.network.max_min import finish_seconds
from myriad.network.routing import Routes, adaptive
from myriad.network.shape import FabricShape
from myriad.network.shapes import build
from myriad.network.switch_settings import PACKET_BYTES, SwitchSettings

__all__ = ["PORT_BYTES_PER_SECOND", "SCENARIOS", "Scenario", "fabric_of", "scenario", "settings_for"]

PORT_BYTES_PER_SECOND = 25e9


@dataclass(frozen=True, eq=False)
class Scenario:
    """Who sends what to whom, and what to look at."""

    name: str
    title: str
    fabric: Fabric
    flows: Flows
    paths: Paths
    watched: npt.NDArray[np.bool_]
    """(F) Flows whose completion is measured."""
    start_packets: float | None = None
    """What each sender has on its way in its first round trip; off: what its port can send in one."""

    def alone_seconds(self) -> Numbers:
        """(F) How long each flow would take if there were no other."""
        paths, rate = self.paths, self.fabric.bytes_per_second
        slowest = np.minimum.reduceat(rate[paths.link], paths.first[:-1])
        return (self.flows.num_bytes - PACKET_BYTES) / slowest + travel_seconds(self.fabric, paths)

    def fair_seconds(self) -> Numbers:
        """(F) When each flow is done where all have max-min fair rates at every moment."""
        return finish_seconds(self.fabric, self.flows, self.paths, tolerance=1e-3)


def fabric_of(num_hosts: int) -> Fabric:
    """The fabric of the scenarios. Raises `BadInputError`."""
    if num_hosts < 8 or num_hosts > 1024:
        raise BadInputError("hosts", num_hosts, "from 8 to 1024")
    shape = FabricShape(kind="clos2", nodes_per_switch=_hosts_per_switch(num_hosts))
    rate = PORT_BYTES_PER_SECOND
    return build(shape, name="scenario", num_nodes=num_hosts, ports_per_node=1, nic_bytes_per_second=rate)


def _hosts_per_switch(num_hosts: int) -> int:
    """Eight, and at least four switches: flows of several meet above the target's."""
    return min(8, num_hosts // 4)


def settings_for(control: Control, fabric: Fabric, paths: Paths) -> SwitchSettings:
    """Those of HPCC's simulator for this port. For the hybrid, marks from the queue on that makes a round
    trip as long as its target: then what marks tell and what delay tells agree."""
    settings = SwitchSettings.simulator(PORT_BYTES_PER_SECOND)
    if not isinstance(control, Hybrid):
        return settings
    path_bytes = PORT_BYTES_PER_SECOND * float(base_round_trip_seconds(fabric, paths).max())
    return settings.step_at((control.base_target_ratio - 1) * path_bytes)


def scenario(name: str, num_hosts: int = 32, scale: float = 1.0) -> Scenario:
    """By name; ``scale`` multiplies all sizes. Raises `BadInputError`."""
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
    return Scenario(name, title, fabric, flows, paths, watched, start)


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
