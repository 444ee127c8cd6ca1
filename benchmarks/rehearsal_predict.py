"""A rehearsal's iterations as the planner predicts them: the machine as it was measured, its links as set."""

from functools import cache

from hosts import bits_per_second
from myriad.job import Job
from myriad.planner.cluster import Cluster, Links
from myriad.planner.costs import Costs
from myriad.planner.sharing import predict
from myriad.planner.work import Practice, Work
from rehearsal_cases import LOOPBACK

__all__ = ["predicted_seconds", "work_of"]

_PAYLOAD = 0.956
"""Of what a shaped link carries: the rest are headers of Ethernet, IP and TCP (`hosts.py --check`)."""


def work_of(job: Job) -> Work:
    """What one iteration of a float32 job is to the planner."""
    return Work(
        job.model,
        job.layout,
        job.train.global_batch,
        job.overlap,
        Practice(tensor_chunks=job.overlap.tensor_chunks),
        optimizer=job.optimizer.name,
        value_bytes=4,
    )


def predicted_seconds(job: Job, machine: Cluster, link: str) -> float:
    """Of one iteration on ``machine``: all ranks in one host, or each in its own behind a link."""
    cluster = _cluster(machine, link, job.layout.world)
    return predict(Costs(work_of(job), cluster), spans=False).seconds


@cache
def _cluster(machine: Cluster, link: str, world: int) -> Cluster:
    if link == LOOPBACK:
        return machine.model_copy(update={"accelerators_per_node": world})
    loop = machine.links.node
    rate = bits_per_second(link) / 8 * _PAYLOAD
    # a byte costs a core what it costs on the loopback
    busy = loop.busy_ratio * rate / loop.bytes_per_second
    network = loop.model_copy(update={"bytes_per_second": rate, "busy_ratio": min(1.0, busy)})
    links = Links(node=loop, network=network)
    return machine.model_copy(update={"nodes": world, "accelerators_per_node": 1, "links": links})
