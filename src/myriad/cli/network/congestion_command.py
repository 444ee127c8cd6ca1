"""``myriad network congestion``: compare congestion controls under the same traffic on the same fabric."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.json_output import print_json
from myriad.cli.output_files import check_picture, write_picture
from myriad.cli.progress_bar import count_bar
from myriad.errors import BadInputError
from myriad.units import format_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from myriad.network.congestion_study import (
        ClaimCheck,
        CongestionRow,
    )

__all__ = ["register"]

_DEFAULT = "incast,all-to-all,ring,victim"


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("congestion")(congestion)


def congestion(
    scenario: Annotated[
        str,
        typer.Option(metavar="NAME,NAME..", help="incast, many-to-one, all-to-all, ring, victim; or all."),
    ] = _DEFAULT,
    control: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME..",
            help="dcqcn-paper, dcqcn (a ConnectX's defaults), dcqcn-tuned, dcqcn-simulator, swift, "
            "swift-whole-packets, hpcc, hybrid; or all.",
        ),
    ] = "all",
    level: Annotated[
        str, typer.Option(metavar="flow|fluid|packet", help="Level of detail of the model.")
    ] = "fluid",
    hosts: Annotated[
        int,
        typer.Option(
            help="Number of hosts with one 200 Gbit/s port each, eight to a switch (fewer below 32)."
        ),
    ] = 32,
    scale: Annotated[float, typer.Option(min=0.01, max=100, help="Factor on all message sizes.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the random ECN marking.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE.svg|png", help="Draw the table.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare congestion controls: throughput, queue, pauses, slowdown, fairness.

    Below the table: whether the results agree with published claims, and where the hybrid control (ECN marks
    decide when to slow down, delay by how much) is worse than the controls that it combines. Parameters and
    sources: docs/network/congestion.md.
    """
    if out is not None:
        check_picture("--out", out)
    rows = _rows(scenario, control, level, hosts, scale, seed)
    if out is not None:
        from myriad.reports.charts.congestion_chart import draw

        write_picture(
            "--out", out, draw(rows, f"Congestion controls on one fabric of {hosts} hosts ({level} level)")
        )
    if as_json:
        print_json(_as_json(rows, hosts, level))
    else:
        _show(rows, hosts)


def _rows(
    scenario: str, control: str, level: str, hosts: int, scale: float, seed: int
) -> "list[CongestionRow]":
    """Measure every scenario under every control. Raises `BadInputError`."""
    from myriad.network.congestion_controls import CONTROLS
    from myriad.network.congestion_scenarios import SCENARIOS
    from myriad.network.congestion_scenarios import scenario as make
    from myriad.network.congestion_study import LEVELS, measure_scenario

    if level not in LEVELS:
        raise BadInputError("--level", level, "one of " + ", ".join(LEVELS))
    names = _chosen("--scenario", scenario, SCENARIOS)
    controls = _chosen("--control", control, CONTROLS) if level != "flow" else [next(iter(CONTROLS))]
    try:
        cases = [make(name, hosts, scale) for name in names]
    except BadInputError as error:
        raise BadInputError(f"--{error.key}", error.value, error.allowed) from None
    pairs, rows = [(case, name) for case in cases for name in controls], []
    with count_bar("simulating") as show:
        for number, (case, name) in enumerate(pairs):
            show(f"simulating {case.name} with {name}", number, len(pairs))
            rows.append(measure_scenario(case, name, CONTROLS[name], level, seed=seed))
    return rows


