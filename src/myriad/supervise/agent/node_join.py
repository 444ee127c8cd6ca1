"""Makes this machine a node of a run: what `myriad join` does.

RUN/driver.json ──► the driver ──a number, if none was given──► node agent, until the run is over
"""

import asyncio
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from myriad.checkpoint.snapshots.server_start import NODE
from myriad.errors import BadInputError, RunFailedError
from myriad.job import Job
from myriad.run import Run
from myriad.supervise.agent.agent_process import run_node
from myriad.supervise.driver_address import DriverConnection
from myriad.supervise.messages import NodeNumber, NodeRefused, NodeWanted
from myriad.system.machine import machine_name, num_cores
from myriad.wire.framing import Refused
from myriad.wire.run_secret import secret_place

__all__ = ["join"]

_RETRY_SECONDS = 0.2
_UNATTENDED_SECONDS = 300.0
"""How long a node without ranks waits for another driver."""


def join(
    run: Run,
    node: int | None = None,
    *,
    wait_seconds: float = 60.0,
    unattended_seconds: float = _UNATTENDED_SECONDS,
    report: Callable[[str], None] = lambda line: None,
) -> int:
    """Run a node agent on this machine until the run is over. Return the node number that this machine had.
    ``node``: ``None`` lets the driver choose. ``report`` receives progress messages.

    Raises `BadInputError` if there is nothing to join, `DriverLostError` after ``unattended_seconds``
    without a driver, and `RunFailedError`."""
    job = run.job()
    report(f"looking for the driver of {run.path}, for {wait_seconds:g} s at most")
    number = asyncio.run(_find(run, node, wait_seconds))
    role = "" if number < job.resilience.nodes else ", a spare"
    report(f"node {number} of {run.path}{role}; what its ranks print goes to {run.logs_path}")
    os.environ[NODE] = str(number)
    problem = run_node(run.path, number, _threads(job), unattended_seconds=unattended_seconds)
    if problem is not None:
        raise RunFailedError(problem)
    report(f"{run.path} is over, or goes on without this machine")
    return number


def _threads(job: Job) -> int:
    here = job.layout.world // job.resilience.nodes
    return job.train.threads or max(1, num_cores() // here)


async def _find(run: Run, node: int | None, wait_seconds: float) -> int:
    """Wait for a driver; return the node number that it gives."""
    deadline = time.monotonic() + wait_seconds
    while True:
        if (problem := _unreadable(secret_place(run.path / "secret"))) is not None:
            raise BadInputError("RUN", str(run.path), problem)
        with suppress(OSError, KeyError, ValueError):
            return await _ask(run, node)
        if time.monotonic() > deadline:
            raise BadInputError("RUN", str(run.path), await _why_not(run, wait_seconds))
        await asyncio.sleep(_RETRY_SECONDS)


def _unreadable(secret: Path) -> str | None:
    try:
        secret.read_bytes()
    except FileNotFoundError:
        return None  # the secret is created when the run starts
    except OSError as error:
        return f"its secret cannot be read: {error.strerror}; join as the user who trains it"
    return None


async def _ask(run: Run, node: int | None) -> int:
    if not secret_place(run.path / "secret").exists():
        raise FileNotFoundError("there is no run yet")
    async with DriverConnection(run.path).link() as link:
        machine = machine_name()
        link.send(NodeWanted(socket.gethostname(), machine, -1 if node is None else node))
        answer: NodeNumber | NodeRefused = await link.receive((NodeNumber, NodeRefused))
        if isinstance(answer, NodeRefused):
            raise BadInputError("machine", machine, answer.why)
        return answer.node


async def _why_not(run: Run, wait_seconds: float) -> str:
    if not secret_place(run.path / "secret").exists() or not (run.path / "driver.json").exists():
        return f"no driver has begun it within {wait_seconds:g} s; `myriad train` does"
    try:
        await _ask(run, 0)
    except Refused as error:
        return f"its driver does not take this machine: {error}"
    except (OSError, KeyError, ValueError) as error:
        return f"its driver did not answer within {wait_seconds:g} s: {error}"
    return "its driver answered too late"
