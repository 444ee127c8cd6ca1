"""Nodes that are started from outside, by a person or an unknown cluster manager: `myriad join RUN` on each.

The run begins when enough nodes have joined; further nodes are spares.
"""

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.launchers.launcher import Observer, Outcome
from myriad.launchers.supervised_run import supervise_run
from myriad.run import Run
from myriad.supervise.driver_address import check_listen

__all__ = ["ExternalNodes", "check_joined", "run_joined"]

_GATHER_SECONDS = 3600.0
"""How long to wait for people to start the nodes."""


class ExternalNodes:
    """The launcher of nodes that are started from outside. It starts and ends no process; agents leave when
    the driver reports that the run is over."""

    def start(self) -> None:
        """Do nothing: nodes join by themselves."""

    def poll(self) -> None:
        """Do nothing: whoever started a node restarts it."""

    def replace(self, node: int) -> None:
        """Do nothing: the driver has closed the connection, and a healthy node may join again as a spare."""

    def ask_to_stop(self) -> None:
        """Do nothing: the driver notifies the agents."""

    def wait(self, seconds: float) -> None:
        """Do nothing: the driver notifies the agents."""

    def close(self) -> None:
        """Do nothing: agents end on the driver's command, or when they find no driver."""


def check_joined(job: Job, *, oversubscribe: bool = False) -> None:
    """Refuse a job that nodes cannot join. Raises `BadInputError`."""
    if job.resilience.spares:
        allowed = "0 with the engine join: a machine that joins beyond resilience.nodes is a spare"
        raise BadInputError("resilience.spares", job.resilience.spares, allowed)
    check_listen(job.resilience.listen)


def run_joined(run: Run, world: int, *, threads: int = 0, observer: Observer | None = None) -> Outcome:
    """Train ``world`` ranks on nodes that join. Raises `RunFailedError`."""
    return supervise_run(run, world, ExternalNodes(), observer, gather_seconds=_GATHER_SECONDS)