def _chosen(option: str, text: str, known: dict[str, Any]) -> list[str]:
    """Return the names in a comma-separated list, in its order and each once. Raises `BadInputError`."""
    names = list(known) if text == "all" else [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise BadInputError(option, name, "all, or some of " + ", ".join(known))
    return list(dict.fromkeys(names))


def _as_json(rows: "Sequence[CongestionRow]", hosts: int, level: str) -> dict[str, Any]:
    from myriad.network.congestion_study import check_claims, steady_queues, worse_than_parents

    verdicts = [
        {
            "claim": verdict.claim.words,
            "source": verdict.claim.source,
            "scenario": verdict.claim.scenario,
            "measure": verdict.claim.measure,
            verdict.claim.less: verdict.less,
            verdict.claim.more: verdict.more,
            "holds": verdict.holds,
        }
        for verdict in check_claims(rows)
    ]
    return {
        "level": level,
        "hosts": hosts,
        "rows": [asdict(row) for row in rows],
        "published": verdicts,
        "hybrid_is_worse": worse_than_parents(rows),
        "dcqcn_resting_queue_bytes": steady_queues(rows, hosts),
    }


_NAMES = (
    "done\nms",
    "of\nfair",
    "queue\nkB p50",
    "\np99",
    "pauses\nms",
    "slow-\ndown p50",
    "\np99",
    "fair-\nness",
)


def _show(rows: "Sequence[CongestionRow]", hosts: int) -> None:
    """Print a table for each scenario, then the published claims, then the hybrid compared with the controls
    that it combines."""
    from rich.console import Console
    from rich.text import Text

    from myriad.network.congestion_study import check_claims, steady_queues, worse_than_parents

    console = Console()
    for _, each in groupby(rows, key=lambda row: row.scenario):
        _show_scenario(console, list(each))
    verdicts = check_claims(rows)
    if verdicts:
        console.print(Text("Published of these controls, and here:", style="bold"))
    for verdict in verdicts:
        console.print(_verdict(verdict), soft_wrap=True)
    for control, queue in steady_queues(rows, hosts).items():
        text = f"  {control} has a steady queue of {queue / 1e3:.0f} kB in a long incast (CoNEXT 2016)"
        console.print(Text(text, style="dim"), soft_wrap=True)
    _show_hybrid(console, worse_than_parents(rows))


def _show_scenario(console: "Console", rows: "Sequence[CongestionRow]") -> None:
    from rich.table import Table

    table = Table(
        title=f"{rows[0].scenario}: {rows[0].title} ({rows[0].level} level)", title_justify="left", box=None
    )
    table.add_column("control", no_wrap=True)
    for name in _NAMES:
        table.add_column(name, justify="right")
    for row in rows:
        done = f"{row.seconds * 1e3:.3f}" if not row.num_unfinished else f"{row.num_unfinished} never"
        table.add_row(
            row.control,
            done,
            f"{row.throughput_ratio:.1%}",
            _kilobytes(row.queue_median_bytes),
            _kilobytes(row.queue_p99_bytes),
            "" if row.pause_seconds is None else format_number(row.pause_seconds * 1e3),
            format_number(row.slowdown_median, 4),
            format_number(row.slowdown_p99, 4),
            "" if row.fairness is None else f"{row.fairness:.3f}",
        )
    console.print(table)
    console.print()


def _kilobytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / 1e3:.0f}"


def _verdict(verdict: "ClaimCheck") -> "Text":
    from rich.text import Text

    claim = verdict.claim
    word, style = ("yes", "green") if verdict.holds else ("NO ", "red")
    figures = f"{claim.less} {format_number(verdict.less, 4)}, {claim.more} {format_number(verdict.more, 4)}"
    line = Text(f"  {word} ", style=style)
    return line.append(
        f"{claim.words}: {claim.scenario}, {claim.measure}: {figures} [{claim.source}]", "default"
    )


def _show_hybrid(console: "Console", worse: dict[str, list[str]]) -> None:
    from rich.text import Text

    from myriad.network.congestion_study import TOLERANCE

    if worse:
        text = f"The hybrid control against its parents (differences of {TOLERANCE:.0%} or less are ignored):"
        console.print(Text(text, style="bold"))
    for scenario, losses in worse.items():
        text = "worse: " + ", ".join(losses) if losses else "at least as good in every measure"
        console.print(Text(f"  {scenario}: {text}"), soft_wrap=True)
