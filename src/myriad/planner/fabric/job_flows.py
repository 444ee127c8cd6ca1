"""The traffic of a job: the transfers between its ranks and their times, from the program that the ranks run.

    activation, gradient   between pipeline neighbours, each tensor-parallel rank its share
    gather, reduce         of a chunk's parameters and gradients among data-parallel replicas
    tied                   gradients that the first and the last stage share, summed between the two
    tensor-forward, ...    the gathers and scatters inside the layers, of a forward or a backward
    expert-forward, ...    tokens to the ranks of their experts, and results back, of a forward or a backward
    expert-gather, ...     of the parameters and gradients of experts, among the ranks that hold the same ones
    context-forward, ...   keys and values, and sums of their gradients, among the ranks that share a sequence

One `TransferPhase` is one of these for one stage of the program, among all ranks at once, with the times at
which the simulated iteration posts it. So 12,288 ranks give some hundreds of phases with arrays. Transfers of
a few bytes are left out: the gradient norm, the loss, the numbers of tokens. Tokens are counted as if all
experts were equally loaded, and sequences as one document each.

`collective_patterns` has the pairs of ranks of each collective.

Arrays: E transfers.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
import numpy.typing as npt

from myriad.comm.layout import AXES
from myriad.network.rank_transfers import RankTransfers, merge_transfers
from myriad.planner.cost.collective_costs import DpCollectives
from myriad.planner.cost.context_costs import ContextBlock
from myriad.planner.cost.expert_costs import expert_hops
from myriad.planner.cost.layer_costs import context_block
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.stage_layers import blocks_of_layer
from myriad.planner.fabric.collective_patterns import (
    CollectivePattern,
    all_to_all_pattern,
    direct_pattern,
    group_transfers,
    level_pattern,
    ring_pattern,
    sparse_pattern,
)
from myriad.planner.simulation.simulator import Prediction, SimulatedSpan, simulate
from myriad.program.actions import SEMANTICS, Collective, Payload
from myriad.program.partition import cut_ranges, num_recomputed

__all__ = ["Axis", "PhaseKind", "TransferPhase", "rank_grid", "transfer_phases"]

_Ints = npt.NDArray[np.int64]


PhaseKind = Literal[
    "activation",
    "gradient",
    "gather",
    "reduce",
    "reduce-across",
    "expert-gather",
    "expert-reduce",
    "tied",
    "tensor-forward",
    "tensor-backward",
    "expert-forward",
    "expert-backward",
    "context-forward",
    "context-backward",
]
Axis = Literal["dp", "pp", "tp", "edp", "ep", "cp"]
_AXIS: dict[PhaseKind, Axis] = {
    "activation": "pp",
    "gradient": "pp",
    "tied": "pp",
    "gather": "dp",
    "reduce": "dp",
    "reduce-across": "dp",
    "expert-gather": "edp",
    "expert-reduce": "edp",
    "tensor-forward": "tp",
    "tensor-backward": "tp",
    "expert-forward": "ep",
    "expert-backward": "ep",
    "context-forward": "cp",
    "context-backward": "cp",
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
        """Axis of the grid along which the phase communicates; "edp": among ranks that hold the same
        experts."""
        return _AXIS[self.kind]

    @property
    def num_bytes(self) -> float:
        """Bytes of all occurrences in an iteration."""
        return float(self.exchange.num_bytes.sum()) * len(self.start_seconds)


def rank_grid(costs: Costs) -> _Ints:
    """Return the ranks as an array ``[dp, pp, cp x tp]``."""
    layout = costs.workload.layout
    shape = tuple(getattr(layout, axis) for axis in AXES)
    return np.arange(layout.world, dtype=np.int64).reshape(shape).reshape(layout.dp, layout.pp, -1)


def transfer_phases(costs: Costs, prediction: Prediction | None = None) -> list[TransferPhase]:
    """Return all transfer phases of an iteration. ``prediction``: a simulated iteration with spans; off:
    simulated here."""
    prediction = prediction or simulate(costs)
    maker = _Maker(costs, prediction)
    parts = maker.pipeline(), maker.data(), maker.tied(), maker.tensor(), maker.experts(), maker.context()
    return list(chain(*parts))


class _Maker:
    def __init__(self, costs: Costs, prediction: Prediction) -> None:
        self.costs, self.program = costs, prediction.program
        self.grid, self.starts = rank_grid(costs), _starts(prediction)
        self.layers = cut_ranges(costs.layers_of_stage, costs.num_chunks)
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
        tokens = workload.layout.micro_batch * workload.rank_model.sequence
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
        layout = self.costs.workload.layout
        for (kind, stage), every in latest.items():
            others, experts = self.costs.held_parameters(self.layers[stage])
            starts = tuple(map(max, zip(*every, strict=True)))
            line, sums = self._line(self.program.stage_rank[stage]), self.costs.dp_collectives
            if kind == "reduce-across":
                assert self.costs.across_groups is not None, "the program has such sums"
                parts = line.reshape(-1, sums.size, line.shape[1])  # [group, shard, tp]
                groups, sums = parts.transpose(1, 2, 0).reshape(-1, len(parts)), self.costs.across_groups
                others = others / layout.num_shards + experts / layout.num_expert_shards
            else:
                groups = line.reshape(-1, sums.size, line.shape[1]).transpose(0, 2, 1).reshape(-1, sums.size)
            yield from self._among(kind, stage, starts, groups, sums, others)
            if experts and self.costs.expert_collectives is not None and kind != "reduce-across":
                alike, sums = self._experts_of(line), self.costs.expert_collectives
                in_groups = alike.reshape(-1, sums.size, *alike.shape[1:])  # [group, replica, ep, tp]
                groups = in_groups.transpose(0, 2, 3, 1).reshape(-1, sums.size)
                own: PhaseKind = "expert-gather" if kind == "gather" else "expert-reduce"
                yield from self._among(own, stage, starts, groups, sums, experts)

    def _among(
        self,
        kind: PhaseKind,
        stage: int,
        starts: tuple[float, ...],
        groups: _Ints,
        sums: DpCollectives,
        parameters: float,
    ) -> Iterator[TransferPhase]:
        """Yield the collective of so many parameters in groups of ranks ``[group, member]``."""
        pattern = self._data_pattern(sums, groups[0])
        if len(pattern.source):
            exchange = group_transfers(pattern, groups, self._data_bytes(kind, parameters))
            yield TransferPhase(kind, stage, exchange, starts)

    def _line(self, rank: int) -> _Ints:
        """Return the ranks of a pipeline rank ``[holder, tp]``; those of a row share matrices."""
        return self.grid[:, rank].reshape(-1, self.costs.workload.layout.tp)

    def _experts_of(self, line: _Ints) -> _Ints:
        """Return the ranks of a pipeline rank as experts see them: ``[replica, ep, tp]``."""
        layout = self.costs.workload.layout
        return line.reshape(layout.num_expert_replicas, layout.ep, layout.expert_tp)

    def _data_bytes(self, kind: PhaseKind, parameters: float) -> float:
        """Return the bytes of a collective of so many parameters; an all-reduce counts as a reduce-scatter
        and an all-gather."""
        workload = self.costs.workload
        if kind in ("gather", "expert-gather"):
            return parameters * workload.value_bytes
        gradients = parameters * workload.profile.gradient_bytes
        if kind == "reduce-across":
            return 2 * gradients
        return gradients * (1 if workload.layout.zero else 2)

    def _data_pattern(self, sums: DpCollectives, group: _Ints) -> CollectivePattern:
        """Return the pattern of the first group, which represents all groups."""
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
        tp = self.costs.workload.layout.tp
        if tp == 1:
            return
        pattern = ring_pattern(self.grid[0, 0, :tp] // self.per_node)
        for kind, stage, replica, starts in self._of("tensor-forward", "tensor-backward"):
            ranks = self.grid[self._replicas(replica), self.program.stage_rank[stage]]
            num_bytes = tensor_bytes(self.costs, self.layers[stage], backward=kind == "tensor-backward")
            if num_bytes:
                exchange = group_transfers(pattern, ranks.reshape(-1, tp), num_bytes)
                yield TransferPhase(kind, stage, exchange, starts)

    def experts(self) -> Iterator[TransferPhase]:
        """Yield the tokens that travel to experts and back in each compute action."""
        if self.costs.workload.layout.ep == 1:
            return
        done: set[tuple[PhaseKind, int]] = set()
        for kind, stage, _, starts in self._of("expert-forward", "expert-backward"):
            count = self._exchanges(stage, backward=kind == "expert-backward")
            if count and (kind, stage) not in done:  # replicas have equal numbers of micro-batches
                done.add((kind, stage))
                exchange = self._exchange(self._line(self.program.stage_rank[stage]), count)
                yield TransferPhase(kind, stage, exchange, starts)

    def _exchanges(self, stage: int, *, backward: bool) -> int:
        """Return the number of blocks of a stage that exchange tokens in a compute action; recomputed blocks
        do so again."""
        every, again = self._blocks(stage, backward=backward)
        return sum(map(self.costs.workload.model.has_experts, [*every, *again]))

    def _blocks(self, stage: int, *, backward: bool) -> tuple[list[int], list[int]]:
        """Return the blocks of a stage, and those whose forward is repeated in a compute action."""
        workload, layers = self.costs.workload, self.layers[stage]
        every = [blocks_of_layer(workload.model, layer) for layer in layers]
        num_again = 0
        if backward and workload.recompute == "full":
            last = len(every) if layers[-1] <= workload.model.layers else len(every) - 1
            num_again = min(last, num_recomputed(len(every), workload.layout.recompute_ratio))
        return list(chain(*every)), list(chain(*every[:num_again]))

    def context(self) -> Iterator[TransferPhase]:
        """Yield what the ranks that share sequences exchange in each compute action."""
        layout = self.costs.workload.layout
        if layout.cp == 1:
            return
        for kind, stage, replica, starts in self._of("context-forward", "context-backward"):
            backward = kind == "context-backward"
            blocks, again = (
                [self._context_block(one) for one in some] for some in self._blocks(stage, backward=backward)
            )
            ranks = self.grid[self._replicas(replica), self.program.stage_rank[stage]]
            grid = ranks.reshape(-1, layout.ring, layout.ulysses, layout.tp).transpose(1, 2, 0, 3)
            exchange = _context_transfers(grid.reshape(*grid.shape[:2], -1), blocks, again, backward=backward)
            if len(exchange):
                yield TransferPhase(kind, stage, exchange, starts)

    def _context_block(self, block: int) -> ContextBlock:
        model = self.costs.workload.rank_model
        return context_block(model.of_block(block), self.costs.slice, model.layer_window(block))

    def _exchange(self, line: _Ints, count: int) -> RankTransfers:
        """Return the transfers of ``count`` blocks among the ranks of a pipeline rank."""
        workload, found = self.costs.workload, list[RankTransfers]()
        tokens = workload.layout.micro_batch * workload.rank_model.sequence
        sharers = self._experts_of(line).transpose(0, 2, 1).reshape(-1, workload.layout.ep)
        hops = expert_hops(workload.rank_model, self.costs.slice, tokens)
        for hop in hops:
            groups, size = sharers, hop.ranks.size
            if size < sharers.shape[1]:  # by node: between nodes first, then inside each
                nodes = hops[0].ranks.size
                apart = sharers.reshape(len(sharers), nodes, -1)
                groups = (apart.transpose(0, 2, 1) if hop is hops[0] else apart).reshape(-1, size)
            num_bytes = count * float(hop.sent_bytes + hop.returned_bytes)
            found.append(group_transfers(all_to_all_pattern(size), groups, num_bytes))
        return merge_transfers(found)


def _context_transfers(
    ranks: _Ints, blocks: Sequence[ContextBlock], again: Sequence[ContextBlock], *, backward: bool
) -> RankTransfers:
    """Return what ranks ``[ring, ulysses, group]`` that share sequences exchange in an action of ``blocks``,
    with the forwards of ``again``."""
    ring, ulysses, _ = ranks.shape
    rings, rows = ranks.reshape(ring, -1).T, ranks.transpose(0, 2, 1).reshape(-1, ulysses)
    in_rows, around, seen = 0.0, np.zeros((ring, ring)), np.zeros((ring, ring))
    place = np.arange(ring)
    for number, block in enumerate((*blocks, *again)):
        keys, sums = map(float, block.share_bytes)
        returns = backward and number < len(blocks)
        positions = np.array(block.messages) * (ring / block.sequence)
        if len(positions):
            seen += positions * keys + positions.T * (sums if returns else 0.0)
        else:
            halves = np.array(block.halves) @ (keys / 2, sums / 2 if returns else 0.0)
            around[place, (place + 1) % ring] += halves
        in_rows += sum(map(float, block.row_bytes))
    found = [group_transfers(sparse_pattern(one), rings, 1.0) for one in (around, seen) if one.any()]
    if in_rows and ulysses > 1:
        found.append(group_transfers(all_to_all_pattern(ulysses), rows, in_rows))
    return merge_transfers(found)


def tensor_bytes(costs: Costs, layers: Sequence[int], *, backward: bool) -> float:
    """Return the bytes of the whole tensors that are gathered or scattered in the layers of a stage for one
    micro-batch, as those of one ring, which carries (tp - 1)/tp of each. The count is that of
    `myriad.planner.cost.layer_costs`."""
    workload = costs.workload
    model = workload.model
    one = float(
        workload.layout.micro_batch * workload.rank_model.sequence * model.hidden * workload.value_bytes
    )
    head = 1 + sum(  # tokens scattered, and the input of the loss gathered
        2 + _crossings(costs, layer, backward=backward)
        for layer in range(model.layers, model.layers + model.prediction_layers)
    )
    ends = {0: 1, model.layers + 1: head}
    count = sum(
        ends[layer] if layer in ends else _crossings(costs, layer - 1, backward=backward) for layer in layers
    )
    if backward and workload.recompute == "full" and 0 in layers:
        count += 1
    return one * count


def _crossings(costs: Costs, block: int, *, backward: bool) -> float:
    """Return how often tensor-parallel ranks gather or scatter the sequence in a block. Whole experts need
    neither, and where fewer than all ranks share an expert, they send (etp - 1)/(tp - 1) of the bytes."""
    workload, profile = costs.workload, costs.workload.profile
    model = workload.model.of_block(block)
    entries: float = 1 if model.block == "parallel" else 1 + costs.slice.gathers_mlp(model)
    if costs.slice.gathers_part(model):
        entries += (workload.layout.expert_tp - 1) / (workload.layout.tp - 1)
    found = 2 * entries
    if backward:
        gathers = profile.sequence_parallel and not profile.selective_attention
        again = {"none": 0, "selective": entries if gathers else 0, "full": 2 * entries}
        found += (entries if profile.sequence_parallel else 0) + again[workload.recompute]
    return found


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
        yield "expert-forward" if forward else "expert-backward", action.stage
        yield "context-forward" if forward else "context-backward", action.stage
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
