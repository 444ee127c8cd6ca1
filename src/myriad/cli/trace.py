"""``myriad trace``: look into ranks of a run that is at work, for a few seconds."""

import json as json_format
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from myriad.cli.runs import existing_run
from myriad.errors import BadInputError
from myriad.telemetry.trace_request import What
from myriad.units import parse_ranges

if TYPE_CHECKING:
    from myriad.resilience.traces import TraceAnswer
    from myriad.run import Run

__all__ = ["register", "trace"]

_MOST_KEPT = 16
_MOST_RANKS = 1_000_000
"""That fit into memory, of whatever run."""


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("trace")(trace)


def trace(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="The run's folder, or its name under runs/.", show_default=False),
    ],
    ranks: Annotated[
        str,
        typer.Option(
            metavar="RANKS", help="Ranks to look into, such as 3,7 or 0-15; all: every rank of the run."
        ),
    ] = "0",
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long, at most 60; a profile takes whole steps.")
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
    json: Annotated[
        bool, typer.Option("--json", help="One JSON object on standard output, for programs.")
    ] = False,
) -> None:
    """Look into ranks of a run while it trains: operators, collectives, stacks, links.

    Files go to RUN/traces and RUN/counters. A profile slows its rank down while it is taken, and stops it
    for a moment at the end; the others wait for it meanwhile. Nothing of the result changes.

    Exit code: 0 done, 1 some of it is missing, 2 the run is not at work, or bad input.
    """
    from myriad.resilience.ask_trace import request_trace
    from myriad.resilience.traces import TraceAnswer
    from myriad.run import Run

    folder = Run(existing_run(run))
    wanted, kept = parse_ranks(ranks), _kept(folder) if what == "network" else []
    try:
        answer = request_trace(folder, wanted, seconds, _what(what))
    except BadInputError as error:
        if error.key != "RUN" or not kept:
            raise
        answer = TraceAnswer("", (), (), ())  # of a run that has ended, what was kept is all there is
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
    """Link counters that nodes have kept around anomalies, newest last."""
    from myriad.telemetry.link_evidence import list_evidence, told_evidence

    found = []
    for one in list_evidence(run.counters_path / "around")[-_MOST_KEPT:]:
        try:
            words = told_evidence(one.path)
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
    """``3,7`` or ``0-15,20``; none: all. Raises `BadInputError`."""
    if text == "all":
        return []
    try:
        return list(dict.fromkeys(chain(*parse_ranges(text, _MOST_RANKS))))
    except ValueError:
        raise BadInputError("--ranks", text, "numbers of ranks, as in 3,7 or 0-15; or all") from None
