"""Bytes of all objects that a pipeline rank of one layout may hold, by stage of its program.

The kept and temporary bytes of a stage's layers are the same for every micro-batch, with one exception.
Where a rank runs a forward's own backward next, the last layer keeps its graph instead of recomputing it.
So each stage has two results, each computed once.

Stages that are captured as CUDA graphs (`myriad.parallel.cuda_graphs`) reserve from the first step to the
last (`captured_bytes`):

    in turn          one memory pool for all stages: the peak of one micro-batch in its forward and backward
    else             a pool for each slot, a micro-batch in flight of a stage: what its layers keep, and their
                     peak in the forward or backward
    each slot        its tokens and targets; a message for each output and gradient that is written or read
                     there, apart from the input, which the layers keep anyway
    validation       runs operator by operator, in separate memory
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from myriad.model.activation_memory import LayerKind
from myriad.planner.cost.quantization_costs import kept_form_bytes
from myriad.planner.cost.stage_layers import first_alike, routed_elements
from myriad.planner.memory.generation_memory import generation_bytes
from myriad.planner.memory.layer_memory import (
    layer_bytes,
    layer_elements,
    message_bytes,
    product_inputs,
)
from myriad.planner.memory.micro_batch_shard import MicroBatchShard
from myriad.planner.workload import Recompute, Workload
from myriad.program.actions import Action
from myriad.program.in_flight import InFlight
from myriad.program.partition import num_recomputed

__all__ = ["MicroBatchBytes", "StageMemory", "captured_bytes"]


@dataclass(frozen=True)
class _LayerHeld:
    """`myriad.planner.memory.layer_memory.LayerBytes` as plain numbers."""

    kept: float
    forward: float
    backward: float


@dataclass(frozen=True)
class MicroBatchBytes:
    """Bytes of one micro-batch in the layers of a stage."""

    kept: float
    """Bytes kept from its forward to its backward, without the head's."""
    head_bytes: float
    """Bytes of the head that are kept for that time."""
    in_forward: tuple[float, float]
    """Peak of temporary bytes in the forward, and the head's part of it."""
    in_backward: tuple[float, float]
    in_split_backward: tuple[float, float]
    """The same in the first half of a split backward, which leaves the operands of the weights' products."""


