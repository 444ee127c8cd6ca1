"""A machine that takes over when the machine of the driver is lost: `myriad train RUN --standby`.

    machine A    myriad train JOB --resilience.engine join --resilience.journal redis://R:6379 ...    drives
    machine B    myriad train RUN --standby --resilience.listen B                                waits for it

It is what `myriad train` is with nodes that join: a driver that is kept alive, a screen, an exit code. Its
driver waits for the lease (`candidate.py`); once it has that, the tools that get the job's metrics are told
from here. Without Redis nobody can stand by: a lock of a shared file system stays with a lost machine for a
minute and more (NFS), or holds on one machine alone, and neither can be seen.
"""

import socket
from typing import Literal

from myriad.alerts.config import check_alert_places
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.resilience.engines.begin import alarm_options, answered, driver_options, open_lease
from myriad.resilience.engines.engine import Observer, Outcome
from myriad.resilience.engines.joined import Joined
from myriad.resilience.engines.loggers import Loggers
from myriad.resilience.engines.supervise import supervise
from myriad.resilience.listen import check_listen
from myriad.resilience.wire import secret_place
from myriad.run import Run
from myriad.telemetry.logger_names import check_loggers

__all__ = ["check_standby", "stand_by"]


def check_standby(run: Run, job: Job) -> None:
    """Refuses where nobody can stand by. Raises `BadInputError`."""
    how = job.resilience
    if how.engine != "join":
        allowed = "needs the engine join: what an engine has started is lost with its machine"
        raise BadInputError("--standby", how.engine, allowed)
    if how.journal == "file":
        allowed = "needs resilience.journal = redis://HOST:PORT: files cannot tell that their writer is lost"
        raise BadInputError("--standby", how.journal, allowed)
    check_listen(how.listen)
    check_loggers(job.telemetry.loggers)
    check_alert_places(job.alerts)
    begun = secret_place(run.path / "secret").exists()
    if not begun or answered(open_lease(run.path, how).look, how) == ("", False):
        raise BadInputError("--standby", str(run.path), "nobody drives this run; `myriad train RUN` does")


def stand_by(run: Run, job: Job, observer: Observer | None = None) -> Outcome | Literal["left"]:
    """Until the run is over, whoever drives it then; ``left``: until a person wanted no more of it. ``job``
    says where this machine listens. Raises `RunFailedError`."""
    how = job.resilience
    options = [*driver_options(open_lease(run.path, how), how), "--listen", how.listen]
    options += alarm_options(job.alerts)
    name = f"driver-{socket.gethostname()}"
    with Loggers(run, job.telemetry.loggers) as loggers:
        return supervise(run, Joined(), how.patience, options, observer, name, on_drive=loggers.begin)
