"""What ``myriad network place`` says, as a value: shown, as JSON, as a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from myriad.cli.network_place_chart import TIERS, Drawn, draw, spell
from myriad.job import Job
from myriad.network.fabric import Fabric
from myriad.network.placement import Neighbourhoods
from myriad.planner.costs import Costs
from myriad.planner.job_placement import Verdict

if TYPE_CHECKING:
    from rich.console import Console
from myriad.units import format_number

__all__ = ["Placed", "show"]


@dataclass(frozen=True, eq=False)
class Placed:
    """Jobs, and what each arrangement does to them."""

    jobs: tuple[Job, ...]
    costs: tuple[Costs, ...]
    fabric: Fabric
    verdicts: Sequence[Sequence[Verdict]]
    """By arrangement and job."""
    plain_seconds: Sequence[float]
    """Of each job's iteration, as the cost model has it without a fabric."""
    routing: str
    queue_pairs: int
    num_draws: int

    @property
    def titles(self) -> list[str]:
        """Of the jobs; those of one name are numbered."""
        names = [job.name for job in self.jobs]
        return [f"{n} ({i})" if names.count(n) > 1 else n for i, n in enumerate(names, 1)]

    def nodes(self, number: int) -> tuple[tuple[int, ...], ...]:
        """Of an arrangement, by job and slot."""
        return self.verdicts[number][0].arrangement.nodes

    def headline(self) -> str:
        """Jobs and cluster."""
        world = sum(job.layout.world for job in self.jobs)
        cluster = self.costs[0].cluster
        return f"{', '.join(self.titles)}: {world:,} of {cluster.world:,} accelerators of {cluster.name}"

    def conditions(self) -> str:
        """Under which this holds."""
        tiers = np.bincount(self.fabric.tier)[1:]
        switches = " + ".join(f"{count:,}" for count in tiers if count)
        pairs = f"{self.queue_pairs} queue pair{'s' * (self.queue_pairs > 1)} a transfer"
        drawn = f"{self.num_draws} draws" if self.routing == "ecmp" else "nothing is drawn"
        return f"switches by tier: {switches}; {self.routing}, {pairs}, {drawn}"

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "cluster": self.costs[0].cluster.name,
            "switches": [int(count) for count in np.bincount(self.fabric.tier)[1:]],
            "routing": self.routing,
            "queue_pairs": self.queue_pairs,
            "draws": self.num_draws,
            "jobs": [
                {"job": title, "ranks": job.layout.world, "plain_seconds": plain}
                for title, job, plain in zip(self.titles, self.jobs, self.plain_seconds, strict=True)
            ],
            "placements": [
                {"placement": row[0].arrangement.name, "jobs": [self._verdict(one) for one in row]}
                for row in self.verdicts
            ],
        }

    def _verdict(self, one: Verdict) -> dict[str, Any]:
        p50, p95 = np.percentile(one.seconds, (50, 95))
        p5_ring, p50_ring = np.percentile(one.slowest_ring, (5, 50))
        return {
            "job": self.titles[one.job],
            "nodes": list(one.arrangement.nodes[one.job]),
            "p50_seconds": float(p50),
            "p95_seconds": float(p95),
            "slowest_ring_p50_ratio": float(p50_ring),
            "slowest_ring_p5_ratio": float(p5_ring),
            "shared_ratio": one.shared_ratio,
            "bytes": dict(zip(TIERS, map(float, one.tier_bytes), strict=True)),
        }

    def picture(self) -> str:
        """As SVG."""
        near = Neighbourhoods(self.fabric)
        held, names = self._held()
        drawn = [
            Drawn(
                row[0].arrangement.name,
                held(row[0].arrangement.nodes),
                [float(sum(one.tier_bytes[tier] for one in row)) for tier in range(len(TIERS))],
                [[float(s) for s in one.seconds] for one in row],
            )
            for row in self.verdicts
        ]
        rows = [int(one) for one in near.set_of]
        jobs = list(zip(self.titles, self.plain_seconds, strict=True))
        return draw(self.headline(), drawn, rows, names, jobs)

    def _held(self) -> Any:
        """What each node holds, and names of it: parts of the pipeline; of several jobs which of them."""
        if len(self.jobs) > 1:
            return self._holds_jobs, self.titles
        layout = self.jobs[0].layout
        per_node = self.costs[0].cluster.accelerators_per_node
        slots = range(-(-layout.world // per_node))
        part_of = [slot * per_node // layout.tp % layout.pp for slot in slots]
        first = sorted(set(part_of))
        number = {part: i for i, part in enumerate(first)}
        names = [f"from pipeline rank {part}" if i == 0 else f"{part}" for i, part in enumerate(first)]

        def held(nodes: Sequence[Sequence[int]]) -> list[int]:
            found = [-1] * self.fabric.num_nodes
            for slot, node in enumerate(nodes[0]):
                found[node] = number[part_of[slot]]
            return found

        return held, names

    def _holds_jobs(self, nodes: Sequence[Sequence[int]]) -> list[int]:
        found = [-1] * self.fabric.num_nodes
        for job, own in enumerate(nodes):
            for node in own:
                found[node] = job
        return found


def show(placed: Placed, files: Sequence[str]) -> None:
    """Prints it."""
    from rich.console import Console

    console = Console(highlight=False)
    console.print(placed.headline(), style="bold", soft_wrap=True)
    console.print(placed.conditions(), style="dim", soft_wrap=True)
    for job, title in enumerate(placed.titles):
        _show_job(console, placed, job, title)
    console.print(
        "slowest ring: share of its ports' rate, median over draws; meet: share of the rings' flows above "
        "a first-tier switch that share a link which is too narrow for them",
        style="dim",
        soft_wrap=True,
    )
    for file in files:
        console.print(file, soft_wrap=True)


def _show_job(console: "Console", placed: Placed, job: int, title: str) -> None:
    from rich.table import Table

    plain = placed.plain_seconds[job]
    told = f"{title}: {spell(plain)} an iteration, predicted without switches"
    table = Table(box=None, title=told, title_justify="left", title_style="bold", pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in (*(f"TB {tier}" for tier in TIERS), "meet", "slowest ring", "p50", "p95"):
        table.add_column(name, justify="right", no_wrap=name in ("p50", "p95"))
    for row in placed.verdicts:
        one = row[job]
        p50, p95 = np.percentile(one.seconds, (50, 95))
        cells = [_terabytes(size) for size in one.tier_bytes]
        rings = f"{np.median(one.slowest_ring):.2f}"
        ends = (f"{one.shared_ratio:.1%}", rings, spell(p50), spell(p95))
        table.add_row(one.arrangement.name, *cells, *ends)
    console.print(table)


def _terabytes(num_bytes: float) -> str:
    if 0 < num_bytes < 1e10:
        return "<0.01"
    return f"{num_bytes / 1e12:,.0f}" if num_bytes >= 1e14 else format_number(num_bytes / 1e12)
