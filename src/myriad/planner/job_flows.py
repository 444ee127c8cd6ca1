"""The traffic of a job: which rank sends what to whom, and when, from the program that its ranks run.

    activation, gradient   between pipeline neighbours, each tensor-parallel rank its share
    gather, reduce         of a chunk's parameters and gradients among data-parallel replicas
    tied                   gradients that the first and the last stage share, summed between the two
    tensor-forward, ...    the gathers and scatters inside the layers, of a forward or a backward

One `Phase` is one of these for one stage of the program, among all ranks at once, with the moments at which
the simulated iteration posts it. So 12,288 ranks are some hundreds of phases of arrays. Left out is what is a
few bytes: the gradient's norm, the loss.

A ring among n ranks of which k stand in each node is k rings, each of which enters and leaves a node at
another of its ranks, as NCCL lays them (one channel a NIC, each with a k-th of the bytes):

    node 0: 0 1   node 1: 4 5      ring a   0 -> 4 -> 5 .. -> 0     ring b   1 -> 5 -> 4 .. -> 1

so each rank sends and receives (n - 1)/n of the bytes, 1/k of that through its NIC. Level by level
(`myriad.comm.hierarchy`) and with gloo, which sends every slice straight to its owner, the slices are counted
as the runtime sends them.

Arrays: E transfers, G groups, n ranks of a group.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import AXES
from myriad.network.exchange import Exchange
from myriad.planner.costs import Costs
from myriad.planner.rings import Pattern, direct_pattern, level_pattern, ring_pattern, transfers
from myriad.planner.simulator import Prediction, SimulatedSpan, simulate
from myriad.program.actions import COMPUTE, Kind, Payload
from myriad.program.partition import cut_ranges

__all__ = ["Axis", "Phase", "PhaseKind", "phases_of", "rank_grid"]

PhaseKind = Literal["activation", "gradient", "gather", "reduce", "tied", "tensor-forward", "tensor-backward"]
Axis = Literal["dp", "pp", "tp"]
_AXIS: dict[PhaseKind, Axis] = {
    "activation": "pp",
    "gradient": "pp",
    "tied": "pp",
    "gather": "dp",
    "reduce": "dp",
    "tensor-forward": "tp",
    "tensor-backward": "tp",
}
_GATHERS = (Kind.GATHER, Kind.START_GATHER)
_REDUCES = (Kind.REDUCE, Kind.START_REDUCE)
_Ints = npt.NDArray[np.int64]
_Starts = dict[tuple[PhaseKind, int, int], list[float]]
"""By kind, stage and replica (-1: all)."""


@dataclass(frozen=True, eq=False)
class Phase:
    """One kind of transfer of one stage of the program."""

    kind: PhaseKind
    stage: int
    exchange: Exchange
    """Of one time."""
    start_seconds: tuple[float, ...]
    """Of each time in an iteration, from its beginning; what is posted before others have finished the last
    one begins below 0."""

    @property
    def axis(self) -> Axis:
        """Of the grid, that it goes along."""
        return _AXIS[self.kind]

    @property
    def num_bytes(self) -> float:
        """In an iteration."""
        return float(self.exchange.num_bytes.sum()) * len(self.start_seconds)


def rank_grid(costs: Costs) -> _Ints:
    """``[dp, pp, tp]``: the ranks."""
    layout = costs.work.layout
    shape = tuple(getattr(layout, axis) for axis in AXES)
    return np.arange(layout.world, dtype=np.int64).reshape(shape).reshape(layout.dp, layout.pp, -1)


def phases_of(costs: Costs, prediction: Prediction | None = None) -> list[Phase]:
    """All of an iteration. ``prediction``: a simulated one with spans; off: simulated here."""
    prediction = prediction or simulate(costs)
    maker = _Maker(costs, prediction)
    return [*maker.pipeline(), *maker.data(), *maker.tied(), *maker.tensor()]


class _Maker:
    def __init__(self, costs: Costs, prediction: Prediction) -> None:
        self.costs, self.program = costs, prediction.program
        self.grid, self.starts = rank_grid(costs), _starts(prediction)
        self.per_node = costs.cluster.accelerators_per_node

    def _of(self, *kinds: PhaseKind) -> Iterator[tuple[PhaseKind, int, int, tuple[float, ...]]]:
        for (kind, stage, replica), found in sorted(self.starts.items()):
            if kind in kinds:
                yield kind, stage, replica, tuple(found)

    def _replicas(self, replica: int) -> Sequence[int]:
        """That a simulated one stands for."""
        shares = self.costs.work.shares
        if replica < 0:
            return range(len(shares))
        return [one for one, share in enumerate(shares) if share == shares[replica]]

    def pipeline(self) -> Iterator[Phase]:
        """To the stage after and the stage before."""
        work, owners = self.costs.work, self.program.stage_rank
        tokens = work.layout.micro_batch * work.model.sequence
        num_bytes = tokens * work.model.hidden * work.value_bytes / work.layout.tp
        for kind, stage, replica, starts in self._of("activation", "gradient"):
            to = owners[stage + (1 if kind == "activation" else -1)]
            ranks = self.grid[self._replicas(replica)]
            source, target = ranks[:, owners[stage]].reshape(-1), ranks[:, to].reshape(-1)
            sizes = np.full(len(source), num_bytes)
            yield Phase(kind, stage, Exchange(source, target, sizes, np.arange(len(source))), starts)

    def data(self) -> Iterator[Phase]:
        """Among replicas, whose simulated ones stand for all: the last of them to post begins it."""
        latest: defaultdict[tuple[PhaseKind, int], list[tuple[float, ...]]] = defaultdict(list)
        for kind, stage, _, starts in self._of("gather", "reduce"):
            latest[kind, stage].append(starts)
        pattern = self._data_pattern()
        if not len(pattern.source):
            return
        for (kind, stage), every in latest.items():
            groups = self.grid[:, self.program.stage_rank[stage]].T
            exchange = transfers(pattern, groups, self._data_bytes(kind, stage))
            yield Phase(kind, stage, exchange, tuple(map(max, zip(*every, strict=True))))

    def _data_bytes(self, kind: PhaseKind, stage: int) -> float:
        """Of a chunk; a sum for everybody is a reduction and a gather of the same."""
        work, parameters = self.costs.work, self.costs.stages[stage].parameters
        if kind == "gather":
            return parameters * work.value_bytes
        return parameters * work.practice.gradient_bytes * (1 if work.layout.zero else 2)

    def _data_pattern(self) -> Pattern:
        """Of all groups: that of the first, which stands as they all do where it matters."""
        sums, group = self.costs.data_sums, self.grid[:, 0, 0]
        if sums.sent is None:
            return ring_pattern(group // self.per_node)
        radices = sums.sites.radices(group.tolist(), sums.hierarchy) or (len(group),)
        return level_pattern(radices, direct=self.costs.cluster.on_cpu)

    def tied(self) -> Iterator[Phase]:
        """Both ends of the pipeline send half of the sum and get half of it, twice."""
        work, owners = self.costs.work, self.program.stage_rank
        starts = self.starts.get(("tied", 0, -1)) or self.starts.get(("tied", 0, 0))
        if not starts:
            return
        ends = self.grid[:, [owners[0], owners[-1]]].transpose(0, 2, 1).reshape(-1, 2)
        rows = work.model.padded_vocabulary() * work.model.hidden / work.layout.tp
        exchange = transfers(direct_pattern(2), ends, 2 * rows * work.practice.gradient_bytes)
        yield Phase("tied", 0, exchange, (max(starts),))

    def tensor(self) -> Iterator[Phase]:
        """Each compute's gathers and scatters as one ring's bytes."""
        if self.costs.work.layout.tp == 1:
            return
        pattern = ring_pattern(self.grid[0, 0] // self.per_node)
        layers = cut_ranges(self.costs.layers_of_stage, self.costs.num_chunks)
        for kind, stage, replica, starts in self._of("tensor-forward", "tensor-backward"):
            groups = self.grid[self._replicas(replica), self.program.stage_rank[stage]]
            num_bytes = tensor_bytes(self.costs, layers[stage], backward=kind == "tensor-backward")
            if num_bytes:
                yield Phase(kind, stage, transfers(pattern, groups, num_bytes), starts)


def tensor_bytes(costs: Costs, layers: Sequence[int], *, backward: bool) -> float:
    """Of the whole tensors that cross in the layers of a stage for one micro-batch; of each, a ring carries
    (tp - 1)/tp. Counted as `myriad.planner.layers` counts seconds."""
    work = costs.work
    model, practice = work.model, work.practice
    one = float(work.layout.micro_batch * model.sequence * model.hidden * work.value_bytes)
    entries = 1 if model.block == "parallel" else 2
    again = {"none": 0, "selective": entries if practice.sequence_parallel else 0, "full": 2 * entries}
    block = 2 * entries
    if backward:
        block += (entries if practice.sequence_parallel else 0) + again[work.recompute]
    count = sum(1 if layer in (0, model.layers + 1) else block for layer in layers)
    if backward and work.recompute == "full" and 0 in layers:
        count += 1
    return one * count


def _starts(prediction: Prediction) -> _Starts:
    """When each is posted."""
    begin = max(span.start + span.duration for span in prediction.spans) - prediction.seconds
    found: _Starts = defaultdict(list)
    come = _gathered_ahead(prediction)
    for span in prediction.spans:
        now = span.start - begin
        for kind, stage in _posted(span):
            if kind == "gather" and span.action.kind is Kind.START_GATHER and (span.replica, stage) in come:
                come.discard((span.replica, stage))  # the last iteration posted it behind its optimizer
                continue
            found[kind, stage, span.replica].append(now)
    return found


def _posted(span: SimulatedSpan) -> Iterator[tuple[PhaseKind, int]]:
    action = span.action
    if action.kind in _GATHERS:
        yield "gather", action.stage
    elif action.kind in _REDUCES:
        yield "reduce", action.stage
    elif action.kind is Kind.SYNC_TIED:
        yield "tied", 0
    elif action.kind in COMPUTE and action.kind is not Kind.BACKWARD_WEIGHT:
        yield "tensor-forward" if action.kind is Kind.FORWARD else "tensor-backward", action.stage
    elif action.kind is not Kind.WAIT:
        for transfer in action.transfers:
            if transfer.sends:
                kind: PhaseKind = "activation" if transfer.payload is Payload.ACTIVATION else "gradient"
                yield kind, transfer.stage


def _gathered_ahead(prediction: Prediction) -> set[tuple[int, int]]:
    """Replicas and stages whose next parameters travel behind the optimizer."""
    updated: set[tuple[int, int]] = set()
    found: set[tuple[int, int]] = set()
    for span in prediction.spans:
        place = span.replica, span.action.stage
        if span.action.kind is Kind.UPDATE:
            updated.add(place)
        elif span.action.kind in _GATHERS and place in updated:
            found.add(place)
    return found
