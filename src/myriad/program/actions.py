"""The data model of a program: actions, transfers and their semantics.

A program is one list of actions per *pipeline rank*: data- and tensor-parallel peers run the same list.
Schedules write the compute actions; lowering (`lower.py`) adds the communication that they need; passes
rewrite the lists; the checker proves them; the runtime and the simulator execute them.

    rank 0   LOAD  GATHER s0  F s0 m0  SEND a s0 m0   F s0 m1 ...   B s0 m0   ...   REDUCE s0   STEP
    rank 1   LOAD  GATHER s1  RECV a s0 m0  F s1 m0  B s1 m0  SEND g s1 m0 ...      REDUCE s1   STEP

`SEMANTICS` says what each kind of action needs, posts, waits for, allocates and frees. The checker, the
simulators, the memory model and the dashboard read that table, so a new kind of action is one entry in it, an
implementation in the runtime, and a cost. In words:

- FORWARD / BACKWARD / BACKWARD_INPUT / BACKWARD_WEIGHT of (stage, micro_batch). BACKWARD is both halves.
- PAIRED_FORWARD and, directly after it, PAIRED_BACKWARD of another micro-batch run at the same time: one
  computes while the other's tokens travel between the ranks that share experts.
- EXCHANGE: a coupled transfer. All its ``transfers`` (sends and receives, any peers) are posted together and
  the rank waits until every one has completed; a send completes only when the peer has posted the matching
  receive.
- SEND: posts one send without waiting. RECEIVE: posts one receive without waiting. WAIT: waits for the one
  posted receive that it names. The runtime keeps the buffer of a posted send alive until a later
  receive proves that it has completed (`proved_sends.py`), or to the end.
- A transfer is named by its payload: the activation that ``stage`` made for stage + 1, or the gradient that
  ``stage`` made for stage - 1, of one micro-batch. Between two stages on the same rank nothing is sent.
- GATHER / RELEASE: make a stage's parameters whole on this rank / free them (ZeRO >= 1 / ZeRO 3).
- REDUCE: sums a stage's gradient buffer over data-parallel ranks (after SYNC_TIED for tied parameters).
- REDUCE_ACROSS: sums a stage's shard of the gradients across the groups of ``layout.shard_group``. Follows
  the stage's last REDUCE, which then sums over the ranks of a group.
- START_GATHER, AWAIT_GATHER and START_REDUCE, AWAIT_REDUCE: issue and wait for the same two collectives. A
  gather that is issued after its stage's UPDATE belongs to the next iteration, where issuing it again does
  nothing. START_REDUCE_ACROSS, AWAIT_REDUCE_ACROSS: likewise. It may be issued while the reduction that it
  follows is in flight, and starts when that has ended.
- SYNC_TIED: sums the gradients of parameters that the first and the last stage share, between the ranks that
  hold them.
- LOAD: loads the step's tokens. STEP: CLIP, then UPDATE of every stage of the rank.
- CLIP: computes the global gradient norm. UPDATE: the optimizer updates a stage's parameters, after CLIP or
  (``updates_early``) as soon as that stage's gradients are reduced.
- START_GATHER_MOMENTUM, AWAIT_GATHER_MOMENTUM, ORTHOGONALIZE, START_SCATTER_UPDATE, AWAIT_SCATTER_UPDATE
  (``orthogonalizes``, between a stage's CLIP and UPDATE): the momentum of each matrix comes to one of the
  ranks that share it, which orthogonalizes it and returns the update. Also part of STEP.
- START_OFFLOAD, AWAIT_OFFLOAD: copy what a stage's layers keep of one micro-batch to host memory, and free it
  on the device. START_FETCH, AWAIT_FETCH: allocate it again and copy it back, before the backward.
- START_FETCH_STATE, AWAIT_FETCH_STATE, START_OFFLOAD_STATE, AWAIT_OFFLOAD_STATE: the same for a stage's
  optimizer state, which is in host memory except around the stage's UPDATE.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from msgspec import Struct

__all__ = [
    "ADDS_TO_GRADIENTS",
    "COMPUTE",
    "COPIES_ACTIVATIONS",
    "COPIES_STATE",
    "MAKES_WEIGHT_GRADIENT",
    "ORTHOGONALIZATION",
    "SEMANTICS",
    "Action",
    "Collective",
    "Copy",
    "Kind",
    "Lowering",
    "Payload",
    "PipelineTransfer",
    "Program",
    "Resource",
    "Semantics",
    "chunk_of",
    "input_of",
    "kinds_where",
    "output_of",
    "user_of",
]


class _Word(StrEnum):
    """An enumeration of strings that hashes as a string: the hash of `enum.Enum` is a call of Python code."""

    __hash__ = str.__hash__


class Kind(_Word):
    """The kind of an action."""

    LOAD = "load"
    GATHER = "gather"
    START_GATHER = "start_gather"
    AWAIT_GATHER = "await_gather"
    RELEASE = "release"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    PAIRED_FORWARD = "paired_forward"
    PAIRED_BACKWARD = "paired_backward"
    EXCHANGE = "exchange"
    SEND = "send"
    RECEIVE = "receive"
    WAIT = "wait"
    SYNC_TIED = "sync_tied"
    REDUCE = "reduce"
    START_REDUCE = "start_reduce"
    AWAIT_REDUCE = "await_reduce"
    REDUCE_ACROSS = "reduce_across"
    START_REDUCE_ACROSS = "start_across"
    AWAIT_REDUCE_ACROSS = "await_across"
    CLIP = "clip"
    START_GATHER_MOMENTUM = "start_momentum"
    AWAIT_GATHER_MOMENTUM = "await_momentum"
    ORTHOGONALIZE = "orthogonalize"
    START_SCATTER_UPDATE = "start_scatter"
    AWAIT_SCATTER_UPDATE = "await_scatter"
    UPDATE = "update"
    STEP = "step"
    START_OFFLOAD = "start_offload"
    AWAIT_OFFLOAD = "await_offload"
    START_FETCH = "start_fetch"
    AWAIT_FETCH = "await_fetch"
    START_FETCH_STATE = "start_state_in"
    AWAIT_FETCH_STATE = "await_state_in"
    START_OFFLOAD_STATE = "start_state_out"
    AWAIT_OFFLOAD_STATE = "await_state_out"


class Payload(_Word):
    """The tensors that are sent between stages."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class Collective(_Word):
    """A collective of the ranks that share one stage's parameters or gradients."""

    GATHER = "gather"
    REDUCE = "reduce"
    """Gather and reduce are among the data-parallel ranks of a group."""
    REDUCE_ACROSS = "reduce_across"
    """Among the ranks of different groups that hold the same shard."""
    GATHER_MOMENTUM = "gather_momentum"
    """Among data- and tensor-parallel ranks, like the next one."""
    SCATTER_UPDATE = "scatter_update"


