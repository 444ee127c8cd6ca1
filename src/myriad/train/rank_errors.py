"""Report the error of a rank that torchrun, Slurm or a user started: one line, no traceback.

All ranks usually find the same fault in the same job. Under torchrun, the first rank that enters the message
in the store of torchrun's agent prints it, and the others print nothing. Elsewhere each rank prints its own.
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist
from pydantic import ValidationError
from torch._C._distributed_c10d import TCPStore

from myriad.config import explain
from myriad.errors import BadInputError, MyriadError

__all__ = ["one_line_errors", "report_error"]

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
