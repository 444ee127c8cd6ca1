"""Why a plan takes as long as it does, what its neighbours would take, and what would help most.

A waterfall is made by taking things away: the iteration is simulated as it is, then with messages that cost
nothing, then also without data parallelism, then also without the optimizer. What each step saves is that
part; the rest is the busiest rank's compute, by operators, and its bubble. What snapshots add comes last. So
the parts sum to the predicted time, to the last bit but rounding. Every run reads the same program.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from myriad.planner.cluster import Cluster, Link, SlowNodes
from myriad.planner.costs import Costs, StageCosts
from myriad.planner.rescore import Plan, Simulations
from myriad.planner.space import Candidate, Problem
from myriad.planner.work import Work

__all__ = ["PARTS", "Help", "helps", "waterfall"]

PARTS = (
    "matrix products",
    "attention",
    "memory-bound",
    "tensor parallelism",
    "recomputation",
    "pipeline bubble",
    "pipeline messages",
    "data parallelism",
    "optimizer",
    "slow nodes, host",
    "checkpoints",
)
"""Of a waterfall, in order. Slow nodes, host: the batch that is waited for, and slow nodes. Checkpoints: what
snapshots add, on average over steps."""


class _Without(Costs):
    """The same layout, where some things cost nothing."""

    def __init__(self, work: Work, cluster: Cluster, *gone: str) -> None:
        super().__init__(work, cluster)
        self._gone = frozenset(gone)

    @cached_property
    def stages(self) -> list[StageCosts]:
        stages = super().stages
        if "data" in self._gone:
            stages = [replace(stage, gather=0.0, reduce=0.0) for stage in stages]
        if "optimizer" in self._gone:
            stages = [replace(stage, update=0.0) for stage in stages]
        return stages

    @cached_property
    def message(self) -> float:
        return 0.0 if "messages" in self._gone else super().message

    def clip(self, parameters: float) -> float:
        return 0.0 if "optimizer" in self._gone else super().clip(parameters)

    @cached_property
    def tied(self) -> float:
        return 0.0 if "data" in self._gone else super().tied

    @cached_property
    def load(self) -> float:
        return 0.0 if "load" in self._gone else super().load


def waterfall(problem: Problem, candidate: Candidate, simulations: Simulations) -> dict[str, float]:
    """Seconds of each of `PARTS`."""
    work, cluster = candidate.work(problem), problem.cluster
    gone = ("messages", "data", "optimizer", "load")
    steps = [
        simulations.without_saves(_Without(work, cluster, *gone[:count]))
        for count in range(len(gone) + 1)
        if count < 4 or work.practice.host_seconds
    ]
    saved = [before - after for before, after in pairwise(steps)]
    costs = Costs(work, cluster)
    operators, once_more = costs.busiest_rank
    again = float(once_more.total)
    compute = float(operators.total) + again
    slow = (cluster.expected_slowdown - 1) * compute
    values = (
        float(operators.matmul),
        float(operators.attention),
        float(operators.memory),
        float(operators.tensor),
        again,
        steps[-1] - compute - slow,
        *saved[:3],
        sum(saved[3:]) + slow,
        costs.stall(steps[0]),
    )
    least = 1e-9 * steps[0]  # what differences of sums leave of nothing
    return {name: value if abs(value) > least else 0.0 for name, value in zip(PARTS, values, strict=True)}


@dataclass(frozen=True)
class Help:
    """What an iteration would take if something were better."""

    what: str
    seconds: float


def helps(problem: Problem, plan: Plan, parts: dict[str, float], simulations: Simulations) -> list[Help]:
    """The same layout with one thing better, the most helpful first."""
    found = [Help("no pipeline bubble", plan.seconds - max(0.0, parts["pipeline bubble"]))]
    for what, cluster in _better(problem.cluster):
        costs = Costs(plan.candidate.work(problem), cluster)
        found.append(Help(what, simulations.seconds(costs)))
    return sorted((one for one in found if one.seconds < plan.seconds), key=lambda one: one.seconds)


def _better(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    chip, links = cluster.accelerator, cluster.links
    yield "matrix products twice as fast", _chip(cluster, "peak_flops_per_second", "float32_flops_per_second")
    yield "memory bandwidth doubled", _chip(cluster, "memory_bytes_per_second")
    yield (
        "operators launched in no time",
        cluster.model_copy(update={"accelerator": chip.model_copy(update={"launch_seconds": 0.0})}),
    )
    for level in ("node", "network", "spine"):
        link: Link | None = getattr(links, level)
        if link is not None:
            yield f"links.{level} twice as fast", _link(cluster, level, link, 2.0, 1.0)
            yield f"links.{level} with half the latency", _link(cluster, level, link, 1.0, 0.5)
    if cluster.slow_nodes.ratio:
        yield "no slow nodes", cluster.model_copy(update={"slow_nodes": SlowNodes()})


def _chip(cluster: Cluster, *names: str) -> Cluster:
    chip = cluster.accelerator
    doubled = {name: 2 * value for name in names if (value := getattr(chip, name)) is not None}
    return cluster.model_copy(update={"accelerator": chip.model_copy(update=doubled)})


def _link(cluster: Cluster, level: str, link: Link, rate: float, latency: float) -> Cluster:
    better = link.model_copy(
        update={
            "bytes_per_second": link.bytes_per_second * rate,
            "latency_seconds": link.latency_seconds * latency,
            "launch_seconds": link.launch_seconds * latency,
        }
    )
    return cluster.model_copy(update={"links": cluster.links.model_copy(update={level: better})})
