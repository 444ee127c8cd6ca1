"""Cached simulation of the layouts that a search found: a fraction of a second for each.

With many micro-batches an iteration has a steady part, in which each further micro-batch costs the same. So
two short iterations are simulated and the rest is extrapolated linearly. A pipeline of p ranks is steady from
about 2 p micro-batches on, with interleaving from 3 p, with zero-bubble schedules from 3 or 4 p. The eager
schedules are steady from 6 p on: they fill all that may be in flight before a slow rank delays the others.
The two lengths differ by p and have the same remainder modulo p, because interleaving works in rounds.
Layouts that differ only in sizes share one program, which is built once (`compiled_simulator`). Layouts with
equal costs in that program are simulated once.

    T(m) = T(a) + (m - a) (T(b) - T(a)) / (b - a)        a = 2 p + m mod p (at least 6),  b = a + p
"""

from typing import Any

from myriad.planner.cost.layout_costs import Costs
from myriad.planner.memory.closed_form_memory import PeakMemory
from myriad.planner.memory.rank_memory import memory_of_ranks, memory_of_repeating_ranks
from myriad.planner.rehearsal.shared_core_simulator import predict_iteration
from myriad.planner.simulation.compiled_simulator import CompiledProgram, ProgramCosts
from myriad.planner.simulation.simulator import iteration_program, simulate
from myriad.planner.simulation.steady_state import short_run_lengths, steady_states
from myriad.program.actions import Program
from myriad.program.build import Lowered

__all__ = ["SimulationCache"]

_TIMES = (1, 2, 4)
"""Factors on the lengths of the two short programs, tried in order until a steady part is found."""
_KEPT = 64
"""Largest number of cached programs, and of cached compiled programs."""


_Shape = tuple[object, ...]
"""Everything that a program depends on."""


def _shape(costs: Costs, num_micro_batches: int) -> _Shape:
    """Return the cache key of a program. ZeRO 1 and 2 share one: they differ in what is stored, not in the
    actions."""
    layout, overlap = costs.workload.layout, costs.workload.overlap
    return (
        layout.schedule_name,
        layout.pp,
        layout.virtual_stages,
        1 if layout.zero == 2 else layout.zero,
        layout.reduce,
        (layout.dp > 1, layout.reduces_across),
        costs.num_chunks,
        num_micro_batches,
        (overlap.pipeline, overlap.data, overlap.optimizer, overlap.pairs, overlap.receive_ahead),
        (costs.workload.model.shares_embedding, costs.workload.dp_comm_at_ends),
        costs.workload.validates_later,
        costs.workload.orthogonalizes,
        (layout.offload_activations, layout.offload_optimizer, layout.offload_optimizer_ratio),
        overlap.offload_ahead,
    )


class SimulationCache:
    """Builds each program once, and simulates each program under the same costs once.

    A program is proved when the memory of a plan is counted, as for the first plans of a search, and again
    before it runs. One that is only simulated or compared is not: the simulation itself fails if a rank would
    wait forever.
    """

    def __init__(self) -> None:
        self._programs: dict[_Shape, Program] = {}
        self._checked: set[_Shape] = set()
        """Shapes whose program is proved."""
        self._lowered: Lowered = {}
        """Results of the passes that several programs share (`myriad.program.build`)."""
        self._lines: dict[_Shape, CompiledProgram] = {}
        self._seconds: dict[tuple[_Shape, ProgramCosts], float] = {}

    def seconds(self, costs: Costs) -> float:
        """Return the seconds of one iteration, including the average seconds that snapshots add."""
        seconds = self.without_snapshots(costs)
        return seconds + costs.stall(seconds)

    def without_snapshots(self, costs: Costs) -> float:
        """Return the seconds of one iteration without snapshots."""
        if costs.cluster.shared_cores is not None:
            return predict_iteration(costs, spans=False).seconds
        if len(set(costs.workload.micro_batches_per_replica)) > 1:
            return simulate(costs, spans=False).seconds
        whole = costs.workload.num_micro_batches
        counts = short_run_lengths(costs.workload.layout, whole)
        if counts is None:
            return self._simulated(costs, whole)
        short, longer = counts
        first, second = self._simulated(costs, short), self._simulated(costs, longer)
        return first + (whole - short) * (second - first) / (longer - short)

    def _simulated(self, costs: Costs, num_micro_batches: int) -> float:
        line = self._line(costs, num_micro_batches)
        key = _shape(costs, num_micro_batches), line.costs_of(costs)
        if key not in self._seconds:
            self._seconds[key] = line.seconds(key[1])
        return self._seconds[key]

    def memory(self, costs: Costs, *, checks: bool = True) -> list[PeakMemory]:
        """Return the memory of each pipeline rank. It comes from the rank's program, or from the start, the
        steady part and the end of that program. ``checks=False``: the program need not be proved."""
        workload, on_cpu, node_size = (
            costs.workload,
            costs.cluster.on_cpu,
            costs.cluster.accelerators_per_node,
        )
        for times in _TIMES if workload.layout.schedule_name != "gpipe" else ():
            counts = short_run_lengths(workload.layout, workload.num_micro_batches, times)
            if counts is None:
                break
            shorter, longer = (self.program(costs, count, checks=checks) for count in counts)
            if steady := steady_states(shorter, longer):
                found = memory_of_repeating_ranks(
                    workload, longer, steady, on_cpu=on_cpu, node_size=node_size
                )
                if found is not None:
                    return found
        program = self.program(costs, workload.num_micro_batches, checks=checks)
        return memory_of_ranks(workload, program, on_cpu=on_cpu, node_size=node_size)

    def program(self, costs: Costs, num_micro_batches: int, *, checks: bool = True) -> Program:
        """Return the program with so many micro-batches. ``checks=False``: it need not be proved."""
        shape = _shape(costs, num_micro_batches)
        needs_proof = checks and shape not in self._checked
        if needs_proof or shape not in self._programs:
            _make_room(self._programs)
            _make_room(self._lowered)
            self._programs[shape] = iteration_program(
                costs, num_micro_batches, lowered=self._lowered, checks=checks
            )
        if needs_proof:
            self._checked.add(shape)
        return self._programs[shape]

    def _line(self, costs: Costs, num_micro_batches: int) -> CompiledProgram:
        shape = _shape(costs, num_micro_batches)
        if shape not in self._lines:
            _make_room(self._lines)
            self._lines[shape] = CompiledProgram(self.program(costs, num_micro_batches, checks=False))
        return self._lines[shape]


def _make_room(kept: dict[_Shape, Any]) -> None:
    if len(kept) >= _KEPT:
        kept.pop(next(iter(kept)))
