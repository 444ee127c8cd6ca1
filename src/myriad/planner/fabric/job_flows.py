"""The traffic of a job: the transfers between its ranks and their times, from the program that the ranks run.

    activation, gradient   between pipeline neighbours, each tensor-parallel rank its share
    gather, reduce         of a chunk's parameters and gradients among data-parallel replicas
    tied                   gradients that the first and the last stage share, summed between the two
    tensor-forward, ...    the gathers and scatters inside the layers, of a forward or a backward

One `TransferPhase` is one of these for one stage of the program, among all ranks at once, with the times at
which the simulated iteration posts it. So 12,288 ranks give some hundreds of phases with arrays. Transfers of
a few bytes are left out: the gradient norm, the loss.

A ring among n ranks with k of them in each node consists of k rings. Each ring enters and leaves a node at a
different rank, as NCCL builds them (one channel a NIC, each with a k-th of the bytes):

    node 0: 0 1   node 1: 4 5      ring a   0 -> 4 -> 5 .. -> 0     ring b   1 -> 5 -> 4 .. -> 1

So each rank sends and receives (n - 1)/n of the bytes, 1/k of that through its NIC. Hierarchical collectives
(`myriad.comm.hierarchy`) and those of gloo, which sends every slice directly to its owner, are counted slice
by slice as the runtime sends them.

A `CollectivePattern` lists the pairs of a group that communicate and their share of a collective's bytes: by
rings, by levels, or directly to the owner. An all-gather and a reduce-scatter use the same pairs in opposite
directions. A pattern describes either of them; an all-reduce is twice the pattern.

Arrays: T transfers of one group, E transfers, G groups, n ranks of a group.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import AXES
from myriad.errors import BadInputError
from myriad.network.rank_transfers import RankTransfers
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.simulation.simulator import Prediction, SimulatedSpan, simulate
from myriad.program.actions import SEMANTICS, Collective, Payload
from myriad.program.partition import cut_ranges

__all__ = ["Axis", "PhaseKind", "TransferPhase", "rank_grid", "transfer_phases"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class CollectivePattern:
    """The transfers of a collective in one group, by the ranks' indices in the group."""

    source: _Ints
    """Index of the sender, shape (T)."""
    target: _Ints
    """Index of the receiver, shape (T)."""
    share: npt.NDArray[np.float64]
    """Share of the bytes that every rank has at the end, shape (T)."""
    rate_group: _Ints
    """Rate group of each transfer, shape (T); transfers of one group have one rate."""


def group_transfers(pattern: CollectivePattern, groups: _Ints, num_bytes: float) -> RankTransfers:
    """Return the transfers of all groups ``[G, n]`` at once."""
    num_rate_groups = int(pattern.rate_group.max(initial=-1)) + 1
    first = num_rate_groups * np.arange(len(groups))[:, None]
    return RankTransfers(
        source=groups[:, pattern.source].reshape(-1),
        target=groups[:, pattern.target].reshape(-1),
        num_bytes=np.tile(pattern.share * num_bytes, len(groups)),
        rate_group=(pattern.rate_group + first).reshape(-1),
    )


def ring_pattern(nodes: _Ints) -> CollectivePattern:
    """Return NCCL's pattern: one ring for each rank of a node where all nodes hold as many ranks, else a
    single ring. ``nodes``: the node of each rank of the group, in order."""
    size, num_nodes = len(nodes), len(np.unique(nodes))
    inside = size // num_nodes
    even = size == inside * num_nodes and bool(np.all(nodes[::inside] == nodes.reshape(num_nodes, -1).T))
    if size == 1:
        return _pattern([], [], [], [])
    if num_nodes == 1 or not even or inside == 1:
        place = np.arange(size)
        return _pattern([place], [(place + 1) % size], [np.full(size, 1 - 1 / size)], [np.zeros(size)])
    place = np.arange(size)
    node, rank = np.divmod(place, inside)
    across = (node + 1) % num_nodes * inside + rank
    within = node * inside + (rank + 1) % inside
    each = np.full(size, (1 - 1 / size) / inside)
    return _pattern([place, place], [across, within], [each, each * (inside - 1)], [rank, inside + node])


