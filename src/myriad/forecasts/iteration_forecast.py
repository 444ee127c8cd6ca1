"""One iteration of a job, predicted on a cluster: time, MFU, memory, and the waiting of each pipeline rank.

question = IterationRequest(job, cluster, stragglers=["node=3:1.2x"])
found = question.forecast()
found.headline      "tiny on 2 of 2 accelerators of laptop: 13.2 ms an iteration, MFU 41.0%"
found.summary       times and memory of each pipeline rank
found.spans         rank -> predicted spans, in the format of measured ones
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from myriad.errors import BadInputError
from myriad.forecasts.network_effect import NetworkEffect, NetworkEventRequest
from myriad.units import format_bytes, format_number

if TYPE_CHECKING:
    from myriad.forecasts.measured_loads import MeasuredLoads
    from myriad.job import Job
    from myriad.planner import Cluster, Costs, DimensionWarning, IterationSummary, Workload
    from myriad.planner.fabric.fabric_forecast import FabricDistribution
    from myriad.planner.simulation.iteration_summary import RankSummary
    from myriad.planner.simulation.simulated_events import NetworkEvents
    from myriad.telemetry.spans import Span

__all__ = [
    "IterationForecast",
    "IterationRequest",
    "check_world",
    "costs_of",
    "nodes_of",
    "predict_iteration",
]

_MOST_ROWS = 32
"""Largest number of pipeline ranks in the printed table."""
_MOST_JITTER = 0.5


@dataclass(frozen=True)
class IterationRequest:
    """One iteration of a job on a cluster, with slow ranks and network events."""

    job: "Job"
    cluster: "Cluster"
    every_replica: bool = False
    """Whether to simulate every data-parallel replica, even where all are alike."""
    stragglers: Sequence[str] = ()
    """Slow nodes and ranks, as ``node=N:Fx`` or ``rank=N:Fx``."""
    jitter: float = 0.0
    """Standard deviation of each compute time, as a ratio of it."""
    seed: int = 1
    network: NetworkEventRequest = field(default_factory=NetworkEventRequest)

    def forecast(self) -> "IterationForecast":
        """Simulate the iteration. Raises `BadInputError`."""
        from myriad.planner import fits_probability, memory_of_ranks, simulate, summarize_iteration
        from myriad.planner.simulation.simulator import predicted_spans

        job, cluster = self.job, self.cluster
        check_jitter(self.jitter)
        slower, events = self._disturbances()
        costs = costs_of(job, cluster)
        run = partial(simulate, costs, slower=slower, jitter=self.jitter, seed=self.seed)
        prediction = run(every_replica=self.every_replica, network=events)
        memory = memory_of_ranks(
            costs.workload, prediction.program, on_cpu=cluster.on_cpu, node_size=cluster.accelerators_per_node
        )
        capacity = float(cluster.accelerator.memory_bytes)
        fits = [float(fits_probability(one, capacity)) for one in memory]
        effect = None
        if events is not None:
            effect = NetworkEffect(events, prediction.seconds, run(spans=False).seconds)
        found = summarize_iteration(costs, prediction, memory, fits)
        return IterationForecast(job, cluster, found, predicted_spans(prediction, costs), effect)

    def with_expert_load(self, load: float) -> "IterationRequest":
        """Return the same request for a busiest rank with this load of its experts."""
        layout = self.job.layout.model_copy(update={"expert_load": load})
        return replace(self, job=self.job.model_copy(update={"layout": layout}))

    def fabric_outlook(self, progress: Callable[[int, int], None]) -> "FabricDistribution":
        """Simulate the iteration on the cluster's switches, once for each draw of the hash seeds.

        Nodes are in the job's own order."""
        from myriad.planner import SimulationCache, simulate
        from myriad.planner.fabric.fabric_forecast import FabricForecaster

        slower, events = self._disturbances()
        run = partial(simulate, slower=slower, jitter=self.jitter, seed=self.seed, spans=False)

        def disturbed(costs: "Costs") -> float:
            return run(costs, network=events).seconds

        iteration_seconds = (
            disturbed if slower or self.jitter or events else SimulationCache().without_snapshots
        )
        on_fabric = FabricForecaster(self.cluster, iteration_seconds, first_seed=self.seed)
        tenant = on_fabric.job(costs_of(self.job, self.cluster))
        return on_fabric.outlook(tenant, nodes_of(self.job, self.cluster), progress=progress)

    def _disturbances(self) -> "tuple[dict[tuple[int, int], float], NetworkEvents | None]":
        """Return the slow ranks, and the events of links, on the nodes of the job."""
        from myriad.planner.simulation.simulated_events import parse_stragglers

        order = nodes_of(self.job, self.cluster)
        per_node = self.cluster.accelerators_per_node
        slower = parse_stragglers(self.stragglers, self.job.layout, per_node, order)
        return slower, self.network.events(self.job, self.cluster, order)


