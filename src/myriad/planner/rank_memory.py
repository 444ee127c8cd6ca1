"""Memory of every pipeline rank of one layout, from the program that it runs.

A rank's list is walked action by action with what the runtime would hold then; where that is the most, it is
written down:

    always         values, master values, optimizer, gradient sums: by ZeRO stage (`docs/memory.md`)
    GATHER         to RELEASE: a chunk's values, with ZeRO 3
    BACKWARD       to REDUCE's end: a chunk's gradient sums, with ZeRO 2 and 3; to its UPDATE in the backward,
                   with ZeRO 0 and 1 and one micro-batch
    FORWARD        to BACKWARD: what the layers keep; with a split backward to its second half: what the
                   products need
    RECEIVE        to the compute that uses it: a message
    a sent message until its answer: an activation to its BACKWARD, a gradient to the iteration's end, or to
                   its EXCHANGE's
    a compute      what its layers hold on the way

Chunks are those of the program, with the layers that the runtime gives them, tied parameters apart. Sums are
kept up to date as things come and go, so the time taken is linear in the number of actions.
"""

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Generic, TypeVar

from myriad.comm.layout import Layout
from myriad.planner.costs import stage_layers
from myriad.planner.memory import Memory, count_groups, expected_margin
from myriad.planner.stage_bytes import StageBytes, StageHeld
from myriad.planner.steady import SteadyPart
from myriad.planner.work import Work
from myriad.program.actions import MAKES_WEIGHT_GRADIENT, Action, Kind, Payload, Program
from myriad.program.build import build_program, count_chunks
from myriad.program.partition import cut_ranges

__all__ = ["count_communicators", "memory_of_ranks", "memory_of_repeating_ranks"]

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_REDUCES = (Kind.REDUCE, Kind.START_REDUCE)
_GATHERS = (Kind.GATHER, Kind.START_GATHER)
_REDUCING = 2
"""Chunks that are being reduced at a time: what was posted earlier is done."""
_HIGHER = 1 + 1e-12
"""By how much a moment must be above an earlier one: less may be rounding."""


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
    model = StageBytes(work, layers, on_cpu)
    walks = [_Walk(model, program, rank) for rank in range(program.num_ranks)]
    return [walk.peak() for walk in walks]


def memory_of_repeating_ranks(
    work: Work, program: Program, steady: Sequence[SteadyPart], *, on_cpu: bool
) -> list[Memory] | None:
    """As `memory_of_ranks` of the whole program, by one of fewer micro-batches that has each steady part
    twice; ``None`` where that does not tell."""
    layers_of_stage = stage_layers(work)
    layers = cut_ranges(layers_of_stage, count_chunks(work.layout, work.overlap, layers_of_stage))
    model = StageBytes(work, layers, on_cpu)
    walks = [_Walk(model, program, rank) for rank in range(program.num_ranks)]
    found = [walk.peak_repeating(part) for walk, part in zip(walks, steady, strict=True)]
    known = [memory for memory in found if memory is not None]
    return known if len(known) == len(found) else None


def count_communicators(layout: Layout, program: Program, rank: int) -> tuple[int, int]:
    """NCCL communicators of a pipeline rank: of groups, and of pairs, which have one for each neighbour,
    payload and way (`myriad.comm.first_use`). Levels of a hierarchy and LAMB's norms are not counted."""
    transfers = [transfer for action in program.ranks[rank] for transfer in action.transfers]
    pairs = {(one.payload, one.peer, (one.peer > rank) == one.sends) for one in transfers}
    holds_tied = rank in (program.stage_rank[0], program.stage_rank[-1])
    syncs_tied = float(program.syncs_tied and holds_tied)
    return int(count_groups(layout.dp, layout.tp, layout.pp, syncs_tied=syncs_tied)), len(pairs)


_Key = TypeVar("_Key", bound=Hashable)


class _Pile(Generic[_Key]):
    """Bytes of several things, and their sum."""

    __slots__ = ("bytes_of", "total")

    def __init__(self) -> None:
        self.bytes_of: dict[_Key, float] = {}
        self.total = 0.0

    def put(self, key: _Key, num_bytes: float) -> None:
        self.drop(key)
        self.bytes_of[key] = num_bytes
        self.total += num_bytes

    def drop(self, key: _Key) -> None:
        """If it is there."""
        self.total -= self.bytes_of.pop(key, 0.0)


