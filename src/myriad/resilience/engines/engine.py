"""What an engine is, and which there are: it starts a run's executors, and decides nothing.

    supervise.py ──start, poll, replace node k, ask to stop, wait, close──► Engine ──► executors of all nodes

An engine is a module with three functions, named in `_ENGINES` and imported when it is asked for: one refuses
jobs that it cannot start, one has a run trained. What it starts on a machine is an executor: a child process
(`local`), whatever a person starts there with `myriad join` (`join`), a task of a cluster manager.
"""

import os
from importlib import import_module
from typing import Any, Literal, Protocol

from myriad.alerts.config import check_alert_places
from myriad.job import Job
from myriad.job_values import device_job_of
from myriad.program.device_needs import check_device_job, queues_in
from myriad.resilience.engines.local_memory import uses_gpus
from myriad.run import Run
from myriad.telemetry.logger_names import check_loggers

__all__ = ["Engine", "Observer", "Outcome", "check_engine", "train_on"]

Outcome = Literal["finished", "interrupted"]


class Observer(Protocol):
    """Who watches a run; whatever it raises, the run goes on."""

    def tick(self) -> None:
        """Called about ten times a second while ranks are at work."""

    def stopping(self) -> None:
        """The ranks have just been asked to save and stop."""


class Engine(Protocol):
    """Has the executors of nodes 0, 1, ...: those that the ranks need, then the spares."""

    def start(self) -> None:
        """All of them. Raises `RunFailedError`."""

    def poll(self) -> None:
        """Looks after them, ten times a second: who has died is started again. Raises `RunFailedError` when
        that is in vain."""

    def replace(self, node: int) -> None:
        """The driver has given a node up: it is ended, and another brought in its stead where that can be."""

    def ask_to_stop(self) -> None:
        """Ranks save and stop, also if the driver is not there to say so."""

    def wait(self, seconds: float) -> None:
        """The run is over: they end by themselves."""

    def close(self) -> None:
        """None of them is left, nor what they have started."""


class Train(Protocol):
    """Has ranks train until they are done. Raises `RunFailedError`."""

    def __call__(
        self, run: Run, world: int, *, threads: int = 0, observer: Observer | None = None
    ) -> Outcome: ...


_ENGINES = {
    "local": ("myriad.resilience.engines.local", "check_local", "run_local"),
    "join": ("myriad.resilience.engines.joined", "check_joined", "run_joined"),
    "slurm": ("myriad.resilience.engines.slurm", "check_slurm", "run_slurm"),
    "ray": ("myriad.resilience.engines.ray_cluster.train", "check_ray", "run_ray"),
    "kubernetes": ("myriad.resilience.engines.kubernetes.train", "check_kubernetes", "run_kubernetes"),
}


def check_engine(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuses a job that its engine cannot start, whose programs may deadlock on GPUs, or whose metrics and
    alarms cannot go where it says. Raises `BadInputError`."""
    check_loggers(job.telemetry.loggers)
    check_alert_places(job.alerts)
    _check_programs(job)
    module, check, _ = _ENGINES[job.resilience.engine]
    getattr(import_module(module), check)(job, oversubscribe=oversubscribe)


def _check_programs(job: Job) -> None:
    """Ranks on GPUs check the same before they exchange a tensor: here it is refused before any starts. The
    environment is theirs with engines that hand it on."""
    if job.layout.pp > 1 and uses_gpus(job):
        environment = os.environ if job.resilience.engine in ("local", "slurm") else {}
        check_device_job(device_job_of(job), queues_in(environment, job.layout, job.overlap))


def train_on(job: Job) -> Train:
    """What has it trained, by its engine."""
    module, _, train = _ENGINES[job.resilience.engine]
    found: Any = getattr(import_module(module), train)
    trains: Train = found
    return trains
