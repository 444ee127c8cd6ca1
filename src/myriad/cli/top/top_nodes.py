"""``myriad top --nodes``: the machines of a run, in the terminal."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from myriad.units import format_bytes, format_ranks, format_seconds

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from myriad.run import Run

__all__ = ["show_nodes"]

_MOST_ROWS, _MOST_KINDS = 64, 8
_WELL = "no complaint"


def show_nodes(run: "Run", *, once: bool, every: float, as_json: bool) -> None:
    """Print a frame, or one each ``every`` seconds until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from myriad.dashboard.node_measurements import NodeCounters
    from myriad.dashboard.node_table import evidence_rows, health_of, node_rows, read_facts

    counters = NodeCounters(run.counters_path)

    def rows() -> list[dict[str, Any]]:
        health = health_of(run.read_events())
        return node_rows(read_facts(run.nodes_path), counters.newest(), health, time.time())

    if as_json:
        kept = [dict(one) for one in evidence_rows(run.counters_path / "around")]
        typer.echo(json.dumps({"run": str(run.path), "nodes": rows(), "evidence": kept}))
        return
    console = Console(highlight=False)
    if once or not console.is_terminal:
        console.print(_frame(rows()))
        return
    with Live(_frame(rows()), console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                live.update(_frame(rows()), refresh=True)
        except KeyboardInterrupt:
            return


def _frame(rows: Sequence[Mapping[str, Any]]) -> "Group":
    """Return the table of nodes, unhealthy ones first, and the hardware of the machines."""
    from rich.console import Group
    from rich.text import Text

    if not rows:
        return Group(Text("no node has reported what it is made of yet", style="dim"))
    alike: dict[str, list[int]] = {}
    for row in rows:
        alike.setdefault(_made_of(row), []).append(row["node"])
    lines = [
        Text(f"{format_ranks(nodes).replace('rank', 'node')}: {text}", style="dim")
        for text, nodes in alike.items()
    ]
    return Group(_table(rows), Text(), *lines[:_MOST_KINDS])


def _table(rows: Sequence[Mapping[str, Any]]) -> "Table":
    """Return the table without columns that are empty for all nodes."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    cells = [_cells(row) for row in sorted(rows, key=lambda row: row["health"] == _WELL)[:_MOST_ROWS]]
    headings = [one for one in cells[0] if any(cell[one] for cell in cells)]
    for heading in headings:
        number = heading in ("heartbeat", "sent/s", "received/s", "RDMA/s", "again/s")
        table.add_column(heading, justify="right" if number else "left", no_wrap=heading != "health")
    for cell in cells:
        style = "" if cell["health"] == _WELL else "red"
        table.add_row(*(Text(cell[heading]) for heading in headings), style=style)
    if len(rows) > _MOST_ROWS:
        table.add_row(f"and {len(rows) - _MOST_ROWS:,} more: --json has all")
    return table


def _cells(row: Mapping[str, Any]) -> dict[str, str]:
    ago, again, rdma = (
        row[key] for key in ("heartbeat_seconds_ago", "sent_again_per_second", "rdma_bytes_per_second")
    )
    return {
        "node": str(row["node"]),
        "heartbeat": "-" if ago is None else f"{format_seconds(ago)} ago",
        "host": row["host"],
        "address": row["address"],
        "pod": row["pod"] if row["pod"] != row["host"] else "",
        "sent/s": format_bytes(row["sent_bytes_per_second"]),
        "received/s": format_bytes(row["received_bytes_per_second"]),
        "RDMA/s": format_bytes(rdma) if rdma else "",
        "again/s": f"{again:.0f}" if again else "",
        "health": row["health"],
    }


def _made_of(row: Mapping[str, Any]) -> str:
    """Return the hardware without serial numbers, which are in --json and on the page."""
    versions = [f"{name} {text}" for name, text in row["versions"].items()]
    return "; ".join(filter(None, [row["gpus"], row["cpu"], *row["nics"], ", ".join(versions)])) or "unknown"