class StageMemory:
    """Memory of each stage of one layout's program."""

    def __init__(self, workload: Workload, layers: Sequence[range], on_cpu: bool) -> None:
        self.workload, self.layers, self.on_cpu = workload, layers, on_cpu
        layout = workload.layout
        micro_batch, value_bytes = float(layout.micro_batch), workload.value_bytes
        experts = layout.ep, layout.etp, layout.busiest_load
        context = layout.ring, layout.ulysses
        self.part = MicroBatchShard(float(layout.tp), micro_batch, value_bytes, on_cpu, *experts, context)
        self.full = workload.recompute == "full"
        self.message = float(message_bytes(workload.rank_model, workload.profile, self.part))
        self._layers_held: dict[tuple[LayerKind, int, Recompute], _LayerHeld] = {}
        self._stages_held: dict[tuple[int, bool], MicroBatchBytes] = {}
        self._layer_elements: dict[tuple[LayerKind, int], float] = {}
        self._block_operands: dict[int, float] = {}

    def kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer of the pipeline: the blocks are between embedding and head."""
        if layer == 0:
            return "embedding"
        return "head" if layer == self.workload.model.layers + 1 else "block"

    def held(self, stage: int, *, turns: bool) -> MicroBatchBytes:
        """Return the bytes of one micro-batch in a stage. ``turns``: the rank runs the backward of this
        micro-batch next."""
        key = stage, turns
        if key not in self._stages_held:
            self._stages_held[key] = self._stage_held(stage, turns)
        return self._stages_held[key]

    def _stage_held(self, stage: int, turns: bool) -> MicroBatchBytes:
        layers, recompute = self.layers[stage], self.workload.recompute
        modes: list[Recompute] = [recompute] * len(layers)
        if self.full:
            again = num_recomputed(len(layers), self.workload.layout.recompute_ratio)
            modes[again:] = ["none"] * (len(layers) - again)
        if turns and self.full:
            modes[-1] = "none"
        held = [self._layer_held(layer, mode) for layer, mode in zip(layers, modes, strict=True)]
        heads = [self.kind(layer) == "head" for layer in layers]
        on_the_way, so_far = [], 0.0
        for one, is_head in zip(held, heads, strict=True):
            own = one.kept + one.forward
            on_the_way.append((so_far + own, own if is_head else 0.0))
            so_far += one.kept
        on_the_way_back, in_halves, gone, left = [], [], 0.0, 0.0
        for layer, one, is_head in zip(reversed(layers), reversed(held), reversed(heads), strict=True):
            in_head = one.backward if is_head else 0.0
            on_the_way_back.append((one.backward - gone, in_head))
            in_halves.append((one.backward - gone + left, in_head))
            # Gradients that stay until the end of this backward take the place of what it frees.
            gone += one.kept - self._own_grad_bytes * self._elements(layer)
            left += self._operands(layer)
        return MicroBatchBytes(
            kept=sum(one.kept for one, is_head in zip(held, heads, strict=True) if not is_head),
            head_bytes=sum(one.kept for one, is_head in zip(held, heads, strict=True) if is_head),
            in_forward=max(on_the_way, key=lambda moment: moment[0]),
            in_backward=max(on_the_way_back, key=lambda moment: moment[0]),
            in_split_backward=max(in_halves, key=lambda moment: moment[0]),
        )

    def keeps_output(self, stage: int) -> bool:
        """Return whether a stage's backward keeps the output of the forward: the last layer is not
        recomputed."""
        num_layers, ratio = len(self.layers[stage]), self.workload.layout.recompute_ratio
        return not self.full or num_recomputed(num_layers, ratio) < num_layers

    def generated(self, stages: Sequence[int]) -> float:
        """Return the bytes of the texts that a rank with these stages generates between iterations; 0: there
        are none."""
        if not self.workload.generates:
            return 0.0
        layers = (layer for stage in stages for layer in self.layers[stage])
        num_blocks = sum(self.kind(layer) == "block" for layer in layers)
        own = generation_bytes(self.workload.model, self.workload.profile, self.part)
        gathered = 0.0
        if self.workload.layout.zero == 3 and not self.workload.profile.cuda_graphs:
            ends = self.padded(self.table) if {0, len(self.layers) - 1} & {*stages} else 0.0
            gathered = ends + max(self.chunk(stage) + self.expert_chunk(stage) for stage in stages)
        return float(own.total(num_blocks)) + gathered * self.workload.value_bytes

    def _layer_held(self, layer: int, recompute: Recompute) -> _LayerHeld:
        model, profile, kind = self.workload.rank_model, self.workload.profile, self.kind(layer)
        block = first_alike(model)[layer - 1] if kind == "block" else 0
        key = kind, block, recompute
        if key not in self._layers_held:
            found = layer_bytes(model, profile, kind, block, self.part, recompute)
            self._layers_held[key] = _LayerHeld(
                float(found.kept), float(found.forward), float(found.backward)
            )
        return self._layers_held[key]

    @property
    def _own_grad_bytes(self) -> int:
        return self.workload.profile.memory.backward_gradient_bytes

    def own_grads(self, stage: int) -> float:
        """Return the bytes of gradients that a backward of this stage leaves until the rank's is complete."""
        return self._own_grad_bytes * sum(map(self._elements, self.layers[stage]))

    def padded(self, elements: float, *, of_experts: bool = False) -> float:
        """Round up to a multiple of the number of replicas that hold these elements."""
        layout = self.workload.layout
        ranks = layout.num_expert_replicas if of_experts else layout.num_holders
        return -(-int(elements) // ranks) * ranks

    @cached_property
    def table(self) -> float:
        """Number of elements that the first and the last stage share."""
        model = self.workload.model
        rows = model.vocabulary_rows(self.workload.layout.tp) if model.shares_embedding else 0
        return float(rows * model.hidden)

    def _elements(self, layer: int) -> float:
        """Return the number of elements of a layer of the pipeline on one rank, shared ones included."""
        kind, model = self.kind(layer), self.workload.model
        block = first_alike(model)[layer - 1] if kind == "block" else 0
        if (kind, block) not in self._layer_elements:
            elements = layer_elements(model, kind, self.workload.layout.tp, block)
            self._layer_elements[kind, block] = float(elements)
        return self._layer_elements[kind, block]

    def chunk(self, stage: int) -> float:
        """Return the number of elements of a stage of the program, without shared ones, and without those of
        `expert_chunk`."""
        every, layout = 0.0, self.workload.layout
        for layer in self.layers[stage]:
            every += self._elements(layer)
            if layout.folds_experts:
                every -= routed_elements(self.workload.model, layer, layout.tp)
            every -= self.table if self.kind(layer) != "block" else 0.0
        return self.padded(every)

    def expert_chunk(self, stage: int) -> float:
        """Return the number of elements of a stage's routed experts on one rank, where ranks share experts;
        0 elsewhere."""
        layout, model = self.workload.layout, self.workload.model
        if not layout.folds_experts:
            return 0.0
        held = sum(routed_elements(model, layer, layout.expert_tp) for layer in self.layers[stage])
        return self.padded(held / layout.ep, of_experts=True)

    def quantized_forms(self, stage: int) -> float:
        """Return the bytes of a stage's weights in float8 or NVFP4 that are kept from one micro-batch to the
        next; 0: they are converted for each."""
        model, layout = self.workload.model, self.workload.layout
        if self.workload.quantized_kept_over == 1:
            return 0.0
        elements = 0.0
        for layer in self.layers[stage]:
            if self.kind(layer) == "block":
                elements += self._elements(layer)
                if layout.folds_experts:
                    elements -= routed_elements(model, layer, layout.tp)
                    elements += routed_elements(model, layer, layout.expert_tp) / layout.ep
        return kept_form_bytes(self.workload.profile) * elements

    def products(self, stage: int) -> float:
        """Return the bytes of one micro-batch that are kept from the first half of a backward to the
        second."""
        return sum(map(self._operands, self.layers[stage]))

    def _operands(self, layer: int) -> float:
        """Return the bytes of one micro-batch that the weights' products of a layer need after the rest of
        the backward; 0 for embedding and head."""
        if self.kind(layer) != "block":
            return 0.0
        block = first_alike(self.workload.model)[layer - 1]
        if block not in self._block_operands:
            self._block_operands[block] = float(product_inputs(self.workload.rank_model, block, self.part))
        return self._block_operands[block]

    def room(self, elements: float, *, of_experts: bool = False) -> float:
        """Return the bytes of the receive buffers for other ranks' gradients while a chunk is reduced."""
        layout = self.workload.layout
        if of_experts:
            return self._room(
                elements, layout.num_expert_shards if layout.zero else layout.num_expert_replicas
            )
        return self._room(elements, layout.num_shards if layout.zero else layout.num_holders)

    def room_across(self, elements: float, *, of_experts: bool = False) -> float:
        """Return the bytes of the receive buffers while a chunk's shards are summed across groups."""
        layout = self.workload.layout
        shards = layout.num_expert_shards if of_experts else layout.num_shards
        return self._room(elements / shards, layout.num_shard_groups)

    def _room(self, elements: float, ranks: int) -> float:
        return 4 * elements * (ranks - 1 if self.on_cpu else min(ranks - 1, 1)) / ranks


def captured_bytes(model: StageMemory, actions: Sequence[Action], num_stages: int) -> float:
    """Return the bytes that the stages of a rank with these actions reserve."""
    in_flight = InFlight.of(actions)
    held = {
        stage: model.held(stage, turns=model.full and stage in in_flight.ends_next)
        for stage in sorted(in_flight.slots)
    }
    validates = max(one.in_forward[0] - one.kept - one.head_bytes for one in held.values())
    if in_flight.in_turn:
        return max(validates, 0.0) + _in_turn(list(held.values())) + _tokens(model)
    splits = in_flight.splits
    slots = (
        in_flight.slots[stage]
        * (
            max(one.in_forward[0], _backward(one, model.products(stage)) if splits else _backward(one))
            + model.message * _messages(stage, num_stages)
            + _tokens(model)
        )
        for stage, one in held.items()
    )
    return max(validates, 0.0) + sum(slots)


def _backward(held: MicroBatchBytes, left: float | None = None) -> float:
    """Return the peak in the backward. ``left``: what the first half of a split one leaves for the second."""
    if left is None:
        return _kept(held) + held.in_backward[0]
    return max(_kept(held) + held.in_split_backward[0], left)


def _kept(held: MicroBatchBytes) -> float:
    return held.kept + held.head_bytes


def _in_turn(held: Sequence[MicroBatchBytes]) -> float:
    most = so_far = 0.0
    for one in held:
        most = max(most, so_far + one.in_forward[0])
        so_far += _kept(one)
    for one in reversed(held):
        most = max(most, so_far + one.in_backward[0])
        so_far -= _kept(one)
    return most


def _messages(stage: int, num_stages: int) -> int:
    """Return the number of messages in a slot: the output and the incoming gradient, and the outgoing
    gradient."""
    return 2 * (stage < num_stages - 1) + (stage > 0)


def _tokens(model: StageMemory) -> float:
    """Return the bytes of a slot's targets and tokens, counted twice for every stage."""
    return 2.0 * 8 * model.workload.layout.micro_batch * model.workload.model.sequence