def direct_pattern(size: int) -> CollectivePattern:
    """Return the pattern in which every rank sends its slice to each other rank directly."""
    return level_pattern((size,), direct=True)


def level_pattern(radices: Sequence[int], *, direct: bool) -> CollectivePattern:
    """Return the pattern of `myriad.comm.hierarchy.make_levels` for all ranks at once. ``radices``: outermost
    first. ``direct``: within a level each rank sends to each other one directly; off: by a ring."""
    size, stride, paces = int(np.prod(radices)), 1, 0
    place = np.arange(size)
    sources, targets, numbers = list[_Ints](), list[_Ints](), list[_Ints]()
    shares = list[npt.NDArray[np.float64]]()
    for radix in reversed(radices):
        own, share = place // stride % radix, 1 / (stride * radix)
        for step in range(1, radix) if direct else [1][: radix - 1]:
            target = place + ((own + step) % radix - own) * stride
            rate_group = place if direct else place - own * stride
            carried = share if direct else share * (radix - 1)
            sources.append(place)
            targets.append(target)
            shares.append(np.full(size, carried))
            numbers.append(paces + rate_group)
            paces += size
        stride *= radix
    return _pattern(sources, targets, shares, numbers)


def _pattern(
    source: Sequence[_Ints],
    target: Sequence[_Ints],
    share: Sequence[npt.NDArray[np.float64]],
    rate_group: Sequence[npt.NDArray[np.float64] | _Ints],
) -> CollectivePattern:
    none = np.empty(0, dtype=np.int64)
    _, numbers = np.unique(np.concatenate([none, *rate_group]).astype(np.int64), return_inverse=True)
    return CollectivePattern(
        source=np.concatenate([none, *source]).astype(np.int64),
        target=np.concatenate([none, *target]).astype(np.int64),
        share=np.concatenate([np.empty(0), *share]),
        rate_group=np.asarray(numbers, dtype=np.int64).reshape(-1),
    )


PhaseKind = Literal[
    "activation",
    "gradient",
    "gather",
    "reduce",
    "reduce-across",
    "tied",
    "tensor-forward",
    "tensor-backward",
]
Axis = Literal["dp", "pp", "tp"]
_AXIS: dict[PhaseKind, Axis] = {
    "activation": "pp",
    "gradient": "pp",
    "tied": "pp",
    "gather": "dp",
    "reduce": "dp",
    "reduce-across": "dp",
    "tensor-forward": "tp",
    "tensor-backward": "tp",
}
_Starts = dict[tuple[PhaseKind, int, int], list[float]]
"""Start seconds by kind, stage and replica (-1: all)."""


@dataclass(frozen=True, eq=False)
class TransferPhase:
    """One kind of transfer of one stage of the program."""

    kind: PhaseKind
    stage: int
    exchange: RankTransfers
    """The transfers of one occurrence."""
    start_seconds: tuple[float, ...]
    """Start of each occurrence, in seconds from the start of the iteration. A transfer posted before the
    previous iteration has ended everywhere has a negative start."""

    @property
    def axis(self) -> Axis:
        """Axis of the grid along which the phase communicates."""
        return _AXIS[self.kind]

    @property
    def num_bytes(self) -> float:
        """Bytes of all occurrences in an iteration."""
        return float(self.exchange.num_bytes.sum()) * len(self.start_seconds)


def rank_grid(costs: Costs) -> _Ints:
    """Return the ranks as an array ``[dp, pp, tp]``."""
    layout = costs.workload.layout
    shape = tuple(getattr(layout, axis) for axis in AXES)
    return np.arange(layout.world, dtype=np.int64).reshape(shape).reshape(layout.dp, layout.pp, -1)


