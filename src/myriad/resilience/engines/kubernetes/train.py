"""A run on Kubernetes, as its driver's pod starts it."""

import os

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.resilience.engines.engine import Observer, Outcome
from myriad.resilience.engines.kubernetes.api import in_cluster
from myriad.resilience.engines.kubernetes.engine import KubernetesEngine
from myriad.resilience.engines.kubernetes.labels import NAMESPACE, RUN_NAME
from myriad.resilience.engines.supervise import see_through
from myriad.resilience.listen import check_listen
from myriad.run import Run

__all__ = ["check_kubernetes", "run_kubernetes"]

_GATHER_SECONDS = 3600.0
"""A cluster may have to grow, and images to be pulled."""


def check_kubernetes(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuses to start anywhere but in the driver's pod. Raises `BadInputError`."""
    if in_cluster() is None or RUN_NAME not in os.environ or NAMESPACE not in os.environ:
        allowed = "only in the driver's pod; `myriad manifests JOB --image IMAGE` writes what to apply"
        raise BadInputError("resilience.engine", "kubernetes", allowed)
    check_listen(job.resilience.listen)


def run_kubernetes(run: Run, world: int, *, threads: int = 0, observer: Observer | None = None) -> Outcome:
    """Has ``world`` ranks train in pods that join. Raises `RunFailedError`."""
    api = in_cluster()
    assert api is not None, "it was checked"
    spares = run.job().resilience.spares
    engine = KubernetesEngine(run, api, os.environ[NAMESPACE], os.environ[RUN_NAME], spares)
    return see_through(run, world, engine, observer, gather_seconds=_GATHER_SECONDS)
