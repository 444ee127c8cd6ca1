"""What a job's program sends over the edge of each node in a step, for the driver to judge links by.

The bytes are those of the simulated program (`planner.job_flows`), as the fabric model has them: activations
and gradients between stages, gathers and reductions among replicas, tensor parallelism. The launcher counts
them once and hands them down in the plan: the driver imports neither the planner nor numpy for it.
"""

import logging
from typing import TYPE_CHECKING

from myriad.resilience.doctor.devices import has_driver

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = ["expected_traffic"]

_LOG = logging.getLogger(__name__)


def expected_traffic(job: "Job", num_nodes: int) -> tuple[tuple[float, float], ...]:
    """Bytes sent and received in a step by each block of world / ``num_nodes`` consecutive ranks, to and from
    other blocks. Empty where the job has one node, or the simulator cannot have it: links are then judged by
    what their own steps carry."""
    world, on_cpu = job.layout.world, job.train.device == "cpu"
    on_cpu |= job.train.device == "auto" and not has_driver()
    if num_nodes < 2 or world % num_nodes or job.layout.cp * job.layout.ep != 1 or job.comm.sync_every > 1:
        return ()
    try:
        return _counted(job, num_nodes, on_cpu=on_cpu)
    except Exception as error:  # a model of the job is no condition for training it
        _LOG.info("the traffic of the job is not known: %s", error)
        return ()


def _counted(job: "Job", num_nodes: int, *, on_cpu: bool) -> tuple[tuple[float, float], ...]:
    import numpy as np

    from myriad.job import work_of
    from myriad.planner.costs import Costs
    from myriad.planner.job_flows import phases_of
    from myriad.recipes.cluster import load_cluster

    size = job.layout.world // num_nodes
    cluster = load_cluster("laptop" if on_cpu else "one-node-8xh100")
    cluster = cluster.model_copy(update={"nodes": num_nodes, "accelerators_per_node": size})
    single = job.train.precision == "float32" or (job.train.precision == "auto" and on_cpu)
    work = work_of(job, 4 if single else 2)
    sent, received = np.zeros(num_nodes), np.zeros(num_nodes)
    for phase in phases_of(Costs(work, cluster)):
        exchange, times = phase.exchange, len(phase.start_seconds)
        source, target = exchange.source // size, exchange.target // size
        away = source != target
        sent += np.bincount(source[away], exchange.num_bytes[away], num_nodes) * times
        received += np.bincount(target[away], exchange.num_bytes[away], num_nodes) * times
    order = job.comm.node_order or range(num_nodes)
    placed = {node: place for place, node in enumerate(order)}
    return tuple((float(sent[placed[node]]), float(received[placed[node]])) for node in range(num_nodes))
