"""A layout's costs on a fabric, whose switches slow its transfers.

A *slowdown* is the ratio of a transfer's rate on ports alone to its rate on the fabric
(`myriad.planner.fabric.job_exposure`). It multiplies the cost model's seconds of the transferred bytes.

Tokens travel to experts, and keys and values of shared sequences around a ring, inside forwards and
backwards. The cost model computes these again with slower exchanges, so that more of them is exposed only
where they no longer hide. While data-parallel rings are in
flight, exchanges are slower still, and the compute beside a ring takes longer by that.
"""

from dataclasses import dataclass, replace
from functools import cached_property

from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.collective_costs import ExchangeSlowdown
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_costs import StageCosts
from myriad.planner.workload import Workload
from myriad.program.actions import Kind
from myriad.program.partition import cut_ranges
from myriad.program.schedules import stage_owners

__all__ = ["FabricCosts", "TransferSlowdown", "without_spine"]


@dataclass(frozen=True)
class TransferSlowdown:
    """Slowdown of one job's transfers under one seed; 1 is the rate on ports alone."""

    data: tuple[float, ...]
    """Slowdown of the data-parallel rings, by pipeline rank."""
    tensor: tuple[float, ...]
    messages: dict[tuple[int, int], float]
    """Slowdown of the messages between two pipeline ranks, in the replica with the slowest messages."""
    expert_data: tuple[float, ...] = ()
    """Slowdown of the rings among ranks that hold the same experts; empty: there are none."""
    exchanges: tuple[float, ...] = ()
    """Slowdown of the tokens that travel to experts; empty: none travel."""
    beside_rings: tuple[float, ...] = ()
    """The same while data-parallel rings are in flight."""
    rings_alone: tuple[float, ...] = ()
    """Slowdown of the rings while no tokens travel; empty: none ever do."""
    context: tuple[float, ...] = ()
    """Slowdown of what ranks that share sequences exchange; empty: none do."""

    @property
    def slowest_ring(self) -> float:
        """Largest slowdown of a data-parallel ring, while no tokens travel."""
        return max(self.rings_alone or (*self.data, *self.expert_data), default=1.0)

    @property
    def slowest_exchange(self) -> float:
        """Largest slowdown of the tokens that travel to experts, while no ring is in flight."""
        return max(self.exchanges, default=1.0)

    def with_slower_exchanges(self, factor: float) -> "TransferSlowdown":
        """Return the slowdown with all exchanges of tokens slower."""
        slower = [tuple(factor * one for one in ranks) for ranks in (self.exchanges, self.beside_rings)]
        return replace(self, exchanges=slower[0], beside_rings=slower[1])


class FabricCosts(Costs):
    """A layout's costs with slowed transfers. The fabric replaces `links.spine`."""

    def __init__(self, workload: Workload, cluster: Cluster, slowdown: TransferSlowdown) -> None:
        super().__init__(workload, without_spine(cluster))
        self.slowdown = slowdown
        layout = workload.layout
        owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
        self.owners = [owner for owner in owners for _ in range(self.num_chunks)]
        """Pipeline rank of each stage of the program."""
        self._at: dict[ExchangeSlowdown, list[StageCosts]] = {}

    def with_slower_exchanges(self, factor: float) -> "FabricCosts":
        return FabricCosts(self.workload, self.cluster, self.slowdown.with_slower_exchanges(factor))

    @cached_property
    def stages(self) -> list[StageCosts]:
        return [
            self._slower(self._stages_at(self._inside(rank, self.slowdown.exchanges))[index], index)
            for index, rank in enumerate(self.owners)
        ]

    def _inside(self, rank: int, tokens: tuple[float, ...]) -> ExchangeSlowdown:
        """Return the slowdowns inside the compute of a pipeline rank. ``tokens``: those of tokens, by
        rank."""
        return ExchangeSlowdown(*(one[rank] if one else 1.0 for one in (tokens, self.slowdown.context)))

    def _stages_at(self, slowdown: ExchangeSlowdown) -> list[StageCosts]:
        """Return the stages with slower exchanges inside them, and all else at the rate of the ports."""
        if slowdown not in self._at:
            self._at[slowdown] = Costs(self.workload, self.cluster, slowdown).stages
        return self._at[slowdown]

    def _slower(self, stage: StageCosts, index: int) -> StageCosts:
        rank, times, across = self.owners[index], stage.times, self.across_groups
        data, tensor = self.slowdown.data[rank] - 1, self.slowdown.tensor[rank] - 1
        begun_across = float(across.all_reduce_seconds(0.0)) if across is not None else 0.0
        gathers, reduces = self._added_seconds(index, rank)
        return replace(
            stage,
            gather=stage.gather + gathers,
            reduce=stage.reduce + reduces,
            reduce_across=stage.reduce_across + data * max(0.0, stage.reduce_across - begun_across),
            forward=stage.forward + tensor * float(times.forward.tensor),
            backward_input=stage.backward_input
            + tensor * float(times.backward_input.tensor + stage.recompute.tensor),
        )

    def _added_seconds(self, index: int, rank: int) -> tuple[float, float]:
        """Return the seconds by which a stage's gathers and reductions take longer: those of experts go in
        rings of their own."""
        others, experts = self.held_parameters(cut_ranges(self.layers_of_stage, self.num_chunks)[index])
        rings = [(self.dp_collectives, self.slowdown.data[rank], others)]
        if experts and self.expert_collectives is not None and self.slowdown.expert_data:
            rings.append((self.expert_collectives, self.slowdown.expert_data[rank], experts))
        gathers = reduces = 0.0
        for sums, slowdown, parameters in rings:
            if slowdown != 1:
                gather, reduced = self.gather_and_reduce(sums, parameters)
                begun = float(sums.all_gather_seconds(0.0))
                whole = begun if self.workload.layout.zero else float(sums.all_reduce_seconds(0.0))
                gathers += (slowdown - 1) * max(0.0, gather - begun)
                reduces += (slowdown - 1) * max(0.0, reduced - whole)
        return gathers, reduces

    def busy_ratio_of(self, stage: int, kind: Kind) -> float:
        """Return the share of a ring's time by which a compute action beside it slows down, also because its
        tokens travel more slowly."""
        busy, rank = super().busy_ratio_of(stage, kind), self.owners[stage]
        if not self.slowdown.beside_rings or kind is Kind.BACKWARD_WEIGHT:
            return busy
        alone, beside = (
            self._stages_at(self._inside(rank, tokens))[stage].seconds_of(kind)
            for tokens in (self.slowdown.exchanges, self.slowdown.beside_rings)
        )
        return busy + (beside - alone) / max(alone, 1e-12)

    def message_between(self, source: int, target: int) -> float:
        latency = float(self.pipeline.latency_seconds)
        return latency + (self.message - latency) * self.slowdown.messages.get((source, target), 1.0)


def without_spine(cluster: Cluster) -> Cluster:
    """Return the cluster without its spine link: the fabric models the uplinks instead."""
    return cluster.model_copy(update={"links": cluster.links.model_copy(update={"spine": None})})
