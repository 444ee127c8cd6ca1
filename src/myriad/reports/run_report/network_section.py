"""The network section of ``myriad report --cluster``: the results of ``myriad network`` for the run's own
job, at its own placement.

    placement    the groups on the nodes, under which switches (`myriad network place`)
    conflicts    the hashes of its heaviest traffic, as it is and with one change (`ecmp`)
    congestion   each control where most of these flows meet, cut out of the fabric (`congestion`)
    flaps        the effect of a link that goes down and up on its iteration, by timers (`flap`)
    settings     the environment for NCCL and gloo, with reasons (`tune`)
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, get_args

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.job import Job
from myriad.network.congestion_scenarios import (
    PORT_BYTES_PER_SECOND,
    CongestionScenario,
    extract_subfabric,
    find_hot_spot,
)
from myriad.network.fabric import Flows
from myriad.network.hash_conflicts import node_order
from myriad.network.rank_transfers import inter_node_flows, merge_transfers
from myriad.network.routing import Routes, ecmp
from myriad.planner import Cluster
from myriad.planner.fabric.fabric_placement import rank_mapping
from myriad.planner.fabric.job_exposure import FabricJob
from myriad.planner.fabric.job_flows import Axis
from myriad.reports.run_report.report_page import html_table
from myriad.units import format_number

if TYPE_CHECKING:
    from myriad.network.link_flaps import FlapScenario
    from myriad.planner import Costs
    from myriad.planner.fabric.fabric_placement import JobArrangement, JobsOnFabric

__all__ = ["network_parts"]

_DRAWS = 16
_MOST_PORTS = 32_768
"""Largest number of NIC ports: up to this number the section takes some seconds."""
_TIMEOUTS = (14, 18, 20)


def network_parts(job: Job, cluster: Cluster, progress: Callable[[str, float], None]) -> Iterator[str]:
    """Yield the section as HTML; nothing where the cluster's file has no fabric, or the job fits in one node.
    ``progress`` is called with the next subsection and the completed share."""
    if cluster.fabric is None or job.layout.world <= cluster.accelerators_per_node:
        return
    yield "<h2>The network, predicted</h2>"
    num_ports = cluster.nodes * cluster.ports_per_node
    if num_ports > _MOST_PORTS:
        text = f"{cluster.name} has {num_ports:,} NIC ports: drawn up to {_MOST_PORTS:,}. "
        yield _words(text + "`myriad network place JOB --cluster CLUSTER --out place.svg` draws it.")
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
        except BadInputError as error:  # A fact is missing in the cluster's file, or memory on this machine.
            yield _words(f"No {name}: {error}")


class _RunOnFabric:
    """The network questions of `myriad network` for one job, where its ranks are placed."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster

    @cached_property
    def costs(self) -> "Costs":
        from myriad.forecasts.iteration_forecast import costs_of

        return costs_of(self.job, self.cluster)

    @cached_property
    def iteration_seconds(self) -> "Callable[[Costs], float]":
        """Function that simulates costs and returns the seconds of an iteration."""
        from myriad.planner import SimulationCache

        return SimulationCache().seconds

    @cached_property
    def plain_seconds(self) -> float:
        """Seconds of an iteration without switches."""
        return self.iteration_seconds(self.costs)

    @cached_property
    def routes(self) -> Routes:
        from myriad.planner.fabric.cluster_fabric import fabric_of

        return Routes(fabric_of(self.cluster))

    @cached_property
    def on_fabric(self) -> "JobsOnFabric":
        from myriad.forecasts.iteration_forecast import nodes_of
        from myriad.planner.fabric.fabric_placement import JobsOnFabric

        order = nodes_of(self.job, self.cluster)
        given = None if order is None else [order]
        return JobsOnFabric([self.costs], self.routes, self.iteration_seconds, nodes=given)

    @cached_property
    def arrangement(self) -> "JobArrangement":
        """The job's nodes, in its own order."""
        return self.on_fabric.numbered()

    @cached_property
    def heaviest(self) -> "_BusiestAxis":
        mapping = rank_mapping(self.costs, self.routes, self.arrangement.nodes[0])
        return _BusiestAxis(self.on_fabric.jobs[0].at(mapping))

    @cached_property
    def habits(self) -> "FlapScenario":
        """Flap behaviour of the links of the job's nodes."""
        from myriad.forecasts.flap_answer import JobTolerance, LinkRates, link_habits

        links = len(self.arrangement.nodes[0]) * self.cluster.ports_per_node
        tolerance = JobTolerance(
            driver=True, patience=self.job.resilience.timeout_scale, restart_seconds=None
        )
        return link_habits(self.cluster, "lognormal:2:1", LinkRates(num_links=links), tolerance)

    def placement(self) -> Iterator[str]:
        """Return the section on placement (`myriad network place`)."""
        from myriad.forecasts.compared_placements import ComparedPlacements
        from myriad.reports.charts.placement_chart import placement_picture

        verdicts = [self.on_fabric.evaluate(self.arrangement, range(_DRAWS))]
        plain = [self.plain_seconds]
        of = ((self.job,), (self.costs,), self.routes.fabric)
        placed = ComparedPlacements(*of, verdicts, plain, "ecmp", 1, _DRAWS)
        yield _head("Placement of the ranks", placed.conditions(), "place")
        yield _card(placement_picture(placed))

    def conflicts(self) -> Iterator[str]:
        """Return the section on hash conflicts of the job's heaviest traffic (`myriad network ecmp`)."""
        from myriad.network.ecmp_remedies import FabricStudy, advice, fabric_rows
        from myriad.planner.fabric.cluster_fabric import builder_of, shape_of
        from myriad.reports.charts.ecmp_chart import draw_bars

        of = (builder_of(self.cluster), shape_of(self.cluster), _AS_IT_IS)
        asked, *others = fabric_rows(FabricStudy(*of, draws=_DRAWS, place_flows=self.heaviest.flows_at))
        rows = [replace(asked, name=_AS_IT_IS), *others]
        count = len(self.heaviest.flows_at(self.routes, _AS_IT_IS, 0))
        text = f"{count:,} flows of {self.heaviest.words}, all in flight at the same time. {advice(rows)}"
        yield _head("Hash conflicts", text, "ecmp")
        yield _card(draw_bars(f"{count:,} flows of {self.heaviest.words}", rows))

    def congestion(self) -> Iterator[str]:
        """Return the section on congestion where most flows meet (`myriad network congestion`)."""
        from myriad.network.congestion_controls import CONTROLS
        from myriad.network.congestion_study import measure_scenario
        from myriad.reports.charts.congestion_chart import draw

        case = self.heaviest.hot_spot(self.routes)
        if case is None:
            yield _head("Congestion", "No link is overloaded, so congestion control has no effect.")
            return
        rows = [measure_scenario(case, name, control, "fluid") for name, control in CONTROLS.items()]
        text = "The most overloaded link with all flows that share it under one draw of "
        text += "the hashes, cut out of the fabric and modelled as a fluid; ports of 200 Gbit/s, for which "
        text += "the controls' parameters are published."
        yield _head("Congestion", text, "congestion")
        yield _card(draw(rows, f"Each congestion control on {case.fabric.num_ports} ports of the fabric"))

    def flaps(self) -> Iterator[str]:
        """Return the section on link flaps, with the iteration's seconds (`myriad network flap`)."""
        from myriad.forecasts.flap_answer import COLUMNS, advice, cells, compare_timers, notes
        from myriad.network.link_flaps import MAX_RETRIES, Timers
        from myriad.reports.charts.flap_chart import draw

        nics = self.cluster.nics
        adaptive = nics is None or nics.adaptive_retransmission
        found = compare_timers(self.habits, Timers(18, MAX_RETRIES, adaptive), _TIMEOUTS)
        count = self.habits.num_links * self.habits.flaps_per_month
        text = f"{self.habits.num_links:,} links under the job, {count:.3g} flaps a month (assumed), "
        yield _head("Links that flap", f"{text}down for {self.habits.down.name}", "flap")
        yield _card(draw([one.timers for one in found.shown], self.habits))
        head = [*COLUMNS, "iteration with one"]
        rows = [[*cells(one), f"{self.plain_seconds + one.wait_seconds:.3g} s"] for one in found.shown]
        table = html_table(head, rows, range(1, len(head)))
        lines = "".join(_words(line) for line in notes(found, self.plain_seconds))
        settings = html_table(None, [[_code(setting), escape(why)] for setting, why in advice(found)], ())
        yield f'<div class="card scroll">{table}{lines}</div><div class="card scroll">{settings}</div>'

    def settings(self) -> Iterator[str]:
        """Return the section on settings (`myriad network tune`)."""
        from myriad.planner.fabric.nccl_tuning import AdviceKind, tune, tuning_evidence
        from myriad.reports.charts.tuning_chart import draw

        lines = tune(self.cluster, self.habits)
        yield _head(
            "Settings for NCCL and gloo", "Variables to set, variables to leave alone, and why.", "tune"
        )
        if (why := tuning_evidence(self.cluster, self.habits, lines)) is not None:
            yield _card(draw(self.cluster.name, why))
        ordered = sorted(lines, key=lambda line: get_args(AdviceKind).index(line.what))
        rows = [
            [f'<span class="whole">{line.what}</span>', _code(line.assignment), escape(line.reason)]
            for line in ordered
        ]
        yield f'<div class="card scroll">{html_table(["", "variable", "why"], rows, ())}</div>'


