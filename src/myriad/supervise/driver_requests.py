"""Requests of a person to a run's driver: to evict a node (`myriad evict`) or to trace ranks (`myriad
trace`).

    RUN/driver.json, RUN/secret ──► the driver, both ends authenticated ──► its answer

They work from any machine that has the run's folder and reaches the driver.
"""

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from myriad.errors import BadInputError, RunFailedError
from myriad.run import Run
from myriad.supervise.driver_address import DriverConnection, read_address
from myriad.supervise.messages import EvictionAnswer, EvictionAsked, TraceAnswer, TraceAsked, exceeded_limit
from myriad.system.person import person
from myriad.telemetry.traces.trace_request import What
from myriad.wire.framing import Refused
from myriad.wire.run_secret import secret_place

__all__ = ["ask_driver", "evict", "request_trace", "tracer"]

_AGAIN_SECONDS, _RETRY_SECONDS = 2.0, 0.1
"""Seconds until a request fails, longer than a restart of the driver takes, and seconds between two tries."""
Answer = TypeVar("Answer")


def ask_driver(run: Run, asked: object, kind: type[Answer]) -> Answer:
    """Return the driver's answer. Raises `BadInputError` if the run is not running, `RunFailedError` if its
    driver cannot be reached."""
    return asyncio.run(_ask(run, asked, kind))


async def _ask(run: Run, asked: object, kind: type[Answer]) -> Answer:
    deadline = time.monotonic() + _AGAIN_SECONDS
    while True:
        _check(run)
        try:
            async with DriverConnection(run.path).link() as link:
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
        raise BadInputError(
            "RUN", str(run.path), f"{secret} cannot be read: run this command as the user who trains it"
        )


def _not_there(run: Run, error: Exception) -> BadInputError | RunFailedError:
    try:
        address = read_address(run.path)
        place = f"{address['host']}:{address['port']}"
    except (OSError, KeyError, ValueError):
        place = "the address in driver.json"
    if isinstance(error, ConnectionRefusedError) and not run.is_locked:
        return BadInputError("RUN", str(run.path), f"is not running: no driver listens at {place} any more")
    why = "it did not answer in time" if isinstance(error, TimeoutError) else str(error)
    return RunFailedError(f"the driver of {run.path} is not reachable at {place}: {why}")


def request_trace(run: Run, ranks: Sequence[int], seconds: float, what: What = "profile") -> TraceAnswer:
    """Trace ranks; return when the files are written, with what is missing. ``ranks``: empty for all ranks.
    Raises `BadInputError` if the request is refused, `RunFailedError` if the run's driver cannot be
    reached."""
    key, value, allowed = exceeded_limit(what, len(ranks), seconds)
    if key:
        raise BadInputError(key, value, allowed)
    asked = TraceAsked(person(), what, tuple(dict.fromkeys(ranks)), float(seconds))
    answer = ask_driver(run, asked, TraceAnswer)
    if answer.refused:
        shown = ",".join(map(str, ranks[:16])) + ("..." if len(ranks) > 16 else "")
        raise BadInputError("--ranks", shown or "all", answer.refused)
    return answer


def tracer(run: Run) -> Callable[[Sequence[int], float, What], dict[str, Any]]:
    """Return `request_trace` of one run with plain values, for modules that do not import this one."""
    return lambda ranks, seconds, what: asdict(request_trace(run, ranks, seconds, what))


_MOST_CHARACTERS = 500


def evict(run: Run, node: int, *, reason: str = "", anyway: bool = False) -> str:
    """Evict a node; return what happens next. Raises `BadInputError` if the request is refused,
    `RunFailedError` if the run's driver cannot be reached."""
    if len(reason) > _MOST_CHARACTERS:
        raise BadInputError("--reason", f"{reason[:40]}...", f"at most {_MOST_CHARACTERS} characters")
    answer = ask_driver(run, EvictionAsked(node, person(), reason, anyway), EvictionAnswer)
    if answer.refused:
        raise BadInputError("NODE", node, answer.refused)
    return answer.message
