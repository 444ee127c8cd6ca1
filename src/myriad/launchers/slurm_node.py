"""``python -m myriad.launchers.slurm_node RUN NODE``: a node of a run in a Slurm job.

It does the same as `myriad join`. If the driver is lost with its node, an allocation with ``--no-kill``
survives without its batch script; the remaining nodes then have Slurm requeue the job.
"""

import os
import sys

from myriad.errors import MyriadError
from myriad.launchers.slurm import slurm
from myriad.run import Run
from myriad.supervise.agent.node_join import join
from myriad.supervise.driver_address import DriverLostError

__all__ = ["main"]

_WAIT_SECONDS, _UNATTENDED_SECONDS = 300.0, 30.0


def main(arguments: list[str]) -> int:
    """Join the run until it is over; return the exit code."""
    run = Run(arguments[0])
    try:
        join(run, int(arguments[1]), wait_seconds=_WAIT_SECONDS, unattended_seconds=_UNATTENDED_SECONDS)
    except DriverLostError as error:
        _requeue(run, str(error))
        return error.exit_code
    except MyriadError as error:
        sys.stderr.write(f"myriad: error: {error}\n")
        return error.exit_code
    return 0


def _requeue(run: Run, problem: str) -> None:
    job = os.environ["SLURM_JOB_ID"]
    try:
        slurm("scontrol", "requeue", job)
        run.append_event("requeue", job=job, problem=problem)
    except OSError as error:
        run.append_event("requeue", job=job, problem=f"{problem}; not requeued: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
