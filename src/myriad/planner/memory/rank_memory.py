"""Memory of every pipeline rank of one layout, from the program that it runs.

The actions of a rank are processed one by one with the tensors that the runtime would hold at each. The
result is the state with the largest total:

    always         values, master values, optimizer, gradient buffers: by ZeRO stage
                   (`docs/concepts/memory.md`);
                   float8 or NVFP4 forms of weights that serve several micro-batches
    GATHER         to RELEASE: a chunk's values, with ZeRO 3
    BACKWARD       to REDUCE's end: a chunk's gradient buffer, with ZeRO 2 and 3; to its UPDATE in the
                   backward, with ZeRO 0 and 1 and one micro-batch
    FORWARD        to BACKWARD: what the layers keep; with a split backward to its second half: what the
                   products need
    RECEIVE        to the compute that uses it: a message
    a sent message to the WAIT that proves its arrival (`myriad.program.proved_sends`), or to its EXCHANGE's
                   end; an output that its backward keeps (`StageMemory.keeps_output`) to that BACKWARD
    a compute      temporary bytes of its layers
    between steps  caches of generated texts, and what they need beside (`generation_memory`)
    with Muon      messages with matrices, between CLIP and UPDATE (`matrix_memory`)
    offloaded      kept bytes are on the device until AWAIT_OFFLOAD and from START_FETCH on, optimizer state
                   from START_FETCH_STATE to AWAIT_OFFLOAD_STATE; host buffers stay

Where stages are captured as CUDA graphs (`FrameworkProfile.cuda_graphs`), kept and temporary bytes of layers
stay reserved (`captured_bytes`).

Chunks are those of the program, with the layers that the runtime assigns to them; tied parameters are a chunk
of their own. Totals are updated at each change, so the run time is linear in the number of actions.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

from myriad.planner.cost.stage_layers import stage_layers
from myriad.planner.memory.closed_form_memory import PeakMemory
from myriad.planner.memory.constant_memory import ConstantMemory
from myriad.planner.memory.held_bytes import HeldBytes
from myriad.planner.memory.matrix_memory import matrix_bytes
from myriad.planner.memory.stage_memory import MicroBatchBytes, StageMemory, captured_bytes
from myriad.planner.simulation.steady_state import SteadyState
from myriad.planner.workload import Workload
from myriad.program.actions import (
    ORTHOGONALIZATION,
    SEMANTICS,
    Action,
    Collective,
    Copy,
    Kind,
    Payload,
    Program,
    Resource,
    Semantics,
    input_of,
    kinds_where,
    output_of,
)
from myriad.program.build import build_program, count_chunks
from myriad.program.in_flight import next_is_backward
from myriad.program.partition import cut_ranges
from myriad.program.proved_sends import Message, message_of, proved_sends
from myriad.program.static_buffers import BufferAssignment, assign_buffers, tied_reduction
from myriad.program.warm_up import warm_up_actions

__all__ = ["memory_at_update", "memory_of_ranks", "memory_of_repeating_ranks"]

_HIGHER = 1 + 1e-12
"""Factor by which a state must exceed the earlier peak: smaller differences may be rounding."""
_PASSES = kinds_where(lambda does: does.computes or does.orthogonalizes or does.updates)
_BEGINS = _PASSES | kinds_where(lambda does: bool(does.posts or does.starts or does.allocates))
_ENDS = _PASSES | kinds_where(lambda does: bool(does.waits or does.ends or does.ends_copy or does.frees))
"""Actions with temporary bytes, and those that may change what is held at their begin and at their end."""


def memory_of_ranks(
    workload: Workload, program: Program | None = None, *, on_cpu: bool = False, node_size: int | None = None
) -> list[PeakMemory]:
    """Return the peak memory of each pipeline rank. ``on_cpu``: use a CPU's operators, and data parallelism
    by messages between pairs of ranks (gloo), which need receive buffers; off: use a GPU's operators, and
    collectives. ``node_size``: as in `myriad.comm.hierarchy.count_levels`."""
    if program is None:
        program = build_program(
            workload.layout,
            workload.overlap,
            workload.num_micro_batches,
            tied=workload.model.shares_embedding,
            training=True,
            num_chunks=count_chunks(workload.layout, workload.overlap, stage_layers(workload)),
            orthogonalizes=workload.orthogonalizes,
        )
    return [walk.peak() for walk in _walks(workload, program, node_size, on_cpu=on_cpu)]


def memory_at_update(
    workload: Workload, program: Program, *, node_size: int | None = None
) -> list[PeakMemory]:
    """Return the memory of each pipeline rank, on a GPU, when all backwards are done and it updates."""
    return [walk.at_update() for walk in _walks(workload, program, node_size, on_cpu=False)]


def _walks(
    workload: Workload, program: Program, node_size: int | None, *, on_cpu: bool
) -> list["_MemoryWalk"]:
    layers_of_stage = stage_layers(workload)
    layers = cut_ranges(layers_of_stage, count_chunks(workload.layout, workload.overlap, layers_of_stage))
    model = StageMemory(workload, layers, on_cpu)
    return [_MemoryWalk(model, program, rank, node_size) for rank in range(program.num_ranks)]


def memory_of_repeating_ranks(
    workload: Workload,
    program: Program,
    steady: Sequence[SteadyState],
    *,
    on_cpu: bool,
    node_size: int | None = None,
) -> list[PeakMemory] | None:
    """Return the result of `memory_of_ranks` for the whole program, from a shorter program that contains each
    steady part twice. ``None`` where the shorter program does not determine it."""
    walks = _walks(workload, program, node_size, on_cpu=on_cpu)
    found = [walk.peak_repeating(part) for walk, part in zip(walks, steady, strict=True)]
    known = [memory for memory in found if memory is not None]
    return known if len(known) == len(found) else None


_TIED = -1
"""Key of the chunk that the first and the last stage share."""
_FORMS = -2
"""Key of the weights' converted forms, of all stages."""