@dataclass(frozen=True)
class IterationForecast:
    """A predicted iteration: its summary, and the times of each rank."""

    job: "Job"
    cluster: "Cluster"
    summary: "IterationSummary"
    spans: "Mapping[int, list[Span]]"
    """Predicted spans by global rank."""
    effect: NetworkEffect | None
    """Effect of the network events; ``None``: there are none."""
    loads: "MeasuredLoads | None" = None
    """Loads of experts that a run measured."""
    at_high_load: "IterationSummary | None" = None
    """The iteration with the high one of those loads."""

    @property
    def headline(self) -> str:
        """Job, cluster, seconds and MFU in one line."""
        found, cluster = self.summary, self.cluster
        time = f"{_seconds(found.seconds)} an iteration, MFU {found.mfu:.1%}"
        return (
            f"{self.job.name} on {found.world:,} of {cluster.world:,} accelerators of {cluster.name}: {time}"
        )

    @property
    def rate_line(self) -> str:
        """Tokens per second, and the peak that the MFU refers to."""
        from myriad.forecasts.planned_job import planned_precision

        peak = f"{format_number(self.summary.peak_flops_per_second / 1e12, 4)} TFLOP/s"
        peak += f", {self.cluster.accelerator.name} in {planned_precision(self.job, self.cluster)}"
        return f"{self.summary.tokens_per_second:,.0f} tokens/s; MFU of {peak}"

    def table(self) -> list[str]:
        """Return the heading and a line for each pipeline rank; communication that is fully hidden has no
        column."""
        from myriad.planner.simulation.iteration_summary import EXPOSED_KINDS

        found = self.summary
        kinds = [name for name in EXPOSED_KINDS if any(one.exposed_seconds[name] for one in found.ranks)]
        rows = [["rank", "replicas", "computes", "updates", *kinds, "memory", "fits"]]
        for one in found.ranks[:_MOST_ROWS]:
            shares = (one.computing_seconds, one.optimizer_seconds, *(one.exposed_seconds[k] for k in kinds))
            cells = [f"{share / found.seconds:.1%}" for share in shares]
            memory = format_bytes(int(float(one.memory.total)))
            rows.append([str(one.rank), _replicas(one), *cells, memory, f"{one.fit_probability:.0%}"])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]

    @property
    def num_hidden_ranks(self) -> int:
        """Number of pipeline ranks that `table` leaves out."""
        return max(0, len(self.summary.ranks) - _MOST_ROWS)

    def notes(self) -> list[str]:
        """Return bubble, exposed communication, snapshots, and the interval of the prediction's error."""
        from myriad.forecasts.packed_documents import attended_note, attended_shares
        from myriad.planner.simulation.iteration_summary import EXPOSED_KINDS
        from myriad.planner.validation.prediction_interval import describe_interval

        found = self.summary
        others = sum(found.mean(name) for name in EXPOSED_KINDS if name != "pipeline") / found.seconds
        lines = [
            f"bubble {found.bubble_ratio:.1%}: a rank waits for other stages or their messages; "
            f"other exposed communication: {others:.1%}. This is a prediction: nothing was run."
        ]
        if found.stall_seconds:
            lines.append(
                f"snapshots add {_seconds(found.stall_seconds)} to an iteration, averaged over steps"
            )
        if said := attended_note(self.job, attended_shares(self.job)):
            lines.append(said)
        if self.loads is not None and self.at_high_load is not None:
            lines.append(self.loads.note(*self._high_load(self.at_high_load)))
        if said := describe_interval(self.cluster, has_experts=self.job.model.experts is not None):
            lines.append(said)
        return lines

    def _high_load(self, high: "IterationSummary") -> tuple[int, float, float]:
        """Return the ranks that share experts, and seconds and probability of fitting with the high load."""
        return self.job.layout.ep, high.seconds, min(rank.fit_probability for rank in high.ranks)

    @cached_property
    def warnings(self) -> "Sequence[DimensionWarning]":
        """Dimensions of the model that cost speed in this layout."""
        from myriad.planner import dimension_warnings, simulate

        def seconds(costs: "Costs") -> float:
            return simulate(costs, spans=False).seconds

        return dimension_warnings(_workload(self.job, self.cluster), self.cluster, seconds)

    def network_lines(self) -> list[str]:
        """Return the effect of the network events in sentences."""
        return [] if self.effect is None else list(self.effect.lines(self.summary))

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        from myriad.forecasts.planned_job import planned_precision
        from myriad.planner.simulation.iteration_summary import EXPOSED_KINDS
        from myriad.planner.validation.prediction_interval import interval_ratio

        found = self.summary
        return {
            "job": self.job.name,
            "cluster": self.cluster.name,
            "precision": planned_precision(self.job, self.cluster),
            "accelerators": found.world,
            "iteration_seconds": found.seconds,
            "interval_ratio": interval_ratio(self.cluster, has_experts=self.job.model.experts is not None),
            "mfu": found.mfu,
            "peak_flops_per_second": found.peak_flops_per_second,
            "tokens_per_second": found.tokens_per_second,
            "bubble_ratio": found.bubble_ratio,
            "checkpoint_stall_seconds": found.stall_seconds,
            "checkpoint_store_seconds": found.store_seconds,
            "exposed_seconds": {name: found.mean(name) for name in EXPOSED_KINDS},
            "ranks": [_rank_as_json(one) for one in found.ranks],
            "warnings": [one.as_json() for one in self.warnings],
            **({} if self.effect is None else {"network": self.effect.as_json()}),
            **self._loads_as_json(),
        }

    def _loads_as_json(self) -> dict[str, Any]:
        if self.loads is None or self.at_high_load is None:
            return {}
        return {"expert_load": self.loads.as_json(*self._high_load(self.at_high_load))}


