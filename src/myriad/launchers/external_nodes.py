"""Nodes that are started from outside, by a person or an unknown cluster manager: `myriad join RUN` on each;
and a standby, a machine that takes over when the machine of the driver is lost: `myriad train RUN
--standby`.

    machine A    myriad train JOB --resilience.engine join --resilience.journal redis://R:6379 ...    leads
    machine B    myriad train RUN --standby --resilience.listen B                                waits for it

The run begins when enough nodes have joined; further nodes are spares. A standby works alike: it keeps a
driver alive, has a screen, and returns an exit code. Its driver waits for the lease (`StandbyDriver`);
once it leads, the loggers of the job's metrics start here. Without Redis there is no standby: a lock on a
shared file system stays with a lost machine for a minute or more (NFS), or works on one machine only, and
a program cannot detect either.
"""

import socket
from typing import Literal

from myriad.alerts.config import check_alert_places
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.launchers.launcher import Observer, Outcome
from myriad.launchers.metric_loggers import Loggers
from myriad.launchers.run_start import alarm_options, answered, driver_options, link_options, open_lease
from myriad.launchers.supervised_run import supervise, supervise_run
from myriad.run import Run
from myriad.supervise.driver_address import check_listen
from myriad.telemetry.config import check_loggers
from myriad.wire.run_secret import secret_place

__all__ = ["check_joined", "check_standby", "run_joined", "stand_by"]


def check_standby(run: Run, job: Job) -> None:
    """Refuse a run that cannot have a standby. Raises `BadInputError`."""
    how = job.resilience
    if how.engine != "join":
        allowed = "needs the engine join: what an engine has started is lost with its machine"
        raise BadInputError("--standby", how.engine, allowed)
    if how.journal == "file":
        allowed = "needs resilience.journal = redis://HOST:PORT: a file does not show that its writer is lost"
        raise BadInputError("--standby", how.journal, allowed)
    check_listen(how.listen)
    check_loggers(job.telemetry.loggers)
    check_alert_places(job.alerts)
    begun = secret_place(run.path / "secret").exists()
    if not begun or answered(open_lease(run.path, how).inspect, how) == ("", False):
        raise BadInputError(
            "--standby", str(run.path), "no driver leads this run; start it with `myriad train RUN`"
        )


def stand_by(run: Run, job: Job, observer: Observer | None = None) -> Outcome | Literal["left"]:
    """Stand by until the run is over, under any driver. Return ``left`` if a person stops the standby.
    ``job`` has the address on which this machine listens. Raises `RunFailedError`."""
    how = job.resilience
    options = [*driver_options(open_lease(run.path, how), how), "--listen", how.listen]
    options += [*link_options(how), *alarm_options(job.alerts)]
    name = f"driver-{socket.gethostname()}"
    with run.shared_as_folder(), Loggers(run, job.telemetry.loggers) as loggers:
        return supervise(
            run, _ExternalNodes(), how.timeout_scale, options, observer, name, on_drive=loggers.begin
        )


_GATHER_SECONDS = 3600.0
"""How long to wait for people to start the nodes."""


class _ExternalNodes:
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
    return supervise_run(run, world, _ExternalNodes(), observer, gather_seconds=_GATHER_SECONDS)
