"""What ``myriad plan --fabric`` adds: the best few layouts on the cluster's switches, as p50 and p95."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from myriad.planner.costs import Costs
from myriad.planner.fabric_outlook import FabricOutlook, OnFabric
from myriad.planner.placement import Placement
from myriad.planner.questions import describe
from myriad.planner.rescore import Plan
from myriad.planner.space import Problem
from myriad.planner.traffic import fills_nodes

if TYPE_CHECKING:
    from rich.console import Console
from myriad.units import format_number

__all__ = ["OnSwitches", "on_switches"]

_FEW = 5


@dataclass(frozen=True)
class OnSwitches:
    """Distributions of iterations."""

    rows: Sequence[tuple[str, Plan, FabricOutlook]]
    """Of the ranking, with nodes as they are numbered."""
    placement: Placement | None
    """Of the best plan's nodes; ``None``: it does not fill them evenly."""
    placed: FabricOutlook | None
    """The best plan with nodes in that order."""

    def show(self, console: "Console") -> None:
        """Prints it."""
        from rich.table import Table

        draws = len(self.rows[0][2].seconds)
        title = f"on its switches: {draws} draws of their hashes, nodes as they are numbered"
        table = Table(box=None, title=title, title_justify="left", title_style="bold")
        table.add_column("", justify="right")
        table.add_column("")
        for name in ("plain", "p50", "p95", "slowest ring"):
            table.add_column(name, justify="right")
        for rank, plan, one in self.rows:
            table.add_row(rank, describe(plan.candidate), f"{format_number(plan.seconds, 4)} s", *_cells(one))
        if self.placed is not None:
            table.add_row("", "1, its nodes in the order below", "", *_cells(self.placed), style="bold")
        console.print(table)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "plans": [
                {"rank": rank, "plain_seconds": plan.seconds, **one.as_json()}
                for rank, plan, one in self.rows
            ],
            "placed": None if self.placed is None else self.placed.as_json(),
        }


def _cells(one: FabricOutlook) -> tuple[str, str, str]:
    return f"{format_number(one.p50, 4)} s", f"{format_number(one.p95, 4)} s", f"{one.ring:.2f}"


def on_switches(
    on_fabric: OnFabric, problem: Problem, ranking: Sequence[tuple[str, Plan]], slower: dict[int, float]
) -> OnSwitches:
    """``ranking``: what is printed of it before each, and plans; the first few are looked at. ``slower``:
    factor on the compute of single nodes."""
    rows, best, placement = [], None, None
    for rank, plan in [row for row in ranking if row[0] != "before"][:_FEW]:
        tenant = on_fabric.tenant(Costs(plan.candidate.work(problem), problem.cluster))
        rows.append((rank, plan, on_fabric.outlook(tenant)))
        if rank == "1":
            best, layout = tenant, plan.candidate.layout
            per_node = problem.cluster.accelerators_per_node
            if layout.world == problem.cluster.world and fills_nodes(layout, per_node):
                placement = on_fabric.placed(tenant, slower)
    placed = None
    if best is not None and placement is not None and not placement.is_plain:
        placed = on_fabric.outlook(best, placement.order)
    return OnSwitches(rows, placement, placed)
