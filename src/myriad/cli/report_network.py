"""What ``myriad report --cluster`` says of the network under a run: ``myriad network`` of the run's
own job, where its ranks sit.

    placement    which node holds what under which switches (`myriad network place`)
    conflicts    the hashes of its heaviest traffic, as it is and with one thing different (`ecmp`)
    congestion   each control where most of these flows meet, cut out of the fabric (`congestion`)
    flaps        what a link that goes down and up does to its iteration, by timers (`flap`)
    settings     the environment for NCCL and gloo, with reasons (`tune`)
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, get_args

from myriad.cli.report_page import html_table
from myriad.errors import BadInputError
from myriad.job import Job
from myriad.planner.cluster import Cluster

if TYPE_CHECKING:
    from myriad.network.flaps import Habits
    from myriad.network.routing import Routes
    from myriad.planner.costs import Costs
    from myriad.planner.heaviest import Heaviest
    from myriad.planner.job_placement import Arrangement, JobsOnFabric

__all__ = ["network_parts"]

_DRAWS = 16
_MOST_PORTS = 32_768
"""NIC ports, up to which all of this takes some seconds."""
_TIMEOUTS = (14, 18, 20)


def network_parts(job: Job, cluster: Cluster, progress: Callable[[str, float], None]) -> Iterator[str]:
    """HTML; nothing where the cluster's file says of no fabric, or the job fits in one node. ``progress`` is
    told what begins, and the share that is done."""
    if cluster.fabric is None or job.layout.world <= cluster.accelerators_per_node:
        return
    yield "<h2>The network, predicted</h2>"
    num_ports = cluster.nodes * cluster.ports_per_node
    if num_ports > _MOST_PORTS:
        told = f"{cluster.name} has {num_ports:,} NIC ports: drawn up to {_MOST_PORTS:,}. "
        yield _words(told + "`myriad network place JOB --cluster CLUSTER --out place.svg` draws it.")
        return
    run = _RunOnFabric(job, cluster)
    sections = {
        "placement": run.placement,
        "hash conflicts": run.conflicts,
        "congestion": run.congestion,
        "flaps": run.flaps,
        "settings": run.settings,
    }
    for number, (name, section) in enumerate(sections.items()):
        progress(name, number / len(sections))
        try:
            yield from section()
        except BadInputError as error:  # a fact that the cluster's file lacks, or the memory of this machine
            yield _words(f"No {name}: {error}")


class _RunOnFabric:
    """A job on a cluster."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster

    @cached_property
    def costs(self) -> "Costs":
        from myriad.cli.forecast import costs_of

        return costs_of(self.job, self.cluster)

    @cached_property
    def judge(self) -> "Callable[[Costs], float]":
        """The simulator's word."""
        from myriad.planner.rescore import Simulations

        return Simulations().seconds

    @cached_property
    def plain_seconds(self) -> float:
        """Of an iteration, as the cost model has it without a fabric."""
        return self.judge(self.costs)

    @cached_property
    def routes(self) -> "Routes":
        from myriad.network.routing import Routes
        from myriad.planner.cluster_fabric import fabric_of

        return Routes(fabric_of(self.cluster))

    @cached_property
    def on_fabric(self) -> "JobsOnFabric":
        from myriad.cli.forecast import nodes_of
        from myriad.planner.job_placement import JobsOnFabric

        order = nodes_of(self.job, self.cluster)
        given = None if order is None else [order]
        return JobsOnFabric([self.costs], self.routes, self.judge, nodes=given)

    @cached_property
    def arrangement(self) -> "Arrangement":
        """Where its ranks sit."""
        return self.on_fabric.numbered()

    @cached_property
    def heaviest(self) -> "Heaviest":
        from myriad.planner.fabric_placement import seats_of
        from myriad.planner.heaviest import Heaviest

        seats = seats_of(self.costs, self.routes, self.arrangement.nodes[0])
        return Heaviest(self.on_fabric.tenants[0].at(seats))

    @cached_property
    def habits(self) -> "Habits":
        """Of the links of the job's nodes."""
        from myriad.cli.network_flap import Care, Rates, habits_of

        links = len(self.arrangement.nodes[0]) * self.cluster.ports_per_node
        care = Care(driver=True, patience=self.job.resilience.patience, restart_seconds=None)
        return habits_of(self.cluster, "lognormal:2:1", Rates(num_links=links), care)

    def placement(self) -> Iterator[str]:
        """As `place` draws it."""
        from myriad.cli.network_place_show import Placed

        verdicts = [self.on_fabric.verdicts(self.arrangement, range(_DRAWS))]
        plain = [self.plain_seconds]
        of = ((self.job,), (self.costs,), self.routes.fabric)
        placed = Placed(*of, verdicts, plain, "ecmp", 1, _DRAWS)
        yield _head("Where its ranks sit", placed.conditions(), "place")
        yield _card(placed.picture())

    def conflicts(self) -> Iterator[str]:
        """As `ecmp` draws them, of the heaviest of what the job sends."""
        from myriad.cli.network_ecmp_chart import draw_bars
        from myriad.network.remedies import FabricQuestion, advice, fabric_rows
        from myriad.planner.cluster_fabric import builder_of, shape_of
        from myriad.planner.heaviest import AS_IT_IS

        of = (builder_of(self.cluster), shape_of(self.cluster), AS_IT_IS)
        asked, *others = fabric_rows(FabricQuestion(*of, draws=_DRAWS, lay=self.heaviest.lay))
        rows = [replace(asked, name=AS_IT_IS), *others]
        count = len(self.heaviest.lay(self.routes, AS_IT_IS, 0))
        told = f"{count:,} flows of {self.heaviest.words}, all under way at once. {advice(rows)}"
        yield _head("Hash conflicts", told, "ecmp")
        yield _card(draw_bars(f"{count:,} flows of {self.heaviest.words}", rows))

    def congestion(self) -> Iterator[str]:
        """As `congestion` draws it, where most flows meet."""
        from myriad.cli.network_congestion_chart import draw
        from myriad.network.controls import CONTROLS
        from myriad.network.levels import measure

        case = self.heaviest.crowded(self.routes)
        if case is None:
            yield _head(
                "Congestion", "No link is asked for more than it carries: controls have nothing to do."
            )
            return
        rows = [measure(case, name, control, "fluid") for name, control in CONTROLS.items()]
        told = "The link that is asked for the most of its rate, with all that meets there under one draw of "
        told += "the hashes, cut out of the fabric and modelled as a fluid; ports of 200 Gbit/s, for which "
        told += "the controls' parameters are published."
        yield _head("Congestion", told, "congestion")
        yield _card(draw(rows, f"Each congestion control on {case.fabric.num_ports} ports of the fabric"))

    def flaps(self) -> Iterator[str]:
        """As `flap` draws them, with an iteration's seconds."""
        from myriad.cli.network_flap import answer
        from myriad.cli.network_flap_chart import draw
        from myriad.cli.network_flap_show import COLUMNS, advice, cells, notes
        from myriad.network.retransmission import MOST_RETRIES, Timers

        nics = self.cluster.nics
        adaptive = nics is None or nics.adaptive_retransmission
        found = answer(self.habits, Timers(18, MOST_RETRIES, adaptive), _TIMEOUTS)
        count = self.habits.num_links * self.habits.flaps_per_month
        told = f"{self.habits.num_links:,} links under the job, {count:.3g} flaps a month (assumed), "
        yield _head("Links that flap", f"{told}down for {self.habits.down.name}", "flap")
        yield _card(draw([one.timers for one in found.shown], self.habits))
        head = [*COLUMNS, "iteration with one"]
        rows = [[*cells(one), f"{self.plain_seconds + one.wait_seconds:.3g} s"] for one in found.shown]
        table = html_table(head, rows, range(1, len(head)))
        lines = "".join(_words(line) for line in notes(found, self.plain_seconds))
        settings = html_table(None, [[_code(setting), escape(why)] for setting, why in advice(found)], ())
        yield f'<div class="card scroll">{table}{lines}</div><div class="card scroll">{settings}</div>'

    def settings(self) -> Iterator[str]:
        """As `tune` says and draws them."""
        from myriad.cli.network_tune_chart import draw
        from myriad.planner.tuning import What, tune
        from myriad.planner.tuning_grounds import grounds

        lines = tune(self.cluster, self.habits)
        yield _head("Settings for NCCL and gloo", "What is set, what is better left alone, and why.", "tune")
        if (why := grounds(self.cluster, self.habits, lines)) is not None:
            yield _card(draw(self.cluster.name, why))
        ordered = sorted(lines, key=lambda line: get_args(What).index(line.what))
        rows = [
            [f'<span class="whole">{line.what}</span>', _code(line.assignment), escape(line.reason)]
            for line in ordered
        ]
        yield f'<div class="card scroll">{html_table(["", "variable", "why"], rows, ())}</div>'


def _head(title: str, told: str, command: str = "") -> str:
    more = " " + _code(f"myriad network {command}") if command else ""
    return f"<h3>{escape(title)}</h3>" + _words(told, more)


def _words(told: str, more: str = "") -> str:
    return f'<p class="dim">{escape(told)}{more}</p>'


def _code(told: str) -> str:
    return f"<code>{escape(told)}</code>"


def _card(svg: str) -> str:
    return f'<div class="card drawn">{svg}</div>'
