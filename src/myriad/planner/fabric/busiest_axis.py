"""The axis with the most bytes between nodes in an iteration of a job, which `myriad report` passes to the
network models. All transfers of an axis are in flight at once, as in `myriad.planner.fabric.job_exposure`.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from myriad.network.congestion_scenarios import (
    PORT_BYTES_PER_SECOND,
    CongestionScenario,
    extract_subfabric,
    find_hot_spot,
)
from myriad.network.fabric import Flows
from myriad.network.hash_conflicts import node_order
from myriad.network.rank_transfers import inter_node_flows, merge_transfers
from myriad.network.routing import Routes, ecmp
from myriad.planner.fabric.fabric_placement import rank_mapping
from myriad.planner.fabric.job_exposure import FabricJob
from myriad.planner.fabric.job_flows import Axis
from myriad.units import format_number

__all__ = ["AS_IT_IS", "BusiestAxis"]

AS_IT_IS = "as it is"
"""Name of the job's current placement."""
_WORDS: dict[Axis, str] = {
    "dp": "its data-parallel rings",
    "pp": "its messages between pipeline stages",
    "tp": "its tensor-parallel rings",
}
_MOST_FLOWS = 48
_MOST_BYTES = 8e6
"""Largest flow in bytes on a subfabric: some hundred round trips, after which congestion controls are
steady."""


class BusiestAxis:
    """The busiest axis of a job that is placed on a fabric."""

    def __init__(self, job: FabricJob) -> None:
        self.job = job
        found = {axis: self._flows(axis) for axis in job.parts}
        self.axis: Axis = max(found, key=lambda axis: float(found[axis].num_bytes.sum()))

    def _flows(self, axis: Axis, elsewhere: FabricJob | None = None) -> Flows:
        job = elsewhere or self.job
        return inter_node_flows(merge_transfers([part.exchange for part in job.parts[axis]]), job.mapping)[0]

    @property
    def words(self) -> str:
        """Description of the axis for a report."""
        return _WORDS[self.axis]

    def flows_at(self, routes: Routes, placement: str, seed: int) -> Flows:
        """Return the axis's flows at the job's placement, or with its nodes packed, spread or drawn."""
        if placement == AS_IT_IS:
            nodes: npt.NDArray[np.int64] = self.job.mapping.node
        else:
            nodes = node_order(routes, placement, seed)[: len(self.job.mapping.node)]
        return self._flows(self.axis, self.job.at(rank_mapping(self.job.costs, routes, nodes)))

    def hot_spot(self, routes: Routes, seed: int = 0) -> CongestionScenario | None:
        """Return the place where most of the axis's flows meet under one seed of the hashes. Its ports have
        the rate for which parameters of congestion controls are published. ``None``: no link is too narrow
        for the flows."""
        flows = self.flows_at(routes, AS_IT_IS, seed)
        paths = ecmp(routes, flows, seed)
        chosen = find_hot_spot(routes.fabric, flows, paths, _MOST_FLOWS)
        if not len(chosen):
            return None
        fabric, few, ways = extract_subfabric(routes.fabric, flows, paths, chosen)
        own = fabric.bytes_per_second[fabric.source < fabric.num_ports]
        rates = fabric.bytes_per_second * (PORT_BYTES_PER_SECOND / float(np.median(own)))
        size = min(_MOST_BYTES, float(few.num_bytes.max()))
        few = replace(few, num_bytes=few.num_bytes * (size / float(few.num_bytes.max())))
        title = (
            f"{len(few)} of {len(flows):,} flows of {self.words}, up to {format_number(size / 1e6)} MB each"
        )
        watched = np.ones(len(few), dtype=np.bool_)
        return CongestionScenario(
            "where most meet", title, replace(fabric, bytes_per_second=rates), few, ways, watched
        )
