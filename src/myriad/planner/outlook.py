"""What a simulated iteration comes to: time, MFU, where each rank's time goes, what waits for whom.

Seconds of a rank are those of its simulated spans: an action's own, and what it waited for. Tensor-parallel
communication that nothing hides is part of a compute's seconds and is taken out of them here.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from myriad.planner.costs import Costs, StageCosts
from myriad.planner.memory import Memory
from myriad.planner.operators import peak_flops
from myriad.planner.simulator import Prediction, SimulatedSpan
from myriad.planner.work import Recompute
from myriad.program.actions import COMPUTE, Action, Kind

__all__ = ["EXPOSED", "Outlook", "RankOutlook", "outlook", "tensor_seconds"]

_WAITS = {
    "pipeline": (Kind.EXCHANGE, Kind.SEND, Kind.RECEIVE, Kind.WAIT),
    "gather": (Kind.GATHER, Kind.START_GATHER, Kind.AWAIT_GATHER),
    "reduce": (Kind.REDUCE, Kind.START_REDUCE, Kind.AWAIT_REDUCE),
    "tied": (Kind.SYNC_TIED,),
    "norm": (Kind.CLIP, Kind.STEP),
}
"""What a rank waits for: other stages and their messages, parameters, sums of gradients, those of tied
parameters, the global norm."""
_WAIT_OF = {kind: name for name, kinds in _WAITS.items() for kind in kinds}
EXPOSED = ("tensor", *_WAITS)
"""Communication by kind, in the order of reports."""


@dataclass(frozen=True)
class RankOutlook:
    """One pipeline rank of one replica; its tensor-parallel ranks do the same."""

    replica: int
    rank: int
    num_replicas: int
    """That are like it, itself included."""
    computing_seconds: float
    optimizer_seconds: float
    exposed_seconds: Mapping[str, float]
    """By kind of communication."""
    memory: Memory
    fits: float
    """Probability that the accelerator's memory is enough."""


@dataclass(frozen=True)
class Outlook:
    """One iteration."""

    seconds: float
    mfu: float
    tokens_per_second: float
    peak_flops_per_second: float
    """Of one accelerator, that MFU is a share of."""
    world: int
    stall_seconds: float
    """That snapshots add to this, on average over steps."""
    store_seconds: float | None
    """Until a durable checkpoint is stored; ``None``: how quick storage is is not known."""
    ranks: tuple[RankOutlook, ...]

    def mean(self, name: str) -> float:
        """Seconds that a kind of communication is exposed, over all ranks."""
        weights = [rank.num_replicas for rank in self.ranks]
        pairs = zip(self.ranks, weights, strict=True)
        return sum(rank.exposed_seconds[name] * weight for rank, weight in pairs) / sum(weights)

    @property
    def bubble_ratio(self) -> float:
        """Share of all ranks' time spent waiting for other stages, messages included."""
        return self.mean("pipeline") / self.seconds


def outlook(costs: Costs, prediction: Prediction, memory: Sequence[Memory], fits: Sequence[float]) -> Outlook:
    """``memory``, ``fits``: of each pipeline rank."""
    work = costs.work
    peak = peak_flops(costs.cluster.accelerator, work.value_bytes)
    tokens = work.global_batch * work.model.sequence
    return Outlook(
        seconds=prediction.seconds,
        mfu=work.model_flops / (prediction.seconds * work.layout.world * peak),
        tokens_per_second=tokens / prediction.seconds,
        peak_flops_per_second=peak,
        world=work.layout.world,
        stall_seconds=costs.stall(prediction.seconds),
        store_seconds=costs.saving.store_seconds,
        ranks=tuple(_ranks(costs, prediction, memory, fits)),
    )


def _ranks(
    costs: Costs, prediction: Prediction, memory: Sequence[Memory], fits: Sequence[float]
) -> Iterator[RankOutlook]:
    lanes: defaultdict[tuple[int, int], list[SimulatedSpan]] = defaultdict(list)
    for span in prediction.spans:
        lanes[span.replica, span.rank].append(span)
    others = costs.work.layout.dp - len({replica for replica, _ in lanes if replica >= 0})
    for (replica, rank), spans in sorted(lanes.items()):
        computing, tensor = _computing(costs, spans)
        exposed = dict.fromkeys(EXPOSED, 0.0) | {"tensor": tensor}
        for span in spans:
            if span.action.kind in _WAIT_OF:
                exposed[_WAIT_OF[span.action.kind]] += span.waited
        yield RankOutlook(
            replica,
            rank,
            others if replica < 0 else 1,
            computing,
            sum(s.duration - s.waited for s in spans if s.action.kind in (Kind.UPDATE, Kind.STEP)),
            exposed,
            memory[rank],
            fits[rank],
        )


def _computing(costs: Costs, spans: Sequence[SimulatedSpan]) -> tuple[float, float]:
    """Seconds of compute, and of the tensor-parallel communication between."""
    computes = [span for span in spans if span.action.kind in COMPUTE]
    everything = sum(span.duration - span.waited for span in computes)
    recompute = costs.work.recompute
    tensor = sum(tensor_seconds(costs.stages[span.action.stage], span.action, recompute) for span in computes)
    return everything - tensor, tensor


def tensor_seconds(stage: StageCosts, action: Action, recompute: Recompute) -> float:
    """Of a compute, in tensor-parallel communication that nothing hides."""
    times = stage.times
    forward, inputs = float(times.forward.tensor), float(times.backward_input.tensor)
    again = float(stage.again.tensor) if recompute == "full" else 0.0
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: inputs + again + float(times.backward_weight.tensor),
        Kind.BACKWARD_INPUT: inputs + again,
        Kind.BACKWARD_WEIGHT: float(times.backward_weight.tensor),
    }[action.kind]
