"""``python -m myriad.train.worker RUN``: one rank of a run that `myriad train`, torchrun or Slurm started.

Started by a node agent of Myriad, it is silent: `myriad train` shows the run. Started by another launcher,
rank 0 prints the same lines, through a process that follows the run's files (`myriad.cli.follow`).
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from myriad.errors import MyriadError
from myriad.run import Run
from myriad.train.loop import Trainer
from myriad.train.rank_errors import report_error

__all__ = ["main"]

_FOLLOWER = "myriad.cli.follow"
"""By name: it stands on a higher floor."""
_END_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    """Trains; gives the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m myriad.train.worker RUN\n")
        return 2
    run = Run(arguments[0])
    try:
        trainer = Trainer(run)
        trainer.train()
    except MyriadError as error:
        return report_error(error)
    finally:
        run.flush_lines()
    trainer.close()
    return trainer.exit_code


def _has_agent() -> bool:
    """Whether a node agent of Myriad started this rank, not torchrun or another launcher."""
    return "MYRIAD_EPOCH" in os.environ


@contextlib.contextmanager
def _shown(path: str) -> Iterator[None]:
    """Print progress inside, where this is rank 0 and nothing else shows the run."""
    run = Run(path)
    if _has_agent() or os.environ.get("RANK", "0") != "0" or not run.exists:
        yield
        return
    ready, theirs = os.pipe()
    command = [sys.executable, "-m", _FOLLOWER, str(run.path), str(theirs)]
    follower = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs])
    os.close(theirs)
    os.read(ready, 1)  # or it has failed, and closed it
    os.close(ready)
    try:
        yield
    finally:
        assert follower.stdin is not None
        follower.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            follower.wait(_END_SECONDS)


if __name__ == "__main__":
    with _shown(sys.argv[-1]):  # a node agent's ranks call `main`
        code = main(sys.argv[1:])
    sys.exit(code)
