"""A person asks a run's driver for something, from any machine that has the run's folder and reaches it.

RUN/driver.json, RUN/secret ──► the driver, which proves itself and is asked ──► what it says
"""

import asyncio
import getpass
import os
import socket
import time
from typing import TypeVar

from myriad.errors import BadInputError, RunFailedError
from myriad.resilience.herald import read_address
from myriad.resilience.reach import Reach
from myriad.resilience.wire import Refused, secret_place
from myriad.run import Run

__all__ = ["ask_driver", "person"]

_AGAIN_SECONDS, _RETRY_SECONDS = 2.0, 0.1
"""A driver that died is followed by another in less."""
Answer = TypeVar("Answer")


def ask_driver(run: Run, asked: object, kind: type[Answer]) -> Answer:
    """What it answers. Raises `BadInputError` where the run is not at work, `RunFailedError` when its driver
    cannot be asked."""
    return asyncio.run(_ask(run, asked, kind))


def person() -> str:
    """Who types."""
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


async def _ask(run: Run, asked: object, kind: type[Answer]) -> Answer:
    deadline = time.monotonic() + _AGAIN_SECONDS
    while True:
        _check(run)
        try:
            async with Reach(run.path).link() as link:
                link.send(asked)
                answer: Answer = await link.receive((kind,))
                return answer
        except Refused as error:
            raise RunFailedError(f"the driver of {run.path} does not take this command: {error}") from None
        except (OSError, KeyError, ValueError) as error:
            if time.monotonic() > deadline:
                raise _not_there(run, error) from None
        await asyncio.sleep(_RETRY_SECONDS)


def _check(run: Run) -> None:
    secret = secret_place(run.path / "secret")
    if not secret.exists() or not (run.path / "driver.json").exists():
        raise BadInputError(
            "RUN", str(run.path), "is not running: it has no driver; `myriad train` starts it"
        )
    if not os.access(secret, os.R_OK):
        raise BadInputError("RUN", str(run.path), f"{secret} cannot be read: ask as the user who trains it")


def _not_there(run: Run, error: Exception) -> BadInputError | RunFailedError:
    try:
        address = read_address(run.path)
        place = f"{address['host']}:{address['port']}"
    except (OSError, KeyError, ValueError):
        place = "the address in driver.json"
    if isinstance(error, ConnectionRefusedError) and not run.is_locked:
        return BadInputError(
            "RUN", str(run.path), f"is not running: nobody listens at {place}, as its driver did"
        )
    why = "it did not answer in time" if isinstance(error, TimeoutError) else str(error)
    return RunFailedError(f"the driver of {run.path} is not reachable at {place}: {why}")