class Copy(_Word):
    """A copy between a device and its host's memory."""

    OFFLOAD = "offload"
    """What a stage keeps of one micro-batch, to the host."""
    FETCH = "fetch"
    OFFLOAD_STATE = "state_out"
    """A stage's optimizer state, to the host."""
    FETCH_STATE = "state_in"

    @property
    def is_to_host(self) -> bool:
        """Whether the data leaves the device."""
        return self in (Copy.OFFLOAD, Copy.OFFLOAD_STATE)


class Resource(_Word):
    """Memory that one action allocates and a later one frees."""

    PARAMETERS = "parameters"
    """A stage's whole parameters (temporary with ZeRO 3)."""
    GRADIENTS = "gradients"
    """A stage's gradient buffer (temporary with ZeRO 2 and 3)."""
    ACTIVATIONS = "activations"
    """What a stage's layers keep of one micro-batch for its backward."""
    WEIGHT_OPERANDS = "weight_operands"
    """What the second half of a split backward multiplies."""
    OPTIMIZER_STATE = "optimizer_state"
    """A stage's optimizer state, where it is in host memory between updates."""


@dataclass(frozen=True, slots=True)
class Semantics:
    """What one kind of action does, in this order: it posts, waits, allocates, runs and frees."""

    computes: bool = False
    """Whether it is a forward or backward, or a part of one. Schedules write these; lowering adds all
    others."""
    pairs: Literal["opens", "closes"] | None = None
    """Whether it is the first or the second of two compute actions that run at the same time."""
    uses: Payload | None = None
    """Payload that it needs: the activation of the stage before, or the gradient of the stage after."""
    makes: Payload | None = None
    """Payload that it computes, for the stage after (activation) or before (gradient)."""
    posts: bool = False
    """Whether it posts its transfers."""
    waits: bool = False
    """Whether it waits until its transfers have completed."""
    starts: Collective | None = None
    """Collective that it issues."""
    ends: Collective | None = None
    """Collective that it waits for."""
    joins: Literal["ends", "world"] | None = None
    """Pipeline ranks that it synchronizes: those of the first and the last stage, or all."""
    orthogonalizes: bool = False
    """Whether the rank orthogonalizes its matrices of the stage."""
    updates: bool = False
    """Whether the optimizer updates the stage (of a STEP: all stages of the rank)."""
    starts_copy: Copy | None = None
    """Copy that it issues."""
    ends_copy: Copy | None = None
    """Copy that it waits for."""
    allocates: frozenset[Resource] = frozenset()
    frees: frozenset[Resource] = frozenset()


