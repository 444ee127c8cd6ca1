"""``myriad trace`` and ``myriad spans``: profile ranks of a running job, and query or export the spans of a
run.
"""

import csv as csv_format
import json as json_format
import math
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from myriad.cli.shared_options import AsJson, RunName
from myriad.errors import BadInputError
from myriad.run import existing_run
from myriad.telemetry.traces.trace_request import What
from myriad.units import parse_bytes, parse_ranges

if TYPE_CHECKING:
    from myriad.run import Run
    from myriad.supervise.messages import TraceAnswer
    from myriad.telemetry.span_io.span_query import Answer, SpanQueries

__all__ = ["parse_ranks", "register", "trace"]

_MAX_SHOWN = 1000
_MAX_RANKS = 100_000
_BY_PHASE = """
    SELECT phase, class, count(*) AS spans, count(DISTINCT rank) AS ranks, sum(duration_seconds) AS seconds,
           median(duration_seconds) AS median_seconds, max(duration_seconds) AS longest_seconds
    FROM spans GROUP BY ALL ORDER BY seconds DESC
"""

_Query = Annotated[
    str | None,
    typer.Argument(
        metavar="QUERY",
        show_default=False,
        help="SQL (DuckDB) over the tables spans, metrics, events and files. Default: time by phase.",
    ),
]
_Chrome = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a Chrome trace (Perfetto opens it too): FILE.json or .json.gz."),
]
_Perfetto = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a Perfetto trace, half the size: FILE.pftrace or .pftrace.gz."),
]
_Steps = Annotated[
    str | None, typer.Option(metavar="A-B", help="First and last step to export, or one step.")
]
_Ranks = Annotated[str | None, typer.Option(metavar="LIST", help="Ranks to export, such as 0-7,12.")]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("trace")(trace)
    app.command("spans")(_spans)


def _spans(
    run: RunName,
    query: _Query = None,
    chrome: _Chrome = None,
    perfetto: _Perfetto = None,
    steps: _Steps = None,
    ranks: _Ranks = None,
    timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0.001, max=1e6, help="Seconds that a query may take."),
    ] = 300.0,
    memory: Annotated[
        str,
        typer.Option(metavar="SIZE", help="Memory that a query and its answer may take."),
    ] = "4 GiB",
    csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values with a header.")] = False,
    json: AsJson = False,
) -> None:
    """Query the spans of a run with SQL, or export them as a trace.

    A query that exceeds --timeout or --memory ends with a line that names the limit, and exit code 2.
    """
    if csv and json:
        raise BadInputError("--csv", "--json", "one of them")
    path = existing_run(run)
    out = chrome or perfetto
    if out is not None:
        if query is not None or (chrome and perfetto):
            key = "--chrome" if chrome else "--perfetto"
            raise BadInputError(
                key,
                str(out),
                "only with --steps and --ranks: not with QUERY, nor with both --chrome and --perfetto",
            )
        _export(path, out, _read_steps(steps), _read_ranks(ranks), is_chrome=chrome is not None, json=json)
    elif steps is not None or ranks is not None:
        allowed = "only with --chrome or --perfetto; in a QUERY, use WHERE"
        raise BadInputError("--steps" if steps else "--ranks", steps or ranks, allowed)
    else:
        form = "csv" if csv else "json" if json else "table"
        _answer(path, _BY_PHASE if query is None else query, form, timeout, _memory_bytes(memory))


