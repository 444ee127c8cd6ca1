"""``python -m myriad.resilience.engines.slurm_node RUN NODE``: a node of a run in a Slurm job.

It is what `myriad join` is; and when the driver is lost with its node, which an allocation with ``--no-kill``
survives without its script, whoever is left has Slurm queue the job again.
"""

import os
import sys

from myriad.errors import MyriadError
from myriad.resilience.engines.slurm import slurm
from myriad.resilience.node.join import join
from myriad.resilience.reach import DriverLostError
from myriad.run import Run

__all__ = ["main"]

_WAIT_SECONDS, _LONELY_SECONDS = 300.0, 30.0


def main(arguments: list[str]) -> int:
    """Until the run is over; gives the exit code."""
    run = Run(arguments[0])
    try:
        join(run, int(arguments[1]), wait_seconds=_WAIT_SECONDS, lonely_seconds=_LONELY_SECONDS)
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
