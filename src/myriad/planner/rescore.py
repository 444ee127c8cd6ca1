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

from myriad.errors import BadInputError
from myriad.planner.costs import Costs
from myriad.planner.sharing import predict
from myriad.planner.simulator import program_of
from myriad.planner.space import Candidate, Problem
from myriad.planner.straight_line import Figures, StraightLine
from myriad.program.actions import Program

__all__ = ["Plan", "Simulations", "rescore"]

_DEEP = {"interleaved": 3, "eager-1f1b": 6, "zero-bubble": 3, "eager-zero-bubble": 6, "zero-bubble-v": 4}
"""Micro-batches for each pipeline rank until an iteration is steady, where it is not 2."""
_FEWEST = 6
"""Micro-batches of the shorter one, with however few ranks."""
_KEPT = 64
"""Programs."""


@dataclass(frozen=True)
class Plan:
    """A layout with the simulator's seconds."""

    candidate: Candidate
    seconds: float
    mfu: float
    """Of the peak of all accelerators."""

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
        self._lines: dict[_Shape, StraightLine] = {}
        self._seconds: dict[tuple[_Shape, Figures], float] = {}

    def seconds(self, costs: Costs) -> float:
        """Of one iteration."""
        if costs.cluster.shared_cores is not None:
            return predict(costs, spans=False).seconds
        layout, whole = costs.work.layout, costs.work.num_micro_batches
        deep = _DEEP.get(layout.schedule_name, 2)
        short = max(_FEWEST, deep * layout.pp) + whole % layout.pp
        if whole % layout.pp and layout.virtual_stages > 1:
            short += 2 * layout.pp  # rounds of unequal length: let there be several
        longer = short + max(2, layout.pp)
        if whole <= longer:
            return self._simulated(costs, whole)
        first, second = self._simulated(costs, short), self._simulated(costs, longer)
        return first + (whole - short) * (second - first) / (longer - short)

    def _simulated(self, costs: Costs, num_micro_batches: int) -> float:
        line = self._line(costs, num_micro_batches)
        key = _shape(costs, num_micro_batches), line.figures(costs)
        if key not in self._seconds:
            self._seconds[key] = line.seconds(key[1])
        return self._seconds[key]

    def program(self, costs: Costs, num_micro_batches: int) -> Program:
        """Of so many micro-batches."""
        return self._line(costs, num_micro_batches).program

    def _line(self, costs: Costs, num_micro_batches: int) -> StraightLine:
        shape = _shape(costs, num_micro_batches)
        if shape not in self._lines:
            if len(self._lines) >= _KEPT:
                self._lines.pop(next(iter(self._lines)))
            self._lines[shape] = StraightLine(program_of(costs, num_micro_batches))
        return self._lines[shape]


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
        peak = problem.cluster.accelerator.peak_flops_per_second * candidate.layout.world
        plans.append(Plan(candidate, seconds, work.model_flops / (seconds * peak)))
        if progress:
            progress()
    return sorted(plans, key=lambda plan: plan.key)