def _head(title: str, text: str, command: str = "") -> str:
    more = " " + _code(f"myriad network {command}") if command else ""
    return f"<h3>{escape(title)}</h3>" + _words(text, more)


def _words(text: str, more: str = "") -> str:
    return f'<p class="dim">{escape(text)}{more}</p>'


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _card(svg: str) -> str:
    return f'<div class="card drawn">{svg}</div>'


_AS_IT_IS = "as it is"
"""Name of the job's current placement."""
_WORDS: dict[Axis, str] = {
    "dp": "its data-parallel rings",
    "pp": "its messages between pipeline stages",
    "tp": "its tensor-parallel rings",
    "edp": "its rings of experts",
    "ep": "its tokens to experts and back",
}
_MOST_FLOWS = 48
_MOST_BYTES = 8e6
"""Largest flow in bytes on a subfabric: some hundred round trips, after which congestion controls are
steady."""


class _BusiestAxis:
    """The busiest axis of a job that is placed on a fabric."""

    def __init__(self, job: FabricJob) -> None:
        self.job = job
        found = {axis: self._flows(axis) for axis in job.parts}
        self.axis: Axis = max(found, key=lambda axis: float(found[axis].num_bytes.sum()))

    def _flows(self, axis: Axis, elsewhere: FabricJob | None = None) -> Flows:
        job = elsewhere or self.job
        return inter_node_flows(merge_transfers([part.exchange for part in job.parts[axis]]), job.mapping)[0]

    @property
    def words(self) -> str:
        """Description of the axis for a report."""
        return _WORDS[self.axis]

    def flows_at(self, routes: Routes, placement: str, seed: int) -> Flows:
        """Return the axis's flows at the job's placement, or with its nodes packed, spread or drawn."""
        if placement == _AS_IT_IS:
            nodes: npt.NDArray[np.int64] = self.job.mapping.node
        else:
            nodes = node_order(routes, placement, seed)[: len(self.job.mapping.node)]
        return self._flows(self.axis, self.job.at(rank_mapping(self.job.costs, routes, nodes)))

    def hot_spot(self, routes: Routes, seed: int = 0) -> CongestionScenario | None:
        """Return the place where most of the axis's flows meet under one seed of the hashes. Its ports have
        the rate for which parameters of congestion controls are published. ``None``: no link is too narrow
        for the flows."""
        flows = self.flows_at(routes, _AS_IT_IS, seed)
        paths = ecmp(routes, flows, seed)
        chosen = find_hot_spot(routes.fabric, flows, paths, _MOST_FLOWS)
        if not len(chosen):
            return None
        fabric, few, ways = extract_subfabric(routes.fabric, flows, paths, chosen)
        own = fabric.bytes_per_second[fabric.source < fabric.num_ports]
        rates = fabric.bytes_per_second * (PORT_BYTES_PER_SECOND / float(np.median(own)))
        size = min(_MOST_BYTES, float(few.num_bytes.max()))
        few = replace(few, num_bytes=few.num_bytes * (size / float(few.num_bytes.max())))
        title = (
            f"{len(few)} of {len(flows):,} flows of {self.words}, up to {format_number(size / 1e6)} MB each"
        )
        watched = np.ones(len(few), dtype=np.bool_)
        return CongestionScenario(
            "where most meet", title, replace(fabric, bytes_per_second=rates), few, ways, watched
        )
