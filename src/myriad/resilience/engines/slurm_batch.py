"""The batch script of a run under Slurm: as many nodes as it needs, with its spares, in an allocation that
stays when one is lost. Partition, account and time are asked for as for any job (SBATCH_PARTITION, ...).

When the time is nearly over, or the job is to make room, Slurm says so by SIGTERM: the run saves and stops,
and the job queues again. Whatever ends it, the same script goes on with the same run folder.
"""

import shlex
import sys
from pathlib import Path

from myriad.errors import RunFailedError
from myriad.job import Job
from myriad.resilience.engines.slurm import slurm
from myriad.run import Run
from myriad.whole_file import write_whole

__all__ = ["submit", "write_script"]

_NOTICE_SECONDS = 180
_SCRIPT = """#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --no-kill
#SBATCH --requeue
#SBATCH --signal=B:TERM@{notice_seconds}
#SBATCH --open-mode=append
#SBATCH --output={log}

cd {folder} || exit 1
asked=
trap 'asked=1; kill -TERM $pid' TERM
{program} train {run} &
pid=$!
wait $pid
code=$?
while kill -0 $pid 2>/dev/null; do wait $pid; code=$?; done
if [ -n "$asked" ] && {{ [ $code -eq 130 ] || [ $code -eq 143 ]; }}; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $code
"""


def write_script(run: Run, job: Job) -> Path:
    """RUN/slurm.sh, for ``sbatch``."""
    path = run.path.resolve()
    script = _SCRIPT.format(
        name=job.name,
        nodes=job.resilience.nodes + job.resilience.spares,
        notice_seconds=_NOTICE_SECONDS,
        log=run.logs_path.resolve() / "slurm-%j.log",
        folder=shlex.quote(str(Path.cwd())),
        program=f"{shlex.quote(sys.executable)} -m myriad.cli.main",
        run=shlex.quote(str(path)),
    )
    write_whole(path / "slurm.sh", script)
    return path / "slurm.sh"


def submit(script: Path) -> str:
    """Number of the job. Raises `RunFailedError` when Slurm does not take it."""
    try:
        return slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]
    except OSError as error:
        raise RunFailedError(f"sbatch {script}: {error}") from None
