"""A run's ranks on the switches of the cluster that ``myriad report --cluster`` names, as a picture."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from myriad.job import Job
from myriad.planner.cluster import Cluster

if TYPE_CHECKING:
    from myriad.cli.network_place_show import Placed

__all__ = ["placement_parts"]

_DRAWS = 16


def placement_parts(job: Job, cluster: Cluster) -> Iterator[str]:
    """HTML; nothing where the cluster's file says of no fabric, or the job fits in one node."""
    if cluster.fabric is None or job.layout.world <= cluster.accelerators_per_node:
        return
    placed = _placed(job, cluster)
    yield "<h2>Placement, predicted</h2>"
    yield f'<p class="dim">{placed.conditions()}</p>'
    yield f'<div class="card">{placed.picture()}</div>'


def _placed(job: Job, cluster: Cluster) -> "Placed":
    from myriad.cli.forecast import costs_of, nodes_of
    from myriad.cli.network_place_show import Placed
    from myriad.network.routing import Routes
    from myriad.planner.cluster_fabric import fabric_of
    from myriad.planner.job_placement import JobsOnFabric
    from myriad.planner.rescore import Simulations

    costs, order, judge = costs_of(job, cluster), nodes_of(job, cluster), Simulations().seconds
    routes = Routes(fabric_of(cluster))
    on_fabric = JobsOnFabric([costs], routes, judge, nodes=None if order is None else [order])
    verdicts = [on_fabric.verdicts(on_fabric.numbered(), range(_DRAWS))]
    return Placed((job,), (costs,), routes.fabric, verdicts, [judge(costs)], "ecmp", 1, _DRAWS)
