"""The work of a step: which ranks do the same work, how much of it, and which layers a pipeline rank has.
Pure.

Ranks of one pipeline stage do the same work on each micro-batch, in every replica and for every
tensor-parallel index. Ranks of other stages do not (the first has the embedding, the last the head).

    equal     stage 0  e b b b b   4 x 10 ms           stage 1  b b b b h   5 x 15 ms      75 ms a micro-batch
    moved     stage 0  e b b b b b b   6 x 10 ms       stage 1  b b h       3 x 15 ms      60 ms

The times of layers follow from the first times of the pipeline ranks (`layer_seconds`), the slowdown of a
rank from its present time. `best_cuts` finds the contiguous cuts with the shortest step. A step takes the
time of the slowest rank for all micro-batches but one, and the time of all ranks for one, while the pipeline
fills and drains.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Literal

from myriad.comm.attempt_layout import AttemptLayout, equal_shares

if TYPE_CHECKING:
    from myriad.job import Job
    from myriad.model.config import ModelConfig

__all__ = [
    "LayerMove",
    "Pipeline",
    "StepWork",
    "best_cuts",
    "layer_seconds",
    "pipeline_seconds",
    "shares_are_fixed",
]

_MAX_LAYERS_RATIO = 2
"""No rank gets more than this many times an equal number of layers, because each layer takes memory."""
_MOSTLY, _LITTLE = 0.9, 0.01
"""Share of a rank's time that blocks must have to show the time of a block; least share of embedding and
head."""
_HALVINGS = 40


@dataclass(frozen=True)
class Pipeline:
    """The division of a job's layers among the ranks of its pipeline."""

    weights: tuple[float, ...]
    """FLOPs of each layer, in any unit."""
    cuts: tuple[int, ...]
    """First layer of each later stage."""
    owners: tuple[int, ...]
    """Pipeline rank that owns each stage."""
    most_layers: int
    """Most layers of any rank."""

    @staticmethod
    def of(job: "Job") -> "Pipeline | None":
        """Return the pipeline of a job. Return ``None`` if there is only one stage, or if its cuts depend on
        what a rank measures (profile)."""
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
        most = max(*found.counts(cuts), _MAX_LAYERS_RATIO * -(-len(kinds) // layout.pp))
        return Pipeline(found.weights, cuts, owners, most)

    @property
    def depth(self) -> int:
        """Number of ranks of the pipeline."""
        return max(self.owners) + 1

    def stages(self, cuts: Sequence[int]) -> list[range]:
        """Return the layers of each stage."""
        return [range(a, b) for a, b in pairwise((0, *cuts, len(self.weights)))]

    def counts(self, cuts: Sequence[int]) -> list[int]:
        """Return the number of layers of each rank."""
        return [int(count) for count in self.sums([1.0] * len(self.weights), cuts)]

    def sums(self, of_layers: Sequence[float], cuts: Sequence[int]) -> list[float]:
        """Return the sum of the layers of each rank."""
        found = [0.0] * self.depth
        for owner, layers in zip(self.owners, self.stages(cuts), strict=True):
            found[owner] += sum(of_layers[layer] for layer in layers)
        return found

    def owner_of_layer(self, cuts: Sequence[int]) -> list[int]:
        """Return the rank that owns each layer."""
        stages = zip(self.owners, self.stages(cuts), strict=True)
        return [owner for owner, layers in stages for _ in layers]

    def allows(self, cuts: Sequence[int]) -> bool:
        """Return whether no stage is empty and no rank has more than `most_layers` layers."""
        rising = all(a < b for a, b in pairwise((0, *cuts, len(self.weights))))
        return rising and max(self.counts(cuts)) <= self.most_layers


@dataclass(frozen=True)
class LayerMove:
    """What was known when layers were moved."""

    cuts: tuple[int, ...]
    """Layer cuts before the move."""
    seconds: tuple[float, ...]
    """Seconds of each layer for a micro-batch, on a rank that is not slow."""
    times: tuple[float, ...]
    """Slowdown of each rank of the pipeline: its time as a multiple of the normal time."""


def _parameters(model: "ModelConfig") -> list[float]:
    """Return the parameters of each layer; shared ones count where they are first."""
    from myriad.planner.cost.stage_layers import layer_parameters  # a driver does without numpy where it can

    *others, head = map(float, layer_parameters(model))
    return [*others, head - model.padded_vocabulary() * model.hidden if model.shares_embedding else head]


def pipeline_seconds(paces: Sequence[float], share: int, num_stages: int) -> float:
    """Return the seconds of a step of ``share`` micro-batches; ``paces``: micro-batch seconds by rank."""
    return (share - 1) * max(paces) + sum(paces) * len(paces) / num_stages


def layer_seconds(pipeline: Pipeline, paces: Sequence[float], cuts: Sequence[int]) -> tuple[float, ...]:
    """Return the seconds of each layer; the layers of a rank add up to its seconds per micro-batch with these
    cuts. On ranks with the embedding or the head, blocks take as long as elsewhere, and the two take the
    rest."""
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
    """Return the cuts with the shortest step of ``share`` micro-batches, or one that is hardly longer.
    ``seconds``: seconds of each layer. ``times``: slowdown of each rank."""

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
    """Minimize the time of the slowest stage. Bisect for the least limit within which all layers fit when
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
    """Improve cuts: shift groups of neighbouring cuts by one layer while that makes a step shorter."""
    best = cost(cuts)
    while True:
        tried = [one for one in _neighbours(cuts) if pipeline.allows(one)]
        costs = [cost(one) for one in tried]
        if not tried or min(costs) >= best * (1 - 1e-9):
            return cuts
        best = min(costs)
        cuts = tried[costs.index(best)]


def _neighbours(cuts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield cuts in which one stage gives up a layer to another; each stage between the two passes one layer
    on."""
    for first in range(len(cuts)):
        for last in range(first, len(cuts)):
            for by in (-1, 1):
                yield (*cuts[:first], *(cut + by for cut in cuts[first : last + 1]), *cuts[last + 1 :])


_MAX_SHARE_RATIO = 2
"""No replica gets more than this many times an equal share, because other replicas may be slow next."""


def shares_are_fixed(job: "Job") -> bool:
    """Return whether no replica can take more micro-batches than in the job. With GPipe a rank keeps the
    activations of all its micro-batches until the first backward, and memory was planned for the largest
    number. Replicas that train independently have equal weight, and a state each."""
    return job.layout.schedule_name == "gpipe" or job.comm.sync_every > 1


@dataclass(frozen=True)
class StepWork:
    """The work of a job's step."""

    dp: int
    pp: int
    ranks_per_node: int
    node_order: tuple[int, ...]
    """Order of the nodes in the rank grid; empty: by number."""
    shares: tuple[int, ...]
    """Micro-batches of each replica."""
    most_share: int
    """Largest number of micro-batches of any replica."""
    steps: int
    """Steps of the run."""
    on_slow: Literal["move", "swap", "report"]
    shares_stay: bool = False
    """Replicas that share experts exchange tokens in each micro-batch, so all have equally many."""
    pipeline: Pipeline | None = None
    """Pipeline if layers can be moved; else ``None``."""

    @staticmethod
    def of(job: "Job", num_nodes: int = 1) -> "StepWork":
        """Build the work of a job with known nodes and layout."""
        layout, shares = job.layout, job.shares
        stay = layout.folds_experts
        fixed = stay or shares_are_fixed(job)
        equal = -(-sum(shares) // layout.dp)
        return StepWork(
            dp=layout.dp,
            pp=layout.pp,
            ranks_per_node=layout.world // num_nodes,
            node_order=job.comm.node_order or () if num_nodes > 1 else (),
            shares=shares,
            most_share=max(shares) if fixed else max(*shares, _MAX_SHARE_RATIO * equal),
            steps=job.train.steps,
            on_slow=job.resilience.on_slow,
            shares_stay=stay,
            pipeline=Pipeline.of(job),
        )

    def in_attempt(self, layout: AttemptLayout) -> "StepWork":
        """Return the work with the replicas of an attempt, before any work moves among them."""
        if layout.dp is None:
            return self
        shares = equal_shares(sum(self.shares), layout.dp)
        most = shares[0] if self.shares_stay else max(self.most_share, _MAX_SHARE_RATIO * shares[0])
        return replace(self, dp=layout.dp, shares=shares, most_share=most, node_order=())

    def place(self, rank: int, world: int) -> tuple[int, int]:
        """Return the replica and pipeline stage of one of ``world`` ranks, as the launcher numbers them."""
        replica, stage, _ = self.seat(rank, world)
        return replica, stage

    def seat(self, rank: int, world: int) -> tuple[int, int, int]:
        """Return the replica, pipeline stage and tensor-parallel index of a rank."""
        if self.node_order:
            node, local_rank = divmod(rank, self.ranks_per_node)
            rank = self.node_order.index(node) * self.ranks_per_node + local_rank
        replica, within = divmod(rank, world // self.dp)
        return replica, *divmod(within, world // (self.dp * self.pp))