def _semantics() -> Iterator[tuple[Kind, Semantics]]:
    values, buffer = frozenset({Resource.PARAMETERS}), frozenset({Resource.GRADIENTS})
    kept, operands = frozenset({Resource.ACTIVATIONS}), frozenset({Resource.WEIGHT_OPERANDS})
    activation, gradient = Payload.ACTIVATION, Payload.GRADIENT
    gather, reduce = Collective.GATHER, Collective.REDUCE

    yield Kind.LOAD, Semantics()
    yield Kind.GATHER, Semantics(starts=gather, ends=gather, allocates=values)
    yield Kind.START_GATHER, Semantics(starts=gather, allocates=values)
    yield Kind.AWAIT_GATHER, Semantics(ends=gather)
    yield Kind.RELEASE, Semantics(frees=values)

    forward = Semantics(computes=True, uses=activation, makes=activation, allocates=kept)
    yield Kind.FORWARD, forward
    yield Kind.PAIRED_FORWARD, replace(forward, pairs="opens")
    backward = Semantics(computes=True, uses=gradient, makes=gradient, allocates=buffer, frees=kept)
    yield Kind.BACKWARD, backward
    yield Kind.PAIRED_BACKWARD, replace(backward, pairs="closes")
    yield Kind.BACKWARD_INPUT, replace(backward, allocates=buffer | operands)
    yield Kind.BACKWARD_WEIGHT, Semantics(computes=True, allocates=buffer, frees=operands)

    yield Kind.EXCHANGE, Semantics(posts=True, waits=True)
    yield Kind.SEND, Semantics(posts=True)
    yield Kind.RECEIVE, Semantics(posts=True)
    yield Kind.WAIT, Semantics(waits=True)

    yield Kind.SYNC_TIED, Semantics(joins="ends", allocates=buffer)
    yield Kind.REDUCE, Semantics(starts=reduce, ends=reduce, frees=buffer)
    yield Kind.START_REDUCE, Semantics(starts=reduce)
    yield Kind.AWAIT_REDUCE, Semantics(ends=reduce, frees=buffer)
    across = Collective.REDUCE_ACROSS
    yield Kind.REDUCE_ACROSS, Semantics(starts=across, ends=across)
    yield Kind.START_REDUCE_ACROSS, Semantics(starts=across)
    yield Kind.AWAIT_REDUCE_ACROSS, Semantics(ends=across)

    yield Kind.CLIP, Semantics(joins="world")
    yield Kind.START_GATHER_MOMENTUM, Semantics(starts=Collective.GATHER_MOMENTUM)
    yield Kind.AWAIT_GATHER_MOMENTUM, Semantics(ends=Collective.GATHER_MOMENTUM)
    yield Kind.ORTHOGONALIZE, Semantics(orthogonalizes=True)
    yield Kind.START_SCATTER_UPDATE, Semantics(starts=Collective.SCATTER_UPDATE)
    yield Kind.AWAIT_SCATTER_UPDATE, Semantics(ends=Collective.SCATTER_UPDATE)
    yield Kind.UPDATE, Semantics(updates=True)
    yield Kind.STEP, Semantics(joins="world", updates=True)

    state = frozenset({Resource.OPTIMIZER_STATE})
    yield Kind.START_OFFLOAD, Semantics(starts_copy=Copy.OFFLOAD)
    yield Kind.AWAIT_OFFLOAD, Semantics(ends_copy=Copy.OFFLOAD, frees=kept)
    yield Kind.START_FETCH, Semantics(starts_copy=Copy.FETCH, allocates=kept)
    yield Kind.AWAIT_FETCH, Semantics(ends_copy=Copy.FETCH)
    yield Kind.START_FETCH_STATE, Semantics(starts_copy=Copy.FETCH_STATE, allocates=state)
    yield Kind.AWAIT_FETCH_STATE, Semantics(ends_copy=Copy.FETCH_STATE)
    yield Kind.START_OFFLOAD_STATE, Semantics(starts_copy=Copy.OFFLOAD_STATE)
    yield Kind.AWAIT_OFFLOAD_STATE, Semantics(ends_copy=Copy.OFFLOAD_STATE, frees=state)


