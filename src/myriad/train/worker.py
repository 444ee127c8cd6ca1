"""``python -m myriad.train.worker RUN``: one rank of a run that `myriad train`, torchrun or Slurm started.

Under a node agent of Myriad, the rank prints nothing, because `myriad train` shows the run. Under another
launcher, rank 0 prints the same lines and runs the job's loggers, through a process that follows the run's
files (`myriad.cli.train.follow`).

An error is one line without a traceback (`one_line_errors`). All ranks usually find the same fault in the
same job. Under torchrun, the first rank that enters the message in the store of torchrun's agent prints
it, and the others print nothing. Elsewhere each rank prints its own.
"""

import contextlib
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from pydantic import ValidationError
from torch._C._distributed_c10d import TCPStore

from myriad.config import explain
from myriad.errors import BadInputError, MyriadError
from myriad.run import Run
from myriad.telemetry.config import check_loggers
from myriad.train.trainer import Trainer

__all__ = ["main", "one_line_errors", "report_error"]

_FOLLOWER = "myriad.cli.train.follow"
"""Module of the process that prints progress. It is named, not imported, because it is in a higher layer."""
_END_SECONDS = 25.0
"""How long the process may take at the end, whose loggers send their last lines."""


def main(arguments: list[str]) -> int:
    """Train the run, and return the exit code."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m myriad.train.worker RUN\n")
        return 2
    run = Run(arguments[0])
    run.share_as_folder()
    try:
        if _shows_run() and run.exists:
            check_loggers(run.job().telemetry.loggers)
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


def _shows_run() -> bool:
    return not _has_agent() and os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def _shown(path: str) -> Iterator[None]:
    """Print progress and run loggers inside the block, if this is rank 0 and no other process does."""
    run = Run(path)
    if not (_shows_run() and run.exists):
        yield
        return
    ready, theirs = os.pipe()
    command = [sys.executable, "-Pm", _FOLLOWER, str(run.path), str(theirs)]
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


_STORE_SECONDS = 5.0


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line if a Myriad error leaves the block.

    The exit code is 2 for bad input, 1 for a failure and 130 for Ctrl-C. Scripts that call
    `myriad.train.fit.fit` use it.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        refused = BadInputError(".".join(map(str, first["loc"])), first["input"], explain(first))
        sys.exit(report_error(refused))
    except MyriadError as error:
        sys.exit(report_error(error))
    except KeyboardInterrupt:
        sys.exit(130)


def report_error(error: MyriadError) -> int:
    """Write the error to standard error, unless another rank has written the same; return the exit code."""
    if _is_first(str(error)):
        sys.stderr.write(f"myriad: error: {error}\n")
    return error.exit_code


def _is_first(message: str) -> bool:
    """Return whether no other rank of this start has reported the message; True if torchrun has no store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return True
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    key = f"myriad/errors/{attempt}/{hashlib.sha256(message.encode()).hexdigest()}"
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=_STORE_SECONDS))
        return int(store.add(key, 1)) == 1
    except (dist.DistError, OSError, KeyError, ValueError):
        return True


if __name__ == "__main__":
    with _shown(sys.argv[-1]):  # a node agent's ranks call `main`
        code = main(sys.argv[1:])
    sys.exit(code)