def _experts_of(stage: int) -> int:
    """Return the key of a stage's experts, where not all replicas hold them."""
    return -3 - stage


class _MemoryWalk:
    """Walk over the actions of one rank that tracks what it holds."""

    def __init__(self, model: StageMemory, program: Program, rank: int, node_size: int | None) -> None:
        self.model, self.workload, self._zero = model, model.workload, model.workload.layout.zero
        self.buffer_bytes = self.workload.profile.memory.gradient_buffer_bytes
        self.program, self.rank, self.actions = program, rank, program.ranks[rank]
        self.proved_sends = proved_sends(program, rank)
        self.stages = [stage for stage, owner in enumerate(program.stage_rank) if owner == rank]
        self.chunks = {stage: model.chunk(stage) for stage in self.stages}
        ends = {0, program.num_stages - 1}
        self.tied_stages = sorted(ends & set(self.stages)) if model.workload.model.shares_embedding else []
        if self.tied_stages:
            self.chunks[_TIED] = model.padded(model.table)
        experts = {_experts_of(stage): model.expert_chunk(stage) for stage in self.stages}
        self.expert_chunks = {key: elements for key, elements in experts.items() if elements}
        """Elements of experts that not all replicas hold."""
        self.chunks |= self.expert_chunks
        layers = [model.layers[stage] for stage in self.stages]
        every = matrix_bytes(self.workload, layers, [self.chunks[stage] for stage in self.stages])
        self.matrices = dict(zip(self.stages, every, strict=True))
        elements = {stage: one.elements for stage, one in self.matrices.items()}
        if self.expert_chunks:
            every = matrix_bytes(self.workload, layers, [*experts.values()], of_experts=True)
            for stage, one in zip(self.stages, every, strict=True):
                elements[_experts_of(stage)] = one.elements
                self.matrices[stage] += one
        states = frozenset[int]() if program.lowering is None else program.lowering.states_on_host
        on_host = [key for stage in self.stages if stage in states for key in self._updated_with(stage)]
        self.constant = ConstantMemory(
            model, program, rank, node_size, self.chunks, elements, self.expert_chunks.keys(), on_host
        )
        self.users: dict[int, set[int]] = {key: set() for key in self.chunks}
        self.now = HeldBytes()
        self.reduced_keys: dict[int, list[int]] = {}
        """The chunks that each stage's newest reduction sums."""
        self.turns = next_is_backward(self.actions)
        captures = self.workload.profile.cuda_graphs and not model.on_cpu
        self.captured = captured_bytes(model, self.actions, program.num_stages) if captures else None
        """Bytes that captured stages reserve; ``None``: layers allocate their memory."""
        self.tied_starts, self.tied_ends = tied_reduction(self.actions, self.tied_stages)
        """The actions between which the tied chunk is reduced."""
        self._reduces = self.workload.layout.num_holders > 1 or self.workload.layout.num_etp_groups > 1

    def peak(self) -> PeakMemory:
        """Return the memory at the peak of an iteration, or of the texts that are generated after it."""
        between = self._begin()
        return max(self._peak_of(0, len(self.actions)), between, key=lambda memory: float(memory.total))

    def at_update(self) -> PeakMemory:
        """Return the memory at the update after the last backward, with no other communication in flight."""
        self._begin()
        return self._memory(self.constant.gathered_copies, 0.0)

    def peak_repeating(self, steady: SteadyState) -> PeakMemory | None:
        """Return the peak of a program whose steady part is repeated until it has all micro-batches. ``None``
        if the held bytes differ after a repetition."""
        between = self._begin()
        second = steady.start + steady.length
        before, held = self._peak_of(0, second), self.now.by_purpose
        again = self._peak_of(second, second + steady.length)
        if self.now.by_purpose != held:
            return None
        rest = self._peak_of(second + steady.length, len(self.actions))
        return max(before, again, rest, between, key=lambda memory: float(memory.total))

    def _peak_of(self, start: int, stop: int) -> PeakMemory:
        best, highest = None, -1.0
        for index in range(start, stop):
            action = self.actions[index]
            kind, does = action.kind, SEMANTICS[action.kind]
            if kind in _BEGINS:
                self._before(index, action, does)
            passing, head_bytes = self._passing(action, does) if kind in _PASSES else (0.0, 0.0)
            if (total := self._total(passing)) > highest * _HIGHER:
                best, highest = self._memory(passing, head_bytes), total
            if kind in _ENDS:
                self._after(index, action, does)
        assert best is not None, "every rank does something"
        return best

    def _begin(self) -> PeakMemory:
        """Add what persists across iterations. Return the memory between two, with generated texts."""
        self.now.values.put(_FORMS, sum(map(self.model.quantized_forms, self.stages)))
        if self.captured is not None:
            self._begin_places()
        for key, elements in self.chunks.items():
            if self._zero < 3:
                self.now.values.put(key, elements * self.workload.value_bytes)
            if self._zero < 2 and not self._frees_grad_buffers:
                self.now.grad_buffers.put(key, self.buffer_bytes * elements)
        return self._memory(self.model.generated(self.stages), 0.0)

    def _begin_places(self) -> None:
        """Reserve the fixed buffers of captured stages for values and gradients."""
        chunks_of = {stage: self._chunks_of(stage) for stage in self.stages}
        runs = [self.actions, warm_up_actions(self.program, self.rank)]
        places = assign_buffers(runs, chunks_of, self._zero)
        for place, elements in BufferAssignment.largest(places.values, self.chunks).items():
            self.now.values.put(place, elements * self.workload.value_bytes)
        for place, elements in BufferAssignment.largest(places.grad_buffers, self.chunks).items():
            self.now.grad_buffers.put(place, self.buffer_bytes * elements)

    @cached_property
    def _comes_and_goes(self) -> tuple[bool, bool]:
        """Whether a chunk's values, and its gradient buffer, are temporary."""
        apart = self.captured is None
        return apart and self._zero == 3, apart and (self._zero >= 2 or self._frees_grad_buffers)

    @cached_property
    def _frees_grad_buffers(self) -> bool:
        """Whether `myriad.parallel.chunk` frees gradient buffers at the update."""
        return self._zero < 2 and self.workload.overlap.updates_early and self.workload.num_micro_batches == 1

    def _total(self, passing: float) -> float:
        """Return the bytes of everything that changes during an iteration; the rest is constant."""
        now = self.now
        coming = now.kept.total + now.products.total + now.head_bytes.total + passing + now.buffers
        coming += self.constant.buffers + (self.captured or 0.0)
        staying = now.values.total + now.grad_buffers.total + now.states.total
        return staying + coming + self.constant.margin(coming)

    def _memory(self, passing: float, head_bytes: float) -> PeakMemory:
        now = self.now
        activations = (self.captured or 0.0) + now.kept.total + now.products.total + passing - head_bytes
        logits, buffers = now.head_bytes.total + head_bytes, now.buffers + self.constant.buffers
        return PeakMemory(
            weights=now.values.total + self.constant.masters,
            gradients=now.grad_buffers.total + self.constant.gradients,
            optimizer=now.states.total + self.constant.state,  # with the moving average, which stays
            activations=activations,
            logits=logits,
            buffers=buffers,
            margin=self.constant.margin(activations + logits + buffers),
            host=self.constant.host_bytes,
            outside=self.constant.outside,
        )

    # Parameters and messages.

    def _own_chunks(self, stage: int) -> list[int]:
        experts = _experts_of(stage)
        return [stage, experts] if experts in self.expert_chunks else [stage]

    def _chunks_of(self, stage: int) -> list[int]:
        own = self._own_chunks(stage)
        return [*own, _TIED] if stage in self.tied_stages else own

    def _rooms(self, stage: int, room: Callable[..., float]) -> float:
        keys = self.reduced_keys[stage]
        return sum(room(self.chunks[key], of_experts=key in self.expert_chunks) for key in keys)

    def _before(self, index: int, action: Action, does: Semantics) -> None:
        now, stage = self.now, action.stage
        if does.allocates:
            self._allocate(stage, does)
        if does.starts is not None:
            self._start_reduction(index, stage, does.starts)
        if action.kind in ORTHOGONALIZATION:
            self._put_matrices(stage, self.matrices[stage].after_begin_of(action.kind))
        if does.starts_copy is Copy.FETCH:
            self._keep(action)
        elif does.starts_copy is Copy.FETCH_STATE:
            now.states.put(stage, sum(map(self.constant.state_of, self._updated_with(stage))))
        for transfer in action.transfers if does.posts else ():
            if not transfer.sends:
                now.arriving.put(message_of(transfer), self.model.message)

    def _allocate(self, stage: int, does: Semantics) -> None:
        """Add the parameters and the gradient buffer that an action of a stage allocates."""
        values, grad_buffers = self._comes_and_goes
        if values and Resource.PARAMETERS in does.allocates:
            for key in self._chunks_of(stage):
                self.users[key].add(stage)
                self.now.values.put(key, self.chunks[key] * self.workload.value_bytes)
        if grad_buffers and Resource.GRADIENTS in does.allocates:
            for key in self._chunks_of(stage):
                self.now.grad_buffers.put(key, self.buffer_bytes * self.chunks[key])

    def _start_reduction(self, index: int, stage: int, starts: Collective) -> None:
        """Add the receive buffers of a reduction."""
        if starts is Collective.REDUCE and self._reduces:
            own = self._own_chunks(stage)
            self.reduced_keys[stage] = [*own, _TIED] if index == self.tied_starts else own
            self.now.rooms.append(self._rooms(stage, self.model.room))
        if starts is Collective.REDUCE_ACROSS:
            self.now.rooms_across.append(self._rooms(stage, self.model.room_across))

    def _put_matrices(self, stage: int, num_bytes: float | None) -> None:
        if num_bytes is not None:
            self.now.matrices.put(stage, num_bytes)

    def _after(self, index: int, action: Action, does: Semantics) -> None:
        if action.kind in ORTHOGONALIZATION:
            self._put_matrices(action.stage, self.matrices[action.stage].after_end_of(action.kind))
        if does.computes:
            self._after_compute(action, does)
        elif does.ends_copy is Copy.OFFLOAD:
            self._forget((action.stage, action.micro_batch))
        elif does.ends_copy is Copy.OFFLOAD_STATE:
            self.now.states.drop(action.stage)
        elif Resource.PARAMETERS in does.frees:
            self._release(action.stage)
        elif does.ends is Collective.REDUCE:
            self._reduced(action.stage, ends_tied=index == self.tied_ends)
        elif does.ends is Collective.REDUCE_ACROSS:
            self.now.rooms_across.popleft()
        elif does.updates and self._frees_grad_buffers:
            for key in self._updated_with(action.stage):
                self.now.grad_buffers.drop(key)
        elif does.waits:
            for transfer in action.transfers:
                message = message_of(transfer)
                for sent in (message,) if transfer.sends else self.proved_sends.get(message, ()):
                    self._end_send(sent)

    def _end_send(self, sent: Message) -> None:
        """Drop a sent message, unless it is an output that its backward keeps."""
        if sent[0] is Payload.GRADIENT or not self.model.keeps_output(sent[1]):
            self.now.leaving.drop(sent)

    def _release(self, stage: int) -> None:
        for key in self._chunks_of(stage):
            self.users[key].discard(stage)
            if self._comes_and_goes[0] and not self.users[key]:
                self.now.values.drop(key)

    def _reduced(self, stage: int, *, ends_tied: bool) -> None:
        if self.now.rooms:
            self.now.rooms.popleft()
        if self._comes_and_goes[1] and self._zero >= 2:
            for key in [*self._own_chunks(stage), *([_TIED] if ends_tied else [])]:
                self.now.grad_buffers.drop(key)

    def _updated_with(self, stage: int) -> list[int]:
        """Return the chunks that are updated with a stage."""
        return self._chunks_of(stage) if stage in self.tied_stages[:1] else self._own_chunks(stage)

    def _after_compute(self, action: Action, does: Semantics) -> None:
        now, micro_batch, where = self.now, action.micro_batch, (action.stage, action.micro_batch)
        if needed := input_of(action, self.program.num_stages):
            now.arriving.drop((*needed, micro_batch))
        if Resource.ACTIVATIONS in does.allocates:
            self._keep(action)
        if Resource.ACTIVATIONS in does.frees:
            self._forget(where)
            now.leaving.drop((Payload.ACTIVATION, *where))
            self._leave_own_grads(action.stage)
        if output := output_of(action, self.program.num_stages):
            self._leave((output[0], *where), output[1])
        if Resource.WEIGHT_OPERANDS in does.allocates and self.captured is None:
            now.products.put(where, self.model.products(action.stage))
        if Resource.WEIGHT_OPERANDS in does.frees:
            now.products.drop(where)

    def _leave_own_grads(self, stage: int) -> None:
        """Keep the gradients of a stage until the backward of the rank's adjacent stages is complete."""
        if stage - 1 in self.stages:
            self.now.own_grads.put(stage, self.model.own_grads(stage))
        else:
            for ended in self.stages:
                self.now.own_grads.drop(ended)

    def _leave(self, key: Message, user: int) -> None:
        """Keep an outgoing message to stage ``user`` until its peer has it."""
        if self.captured is not None and key[0] is Payload.ACTIVATION:
            return  # The message is sent from the buffer in which it was computed.
        owners = self.program.stage_rank
        if owners[user] != owners[key[1]] and not self.workload.profile.memory.frees_sent:
            self.now.leaving.put(key, self.model.message)

    # Activations.

    def _held(self, action: Action) -> MicroBatchBytes:
        where = (action.stage, action.micro_batch)
        return self.model.held(action.stage, turns=self.model.full and where in self.turns)

    def _keep(self, action: Action) -> None:
        if self.captured is not None:
            return
        held, where = self._held(action), (action.stage, action.micro_batch)
        self.now.kept.put(where, held.kept)
        if held.head_bytes:
            self.now.head_bytes.put(where, held.head_bytes)

    def _forget(self, where: tuple[int, int]) -> None:
        self.now.kept.drop(where)
        self.now.head_bytes.drop(where)

    def _passing(self, action: Action, does: Semantics) -> tuple[float, float]:
        """Return the peak of temporary bytes of an action, and the head's part of it."""
        if action.kind is Kind.ORTHOGONALIZE:
            return self.matrices[action.stage].workspace, 0.0
        if action.kind is Kind.STEP:
            return max(one.alone for one in self.matrices.values()), 0.0
        copies = self._copied_gradients(action, does) if self.workload.copies_gradients else 0.0
        if does.updates:
            return self.constant.gathered_copies, 0.0
        if self.captured is not None or not does.computes:
            return copies, 0.0
        if Resource.ACTIVATIONS in does.allocates:
            return self._held(action).in_forward
        if Resource.ACTIVATIONS not in does.frees:
            return copies, 0.0
        held = self._held(action)
        split = Resource.WEIGHT_OPERANDS in does.allocates
        passing, head_bytes = held.in_split_backward if split else held.in_backward
        return passing + copies, head_bytes

    def _copied_gradients(self, action: Action, does: Semantics) -> float:
        """Return the bytes of the gradients that a backward copies (`Workload.copies_gradients`)."""
        copied = does.computes and Resource.ACTIVATIONS not in does.allocates
        return 4 * sum(self.chunks[key] for key in self._own_chunks(action.stage)) if copied else 0.0