def transfer_phases(costs: Costs, prediction: Prediction | None = None) -> list[TransferPhase]:
    """Return all transfer phases of an iteration. ``prediction``: a simulated iteration with spans; off:
    simulated here. Raises `BadInputError` where ranks share experts: their tokens are not counted."""
    if (layout := costs.workload.layout).folds_experts:
        allowed = "1, without layout.etp: the flows of a job lack the tokens that travel to experts"
        raise BadInputError("layout.ep", layout.ep, allowed)
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
        """Return the replicas that a simulated one represents."""
        shares = self.costs.workload.micro_batches_per_replica
        if replica < 0:
            return range(len(shares))
        return [one for one, share in enumerate(shares) if share == shares[replica]]

    def pipeline(self) -> Iterator[TransferPhase]:
        """Yield the messages to the next and the previous stage."""
        workload, owners = self.costs.workload, self.program.stage_rank
        tokens = workload.layout.micro_batch * workload.model.sequence
        num_bytes = tokens * workload.model.hidden * workload.value_bytes / workload.layout.tp
        for kind, stage, replica, starts in self._of("activation", "gradient"):
            to = owners[stage + (1 if kind == "activation" else -1)]
            ranks = self.grid[self._replicas(replica)]
            source, target = ranks[:, owners[stage]].reshape(-1), ranks[:, to].reshape(-1)
            sizes = np.full(len(source), num_bytes)
            yield TransferPhase(
                kind, stage, RankTransfers(source, target, sizes, np.arange(len(source))), starts
            )

    def data(self) -> Iterator[TransferPhase]:
        """Yield the collectives among replicas. The last simulated replica to post a collective starts it."""
        latest: defaultdict[tuple[PhaseKind, int], list[tuple[float, ...]]] = defaultdict(list)
        for kind, stage, _, starts in self._of("gather", "reduce", "reduce-across"):
            latest[kind, stage].append(starts)
        for (kind, stage), every in latest.items():
            pattern = self._data_pattern(across=kind == "reduce-across")
            if not len(pattern.source):
                continue
            groups = self._data_groups(self.program.stage_rank[stage], across=kind == "reduce-across")
            exchange = group_transfers(pattern, groups, self._data_bytes(kind, stage))
            yield TransferPhase(kind, stage, exchange, tuple(map(max, zip(*every, strict=True))))

    def _data_groups(self, rank: int, *, across: bool) -> _Ints:
        """Return the data-parallel groups of a pipeline rank, ``[group, member]``."""
        size = self.costs.dp_collectives.size
        parts = self.grid[:, rank].reshape(-1, size, self.grid.shape[2])  # [group, shard, tp]
        return (
            parts.transpose(1, 2, 0).reshape(-1, len(parts))
            if across
            else (parts.transpose(0, 2, 1).reshape(-1, size))
        )

    def _data_bytes(self, kind: PhaseKind, stage: int) -> float:
        """Return the bytes of a chunk's collective; an all-reduce counts as a reduce-scatter and an
        all-gather."""
        workload, parameters = self.costs.workload, self.costs.stages[stage].parameters
        if kind == "gather":
            return parameters * workload.value_bytes
        gradients = parameters * workload.profile.gradient_bytes
        if kind == "reduce-across":
            return 2 * gradients / workload.layout.num_shards
        return gradients * (1 if workload.layout.zero else 2)

    def _data_pattern(self, *, across: bool) -> CollectivePattern:
        """Return the pattern of the first group, which represents all groups."""
        sums = self.costs.across_groups if across else self.costs.dp_collectives
        assert sums is not None, "the program has such sums"
        group = self._data_groups(0, across=across)[0]
        if sums.sent is None:
            return ring_pattern(group // self.per_node)
        radices = sums.sites.radices(group.tolist(), sums.hierarchy) or (len(group),)
        return level_pattern(radices, direct=self.costs.cluster.on_cpu)

    def tied(self) -> Iterator[TransferPhase]:
        """Yield the all-reduce of tied gradients: both ends of the pipeline send and receive half of the sum,
        twice."""
        workload, owners = self.costs.workload, self.program.stage_rank
        starts = self.starts.get(("tied", 0, -1)) or self.starts.get(("tied", 0, 0))
        if not starts:
            return
        ends = self.grid[:, [owners[0], owners[-1]]].transpose(0, 2, 1).reshape(-1, 2)
        rows = workload.model.vocabulary_rows(workload.layout.tp) * workload.model.hidden
        exchange = group_transfers(direct_pattern(2), ends, 2 * rows * workload.profile.gradient_bytes)
        yield TransferPhase("tied", 0, exchange, (max(starts),))

    def tensor(self) -> Iterator[TransferPhase]:
        """Yield the all-gathers and reduce-scatters of each compute action, as the bytes of one ring."""
        if self.costs.workload.layout.tp == 1:
            return
        pattern = ring_pattern(self.grid[0, 0] // self.per_node)
        layers = cut_ranges(self.costs.layers_of_stage, self.costs.num_chunks)
        for kind, stage, replica, starts in self._of("tensor-forward", "tensor-backward"):
            groups = self.grid[self._replicas(replica), self.program.stage_rank[stage]]
            num_bytes = tensor_bytes(self.costs, layers[stage], backward=kind == "tensor-backward")
            if num_bytes:
                yield TransferPhase(kind, stage, group_transfers(pattern, groups, num_bytes), starts)


def tensor_bytes(costs: Costs, layers: Sequence[int], *, backward: bool) -> float:
    """Return the bytes of the whole tensors that are gathered or scattered in the layers of a stage for one
    micro-batch. A ring carries (tp - 1)/tp of each. The count is that of `myriad.planner.cost.layer_costs`.
    """
    workload = costs.workload
    model, profile = workload.model, workload.profile
    one = float(workload.layout.micro_batch * model.sequence * model.hidden * workload.value_bytes)
    entries = 1 if model.block == "parallel" else 2
    again = {"none": 0, "selective": entries if profile.sequence_parallel else 0, "full": 2 * entries}
    block = 2 * entries
    if backward:
        block += (entries if profile.sequence_parallel else 0) + again[workload.recompute]
    head = 1 + model.prediction_layers * (2 + block)  # tokens scattered, and the input of the loss gathered
    ends = {0: 1, model.layers + 1: head}
    count = sum(ends.get(layer, block) for layer in layers)
    if backward and workload.recompute == "full" and 0 in layers:
        count += 1
    return one * count


def _starts(prediction: Prediction) -> _Starts:
    """Return the seconds at which each transfer is posted."""
    begin = max(span.start + span.duration for span in prediction.spans) - prediction.seconds
    found: _Starts = defaultdict(list)
    come = _gathered_ahead(prediction)
    for span in prediction.spans:
        now = span.start - begin
        for kind, stage in _posted(span):
            waits = SEMANTICS[span.action.kind].ends is not None
            if kind == "gather" and not waits and (span.replica, stage) in come:
                # The previous iteration posted this gather behind its optimizer.
                come.discard((span.replica, stage))
                continue
            found[kind, stage, span.replica].append(now)
    return found


def _posted(span: SimulatedSpan) -> Iterator[tuple[PhaseKind, int]]:
    action, does = span.action, SEMANTICS[span.action.kind]
    if does.starts is not None:
        kinds: dict[Collective, PhaseKind] = {
            Collective.GATHER: "gather",
            Collective.REDUCE_ACROSS: "reduce-across",
        }
        yield kinds.get(does.starts, "reduce"), action.stage
    elif does.joins == "ends":
        yield "tied", 0
    elif does.makes is not None:
        forward = does.makes is Payload.ACTIVATION
        yield "tensor-forward" if forward else "tensor-backward", action.stage
    elif does.posts:
        for transfer in action.transfers:
            if transfer.sends:
                kind: PhaseKind = "activation" if transfer.payload is Payload.ACTIVATION else "gradient"
                yield kind, transfer.stage


def _gathered_ahead(prediction: Prediction) -> set[tuple[int, int]]:
    """Return the replicas and stages whose next parameters are gathered behind the optimizer."""
    updated: set[tuple[int, int]] = set()
    found: set[tuple[int, int]] = set()
    for span in prediction.spans:
        place = span.replica, span.action.stage
        does = SEMANTICS[span.action.kind]
        if does.updates:
            updated.add(place)
        elif does.starts is Collective.GATHER and place in updated:
            found.add(place)
    return found
