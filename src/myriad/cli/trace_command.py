"""``myriad trace``: profile or inspect ranks of a running job for a few seconds."""

import json as json_format
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from myriad.cli.run_argument import existing_run
from myriad.errors import BadInputError
from myriad.telemetry.traces.trace_request import What
from myriad.units import parse_ranges

if TYPE_CHECKING:
    from myriad.run import Run
    from myriad.supervise.messages import TraceAnswer

__all__ = ["register", "trace"]

_MOST_KEPT = 16
_MOST_RANKS = 1_000_000
"""Largest number of ranks in a list, for any run."""


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("trace")(trace)


def trace(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="Run folder, or its name under runs/.", show_default=False),
    ],
    ranks: Annotated[
        str,
        typer.Option(metavar="RANKS", help="Ranks to trace, such as 3,7 or 0-15, or all."),
    ] = "0",
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="Duration, at most 60; a profile covers whole steps.")
    ] = 5.0,
    what: Annotated[
        str,
        typer.Option(
            metavar="WHAT",
            help="profile: operators; flight: collectives that the communication library remembers; stacks: "
            "where each thread is, also of a rank that hangs or is stopped; network: the counters of the "
            "links of these ranks' nodes, each 10 ms, and what was kept around anomalies, also of a run that "
            "has ended.",
        ),
    ] = "profile",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Capture profiles, collectives, stacks or link counters of ranks while they train.

    Files go to RUN/traces and RUN/counters. A profile slows its rank down and stops it briefly at the end;
    the other ranks wait. Losses do not change.

    Exit code: 0 done, 1 some traces are missing, 2 the run is not training, or bad input.
    """
    from myriad.run import Run
    from myriad.supervise.driver_requests import request_trace
    from myriad.supervise.messages import TraceAnswer

    folder = Run(existing_run(run))
    wanted, kept = parse_ranks(ranks), _kept(folder) if what == "network" else []
    try:
        answer = request_trace(folder, wanted, seconds, _what(what))
    except BadInputError as error:
        if error.key != "RUN" or not kept:
            raise
        answer = TraceAnswer("", (), (), ())  # A run that has ended has only the counters that were kept.
    if json:
        answered = {"files": answer.files, "found": answer.found, "problems": answer.problems}
        around = {"around": kept} if what == "network" else {}
        typer.echo(json_format.dumps({"run": str(folder.path), "what": what, **answered, **around}))
    else:
        for one in kept:
            typer.echo("\n  ".join(one["found"]))
            typer.echo(f"  {one['file']}")
        _show(folder, answer)
    if answer.problems:
        raise typer.Exit(1)


def _kept(run: "Run") -> list[dict[str, Any]]:
    """Return the link counters that nodes kept around anomalies, newest last."""
    from myriad.telemetry.links.link_evidence import describe_evidence, list_evidence

    found = []
    for one in list_evidence(run.counters_path / "around")[-_MOST_KEPT:]:
        try:
            words = describe_evidence(one.path)
        except (OSError, ValueError) as error:
            words = [str(error)]
        found.append({"node": one.node, "why": one.why, "file": str(one.path), "found": words})
    return found


def _show(run: "Run", answer: "TraceAnswer") -> None:
    for line in answer.found:
        typer.echo(line)
    for name in answer.files:
        typer.echo(run.path / name)
    for line in answer.problems:
        typer.echo(f"myriad: missing: {line}", err=True)


def _what(given: str) -> What:
    for what in get_args(What):
        if given == what:
            return what
    raise BadInputError("--what", given, f"one of {', '.join(get_args(What))}")


def parse_ranks(text: str) -> list[int]:
    """Parse ``3,7`` or ``0-15,20``; the result is empty for ``all``. Raises `BadInputError`."""
    if text == "all":
        return []
    try:
        return list(dict.fromkeys(chain(*parse_ranges(text, _MOST_RANKS))))
    except ValueError:
        raise BadInputError("--ranks", text, "numbers of ranks, as in 3,7 or 0-15; or all") from None
