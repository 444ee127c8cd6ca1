"""``myriad network congestion``: compare congestion controls under the same traffic on the same fabric."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.json_output import print_json
from myriad.cli.output_files import check_picture, write_picture
from myriad.cli.progress_bar import count_bar
from myriad.errors import BadInputError

if TYPE_CHECKING:
    from myriad.network.congestion_study import CongestionRow

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
        from myriad.cli.network.congestion_tables import show

        show(rows, hosts)


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