SEMANTICS: Mapping[Kind, Semantics] = MappingProxyType(dict(_semantics()))
"""The semantics of every kind of action, for all readers of a program."""


def kinds_where(holds: Callable[[Semantics], bool]) -> frozenset[Kind]:
    """Return the kinds of action whose semantics meet a condition."""
    return frozenset(kind for kind, does in SEMANTICS.items() if holds(does))


COMPUTE = kinds_where(lambda does: does.computes)
"""Compute actions. Schedules write these; lowering adds all others."""

ORTHOGONALIZATION = (
    Kind.START_GATHER_MOMENTUM,
    Kind.AWAIT_GATHER_MOMENTUM,
    Kind.ORTHOGONALIZE,
    Kind.START_SCATTER_UPDATE,
    Kind.AWAIT_SCATTER_UPDATE,
)
"""Actions of a stage that precede its UPDATE if the optimizer orthogonalizes matrices, in their order."""

COPIES_ACTIVATIONS = kinds_where(
    lambda does: (does.starts_copy or does.ends_copy) in (Copy.OFFLOAD, Copy.FETCH)
)
"""Actions that copy activations to host memory and back."""

COPIES_STATE = kinds_where(
    lambda does: (does.starts_copy or does.ends_copy) in (Copy.OFFLOAD_STATE, Copy.FETCH_STATE)
)
"""Actions that copy optimizer state to host memory and back."""

ADDS_TO_GRADIENTS = kinds_where(lambda does: does.computes and Resource.GRADIENTS in does.allocates)
"""Compute actions that write to a stage's gradient buffer. The input half of a backward writes the gradients
of norms, biases, embeddings and the head."""

MAKES_WEIGHT_GRADIENT = ADDS_TO_GRADIENTS - kinds_where(
    lambda does: Resource.WEIGHT_OPERANDS in does.allocates
)
"""Compute actions that complete a micro-batch's weight gradients: a whole backward, or its second half."""

_COMMUNICATES_CHUNK = kinds_where(
    lambda does: bool(does.starts or does.ends) or Resource.PARAMETERS in does.frees
)


class PipelineTransfer(Struct, frozen=True, gc=False):
    """One tensor sent between two pipeline ranks. ``stage`` is the stage that *produced* it, ``peer`` the
    other rank."""

    payload: Payload
    stage: int
    micro_batch: int
    peer: int
    sends: bool


class Action(Struct, frozen=True, gc=False):
    """One step of a rank's list. ``stage`` is global (0 .. num_stages - 1); -1 where it has no meaning."""

    kind: Kind
    stage: int = -1
    micro_batch: int = -1
    transfers: tuple[PipelineTransfer, ...] = ()

    def __str__(self) -> str:
        name = str(self.kind)
        if self.transfers:
            arrows = ("->" if t.sends else "<-" for t in self.transfers)
            parts = (
                f"{t.payload[0]}{t.stage}.{t.micro_batch}{arrow}{t.peer}"
                for t, arrow in zip(self.transfers, arrows, strict=True)
            )
            return f"{name}({', '.join(parts)})"
        where = [str(n) for n in (self.stage, self.micro_batch) if n >= 0]
        return f"{name}({'.'.join(where)})" if where else name


