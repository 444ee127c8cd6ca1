"""``myriad validate``: predictions compared with published iteration times, table by table."""

from collections.abc import Sequence
from itertools import count
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.json_output import print_json
from myriad.cli.memory_errors_output import memory_json, print_memory
from myriad.cli.output_files import check_picture, read_earlier, write_output, write_picture
from myriad.cli.progress_bar import count_bar
from myriad.cli.sweeps_output import print_sweeps, sweeps_json
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from rich.console import Console

    from myriad.planner import (
        ErrorScore,
        FrameworkErrors,
        PublishedTable,
        SystemRatio,
        TableOptions,
        TableResult,
    )

__all__ = ["register", "validate"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("validate")(validate)


def validate(
    tables: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[TABLE.csv]...",
            help="CSV files in the general form (docs/guide/validate.md), or with the columns of one of "
            "Myriad's tables. Default: Myriad's tables; all: those of other systems, too.",
        ),
    ] = None,
    columns: Annotated[
        list[str] | None,
        typer.Option(
            "--columns",
            metavar="NAME=YOURS",
            help="Your file's name of a column of the general form, e.g. iteration_s=step_time; repeatable.",
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Predict all rows of the general form as this framework's. Default: each as its own.",
        ),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Cluster file, recipe or this-machine on which all rows of the general form ran, with as "
            "many nodes as each needs. Default: the gpu_type of each row.",
        ),
    ] = None,
    from_log: Annotated[
        bool,
        typer.Option(
            "--from-log",
            help="Read files as training logs (Megatron-LM, NeMo, nanotron, torchtitan) and folders as runs "
            "of Myriad.",
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="TABLE.csv", help="Write the table of --from-log instead of predicting it."),
    ] = None,
    skip_bad: Annotated[
        bool,
        typer.Option(
            "--skip-bad",
            help="Name rows that cannot be read or predicted, and leave them out. Default: refuse the table.",
        ),
    ] = False,
    rows: Annotated[bool, typer.Option("--rows", help="Print every row.")] = False,
    chart: Annotated[
        Path | None,
        typer.Option(metavar="FILE.svg|png", help="Draw predicted against published seconds."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Predict published iteration times, and peak memory, and report the errors of the predictions.

    In each sweep of layouts of one job: what the predicted choice loses, and how well the order is predicted.

    zero-shot: data sheets and the planner's constants, the same for every table.

    calibrated: four factors fitted to the table's other rows, without the row that is predicted; and fitted
    without all rows of its model.
    """
    if chart is not None:
        check_picture("--chart", chart)
    if from_log and not tables:
        raise BadInputError("TABLE", None, "needed with --from-log: logs or run folders")
    if out is not None:
        if not from_log:
            raise BadInputError("--out", str(out), "needs --from-log")
        others: dict[str, object] = {"--framework": framework, "--cluster": cluster, "--chart": chart}
        others |= {"--columns": columns, "--skip-bad": skip_bad, "--rows": rows, "--json": as_json}
        if option := next((option for option, given in others.items() if given), None):
            raise BadInputError("--out", str(out), f"without {option}: nothing is predicted")
        _write_table(out, tables or [])
        return
    from myriad.planner import TableOptions

    options = TableOptions(_columns(columns or []), framework, _cluster(cluster), skip_bad)
    results = _predict(tables, options, from_log=from_log)
    if chart is not None:
        from myriad.reports.charts.validation_chart import validation_svg

        write_picture("--chart", chart, validation_svg(results))
    if as_json:
        print_json(_as_json(results))
    else:
        _print(results, rows=rows)


def _write_table(out: Path, names: Sequence[str]) -> None:
    """Write the rows of logs and runs as a table. Raises `BadInputError`."""
    from myriad.forecasts.measured_rows import TABLE_HEAD, measured_table

    if out.suffix != ".csv":
        raise BadInputError("--out", str(out), "a file name that ends in .csv")
    read_earlier("--out", out, TABLE_HEAD, "a table that --from-log wrote")
    write_output("--out", out, measured_table(names))
    typer.echo(f"{out}: {len(names)} row{'s' * (len(names) > 1)}")


def _cluster(name: str | None) -> str | None:
    """Return the name or path of the cluster. Raises `BadInputError`."""
    from myriad.cli.measured_cluster import cluster_path
    from myriad.recipes.cluster import load_cluster

    if name is None:
        return None
    path = cluster_path(name)
    load_cluster(path)
    return path


def _predict(names: list[str] | None, options: "TableOptions", *, from_log: bool) -> "list[TableResult]":
    """Read all tables, then predict every row."""
    from myriad.forecasts.measured_rows import measured_table
    from myriad.planner import parse_table, predict_table, read_table
    from myriad.recipes.framework import ReadyRecipes, load_framework

    if options.framework is not None:
        load_framework(options.framework)
    recipes = ReadyRecipes()
    read: list[PublishedTable]
    if from_log:
        read = [parse_table("logs", measured_table(names or []), recipes, options, names)]
    else:
        read = [read_table(name, recipes, options) for name in _chosen(names or [])]
    _check_used(options, read)
    for table in read:
        for error in table.skipped:
            typer.echo(f"skipped: {error}", err=True)
        if table.unread:
            typer.echo(f"not read: columns {', '.join(table.unread)} of {table.name}", err=True)
    total, done = sum(len(table.rows) for table in read), count(1)
    with count_bar("predicting") as show:
        show("predicting", 0, total)
        return [predict_table(table, lambda: show("predicting", next(done), total)) for table in read]


def _chosen(names: Sequence[str]) -> list[str]:
    """Return the tables that are named, or Myriad's. Raises `BadInputError`."""
    from myriad.planner import builtin_tables

    if not names:
        return builtin_tables()
    ready, found = builtin_tables(general=True), list[str]()
    for name in names:
        if name in ready and Path(name).exists():
            allowed = f"a table of Myriad's and a file here have this name: ./{name} for the file"
            raise BadInputError("TABLE", name, allowed)
        found += ready if name == "all" else [name]
    for number, name in enumerate(found):
        if Path(name).stem in {Path(one).stem for one in found[:number]}:
            raise BadInputError("TABLE", name, "each table once, and with a file name of its own")
    return found


def _check_used(options: "TableOptions", tables: "Sequence[PublishedTable]") -> None:
    """Refuse options that no table uses. Raises `BadInputError`."""
    for ours, theirs in options.columns.items():
        if not any(theirs in table.columns for table in tables):
            raise BadInputError("--columns", f"{ours}={theirs}", f"no table has a column {theirs!r}")
    if not any(table.is_general for table in tables):
        for option, given in (("--framework", options.framework), ("--cluster", options.cluster)):
            if given is not None:
                raise BadInputError(
                    option, given, "needs a table in the general form (docs/guide/validate.md)"
                )


def _columns(given: Sequence[str]) -> dict[str, str]:
    """Return the file's column by the column of the general form. Raises `BadInputError`."""
    found = dict[str, str]()
    for one in given:
        ours, equals, theirs = (part.strip() for part in one.partition("="))
        if not (ours and equals and theirs):
            raise BadInputError("--columns", one, "NAME=YOURS, such as iteration_s=step_time")
        if ours in found or theirs in found.values():
            raise BadInputError("--columns", one, "each name once on either side")
        found[ours] = theirs
    return found


def _as_json(results: "Sequence[TableResult]") -> dict[str, Any]:
    from myriad.planner import framework_errors, interval, intervals, ratios

    tables = []
    for result, (width, inside) in zip(results, intervals(results), strict=True):
        tables.append(
            {
                "name": result.table.name,
                "table": result.table.name,
                "source": result.table.source,
                "zero_shot": _score(result.zero_shot),
                "calibrated": _score(result.calibrated),
                "model_left_out": _score(result.left_out),
                "factors": dict(zip(_FACTORS, result.factors, strict=True)),
                "interval_ratio": width,
                "interval_coverage_ratio": inside,
                "rows": [_row(one) for one in result.rows],
                "ratios": [_ratio(one) for one in ratios(result)],
                "skipped": [str(error) for error in result.table.skipped],
            }
        )
    frameworks = [_framework(one) for one in framework_errors(results)]
    found = {"tables": tables, "frameworks": frameworks, "interval_ratio": interval(results)}
    return found | sweeps_json(results) | {"memory": memory_json(results)}


_FACTORS = ("matmul", "streams", "tensor", "rest")


def _row(one: Any) -> dict[str, Any]:
    layout = one.workload.layout
    return {
        "name": one.row.name,
        "row": one.row.name,
        "seconds": one.row.seconds,
        "published_seconds": one.row.seconds,
        "predicted_seconds": one.seconds,
        "error": one.error,
        "error_ratio": one.error,
        "framework": one.row.framework,
        "experts": one.row.has_experts,
        "published_mfu": one.row.mfu(one.row.seconds),
        "predicted_mfu": one.row.mfu(one.seconds),
        "open": {"micro_batch": layout.micro_batch, "virtual_stages": layout.virtual_stages}
        if len(one.row.works) > 1
        else {},
    }


def _framework(one: "FrameworkErrors") -> dict[str, Any]:
    return {
        "framework": one.framework,
        "experts": one.has_experts,
        "rows": len(one.errors),
        "mean_error_ratio": one.mean,
        "median_error_ratio": one.median,
        "p90_error_ratio": one.p90,
        "bias_ratio": one.bias,
        "within_10_percent_ratio": one.close,
        "interval_ratio": one.interval,
        "interval_coverage_ratio": one.coverage,
    }


def _ratio(one: "SystemRatio") -> dict[str, Any]:
    return {
        "setting": one.setting,
        "system": one.system,
        "baseline": one.baseline,
        "published_mfu_ratio": one.published,
        "predicted_mfu_ratio": one.predicted,
    }


def _score(score: "ErrorScore | None") -> dict[str, Any] | None:
    if score is None:
        return None
    return {
        "mean_error_ratio": score.mean,
        "worst_error_ratio": score.worst,
        "bias_ratio": score.bias,
        "one_sided": score.is_one_sided,
        "rank_correlation": score.rank_correlation,
    }


def _print(results: "Sequence[TableResult]", *, rows: bool) -> None:
    from rich.console import Console
    from rich.table import Table as Grid

    from myriad.planner import interval, intervals

    console = Console()
    if rows:
        for result in results:
            console.print(_rows(result), "")
        console.print(
            "chosen: micro-batch and virtual stages, where the source leaves them open.\n", style="dim"
        )
    title = "Errors of predicted iteration times"
    grid = Grid(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("table", no_wrap=True)
    for name in ("rows", "mean", "worst", "bias", "ranks", "fitted", "left out", "90 %", "covered"):
        grid.add_column(name, justify="right", no_wrap=True)
    for result, (width, inside) in zip(results, intervals(results), strict=True):
        zero, alone = result.zero_shot, isnan(width)
        grid.add_row(
            result.table.title,
            str(len(result.rows)),
            f"{zero.mean:.1%}",
            f"{zero.worst:.1%}",
            f"{zero.bias:+.1%}" + ("!" if zero.is_one_sided else ""),
            "" if zero.rank_correlation is None else f"{zero.rank_correlation:.2f}",
            _mean(result.calibrated),
            _mean(result.left_out),
            "" if alone else f"±{width:.0%}",
            "" if alone else f"{inside:.0%}",
        )
    console.print(grid)
    console.print(_LEGEND, style="dim")
    _print_frameworks(console, results)
    print_sweeps(console, results)
    print_memory(console, results, rows=rows)
    _print_ratios(console, results)
    if len(results) > 2:
        console.print(f"A system in none of these tables: 90 % of times within ±{interval(results):.0%}.")


def _print_frameworks(console: "Console", results: "Sequence[TableResult]") -> None:
    """Print the errors of each framework, and the interval from the other frameworks."""
    from rich.table import Table as Grid

    from myriad.planner import framework_errors

    title = "Zero-shot errors by framework"
    grid = Grid(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("framework", no_wrap=True)
    for name in ("rows", "mean", "median", "p90", "bias", "in 10 %", "90 %", "held"):
        grid.add_column(name, justify="right", no_wrap=True)
    for one in framework_errors(results):
        alone = isnan(one.interval)
        grid.add_row(
            one.framework + (", experts" if one.has_experts else ""),
            str(len(one.errors)),
            *(f"{value:.1%}" for value in (one.mean, one.median, one.p90)),
            f"{one.bias:+.1%}",
            f"{one.close:.0%}",
            "" if alone else f"±{one.interval:.0%}",
            "" if alone else f"{one.coverage:.0%}",
        )
    console.print("", grid, "")


def _print_ratios(console: "Console", results: "Sequence[TableResult]") -> None:
    """Print the MFU of the systems of each table relative to its first system."""
    from rich.table import Table as Grid

    from myriad.planner import ratios

    found = [one for result in results for one in ratios(result)]
    if not found:
        return
    grid = Grid(title="Ratios of MFU", title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("setting", "compared"):
        grid.add_column(name, overflow="fold")
    for name in ("published", "predicted", "error"):
        grid.add_column(name, justify="right", no_wrap=True)
    for one in found:
        grid.add_row(
            one.setting,
            f"{one.system} / {one.baseline}",
            f"{one.published:.2f} x",
            f"{one.predicted:.2f} x",
            f"{one.predicted / one.published - 1:+.1%}",
        )
    console.print("", grid, "")


_LEGEND = """\
mean, worst, bias: zero-shot errors of predicted times (!: all of one sign).
ranks: rank correlation. fitted: mean error with factors fitted to other rows;
left out: with factors fitted to the rows of other models.
90 %: interval from the errors of the other tables, each of equal weight;
covered: share of this table's rows within it."""


def _mean(score: "ErrorScore | None") -> str:
    return "" if score is None else f"{score.mean:.1%}"


def _rows(result: "TableResult") -> Any:
    from rich.table import Table as Grid

    title = f"{result.table.title} ({result.table.source})"
    grid = Grid(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    grid.add_column("row", overflow="fold")
    for name in ("seconds", "predicted", "error", "MFU", "predicted"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("chosen", no_wrap=True)
    for one in result.rows:
        layout, row = one.workload.layout, one.row
        grid.add_row(
            row.name,
            f"{row.seconds:.3f}",
            f"{one.seconds:.3f}",
            f"{one.error:+.1%}",
            f"{row.mfu(row.seconds):.1%}",
            f"{row.mfu(one.seconds):.1%}",
            f"mb {layout.micro_batch}, v {layout.virtual_stages}" if len(row.works) > 1 else "",
        )
    return grid