def _memory_bytes(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError:
        size = 0
    if not 2**26 <= size < 2**50:
        raise BadInputError("--memory", text, 'a size of at least "64 MiB"')
    return size


def _answer(path: Path, query: str, form: str, seconds: float, memory_bytes: int) -> None:
    from myriad.run import Run
    from myriad.telemetry.span_io.span_query import QueryLimits, limited_memory, open_queries

    run = Run(path)
    limits = QueryLimits(seconds, memory_bytes, _end_process)
    with open_queries(
        run.spans_path, limits, metrics=run.read_metrics(), events=run.read_events()
    ) as queries:
        _warn_left_out(queries)
        try:
            with limited_memory(memory_bytes):
                _print(path, queries.ask(query), form)
        except MemoryError as error:  # rows as text; a query's own are a `BadInputError`
            raise queries.limit_error(error) or error from None


def _print(path: Path, answer: "Answer", form: str) -> None:
    if form == "csv":
        writer = csv_format.writer(sys.stdout, lineterminator="\n")
        writer.writerow(answer.columns)
        writer.writerows(answer.rows)
    elif form == "json":
        rows = [[_plain(value) for value in row] for row in answer.rows]
        typer.echo(json_format.dumps({"run": str(path), "columns": answer.columns, "rows": rows}))
    else:
        _show(answer)


def _end_process(error: BadInputError) -> None:
    """End at once: the query is inside a function that looks at no clock and no signal."""
    with suppress(OSError):
        os.write(2, f"myriad: error: {error}\n".encode(errors="replace"))
    os._exit(error.exit_code)


def _warn_left_out(queries: "SpanQueries") -> None:
    for path, why in islice(queries.left_out.items(), 5):
        typer.echo(f"{path} is left out: {why}", err=True)
    if len(queries.left_out) > 5:
        typer.echo(f"{len(queries.left_out)} files are left out", err=True)


def _show(answer: "Answer") -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = list(islice(answer.rows, _MAX_SHOWN + 1))
    table = Table(box=None, header_style="bold")
    for column, name in enumerate(answer.columns):
        numbers = any(_is_number(row[column]) for row in rows)
        table.add_column(Text(name), justify="right" if numbers else "left", overflow="fold")
    for row in rows[:_MAX_SHOWN]:
        table.add_row(*(Text(_cell(value)) for value in row))
    # A pipe has no width: lines are not folded there.
    Console(width=None if sys.stdout.isatty() else 10_000).print(table)
    if len(rows) > _MAX_SHOWN:
        typer.echo(f"the first {_MAX_SHOWN} rows; --csv or --json have all", err=True)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> str:
    """Return a cell's text without control characters, which could be terminal commands."""
    if value is None:
        return ""
    text = f"{value:.6g}" if isinstance(value, float) and abs(value) < 1e6 else str(value)
    return "".join(each if each.isprintable() else "�" for each in text)


def _plain(value: Any) -> Any:
    """Return a value as plain JSON."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return str(value)


def _export(
    path: Path,
    out: Path,
    steps: tuple[int, int] | None,
    ranks: Sequence[int] | None,
    *,
    is_chrome: bool,
    json: bool,
) -> None:
    from myriad.dashboard.insight.findings import arrows_of
    from myriad.run import Run
    from myriad.telemetry.span_io.span_query import need_packages
    from myriad.telemetry.span_io.span_window import read_window
    from myriad.telemetry.traces.trace_formats import write_chrome_trace, write_perfetto_trace

    key, ending = ("--chrome", "json") if is_chrome else ("--perfetto", "pftrace")
    if not re.search(rf"\.{ending}(\.gz)?$", out.name):
        raise BadInputError(key, str(out), f"must end in .{ending} or .{ending}.gz")
    need_packages("pyarrow")
    window = read_window(Run(path).spans_path, steps, ranks)
    arrows = arrows_of(Run(path), window)
    try:
        if is_chrome:
            write_chrome_trace(out, window, arrows)
        else:
            write_perfetto_trace(out, window)
    except OSError as error:
        raise BadInputError(key, str(out), f"cannot be written: {error.strerror}") from None
    if json:
        written = {"run": str(path), "trace": str(out), "spans": window.num_spans}
        typer.echo(json_format.dumps(written))
    else:
        typer.echo(f"{out}: {window.num_spans} spans of {len({one.rank for one in window.ranks})} ranks")


def _read_steps(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    if match is None or int(match.group(2) or match.group(1)) < int(match.group(1)):
        raise BadInputError("--steps", text, "must be A-B with A at most B, or one step")
    return int(match.group(1)), int(match.group(2) or match.group(1))


def _read_ranks(text: str | None) -> Sequence[int] | None:
    if text is None:
        return None
    try:
        return sorted(set(chain(*parse_ranges(text, _MAX_RANKS))))
    except ValueError:
        allowed = f"must be ranks and ranges of them, such as 0-7,12, below {_MAX_RANKS}"
        raise BadInputError("--ranks", text, allowed) from None


_MOST_KEPT = 16
_MOST_RANKS = 1_000_000
"""Largest number of ranks in a list, for any run."""


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
    json: AsJson = False,
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
        _show_answers(folder, answer)
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


def _show_answers(run: "Run", answer: "TraceAnswer") -> None:
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