def input_of(action: Action, num_stages: int) -> tuple[Payload, int] | None:
    """Return the input of a compute action as payload and the stage that computes it; None: it needs none,
    or its own rank holds it (tokens, the loss)."""
    payload = SEMANTICS[action.kind].uses
    if payload is None:
        return None
    maker = action.stage - 1 if payload is Payload.ACTIVATION else action.stage + 1
    return (payload, maker) if 0 <= maker < num_stages else None


def output_of(action: Action, num_stages: int) -> tuple[Payload, int] | None:
    """Return the output of a compute action as payload and the stage that uses it; None: no stage does."""
    payload = SEMANTICS[action.kind].makes
    if payload is None:
        return None
    user = user_of(payload, action.stage)
    return (payload, user) if 0 <= user < num_stages else None


def user_of(payload: Payload, stage: int) -> int:
    """Return the stage that uses the payload which ``stage`` computes; it may lie outside the pipeline."""
    return stage + 1 if payload is Payload.ACTIVATION else stage - 1


def chunk_of(action: Action, num_stages: int) -> int:
    """Return the number of the chunk whose parameters or gradients the action communicates; -1: none.

    A stage's own chunk has the stage's number. The tied chunk of the first and the last stage has the number
    after the last stage's.
    """
    if action.kind is Kind.SYNC_TIED:
        return num_stages
    return action.stage if action.kind in _COMMUNICATES_CHUNK else -1


@dataclass(frozen=True, slots=True)
class Lowering:
    """The properties of a lowered program, which the checker verifies."""

    zero: int
    """ZeRO stage: it decides whether parameters are gathered (>= 1) and released (3)."""
    reduce: Literal["last", "each"]
    """Whether REDUCE follows a stage's last backward or each backward."""
    tied: bool
    """Whether the first and the last stage share parameters."""
    training: bool
    """Whether the program has backwards; False: forwards only (validation)."""
    most_micro_batches: int = 0
    """The largest number of micro-batches of any replica, if this one has fewer; 0: all replicas have equally
    many."""
    updates_early: bool = False
    """Whether UPDATE may come before CLIP, once the stage's gradients are complete."""
    orthogonalizes: bool = False
    """Whether the actions of `ORTHOGONALIZATION` come before each stage's UPDATE."""
    across: bool = False
    """Whether each stage's gradients are also summed across groups of ranks."""
    states_on_device: int = 0
    """Largest number of stages of `states_on_host` whose optimizer state a rank has on the device at once."""
    states_on_host: frozenset[int] = frozenset()
    """Stages whose optimizer state is in host memory between updates; that of others stays on the device."""


@dataclass(frozen=True, slots=True)
class Program:
    """The program of one iteration: ``ranks[r]`` is pipeline rank r's list of actions.

    ``stage_rank[s]`` is the pipeline rank that owns stage s. In most schedules that is rank s mod pp (the
    loop). If `cut_stages` has cut stages into chunks, each chunk is a stage of the program. ``lowering`` is
    None as long as the program has compute actions only.
    """

    schedule: str
    num_micro_batches: int
    stage_rank: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    lowering: Lowering | None = None

    @property
    def num_ranks(self) -> int:
        """Number of pipeline ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages over the whole pipeline."""
        return len(self.stage_rank)

    @property
    def virtual_stages(self) -> int:
        """Number of stages of one rank."""
        return self.num_stages // self.num_ranks

    @property
    def syncs_tied(self) -> bool:
        """Whether gradients of tied parameters must be summed between two ranks."""
        lowering = self.lowering
        apart = self.stage_rank[0] != self.stage_rank[-1]
        return apart and lowering is not None and lowering.tied and lowering.training

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                yield rank, action