@dataclass
class _Now:
    """What a rank holds at a moment, in bytes, by what it is for."""

    values: _Pile[int] = field(default_factory=_Pile)
    sums: _Pile[int] = field(default_factory=_Pile)
    rooms: deque[float] = field(default_factory=deque)
    kept: _Pile[tuple[int, int]] = field(default_factory=_Pile)
    of_head: _Pile[tuple[int, int]] = field(default_factory=_Pile)
    products: _Pile[tuple[int, int]] = field(default_factory=_Pile)
    arriving: _Pile[tuple[Payload, int, int]] = field(default_factory=_Pile)
    leaving: _Pile[tuple[Payload, int, int]] = field(default_factory=_Pile)


_TIED = -1
"""Key of the chunk that first and last stage share."""


class _Walk:
    """Of one rank."""

    def __init__(self, model: StageBytes, program: Program, rank: int) -> None:
        self.model, self.work = model, model.work
        self.program, self.rank, self.actions = program, rank, program.ranks[rank]
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
        self._begin()
        return self._peak_of(0, len(self.actions))

    def peak_repeating(self, steady: SteadyPart) -> Memory | None:
        """As if the steady part were repeated; ``None`` where what is held does not repeat with it. Nothing
        may grow from one time to the next but what is kept until the iteration's end: then the highest
        moment is before the second time, or in the last time or later."""
        self._begin()
        second = steady.start + steady.length
        before, held = self._peak_of(0, second), self._held_now()
        again = self._peak_of(second, second + steady.length)
        grown = [now - then for now, then in zip(self._held_now(), held, strict=True)]
        if any(grown[1:]):
            return None
        rest = self._peak_of(second + steady.length, len(self.actions))
        times = (self.work.num_micro_batches - self.program.num_micro_batches) / steady.num_micro_batches
        last = [self._with_more(one, grown[0] * times) for one in (again, rest)]
        return max([before, *last], key=lambda memory: float(memory.total))

    def _held_now(self) -> tuple[float, ...]:
        """What is kept until the iteration's end first."""
        now = self.now
        piles = (now.values, now.sums, now.kept, now.of_head, now.products, now.arriving)
        return now.leaving.total, *(pile.total for pile in piles), sum(now.rooms)

    def _peak_of(self, start: int, stop: int) -> Memory:
        best, highest = None, -1.0
        for index in range(start, stop):
            action = self.actions[index]
            self._before(index, action)
            passing, of_head = self._passing(action)
            if (total := self._total(passing)) > highest * _HIGHER:
                best, highest = self._memory(passing, of_head), total
            self._after(action)
        assert best is not None, "every rank does something"
        return best

    def _with_more(self, memory: Memory, num_bytes: float) -> Memory:
        """With larger buffers."""
        buffers = memory.buffers + num_bytes
        coming = float(memory.activations + memory.logits + buffers)
        return replace(memory, buffers=buffers, margin=self._margin(coming))

    @property
    def _zero(self) -> int:
        return self.work.layout.zero

    def _begin(self) -> None:
        """What lives from iteration to iteration."""
        for key, elements in self.chunks.items():
            if self._zero < 3:
                self.now.values.put(key, elements * self.work.value_bytes)
            if self._zero < 2 and not self._frees_sums:
                self.now.sums.put(key, 4 * elements)

    @cached_property
    def _frees_sums(self) -> bool:
        """`myriad.parallel.chunk` gives them back at the update."""
        return self._zero < 2 and self.work.overlap.updates_early and self.work.num_micro_batches == 1

    @cached_property
    def _elements(self) -> float:
        """Of this rank's part of parameters and optimizer."""
        elements = sum(self.chunks.values())
        return elements / self.work.layout.dp if self._zero else elements

    @cached_property
    def _batch(self) -> float:
        """Tokens and targets."""
        work = self.work
        return 2.0 * 8 * work.num_micro_batches * work.layout.micro_batch * work.model.sequence

    @cached_property
    def _communicators(self) -> tuple[int, int]:
        return count_communicators(self.work.layout, self.program, self.rank)

    def _buffers(self) -> float:
        now = self.now
        rooms = sum(islice(reversed(now.rooms), _REDUCING))
        return now.arriving.total + now.leaving.total + rooms + self._batch

    def _margin(self, coming: float) -> float:
        return float(expected_margin(coming, *self._communicators, on_cpu=self.model.on_cpu))

    def _total(self, passing: float) -> float:
        """Of all that comes and goes: the rest is the same at every moment."""
        now = self.now
        coming = now.kept.total + now.products.total + now.of_head.total + passing + self._buffers()
        return now.values.total + now.sums.total + coming + self._margin(coming)

    def _memory(self, passing: float, of_head: float) -> Memory:
        now, part = self.now, self._elements
        master = 0.0 if self.work.value_bytes == 4 and self._zero < 3 else 4 * part
        activations = now.kept.total + now.products.total + passing - of_head
        logits, buffers = now.of_head.total + of_head, self._buffers()
        return Memory(
            weights=now.values.total + master,
            gradients=now.sums.total + (4 * part if self._zero >= 2 else 0.0),
            optimizer=8 * part,
            activations=activations,
            logits=logits,
            buffers=buffers,
            margin=self._margin(activations + logits + buffers),
        )

    # parameters and messages

    def _chunks_of(self, stage: int) -> list[int]:
        return [stage, _TIED] if stage in self.tied_stages else [stage]

    def _before(self, index: int, action: Action) -> None:
        now, stage = self.now, action.stage
        if action.kind in _GATHERS and self._zero == 3:
            for key in self._chunks_of(stage):
                self.users[key].add(stage)
                now.values.put(key, self.chunks[key] * self.work.value_bytes)
        if action.kind in (*_BACKWARDS, Kind.SYNC_TIED) and (self._zero >= 2 or self._frees_sums):
            for key in self._chunks_of(stage):
                now.sums.put(key, 4 * self.chunks[key])
        if action.kind in _REDUCES and self.work.layout.dp > 1:
            keys = [stage, _TIED] if index == self.last_reduce else [stage]
            now.rooms.append(sum(self.model.room(self.chunks[key]) for key in keys))
        for transfer in action.transfers:
            if not transfer.sends and action.kind is not Kind.WAIT:
                payload = (transfer.payload, transfer.stage, transfer.micro_batch)
                now.arriving.put(payload, self.model.message)

    def _after(self, action: Action) -> None:
        now, stage, micro_batch = self.now, action.stage, action.micro_batch
        if action.kind is Kind.RELEASE:
            for key in self._chunks_of(stage):
                self.users[key].discard(stage)
                if not self.users[key]:
                    now.values.drop(key)
        elif action.kind in (Kind.REDUCE, Kind.AWAIT_REDUCE):
            if now.rooms:
                now.rooms.popleft()
            if self._zero >= 2:
                now.sums.drop(stage)
        elif action.kind is Kind.UPDATE and self._frees_sums:
            for key in self._chunks_of(stage) if stage in self.tied_stages[:1] else [stage]:
                now.sums.drop(key)
        elif action.kind is Kind.FORWARD:
            now.arriving.drop((Payload.ACTIVATION, stage - 1, micro_batch))
            self._keep(action)
            self._leave((Payload.ACTIVATION, stage, micro_batch), stage + 1)
        elif action.kind in _BACKWARDS:
            now.arriving.drop((Payload.GRADIENT, stage + 1, micro_batch))
            now.kept.drop((stage, micro_batch))
            now.of_head.drop((stage, micro_batch))
            now.leaving.drop((Payload.ACTIVATION, stage, micro_batch))
            self._leave((Payload.GRADIENT, stage, micro_batch), stage - 1)
            if action.kind is Kind.BACKWARD_INPUT:
                now.products.put((stage, micro_batch), self.model.products(stage))
        elif action.kind is Kind.BACKWARD_WEIGHT:
            now.products.drop((stage, micro_batch))
        elif action.kind is Kind.EXCHANGE:
            for transfer in action.transfers:
                if transfer.sends and transfer.payload is Payload.GRADIENT:
                    now.leaving.drop((transfer.payload, transfer.stage, transfer.micro_batch))

    def _leave(self, key: tuple[Payload, int, int], to: int) -> None:
        """What goes to another rank is kept meanwhile."""
        owners = self.program.stage_rank
        if 0 <= to < self.program.num_stages and owners[to] != owners[key[1]]:
            self.now.leaving.put(key, self.model.message)

    # activations

    def _held(self, action: Action) -> StageHeld:
        where = (action.stage, action.micro_batch)
        return self.model.held(action.stage, turns=self.model.full and where in self.turns)

    def _keep(self, action: Action) -> None:
        held, where = self._held(action), (action.stage, action.micro_batch)
        self.now.kept.put(where, held.kept)
        if held.of_head:
            self.now.of_head.put(where, held.of_head)

    def _passing(self, action: Action) -> tuple[float, float]:
        """Most bytes beyond what is held before the action, and how much of them is the head's."""
        if action.kind is Kind.FORWARD:
            return self._held(action).in_forward
        return self._held(action).in_backward if action.kind in _BACKWARDS else (0.0, 0.0)


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