def fabric_line(one: "FabricDistribution") -> str:
    """Return the p50, the p95 and the slowest ring of an iteration on the cluster's switches."""
    line = f"on its switches, {len(one.seconds)} draws of their hash seeds: p50 {_seconds(one.p50)}, "
    line += f"p95 {_seconds(one.p95)}; the slowest ring at {one.ring:.2f} of its ports' rate"
    if (found := one.as_json()).get("slowest_exchange_p50_ratio") is None:
        return line
    line += f", tokens to experts at {found['slowest_exchange_p50_ratio']:.2f}"
    return f"{line}; {_seconds(found['meeting_p50_seconds'])} are lost where both travel at once"


def check_jitter(jitter: float) -> None:
    """Raise `BadInputError` for a jitter outside its range."""
    if not 0 <= jitter <= _MOST_JITTER:
        raise BadInputError("--jitter", jitter, f"must be 0 to {_MOST_JITTER}: a ratio of each compute time")


def predict_iteration(job: "Job", cluster: "Cluster") -> float:
    """Return the seconds of one undisturbed iteration. Raises `BadInputError`."""
    from myriad.planner import simulate

    return simulate(costs_of(job, cluster), slower={}, jitter=0.0, seed=1).seconds


def costs_of(job: "Job", cluster: "Cluster") -> "Costs":
    """Return the costs of a job's actions on a cluster. Raises `BadInputError` where the cluster is too
    small."""
    from myriad.planner import Costs

    check_world(job, cluster)
    return Costs(_workload(job, cluster), cluster)


def check_world(job: "Job", cluster: "Cluster") -> None:
    """Raise `BadInputError` for a job with more ranks than the cluster has accelerators."""
    if job.layout.world > cluster.world:
        allowed = f"must be at most the {cluster.world:,} accelerators of {cluster.name}"
        raise BadInputError("layout.dp x layout.tp x layout.pp", job.layout.world, allowed)


def nodes_of(job: "Job", cluster: "Cluster") -> Sequence[int] | None:
    """Return the job's ``comm.node_order``, checked against the cluster; ``None`` where the job has none."""
    order = job.comm.node_order
    if order is None:
        return None
    if len(order) * cluster.accelerators_per_node != job.layout.world or len(order) > cluster.nodes:
        allowed = f"must be nodes of {cluster.name}, with {cluster.accelerators_per_node} ranks each"
        raise BadInputError("comm.node_order", f"{len(order)} nodes", allowed)
    return order


def _workload(job: "Job", cluster: "Cluster") -> "Workload":
    from myriad.forecasts.packed_documents import attended_shares
    from myriad.forecasts.planned_job import framework_profile_of, planned_precision, snapshot_schedule_of
    from myriad.job import work_of
    from myriad.planner import layout_within

    value_bytes = 4 if planned_precision(job, cluster) == "float32" else 2
    work = replace(
        work_of(job, value_bytes),
        snapshots=snapshot_schedule_of(job),
        profile=framework_profile_of(job),
        attended=attended_shares(job),
    )
    if job.train.memory_budget is None:
        return work
    layout = layout_within(
        work,
        job.train.memory_budget,
        on_cpu=cluster.on_cpu,
        node_size=cluster.accelerators_per_node,
        offloads=job.train.memory_offload == "auto",
    )
    return replace(work, layout=layout)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _replicas(one: "RankSummary") -> str:
    if one.replica >= 0:
        return f"no. {one.replica}"
    return f"{one.num_replicas:,}"


def _rank_as_json(one: "RankSummary") -> dict[str, Any]:
    purposes = {name: value for name, value in vars(one.memory).items() if name != "outside"}  # in the margin
    memory = {f"{name}_bytes": float(value) for name, value in purposes.items()}
    return {
        "replica": None if one.replica < 0 else one.replica,
        "num_replicas": one.num_replicas,
        "pipeline_rank": one.rank,
        "computing_seconds": one.computing_seconds,
        "optimizer_seconds": one.optimizer_seconds,
        "exposed_seconds": dict(one.exposed_seconds),
        "memory_bytes": float(one.memory.total),
        "memory": memory,
        "fits_probability": one.fit_probability,
    }
