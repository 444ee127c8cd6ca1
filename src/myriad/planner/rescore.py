"""The simulator's word on layouts that a search found, in a fraction of a second each.

With many micro-batches an iteration has a steady part, in which one more costs the same as the last one:
two short iterations are simulated, and the rest is a straight line. A pipeline of p ranks is steady from
about 2 p micro-batches on, with interleaving from 3 p, with zero-bubble schedules from 3 or 4 p, with the
eager ones, which fill all that may be in flight before a slow rank holds up the others, from 6 p on; the
lengths differ by p and leave the same rest divided by p, because interleaving goes in rounds. Programs of
layouts that differ only in sizes are the same, and are made once (`straight_line`); layouts that cost the
same in them are simulated once.

    T(m) = T(a) + (m - a) (T(b) - T(a)) / (b - a)        a = 2 p + m mod p (at least 6),  b = a + p
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from myriad.errors import BadInputError
from myriad.planner.costs import Costs
from myriad.planner.memory import Memory
from myriad.planner.operators import peak_flops
from myriad.planner.rank_memory import memory_of_ranks, memory_of_repeating_ranks
from myriad.planner.sharing import predict
from myriad.planner.simulator import program_of, simulate
from myriad.planner.space import Candidate, Problem
from myriad.planner.steady import short_counts, steady_parts
from myriad.planner.straight_line import Figures, StraightLine
from myriad.program.actions import Program
from myriad.program.build import Lowered

__all__ = ["Plan", "Simulations", "rescore"]

_TIMES = (1, 2, 4)
"""Lengths of the two short programs in which a steady part is looked for."""
_KEPT = 64
"""Programs, and straight lines."""


@dataclass(frozen=True)
class Plan:
    """A layout with the simulator's seconds."""

    candidate: Candidate
    seconds: float
    mfu: float
    """Share of the peak of all accelerators, in the type that the job computes in."""

    @property
    def key(self) -> tuple[float, float]:
        """By time, the leaner of equals first."""
        return round(self.seconds, 6), self.candidate.memory_bytes


_Shape = tuple[object, ...]
"""What a program depends on."""


def _shape(costs: Costs, num_micro_batches: int) -> _Shape:
    """ZeRO 1 and 2 differ in what is kept, not in what is done."""
    layout, overlap = costs.work.layout, costs.work.overlap
    return (
        layout.schedule_name,
        layout.pp,
        layout.virtual_stages,
        1 if layout.zero == 2 else layout.zero,
        layout.reduce,
        layout.dp > 1,
        costs.num_chunks,
        num_micro_batches,
        (overlap.pipeline, overlap.data, overlap.optimizer, overlap.receive_ahead),
        (costs.work.model.tied, costs.work.practice.at_the_ends),
    )


class Simulations:
    """Makes each program once, and simulates each program under the same costs once."""

    def __init__(self) -> None:
        self._programs: dict[_Shape, Program] = {}
        self._lowered: Lowered = {}
        self._lines: dict[_Shape, StraightLine] = {}
        self._seconds: dict[tuple[_Shape, Figures], float] = {}

    def seconds(self, costs: Costs) -> float:
        """Of one iteration, with what snapshots add on average."""
        seconds = self.without_saves(costs)
        return seconds + costs.stall(seconds)

    def without_saves(self, costs: Costs) -> float:
        """Of one iteration."""
        if costs.cluster.shared_cores is not None:
            return predict(costs, spans=False).seconds
        if len(set(costs.work.shares)) > 1:
            return simulate(costs, spans=False).seconds
        whole = costs.work.num_micro_batches
        counts = short_counts(costs.work.layout, whole)
        if counts is None:
            return self._simulated(costs, whole)
        short, longer = counts
        first, second = self._simulated(costs, short), self._simulated(costs, longer)
        return first + (whole - short) * (second - first) / (longer - short)

    def _simulated(self, costs: Costs, num_micro_batches: int) -> float:
        line = self._line(costs, num_micro_batches)
        key = _shape(costs, num_micro_batches), line.figures(costs)
        if key not in self._seconds:
            self._seconds[key] = line.seconds(key[1])
        return self._seconds[key]

    def memory(self, costs: Costs) -> list[Memory]:
        """Of each pipeline rank, by the program that it runs, or by the beginning, the end and the steady
        part of it."""
        work, on_cpu = costs.work, costs.cluster.on_cpu
        for times in _TIMES if work.layout.schedule_name != "gpipe" else ():
            counts = short_counts(work.layout, work.num_micro_batches, times)
            if counts is None:
                break
            shorter, longer = (self.program(costs, count) for count in counts)
            if steady := steady_parts(shorter, longer):
                found = memory_of_repeating_ranks(work, longer, steady, on_cpu=on_cpu)
                if found is not None:
                    return found
        return memory_of_ranks(work, self.program(costs, work.num_micro_batches), on_cpu=on_cpu)

    def program(self, costs: Costs, num_micro_batches: int) -> Program:
        """Of so many micro-batches."""
        shape = _shape(costs, num_micro_batches)
        if shape not in self._programs:
            _make_room(self._programs)
            _make_room(self._lowered)
            self._programs[shape] = program_of(costs, num_micro_batches, lowered=self._lowered)
        return self._programs[shape]

    def _line(self, costs: Costs, num_micro_batches: int) -> StraightLine:
        shape = _shape(costs, num_micro_batches)
        if shape not in self._lines:
            _make_room(self._lines)
            self._lines[shape] = StraightLine(self.program(costs, num_micro_batches))
        return self._lines[shape]


def _make_room(kept: dict[_Shape, Any]) -> None:
    if len(kept) >= _KEPT:
        kept.pop(next(iter(kept)))


def rescore(
    problem: Problem,
    candidates: Iterable[Candidate],
    simulations: Simulations | None = None,
    *,
    progress: Callable[[], None] | None = None,
) -> list[Plan]:
    """Quickest first. ``progress`` is called after each."""
    simulations = simulations or Simulations()
    plans = []
    for candidate in candidates:
        work = candidate.work(problem)
        try:
            seconds = simulations.seconds(Costs(work, problem.cluster))
        except BadInputError:
            continue
        peak = peak_flops(problem.cluster.accelerator, problem.value_bytes) * candidate.layout.world
        plans.append(Plan(candidate, seconds, work.model_flops / (seconds * peak)))
        if progress:
            progress()
    return sorted(plans, key=lambda plan: plan.key)
