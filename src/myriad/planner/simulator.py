"""One iteration of a program on a cost model: every rank's spans.

The program is the one that the runtime reads; `myriad.planner.rank_clocks` follows who waits for whom.
Replicas that cannot differ are one: without stragglers one pipeline stands for 12,288 ranks. What hides
behind compute slows it (`busy_ratio` of a link). Two iterations are run and the second is reported, so that
parameters that travel behind the optimizer are there, or not, as they are in a long run.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from myriad.planner.costs import Costs
from myriad.planner.rank_clocks import RankClocks, SimulatedSpan
from myriad.program.actions import COMPUTE, Action, Kind, Program
from myriad.program.build import Lowered, build_program

if TYPE_CHECKING:
    from myriad.planner.network_events import NetworkEvents

__all__ = ["Prediction", "Run", "SimulatedSpan", "program_of", "programs_of", "simulate"]


@dataclass(frozen=True)
class Prediction:
    """One iteration."""

    seconds: float
    program: Program
    spans: tuple[SimulatedSpan, ...]


def simulate(
    costs: Costs,
    *,
    slower: Mapping[tuple[int, int], float] | None = None,
    jitter: float = 0.0,
    seed: int = 1,
    program: Program | None = None,
    spans: bool = True,
    every_replica: bool = False,
    network: "NetworkEvents | None" = None,
) -> Prediction:
    """``slower``: factor on the compute of (replica, pipeline rank); ``jitter``: standard deviation of each
    compute's factor, for which every replica is simulated, as ``every_replica`` asks in any case.
    ``program``: what `program_of` made of a layout of the same shape, of any number of
    micro-batches, for all replicas; off: made here, with the job's shares. ``network``: what happens to it in
    the iteration."""
    dp = costs.work.layout.dp
    programs = [program] * dp if program else programs_of(costs)
    replicas = list(range(dp))
    if not (every_replica or jitter):
        touched = {replica for replica, _ in slower or {}} | (network.replicas if network else set())
        replicas = _that_differ(programs, touched)
    run = Run([programs[replica] for replica in replicas], costs, replicas, dict(slower or {}), jitter, seed)
    first = run.iterate()
    if network is not None:
        network.begin_seconds, run.network = max(first), network
    run.keep = spans
    second = run.iterate()
    seconds = max(second) - max(first)
    return Prediction(seconds, run.program, tuple(run.spans))


def _that_differ(programs: Sequence[Program], slower: Collection[int]) -> list[int]:
    """Replicas that are slower, and one of each program that stands for all that are as planned; -1 where
    those are all alike."""
    replicas = sorted(slower)
    first: dict[int, int] = {}
    for replica, program in enumerate(programs):
        if replica not in replicas:
            first.setdefault(program.num_micro_batches, replica)
    alike = len({program.num_micro_batches for program in programs}) == 1
    return replicas + ([-1] if alike and first else list(first.values()))


def programs_of(costs: Costs) -> list[Program]:
    """What the ranks of each replica run in one iteration."""
    shares = costs.work.shares
    made = {count: program_of(costs, count, max(shares)) for count in set(shares)}
    return [made[count] for count in shares]


def program_of(
    costs: Costs, num_micro_batches: int, most_micro_batches: int = 0, lowered: Lowered | None = None
) -> Program:
    """What the ranks run in one iteration of so many micro-batches; ``most_micro_batches``: of any replica,
    where they differ. ``lowered``: what is kept between calls."""
    work = costs.work
    program = build_program(
        work.layout,
        work.overlap,
        num_micro_batches,
        tied=work.model.tied,
        training=True,
        num_chunks=costs.num_chunks,
        most_micro_batches=most_micro_batches,
        lowered=lowered,
    )
    if work.practice.at_the_ends:
        program = replace(program, ranks=tuple(map(_at_the_ends, program.ranks)))
    return program


def _at_the_ends(actions: Sequence[Action]) -> tuple[Action, ...]:
    """Gathers first and reductions last, where they are waited for."""
    first = [action for action in actions if action.kind is Kind.GATHER]
    last = [action for action in actions if action.kind is Kind.REDUCE]
    rest = [action for action in actions if action.kind not in (Kind.GATHER, Kind.REDUCE)]
    steps = next(i for i, action in enumerate(rest) if action.kind in (Kind.CLIP, Kind.STEP))
    return (*first, *rest[:steps], *last, *rest[steps:])


class Run(RankClocks):
    """With a cost model's seconds."""

    def __init__(
        self,
        programs: Sequence[Program],
        costs: Costs,
        replicas: Sequence[int],
        slower: Mapping[tuple[int, int], float],
        jitter: float,
        seed: int,
    ) -> None:
        """``programs``: one for each of the replicas."""
        super().__init__(programs, costs, replicas)
        self.costs = costs
        slowdown = costs.cluster.expected_slowdown
        self.factor = [slowdown * slower.get(lane, 1.0) for lane in self.lanes]
        self.random, self.jitter = random.Random(seed), jitter

    def _seconds(self, lane: int, rank: int, action: Action, begin: float) -> float:
        cost = self._cost(lane, rank, action)
        return cost + self._slowed(lane, begin, cost) if action.kind in COMPUTE else cost

    def _slowed(self, lane: int, begin: float, cost: float) -> float:
        """By gathers and reductions that are under way meanwhile."""
        return float(self.costs.data.busy_ratio) * max(
            0.0, min(self.stream[lane], begin + cost) - max(begin, self.hidden_from[lane])
        )

    def _cost(self, lane: int, rank: int, action: Action) -> float:
        kind, costs = action.kind, self.costs
        if kind in COMPUTE:
            stage = costs.stages[action.stage]
            seconds = {
                Kind.FORWARD: stage.forward,
                Kind.BACKWARD: stage.backward,
                Kind.BACKWARD_INPUT: stage.backward_input,
                Kind.BACKWARD_WEIGHT: stage.backward_weight,
            }[kind]
            noise = max(0.5, self.random.gauss(1.0, self.jitter)) if self.jitter else 1.0
            return seconds * self.factor[lane] * noise
        if kind is Kind.UPDATE:
            return costs.stages[action.stage].update
        if kind is Kind.STEP:
            return sum(costs.stages[s].update for s in self._stages_of(rank))
        if kind is Kind.LOAD:
            return costs.load
        if kind is Kind.EXCHANGE:
            return costs.work.practice.exchange_seconds
        return 0.0
