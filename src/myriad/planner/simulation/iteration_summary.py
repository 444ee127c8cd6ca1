"""Summary of a simulated iteration: time, MFU, the seconds of each rank by cause, and the waiting between
ranks.

The seconds of a rank come from its simulated spans: the duration of an action and the waiting before it.
Exposed tensor-parallel communication is part of the seconds of a compute action; it is separated here.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.operator_costs import peak_flops
from myriad.planner.memory.closed_form_memory import PeakMemory
from myriad.planner.simulation.simulator import Prediction, SimulatedSpan
from myriad.planner.simulation.spans_in_layers import IN_LAYERS, exposed_in_layers
from myriad.program.actions import COMPUTE, SEMANTICS, Collective, kinds_where

__all__ = [
    "EXPOSED_KINDS",
    "IterationSummary",
    "RankSummary",
    "summarize_iteration",
]

_REDUCTIONS = {Collective.REDUCE, Collective.REDUCE_ACROSS}
_WAITS = {
    "pipeline": kinds_where(lambda does: does.posts or does.waits),
    "gather": kinds_where(lambda does: Collective.GATHER in (does.starts, does.ends)),
    "reduce": kinds_where(lambda does: bool(_REDUCTIONS & {does.starts, does.ends})),
    "tied": kinds_where(lambda does: does.joins == "ends"),
    "norm": kinds_where(lambda does: does.joins == "world"),
    "host": kinds_where(lambda does: does.ends_copy is not None),
}
"""Causes of waiting: other stages and their messages, parameter gathers, gradient reductions, the reduction
of tied gradients, the global norm, copies between device and host."""
_WAIT_OF = {kind: name for name, kinds in _WAITS.items() for kind in kinds}
EXPOSED_KINDS = (*IN_LAYERS, *_WAITS)
"""Communication by kind, in the order of reports."""


@dataclass(frozen=True)
class RankSummary:
    """Summary of one pipeline rank of one replica; its tensor-parallel ranks have the same values."""

    replica: int
    rank: int
    num_replicas: int
    """Number of replicas with the same values, including this one."""
    computing_seconds: float
    optimizer_seconds: float
    exposed_seconds: Mapping[str, float]
    """Exposed seconds by kind of communication."""
    memory: PeakMemory
    fit_probability: float
    """Probability that the accelerator's memory is enough."""


@dataclass(frozen=True)
class IterationSummary:
    """Times and memory of one simulated iteration."""

    seconds: float
    mfu: float
    tokens_per_second: float
    peak_flops_per_second: float
    """Peak rate of one accelerator, of which MFU is a share."""
    world: int
    stall_seconds: float
    """Average seconds that snapshots add to an iteration."""
    store_seconds: float | None
    """Seconds until a durable checkpoint is stored; ``None``: the storage rate is unknown."""
    ranks: tuple[RankSummary, ...]

    def mean(self, name: str) -> float:
        """Return the mean exposed seconds of a kind of communication over all ranks."""
        weights = [rank.num_replicas for rank in self.ranks]
        pairs = zip(self.ranks, weights, strict=True)
        return sum(rank.exposed_seconds[name] * weight for rank, weight in pairs) / sum(weights)

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time spent waiting for other stages, messages included."""
        return self.mean("pipeline") / self.seconds


def summarize_iteration(
    costs: Costs, prediction: Prediction, memory: Sequence[PeakMemory], fits: Sequence[float]
) -> IterationSummary:
    """Summarize a prediction. ``memory`` and ``fits``: one entry for each pipeline rank."""
    workload = costs.workload
    peak = peak_flops(costs.cluster.accelerator, workload.value_bytes)
    tokens = workload.global_batch * workload.model.sequence
    return IterationSummary(
        seconds=prediction.seconds,
        mfu=workload.model_flops / (prediction.seconds * workload.layout.world * peak),
        tokens_per_second=tokens / prediction.seconds,
        peak_flops_per_second=peak,
        world=workload.layout.world,
        stall_seconds=costs.stall(prediction.seconds),
        store_seconds=costs.snapshot_costs.store_seconds,
        ranks=tuple(_ranks(costs, prediction, memory, fits)),
    )


def _ranks(
    costs: Costs, prediction: Prediction, memory: Sequence[PeakMemory], fits: Sequence[float]
) -> Iterator[RankSummary]:
    lanes: defaultdict[tuple[int, int], list[SimulatedSpan]] = defaultdict(list)
    for span in prediction.spans:
        lanes[span.replica, span.rank].append(span)
    others = costs.workload.layout.dp - len({replica for replica, _ in lanes if replica >= 0})
    for (replica, rank), spans in sorted(lanes.items()):
        computing, in_layers = _computing(costs, spans)
        exposed = dict.fromkeys(EXPOSED_KINDS, 0.0) | in_layers
        for span in spans:
            if span.action.kind in COMPUTE:  # for the slowest of the ranks that share experts
                exposed["experts"] += span.waited
            elif span.action.kind in _WAIT_OF:
                exposed[_WAIT_OF[span.action.kind]] += span.waited
        yield RankSummary(
            replica,
            rank,
            others if replica < 0 else 1,
            computing,
            sum(s.duration - s.waited for s in spans if SEMANTICS[s.action.kind].updates),
            exposed,
            memory[rank],
            fits[rank],
        )


def _computing(costs: Costs, spans: Sequence[SimulatedSpan]) -> tuple[float, dict[str, float]]:
    """Return the seconds of compute, and of the exposed communication in it (`exposed_in_layers`)."""
    computes = [span for span in spans if span.action.kind in COMPUTE]
    everything = sum(span.duration - span.waited for span in computes)
    recompute = costs.workload.recompute
    each = [exposed_in_layers(costs.stages[span.action.stage], span.action, recompute) for span in computes]
    exposed = {kind: sum(one[kind] for one in each) for kind in IN_LAYERS}
    return everything - sum(exposed.values()), exposed
