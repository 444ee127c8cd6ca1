"""A rehearsal's iterations as the planner predicts them: the machine as it was measured, its links as set."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.job import Job, work_of
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.rehearsal.shared_core_simulator import predict_iteration
from myriad.train.calibration.transfer_timings import LinkTimes, time_links
from rehearsal_cases import LOOPBACK

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import Hosts, bits_per_second
from pace import core_speeds

__all__ = ["Way", "measure_way", "predicted_seconds"]

_PAYLOAD = 0.956
"""Share of a shaped link's rate that is payload; the rest are headers (`hosts.py --check`)."""


@dataclass(frozen=True)
class Way:
    """How ranks reach each other: all in one host, or each in its own behind a link of a rate."""

    name: str
    busy_ratio: float = 0.0
    """Share of a core that a transfer over the link takes."""


def measure_way(name: str) -> Way:
    """What a link takes of the cores is measured between two hosts, without any layout; its rate is known."""
    if name == LOOPBACK:
        return Way(name)
    with Hosts(2, rate=name) as hosts:
        ranks = hosts.run_ranks(_time_links, world=2)
    return Way(name, sum(rank.busy_ratio for rank in ranks) / 2)


def _time_links() -> LinkTimes:
    times = time_links(open_world(Layout(tp=2), torch.device("cpu")))
    close_world()
    return times


def predicted_seconds(job: Job, machine: Cluster, way: Way, pace: Sequence[float] = ()) -> float:
    """Return the seconds of one iteration on ``machine``; ``pace``: its cores' speeds then, if changed."""
    cluster = _cluster(machine, way, job.layout.world)
    if pace:
        cluster = cluster.model_copy(update={"core_speeds": core_speeds(cluster, pace)})
    return predict_iteration(Costs(work_of(job, value_bytes=4), cluster), spans=False).seconds


def _cluster(machine: Cluster, way: Way, world: int) -> Cluster:
    if way.name == LOOPBACK:
        return machine.model_copy(update={"accelerators_per_node": world})
    rate = bits_per_second(way.name) / 8 * _PAYLOAD
    measured = {"bytes_per_second": rate, "busy_ratio": way.busy_ratio}
    links = machine.links.model_copy(update={"network": machine.links.node.model_copy(update=measured)})
    return machine.model_copy(update={"nodes": world, "accelerators_per_node": 1, "links": links})
