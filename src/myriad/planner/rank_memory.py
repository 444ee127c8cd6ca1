"""Memory of every pipeline rank of one layout, from the program that it runs.

A rank's list is walked action by action with what the runtime would hold then; where that is the most, it is
written down:

    always         values, master values, optimizer, gradient sums: by ZeRO stage (`docs/memory.md`)
    GATHER         to RELEASE: a chunk's values, with ZeRO 3
    BACKWARD       to REDUCE's end: a chunk's gradient sums, with ZeRO 2 and 3
    FORWARD        to BACKWARD: what the layers keep; with a split backward to its second half: what the
                   products need
    RECEIVE        to the compute that uses it: a message
    a sent message until its answer: an activation to its BACKWARD, a gradient to the iteration's end, or to
                   its EXCHANGE's
    a compute      what its layers hold on the way

Chunks are those of the program, with the layers that the runtime gives them, tied parameters apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise

from myriad.model.activations import LayerKind
from myriad.planner.activations import Part, layer_held, message_bytes, product_inputs
from myriad.planner.costs import stage_layers
from myriad.planner.layer_memory import layer_elements
from myriad.planner.memory import Memory, expected_margin
from myriad.planner.work import Recompute, Work
from myriad.program.actions import MAKES_WEIGHT_GRADIENT, Action, Kind, Payload, Program
from myriad.program.build import build_program, count_chunks
from myriad.program.partition import cut_ranges

__all__ = ["memory_of_ranks"]

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_REDUCES = (Kind.REDUCE, Kind.START_REDUCE)
_GATHERS = (Kind.GATHER, Kind.START_GATHER)
_REDUCING = 2
"""Chunks that are being reduced at a time: what was posted earlier is done."""


def memory_of_ranks(work: Work, program: Program | None = None, *, on_cpu: bool = False) -> list[Memory]:
    """One for each pipeline rank. ``on_cpu``: with the operators of a CPU, and data parallelism by
    messages between pairs of ranks (gloo), which have a buffer for what arrives; else a GPU's, and
    collectives."""
    layers_of_stage = stage_layers(work)
    num_chunks = count_chunks(work.layout, work.overlap, layers_of_stage)
    if program is None:
        program = build_program(
            work.layout,
            work.overlap,
            work.num_micro_batches,
            tied=work.model.tied,
            training=True,
            num_chunks=num_chunks,
        )
    layers = cut_ranges(layers_of_stage, num_chunks)
    model = _Model(work, layers, on_cpu)
    return [_Walk(model, program, rank).peak() for rank in range(program.num_ranks)]


@dataclass(frozen=True)
class _Bytes:
    """`myriad.planner.activations.Held`, as numbers."""

    kept: float
    forward: float
    backward: float


class _Model:
    """Bytes of everything that a rank may hold."""

    def __init__(self, work: Work, layers: Sequence[range], on_cpu: bool) -> None:
        self.work, self.layers, self.on_cpu = work, layers, on_cpu
        layout = work.layout
        self.part = Part(
            float(layout.tp), float(layout.micro_batch), work.value_bytes, on_cpu, work.overlap.tensor
        )
        self._held: dict[tuple[int, Recompute], _Bytes] = {}
        self.message = float(message_bytes(work.model, work.practice, self.part))

    def kind(self, layer: int) -> LayerKind:
        if layer == 0:
            return "embedding"
        return "head" if layer == self.work.model.layers + 1 else "block"

    def held(self, layer: int, recompute: Recompute) -> "_Bytes":
        key = layer, recompute
        if key not in self._held:
            model, practice, kind = self.work.model, self.work.practice, self.kind(layer)
            found = layer_held(model, practice, kind, max(layer - 1, 0), self.part, recompute)
            self._held[key] = _Bytes(float(found.kept), float(found.forward), float(found.backward))
        return self._held[key]

    def padded(self, elements: float) -> float:
        ranks = self.work.layout.dp
        return -(-int(elements) // ranks) * ranks

    @cached_property
    def table(self) -> float:
        """Elements of what the first and the last stage share."""
        model = self.work.model
        return model.padded_vocabulary() * model.hidden / self.work.layout.tp if model.tied else 0.0

    def chunk(self, stage: int) -> float:
        """Elements of a stage of the program, without shared ones."""
        every = 0.0
        for kind in map(self.kind, self.layers[stage]):
            every += float(layer_elements(self.work.model, kind, self.work.layout.tp))
            every -= self.table if kind != "block" else 0.0
        return self.padded(every)

    def products(self, stage: int) -> float:
        """Of one micro-batch, what is kept from the first half of a backward to the second."""
        blocks = sum(self.kind(layer) == "block" for layer in self.layers[stage])
        return blocks * float(product_inputs(self.work.model, self.part))

    def room(self, elements: float) -> float:
        """For what arrives of other ranks' gradients while a chunk is reduced."""
        ranks = self.work.layout.dp
        return 4 * elements * (ranks - 1 if self.on_cpu else min(ranks - 1, 1)) / ranks


