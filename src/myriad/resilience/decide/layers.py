"""Layers that move from a stage on a slow node to other stages. Pure.

    equal     stage 0  e b b b b   4 x 10 ms           stage 1  b b b b h   5 x 15 ms      75 ms a micro-batch
    moved     stage 0  e b b b b b b   6 x 10 ms       stage 1  b b h       3 x 15 ms      60 ms

What a layer takes is known from what each rank of the pipeline took at first (`layer_seconds`), how much
slower a rank is from what it takes now. Of all contiguous cuts those are best with which a step is shortest
(`best_cuts`): mostly what the slowest rank takes for a micro-batch, times their number, and once what all of
them take, while the pipeline fills and drains.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from myriad.job import Job
    from myriad.model.config import ModelConfig

__all__ = ["Moved", "Pipeline", "best_cuts", "layer_seconds", "pipeline_seconds"]

_MOST_TIMES = 2
"""No rank gets more than so many times an equal number of layers: each takes memory."""
_MOSTLY, _LITTLE = 0.9, 0.01
"""Of what a rank takes: blocks, where they tell what a block takes; embedding and head at least."""
_HALVINGS = 40


@dataclass(frozen=True)
class Pipeline:
    """How a job's layers lie on the ranks of its pipeline."""

    weights: tuple[float, ...]
    """Of each layer: its FLOPs, in any unit."""
    cuts: tuple[int, ...]
    """First layer of each later stage."""
    owners: tuple[int, ...]
    """Rank of the pipeline that has each stage."""
    most_layers: int
    """That any rank may get."""

    @staticmethod
    def of(job: "Job") -> "Pipeline | None":
        """``None`` where there is one stage, or its cuts depend on what a rank measures (profile)."""
        from myriad.program.partition import partition_layers  # for a start: a driver does without
        from myriad.program.schedules import stage_owners

        layout, model = job.layout, job.model
        if layout.pp == 1 or layout.partition == "profile":
            return None
        kinds = ("Embedding", *("Block" for _ in range(model.layers)), "Head")
        costs = _parameters(model) if layout.partition == "parameters" else None
        stages = partition_layers(layout.partition, layout.num_stages, kinds, costs)
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        cuts = tuple(layers.start for layers in stages[1:])
        found = Pipeline(tuple(model.layer_flops_per_token()), cuts, owners, 0)
        most = max(*found.counts(cuts), _MOST_TIMES * -(-len(kinds) // layout.pp))
        return Pipeline(found.weights, cuts, owners, most)

    @property
    def depth(self) -> int:
        """Ranks of the pipeline."""
        return max(self.owners) + 1

    def stages(self, cuts: Sequence[int]) -> list[range]:
        """Layers of each stage."""
        return [range(a, b) for a, b in pairwise((0, *cuts, len(self.weights)))]

    def counts(self, cuts: Sequence[int]) -> list[int]:
        """Layers of each rank."""
        return [int(count) for count in self.sums([1.0] * len(self.weights), cuts)]

    def sums(self, of_layers: Sequence[float], cuts: Sequence[int]) -> list[float]:
        """What the layers of each rank add up to."""
        found = [0.0] * self.depth
        for owner, layers in zip(self.owners, self.stages(cuts), strict=True):
            found[owner] += sum(of_layers[layer] for layer in layers)
        return found

    def owner_of_layer(self, cuts: Sequence[int]) -> list[int]:
        """Rank of each layer."""
        stages = zip(self.owners, self.stages(cuts), strict=True)
        return [owner for owner, layers in stages for _ in layers]

    def allows(self, cuts: Sequence[int]) -> bool:
        """No stage is empty, no rank has more than it may."""
        rising = all(a < b for a, b in pairwise((0, *cuts, len(self.weights))))
        return rising and max(self.counts(cuts)) <= self.most_layers


@dataclass(frozen=True)
class Moved:
    """What was known when layers were moved."""

    cuts: tuple[int, ...]
    """Before."""
    seconds: tuple[float, ...]
    """Of each layer for a micro-batch, on a rank that is not slow."""
    times: tuple[float, ...]
    """How many times as long each rank of the pipeline took."""


def _parameters(model: "ModelConfig") -> list[float]:
    """Of each layer; what two of them share counts where it is first."""
    from myriad.planner.costs import layer_parameters  # a driver does without numpy where it can

    *others, head = map(float, layer_parameters(model))
    return [*others, head - model.padded_vocabulary() * model.hidden if model.tied else head]


def pipeline_seconds(paces: Sequence[float], share: int, num_stages: int) -> float:
    """Of a step of ``share`` micro-batches: ``paces`` are what each rank takes for one of them."""
    return (share - 1) * max(paces) + sum(paces) * len(paces) / num_stages


def layer_seconds(pipeline: Pipeline, paces: Sequence[float], cuts: Sequence[int]) -> tuple[float, ...]:
    """Of each layer, from what each rank takes for a micro-batch with such cuts; those of a rank add up to
    it. Where embedding or head are, blocks take what they take elsewhere, the two take the rest."""
    weights = pipeline.weights
    last = len(weights) - 1
    of_blocks = pipeline.sums([0.0, *weights[1:last], 0.0], cuts)
    of_all = pipeline.sums(weights, cuts)
    pure = [blocks / max(total, 1e-30) for blocks, total in zip(of_blocks, of_all, strict=True)]
    enough = min(_MOSTLY, max(pure))
    rate = median(
        pace / total for pace, total, part in zip(paces, of_all, pure, strict=True) if part >= enough
    )
    owner_of, found = pipeline.owner_of_layer(cuts), [0.0] * len(weights)
    for owner, pace in enumerate(paces):
        mine = [layer for layer in range(last + 1) if owner_of[layer] == owner]
        ends = [layer for layer in mine if layer in (0, last)]
        rest = max(_LITTLE * pace, pace - rate * of_blocks[owner]) if ends else 0.0
        parts = {layer: max(weights[layer], _LITTLE * max(weights)) for layer in ends}
        for layer in mine:
            if layer in ends:
                found[layer] = rest * parts[layer] / sum(parts.values())
            else:
                found[layer] = (pace - rest) * weights[layer] / of_blocks[owner]
    return tuple(found)


def best_cuts(
    pipeline: Pipeline, seconds: Sequence[float], times: Sequence[float], share: int
) -> tuple[int, ...]:
    """With which a step of ``share`` micro-batches is shortest, or hardly longer than that. ``seconds``: of
    each layer; ``times``: how many times as long each rank takes for it."""

    def cost(cuts: Sequence[int]) -> float:
        paces = [one * total for one, total in zip(times, pipeline.sums(seconds, cuts), strict=True)]
        return pipeline_seconds(paces, share, len(pipeline.owners))

    begins = [pipeline.cuts]
    evenly = _evenly(pipeline, seconds, times)
    if evenly is not None and pipeline.allows(evenly):
        begins.append(evenly)
    found = [_downhill(pipeline, begin, cost) for begin in begins]
    return min(found, key=cost)


def _evenly(pipeline: Pipeline, seconds: Sequence[float], times: Sequence[float]) -> tuple[int, ...] | None:
    """The slowest stage as fast as possible: by halves, the least limit within which all layers go, when
    each stage takes as many as it can."""
    low, high = 0.0, sum(seconds) * max(times)
    found = None
    for _ in range(_HALVINGS):
        limit = (low + high) / 2
        cuts = _within(pipeline, seconds, times, limit)
        if cuts is None:
            low = limit
        else:
            found, high = cuts, limit
    return found


def _within(
    pipeline: Pipeline, seconds: Sequence[float], times: Sequence[float], limit: float
) -> tuple[int, ...] | None:
    cuts, layer, stages = [], 0, len(pipeline.owners)
    most = pipeline.most_layers * pipeline.depth // stages
    for stage, owner in enumerate(pipeline.owners):
        end = min(layer + most, len(seconds) - (stages - stage - 1))
        first, total = layer, 0.0
        while layer < end and total + times[owner] * seconds[layer] <= limit:
            total += times[owner] * seconds[layer]
            layer += 1
        if layer == first:
            return None
        cuts.append(layer)
    return tuple(cuts[:-1]) if layer == len(seconds) else None


def _downhill(
    pipeline: Pipeline, cuts: tuple[int, ...], cost: Callable[[Sequence[int]], float]
) -> tuple[int, ...]:
    """Runs of cuts are moved by a layer while that makes a step shorter."""
    best = cost(cuts)
    while True:
        tried = [one for one in _neighbours(cuts) if pipeline.allows(one)]
        costs = [cost(one) for one in tried]
        if not tried or min(costs) >= best * (1 - 1e-9):
            return cuts
        best = min(costs)
        cuts = tried[costs.index(best)]


def _neighbours(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """A layer goes from one stage to another, those between them pass one on."""
    for first in range(len(cuts)):
        for last in range(first, len(cuts)):
            for by in (-1, 1):
                yield (*cuts[:first], *(cut + by for cut in cuts[first : last + 1]), *cuts[last + 1 :])
