"""The interface of a launcher, which starts the node agents of a run and decides nothing, and the table of
launchers.

    supervised_run ──start, poll, replace node k, ask to stop, wait, close──► Launcher ──► agents of all nodes

A launcher is a module with two functions, named in `_ENGINES` and imported on demand: one refuses jobs that
it cannot start, one trains a run. Each node has one agent: a child process (`local`), a `myriad join` that a
person has started (`join`), or a task of a cluster manager.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from myriad.alerts.config import check_alert_places
from myriad.job import Job
from myriad.job.job_values import device_job_of
from myriad.program.device_needs import check_device_job, queues_in
from myriad.run import Run
from myriad.telemetry.config import check_loggers

__all__ = ["Launcher", "Observer", "Outcome", "check_engine", "train_on"]

_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""Device files of NVIDIA's and AMD's drivers. Importing torch, which would be more exact, takes a second."""

Outcome = Literal["finished", "interrupted"]


class Observer(Protocol):
    """Observes a run; an exception of the observer does not affect the run."""

    def tick(self) -> None:
        """Update the observer; called about ten times a second while ranks are at work."""

    def stopping(self) -> None:
        """Handle a stop: the ranks were just asked to save and stop."""


class Launcher(Protocol):
    """Runs the agents of nodes 0, 1, ...: first the nodes that the ranks need, then the spares."""

    def start(self) -> None:
        """Launch all nodes. Raises `RunFailedError`."""

    def poll(self) -> None:
        """Restart agents that died; called ten times a second. Raises `RunFailedError` when an agent keeps
        dying."""

    def replace(self, node: int) -> None:
        """End a node that the driver has given up, and start another one in its place if possible."""

    def ask_to_stop(self) -> None:
        """Have ranks save and stop, even if no driver is there to command it."""

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for the agents to end by themselves, because the run is over."""

    def close(self) -> None:
        """End all agents and all processes that they have started."""


class Train(Protocol):
    """Trains a run until its ranks are done. Raises `RunFailedError`."""

    def __call__(
        self, run: Run, world: int, *, threads: int = 0, observer: Observer | None = None
    ) -> Outcome: ...


_ENGINES = {
    "local": ("myriad.launchers.local", "check_local", "run_local"),
    "join": ("myriad.launchers.external_nodes", "check_joined", "run_joined"),
    "slurm": ("myriad.launchers.slurm", "check_slurm", "run_slurm"),
    "ray": ("myriad.launchers.ray_launcher", "check_ray", "run_ray"),
    "kubernetes": ("myriad.launchers.kubernetes.kubernetes_launcher", "check_kubernetes", "run_kubernetes"),
}


def check_engine(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuse a job that its launcher cannot start, a schedule that may deadlock on GPUs, and metrics or
    alarms with an unusable sink. Raises `BadInputError`."""
    check_loggers(job.telemetry.loggers)
    check_alert_places(job.alerts)
    _check_programs(job)
    module, check, _ = _ENGINES[job.resilience.engine]
    getattr(import_module(module), check)(job, oversubscribe=oversubscribe)


def _check_programs(job: Job) -> None:
    """Check the schedule before any rank starts; ranks on GPUs repeat the check before they exchange a
    tensor. Launchers that pass on the environment use this one's."""
    if job.layout.pp > 1 and uses_gpus(job):
        environment = os.environ if job.resilience.engine in ("local", "slurm") else {}
        check_device_job(device_job_of(job), queues_in(environment, job.layout, job.overlap))


def train_on(job: Job) -> Train:
    """Return the training function of the job's launcher."""
    module, _, train = _ENGINES[job.resilience.engine]
    found: Any = getattr(import_module(module), train)
    trains: Train = found
    return trains


def uses_gpus(job: Job) -> bool:
    """Return whether ranks on this machine would use GPUs, as far as is known without querying one."""
    has_gpu = any(driver.exists() for driver in _GPU_DRIVERS)
    return job.train.device == "cuda" or (job.train.device == "auto" and has_gpu)
