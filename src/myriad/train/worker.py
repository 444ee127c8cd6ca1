"""``python -m myriad.train.worker RUN``: one rank of a run that `myriad train`, torchrun or Slurm started.

Under a node agent of Myriad, the rank prints nothing, because `myriad train` shows the run. Under another
launcher, rank 0 prints the same lines, through a process that follows the run's files
(`myriad.cli.train.follow`).
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

from myriad.errors import MyriadError
from myriad.run import Run
from myriad.train.rank_errors import report_error
from myriad.train.trainer import Trainer

__all__ = ["main"]

_FOLLOWER = "myriad.cli.train.follow"
"""Module of the process that prints progress. It is named, not imported, because it is in a higher layer."""
_END_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    """Train the run, and return the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m myriad.train.worker RUN\n")
        return 2
    run = Run(arguments[0])
    run.share_as_folder()
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
    """Return whether a node agent of Myriad started this rank, not torchrun or another launcher."""
    return "MYRIAD_EPOCH" in os.environ


@contextlib.contextmanager
def _shown(path: str) -> Iterator[None]:
    """Print progress inside the block, if this is rank 0 and no other process shows the run."""
    run = Run(path)
    if _has_agent() or os.environ.get("RANK", "0") != "0" or not run.exists:
        yield
        return
    ready, theirs = os.pipe()
    command = [sys.executable, "-m", _FOLLOWER, str(run.path), str(theirs)]
    follower = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[theirs])
    os.close(theirs)
    os.read(ready, 1)  # returns also if the follower fails, which closes the pipe
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