@dataclass
class _Now:
    """What a rank holds at a moment, in bytes, by what it is for."""

    values: dict[int, float] = field(default_factory=dict)
    sums: dict[int, float] = field(default_factory=dict)
    rooms: list[float] = field(default_factory=list)
    kept: dict[tuple[int, int], float] = field(default_factory=dict)
    of_head: dict[tuple[int, int], float] = field(default_factory=dict)
    products: dict[tuple[int, int], float] = field(default_factory=dict)
    arriving: dict[tuple[Payload, int, int], float] = field(default_factory=dict)
    leaving: dict[tuple[Payload, int, int], float] = field(default_factory=dict)


_TIED = -1
"""Key of the chunk that first and last stage share."""


class _Walk:
    """Of one rank."""

    def __init__(self, model: _Model, program: Program, rank: int) -> None:
        self.model, self.work = model, model.work
        self.program, self.actions = program, program.ranks[rank]
        self.stages = [stage for stage, owner in enumerate(program.stage_rank) if owner == rank]
        self.chunks = {stage: model.chunk(stage) for stage in self.stages}
        ends = {0, program.num_stages - 1}
        self.tied_stages = sorted(ends & set(self.stages)) if model.work.model.tied else []
        if self.tied_stages:
            self.chunks[_TIED] = model.padded(model.table)
        self.users: dict[int, set[int]] = {key: set() for key in self.chunks}
        self.now = _Now()
        self.turns = _turns(self.actions)
        self.last_reduce = max(
            (i for i, a in enumerate(self.actions) if a.kind in _REDUCES and a.stage in self.tied_stages),
            default=-1,
        )

    def peak(self) -> Memory:
        """At the highest moment of an iteration."""
        best: Memory | None = None
        self._begin()
        for index, action in enumerate(self.actions):
            self._before(index, action)
            for passing, of_head in self._passing(action):
                now = self._memory(passing, of_head)
                best = now if best is None or now.total > best.total else best
            self._after(action)
        assert best is not None, "every rank does something"
        return best

    @property
    def _zero(self) -> int:
        return self.work.layout.zero

    def _begin(self) -> None:
        """What lives from iteration to iteration."""
        for key, elements in self.chunks.items():
            if self._zero < 3:
                self.now.values[key] = elements * self.work.value_bytes
            if self._zero < 2:
                self.now.sums[key] = 4 * elements

    def _memory(self, passing: float, of_head: float) -> Memory:
        now, work = self.now, self.work
        elements = sum(self.chunks.values())
        part = elements / work.layout.dp if self._zero else elements
        master = 0.0 if work.value_bytes == 4 and self._zero < 3 else 4 * part
        tokens = work.num_micro_batches * work.layout.micro_batch * work.model.sequence
        batch = 2 * 8 * tokens  # tokens and targets
        kept = sum(now.kept.values()) + sum(now.products.values())
        logits = sum(now.of_head.values()) + of_head
        rooms = sum(now.rooms[-_REDUCING:])
        found = Memory(
            weights=sum(now.values.values()) + master,
            gradients=sum(now.sums.values()) + (4 * part if self._zero >= 2 else 0.0),
            optimizer=8 * part,
            activations=kept + passing - of_head,
            logits=logits,
            buffers=sum(now.arriving.values()) + sum(now.leaving.values()) + rooms + batch,
            margin=0.0,
        )
        coming = found.activations + found.logits + found.buffers
        layout = work.layout
        num_axes = sum(ranks > 1 for ranks in (layout.dp, layout.tp, layout.pp))
        return replace(found, margin=expected_margin(coming, num_axes, on_cpu=self.model.on_cpu))

    # parameters and messages

    def _chunks_of(self, stage: int) -> list[int]:
        return [stage, _TIED] if stage in self.tied_stages else [stage]

    def _before(self, index: int, action: Action) -> None:
        now, stage = self.now, action.stage
        if action.kind in _GATHERS and self._zero == 3:
            for key in self._chunks_of(stage):
                self.users[key].add(stage)
                now.values[key] = self.chunks[key] * self.work.value_bytes
        if action.kind in (*_BACKWARDS, Kind.SYNC_TIED) and self._zero >= 2:
            for key in self._chunks_of(stage):
                now.sums.setdefault(key, 4 * self.chunks[key])
        if action.kind in _REDUCES and self.work.layout.dp > 1:
            keys = [stage, _TIED] if index == self.last_reduce else [stage]
            now.rooms.append(sum(self.model.room(self.chunks[key]) for key in keys))
        for transfer in action.transfers:
            if not transfer.sends and action.kind is not Kind.WAIT:
                now.arriving[transfer.payload, transfer.stage, transfer.micro_batch] = self.model.message

    def _after(self, action: Action) -> None:
        now, stage, micro_batch = self.now, action.stage, action.micro_batch
        if action.kind is Kind.RELEASE:
            for key in self._chunks_of(stage):
                self.users[key].discard(stage)
                if not self.users[key]:
                    now.values.pop(key, None)
        elif action.kind in (Kind.REDUCE, Kind.AWAIT_REDUCE):
            if now.rooms:
                now.rooms.pop(0)
            if self._zero >= 2:
                now.sums.pop(stage, None)
        elif action.kind is Kind.FORWARD:
            now.arriving.pop((Payload.ACTIVATION, stage - 1, micro_batch), None)
            self._keep(stage, micro_batch)
            self._leave((Payload.ACTIVATION, stage, micro_batch), stage + 1)
        elif action.kind in _BACKWARDS:
            now.arriving.pop((Payload.GRADIENT, stage + 1, micro_batch), None)
            now.kept.pop((stage, micro_batch))
            now.of_head.pop((stage, micro_batch), None)
            now.leaving.pop((Payload.ACTIVATION, stage, micro_batch), None)
            self._leave((Payload.GRADIENT, stage, micro_batch), stage - 1)
            if action.kind is Kind.BACKWARD_INPUT:
                now.products[stage, micro_batch] = self.model.products(stage)
        elif action.kind is Kind.BACKWARD_WEIGHT:
            now.products.pop((stage, micro_batch))
        elif action.kind is Kind.EXCHANGE:
            for transfer in action.transfers:
                if transfer.sends and transfer.payload is Payload.GRADIENT:
                    now.leaving.pop((transfer.payload, transfer.stage, transfer.micro_batch))

    def _leave(self, key: tuple[Payload, int, int], to: int) -> None:
        """What goes to another rank is kept meanwhile."""
        owners = self.program.stage_rank
        if 0 <= to < self.program.num_stages and owners[to] != owners[key[1]]:
            self.now.leaving[key] = self.model.message

    # activations

    def _modes(self, stage: int, micro_batch: int) -> list[tuple[int, Recompute]]:
        """Layers with what is recomputed of each: the last one keeps its graph when its backward is next."""
        layers, recompute = self.model.layers[stage], self.work.recompute
        turn = (stage, micro_batch) in self.turns
        return [
            (i, "none" if turn and i == layers[-1] and recompute == "full" else recompute) for i in layers
        ]

    def _keep(self, stage: int, micro_batch: int) -> None:
        for layer, mode in self._modes(stage, micro_batch):
            kept = self.model.held(layer, mode).kept
            into = self.now.of_head if self.model.kind(layer) == "head" else self.now.kept
            into[stage, micro_batch] = into.get((stage, micro_batch), 0.0) + kept
        self.now.kept.setdefault((stage, micro_batch), 0.0)

    def _passing(self, action: Action) -> Iterator[tuple[float, float]]:
        """Bytes beyond what is held before the action, layer by layer, and how much of them is the head's."""
        if action.kind is Kind.FORWARD:
            so_far = 0.0
            for layer, mode in self._modes(action.stage, action.micro_batch):
                held = self.model.held(layer, mode)
                own = held.kept + held.forward
                yield so_far + own, own if self.model.kind(layer) == "head" else 0.0
                so_far += held.kept
        elif action.kind in _BACKWARDS:
            gone = 0.0
            for layer, mode in reversed(self._modes(action.stage, action.micro_batch)):
                held = self.model.held(layer, mode)
                yield held.backward - gone, held.backward if self.model.kind(layer) == "head" else 0.0
                gone += held.kept
        else:
            yield 0.0, 0.0


def _turns(actions: Sequence[Action]) -> frozenset[tuple[int, int]]:
    """Forwards after which the rank does the same one's backward (`myriad.parallel.recompute`)."""
    computes = [
        a for a in actions if a.kind is Kind.FORWARD or a.kind in MAKES_WEIGHT_GRADIENT | {*_BACKWARDS}
    ]
    computes = [a for a in computes if a.kind is not Kind.BACKWARD_WEIGHT]
    pairs = pairwise(computes)
    return frozenset(
        (a.stage, a.micro_batch)
        for a, b in pairs
        if a.kind is Kind.FORWARD
        and b.kind in _BACKWARDS
        and (a.stage, a.micro_batch) == (b.stage, b.micro_batch)
    )
