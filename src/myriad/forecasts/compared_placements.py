"""``myriad network place``: jobs on a cluster's fabric, with nodes as numbered, random, and optimised.

found = compare_placements(jobs, cluster, seeds=range(32))
found.verdicts[2][0].seconds        seconds of job 0 under each draw of the hash seeds, nodes optimised
found.nodes(2)                      nodes of each job, slot by slot
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from myriad.forecasts.iteration_forecast import costs_of
from myriad.job import Job
from myriad.network.fabric import Fabric
from myriad.network.routing import Routes
from myriad.planner import Cluster, Costs, SimulationCache
from myriad.planner.fabric.cluster_fabric import fabric_of
from myriad.planner.fabric.fabric_placement import ArrangementResult, JobsOnFabric
from myriad.units import format_number

__all__ = ["PLACEMENTS", "TIERS", "ComparedPlacements", "compare_placements", "format_iteration"]

PLACEMENTS = ("numbered", "random", "optimised")
"""The placements, in the order in which they are compared."""
TIERS = ("inside nodes", "one switch", "one pod", "above pods")
"""The highest switch that traffic goes through; index: tier."""


@dataclass(frozen=True, eq=False)
class ComparedPlacements:
    """Jobs, and the forecast of each placement."""

    jobs: tuple[Job, ...]
    costs: tuple[Costs, ...]
    fabric: Fabric
    verdicts: Sequence[Sequence[ArrangementResult]]
    """Forecasts by placement and job."""
    plain_seconds: Sequence[float]
    """Seconds of each job's iteration, predicted without switches."""
    routing: str
    queue_pairs: int
    num_draws: int

    @property
    def titles(self) -> list[str]:
        """Names of the jobs; equal names are numbered."""
        names = [job.name for job in self.jobs]
        return [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]

    def nodes(self, number: int) -> tuple[tuple[int, ...], ...]:
        """Return the nodes of placement ``number``, by job and slot."""
        return self.verdicts[number][0].arrangement.nodes

    def headline(self) -> str:
        """Return jobs and cluster in one line."""
        world = sum(job.layout.world for job in self.jobs)
        cluster = self.costs[0].cluster
        return f"{', '.join(self.titles)}: {world:,} of {cluster.world:,} accelerators of {cluster.name}"

    def conditions(self) -> str:
        """Return the switches, the routing and the number of draws in one line."""
        tiers = np.bincount(self.fabric.tier)[1:]
        switches = " + ".join(f"{count:,}" for count in tiers if count)
        pairs = f"{self.queue_pairs} queue pair{'s' * (self.queue_pairs > 1)} a transfer"
        drawn = f"{self.num_draws} draws" if self.routing == "ecmp" else "no hash seeds"
        return f"switches by tier: {switches}; {self.routing}, {pairs}, {drawn}"

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return {
            "cluster": self.costs[0].cluster.name,
            "switches": [int(count) for count in np.bincount(self.fabric.tier)[1:]],
            "routing": self.routing,
            "queue_pairs": self.queue_pairs,
            "draws": self.num_draws,
            "jobs": [
                {"job": title, "ranks": job.layout.world, "plain_seconds": plain}
                for title, job, plain in zip(self.titles, self.jobs, self.plain_seconds, strict=True)
            ],
            "placements": [
                {"placement": row[0].arrangement.name, "jobs": [self._verdict(one) for one in row]}
                for row in self.verdicts
            ],
        }

    def quantiles(self, number: int, job: int) -> tuple[float, float, float]:
        """Return p50 and p95 of a job's seconds, and the median of its slowest ring's ratio."""
        one = self.verdicts[number][job]
        p50, p95 = np.percentile(one.seconds, (50, 95))
        return float(p50), float(p95), float(np.median(one.slowest_ring))

    def _verdict(self, one: ArrangementResult) -> dict[str, Any]:
        p50, p95 = np.percentile(one.seconds, (50, 95))
        p5_ring, p50_ring = np.percentile(one.slowest_ring, (5, 50))
        return {
            "job": self.titles[one.job],
            "nodes": list(one.arrangement.nodes[one.job]),
            "p50_seconds": float(p50),
            "p95_seconds": float(p95),
            "slowest_ring_p50_ratio": float(p50_ring),
            "slowest_ring_p5_ratio": float(p5_ring),
            "slowest_exchange_p50_ratio": float(np.median(one.slowest_exchange)),
            "shared_ratio": one.shared_ratio,
            "bytes": dict(zip(TIERS, map(float, one.tier_bytes), strict=True)),
        }

    def node_groups(self) -> list[str]:
        """Return the names of what nodes can hold: parts of the pipeline, or with several jobs the jobs."""
        if len(self.jobs) > 1:
            return self.titles
        first = sorted(set(self._part_of_slot()))
        return [f"from pipeline rank {part}" if i == 0 else f"{part}" for i, part in enumerate(first)]

    def group_of_nodes(self, number: int) -> list[int]:
        """Return for each node of the cluster the index of its group under placement ``number``; -1: idle."""
        nodes = self.nodes(number)
        found = [-1] * self.fabric.num_nodes
        if len(self.jobs) > 1:
            for job, own in enumerate(nodes):
                for node in own:
                    found[node] = job
            return found
        part_of = self._part_of_slot()
        group = {part: i for i, part in enumerate(sorted(set(part_of)))}
        for slot, node in enumerate(nodes[0]):
            found[node] = group[part_of[slot]]
        return found

    def _part_of_slot(self) -> list[int]:
        """Return the first pipeline rank on each node of a single job."""
        layout = self.jobs[0].layout
        per_node = self.costs[0].cluster.accelerators_per_node
        return [slot * per_node // layout.tp % layout.pp for slot in range(-(-layout.world // per_node))]


def compare_placements(
    jobs: Sequence[Job],
    cluster: Cluster,
    *,
    nodes: Sequence[Sequence[int]] | None,
    routing: Literal["ecmp", "adaptive"],
    queue_pairs: int,
    seeds: range,
    progress: Callable[[str, float], None],
) -> ComparedPlacements:
    """Forecast the jobs under each of `PLACEMENTS`, once for each hash seed.

    ``nodes``: the nodes that each job may have; ``progress``: receives the placement and the ratio done."""
    every, simulations = [costs_of(job, cluster) for job in jobs], SimulationCache()
    routes = Routes(fabric_of(cluster))
    on_fabric = JobsOnFabric(
        every, routes, simulations.seconds, nodes=nodes, queue_pairs=queue_pairs, routing=routing
    )
    verdicts, ways = [], (on_fabric.numbered, lambda: on_fabric.random(seeds[0]), on_fabric.optimised)
    for number, (name, way) in enumerate(zip(PLACEMENTS, ways, strict=True)):
        progress(name, number / len(ways))
        verdicts.append(on_fabric.evaluate(way(), seeds))
    plain = [simulations.seconds(costs) for costs in every]
    return ComparedPlacements(
        tuple(jobs), tuple(every), routes.fabric, verdicts, plain, routing, queue_pairs, len(seeds)
    )


def format_iteration(seconds: float) -> str:
    """Return the seconds of an iteration with four digits: ``1.234 s``, ``12.34 ms``."""
    return f"{format_number(seconds, 4)} s" if seconds >= 0.1 else f"{format_number(seconds * 1e3, 4)} ms"
