"""Spans inside the compute actions of a simulated iteration: exposed communication, and the steps of a ring.

Each is the sum over the layers of the stage. They are drawn at the end of the action, where a measured
iteration has them in each layer:

    forward    ... | ring_attention 0 | context_comm 1 | ring_attention 1 | ... | expert_comm | tensor_comm
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from myriad.planner.cost.context_costs import RingSteps
from myriad.planner.cost.layer_costs import block_times, context_block
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.operator_costs import TimeBreakdown
from myriad.planner.cost.stage_costs import StageCosts
from myriad.planner.cost.stage_layers import computed_pairs
from myriad.planner.workload import Recompute
from myriad.program.actions import COMPUTE, Action, Kind
from myriad.program.in_flight import BACKWARDS
from myriad.program.partition import cut_ranges

__all__ = ["IN_LAYERS", "InnerSpan", "SpansInLayers", "exposed_in_layers"]

IN_LAYERS = ("tensor", "experts", "context")
"""Kinds of exposed communication inside compute actions: fields of `TimeBreakdown`."""
_NAMES = dict(zip(IN_LAYERS, ("tensor_comm", "expert_comm", "context_comm"), strict=True))


class InnerSpan(NamedTuple):
    """A span inside a compute action."""

    name: str
    step: int
    """Step of a ring; -1: none."""
    start: float
    seconds: float


_Steps = dict[int, tuple[float, float]]
"""Seconds of waiting and of attention in each step of a ring."""


@dataclass
class SpansInLayers:
    """The spans inside the compute actions of a layout."""

    costs: Costs
    _rings: dict[int, tuple[_Steps, _Steps]] = field(default_factory=dict)

    def of(self, action: Action, start: float, seconds: float) -> list[InnerSpan]:
        """Return the spans inside an action that takes ``seconds`` from ``start``, in order."""
        layout = self.costs.workload.layout
        if action.kind not in COMPUTE or layout.tp * layout.ep * layout.cp == 1:
            return []
        stage = self.costs.stages[action.stage]
        planned, end = stage.seconds_of(action.kind), start + seconds
        if not planned:  # the weight half of a chunk with the embedding only
            return []
        exposed = exposed_in_layers(stage, action, self.costs.workload.recompute)
        ring = self._ring(action) if layout.ring > 1 else []
        waits = sum(one for name, _, one in ring if name == _NAMES["context"])
        exposed["context"] = max(0.0, exposed["context"] - waits)
        parts = [*ring, *((_NAMES[kind], -1, exposed[kind]) for kind in reversed(IN_LAYERS))]
        found = []
        for name, step, one in reversed(parts):
            inside = min(1.0, one / planned) * seconds
            end -= inside
            if inside:
                found.append(InnerSpan(name, step, end, inside))
        return found[::-1]

    def _ring(self, action: Action) -> list[tuple[str, int, float]]:
        """Return the name, step and seconds of each span of the ring in an action, in order."""
        forward, backward = self._steps(action.stage)
        stage = self.costs.stages[action.stage]
        attended = float(stage.times.forward.attention)
        turns = [forward]
        if action.kind is Kind.BACKWARD_WEIGHT:
            turns = []
        elif action.kind in BACKWARDS:
            repeats = self.costs.workload.recompute == "full" and attended > 0
            again = float(stage.recompute.attention) / attended if repeats else 0.0
            turns = [{step: (again * a, again * b) for step, (a, b) in forward.items()}, backward]
        return [
            (name, step, one)
            for steps in turns
            for step, both in sorted(steps.items())
            for name, one in zip((_NAMES["context"], "ring_attention"), both, strict=True)
        ]

    def _steps(self, stage: int) -> tuple[_Steps, _Steps]:
        """Return the steps of all blocks of a stage, forward and backward."""
        if stage in self._rings:
            return self._rings[stage]
        costs, model = self.costs, self.costs.workload.rank_model
        found: tuple[_Steps, _Steps] = ({}, {})
        for layer in cut_ranges(costs.layers_of_stage, costs.num_chunks)[stage]:
            block = layer - 1  # the embedding is the first layer, the head the last
            if not 0 <= block < model.layers:
                continue
            own, window = model.of_block(block), model.layer_window(block)
            pairs = computed_pairs(model, block, costs.workload.layout.cp)
            times = block_times(own, costs.slice, pairs, window)
            exchange = context_block(own, costs.slice, window)
            _add(found[0], exchange.forward(times.forward.attention))
            _add(found[1], exchange.backward(times.backward_input.attention))
        self._rings[stage] = found
        return found


def _add(found: _Steps, steps: Sequence[RingSteps]) -> None:
    sums = defaultdict(lambda: (0.0, 0.0), found)
    for run in steps:
        for step in range(run.first, run.first + run.num_steps):
            wait, attended = sums[step]
            sums[step] = wait + float(run.wait), attended + float(run.pieces)
    found.update(sums)


def exposed_in_layers(stage: StageCosts, action: Action, recompute: Recompute) -> dict[str, float]:
    """Return the seconds of exposed communication in a compute action, by kind of `IN_LAYERS`: of tensor
    parallelism, of tokens with the ranks of their experts, and of keys, values and heads with the ranks that
    share sequences."""
    repeats = recompute == "full" and action.kind in BACKWARDS
    found = stage.parts_of(action.kind) + (stage.recompute if repeats else TimeBreakdown())
    return {kind: float(getattr(found, kind)) for kind in IN_LAYERS}
