"""A person wants to see what ranks do: what `myriad trace RUN` and the page have done."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from myriad.errors import BadInputError
from myriad.resilience.ask import ask_driver, person
from myriad.resilience.traces import TraceAnswer, TraceAsked, told_limit
from myriad.run import Run
from myriad.telemetry.trace_request import What

__all__ = ["request_trace", "tracer"]


def request_trace(run: Run, ranks: Sequence[int], seconds: float, what: What = "profile") -> TraceAnswer:
    """Returns when the files are there, with what is missing. ``ranks``: none means all of the run. Raises
    `BadInputError` for what cannot be done, `RunFailedError` when the run's driver cannot be asked."""
    key, value, allowed = told_limit(what, len(ranks), seconds)
    if key:
        raise BadInputError(key, value, allowed)
    asked = TraceAsked(person(), what, tuple(dict.fromkeys(ranks)), float(seconds))
    answer = ask_driver(run, asked, TraceAnswer)
    if answer.refused:
        shown = ",".join(map(str, ranks[:16])) + ("..." if len(ranks) > 16 else "")
        raise BadInputError("--ranks", shown or "all", answer.refused)
    return answer


def tracer(run: Run) -> Callable[[Sequence[int], float, What], dict[str, Any]]:
    """The same of one run, as plain values: for who may not know of drivers."""
    return lambda ranks, seconds, what: asdict(request_trace(run, ranks, seconds, what))
