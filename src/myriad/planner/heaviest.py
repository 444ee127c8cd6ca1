"""Of what a job sends between nodes in an iteration, the axis with the most bytes: what `myriad report` asks
the network's models about. All of an axis is under way at once, as in `myriad.planner.exposure`.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from myriad.network.crowded import crowd, cut_out
from myriad.network.exchange import flows_of, joined
from myriad.network.exposure import node_order
from myriad.network.flows import Flows
from myriad.network.routing import Routes, ecmp
from myriad.network.scenarios import PORT_BYTES_PER_SECOND, Scenario
from myriad.planner.exposure import Tenant
from myriad.planner.fabric_placement import seats_of
from myriad.planner.job_flows import Axis
from myriad.units import format_number

__all__ = ["AS_IT_IS", "Heaviest"]

AS_IT_IS = "as it is"
"""The placement that the job has."""
_WORDS: dict[Axis, str] = {
    "dp": "its data-parallel rings",
    "pp": "its messages between pipeline stages",
    "tp": "its tensor-parallel rings",
}
_MOST_FLOWS = 48
_MOST_BYTES = 8e6
"""Of a flow on a piece of the fabric: some hundred round trips, after which controls are where they stay."""


class Heaviest:
    """One axis of a job that is somewhere on a fabric."""

    def __init__(self, tenant: Tenant) -> None:
        self.tenant = tenant
        found = {axis: self._flows(axis) for axis in tenant.parts}
        self.axis: Axis = max(found, key=lambda axis: float(found[axis].num_bytes.sum()))

    def _flows(self, axis: Axis, elsewhere: Tenant | None = None) -> Flows:
        tenant = elsewhere or self.tenant
        return flows_of(joined([part.exchange for part in tenant.parts[axis]]), tenant.seats)[0]

    @property
    def words(self) -> str:
        """What it is."""
        return _WORDS[self.axis]

    def lay(self, routes: Routes, placement: str, seed: int) -> Flows:
        """Its flows where the job is, or with its nodes packed, spread or drawn."""
        if placement == AS_IT_IS:
            nodes: npt.NDArray[np.int64] = self.tenant.seats.node
        else:
            nodes = node_order(routes, placement, seed)[: len(self.tenant.seats.node)]
        return self._flows(self.axis, self.tenant.at(seats_of(self.tenant.costs, routes, nodes)))

    def crowded(self, routes: Routes, seed: int = 0) -> Scenario | None:
        """Where its flows meet most under one seed of the hashes, with ports of the rate that parameters of
        congestion controls are published for; ``None``: no link is too narrow for them."""
        flows = self.lay(routes, AS_IT_IS, seed)
        paths = ecmp(routes, flows, seed)
        chosen = crowd(routes.fabric, flows, paths, _MOST_FLOWS)
        if not len(chosen):
            return None
        fabric, few, ways = cut_out(routes.fabric, flows, paths, chosen)
        own = fabric.bytes_per_second[fabric.source < fabric.num_ports]
        rates = fabric.bytes_per_second * (PORT_BYTES_PER_SECOND / float(np.median(own)))
        size = min(_MOST_BYTES, float(few.num_bytes.max()))
        few = replace(few, num_bytes=few.num_bytes * (size / float(few.num_bytes.max())))
        title = (
            f"{len(few)} of {len(flows):,} flows of {self.words}, up to {format_number(size / 1e6)} MB each"
        )
        watched = np.ones(len(few), dtype=np.bool_)
        return Scenario("where most meet", title, replace(fabric, bytes_per_second=rates), few, ways, watched)
