"""A run on Ray, as the command line asks for it: what is refused, and how it is started."""

import logging
import os
from importlib import import_module
from ipaddress import ip_address
from typing import Any

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.resilience.engines.engine import Observer, Outcome
from myriad.resilience.engines.ray_cluster.engine import RayEngine
from myriad.resilience.engines.ray_cluster.room import Needs, Room
from myriad.resilience.engines.supervise import see_through
from myriad.resilience.listen import check_listen, split_listen
from myriad.run import Run

__all__ = ["check_ray", "needs_of", "run_ray"]

_GATHER_SECONDS = 600.0
"""A cluster may have to grow first."""


def check_ray(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuses a job when there is no Ray, or a driver that its machines would not reach. Raises
    `BadInputError`."""
    ray = _connect()
    check_listen(job.resilience.listen)
    own = ray.util.get_node_ip_address()
    others = {machine["NodeManagerAddress"] for machine in ray.nodes() if machine["Alive"]} - {own}
    if others and _is_loopback(job.resilience.listen):
        allowed = f"an address of this machine at which Ray's others reach it, such as {own}"
        raise BadInputError("resilience.listen", job.resilience.listen, allowed)


def _is_loopback(listen: str) -> bool:
    host, _ = split_listen(listen)
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def run_ray(run: Run, world: int, *, threads: int = 0, observer: Observer | None = None) -> Outcome:
    """Has ``world`` ranks train on machines of Ray's. Raises `RunFailedError`."""
    ray = _connect()
    job = run.job()
    needs = needs_of(job, ray.cluster_resources().get("GPU", 0) > 0)
    how = job.resilience
    engine = RayEngine(run, Room(needs), how.nodes, how.spares, threads or 1, how.patience)
    return see_through(run, world, engine, observer, gather_seconds=_GATHER_SECONDS)


def needs_of(job: Job, has_gpus: bool) -> Needs:
    """A core for each thread of a node's ranks, an accelerator for each of them where there are any."""
    each = job.layout.world // job.resilience.nodes
    uses = job.train.device == "cuda" or (job.train.device == "auto" and has_gpus)
    return Needs(cores=each * max(1, job.train.threads), gpus=each if uses else 0)


def _connect() -> Any:
    """Ray, and the cluster that there is: ``RAY_ADDRESS`` names it, else it is this machine's."""
    key = "resilience.engine"
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")  # else Ray writes into our output what it sees
    try:
        ray: Any = import_module("ray")
    except ModuleNotFoundError:
        raise BadInputError(key, "ray", "needs Ray: pip install 'myriad[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            why = str(error).strip().partition("\n")[0]
            allowed = f"needs a Ray cluster: `ray start` on its machines, or RAY_ADDRESS ({why})"
            raise BadInputError(key, "ray", allowed) from None
    return ray
