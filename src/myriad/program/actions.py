"""The words a program is made of.

A program is one list of actions per *pipeline rank*: data- and tensor-parallel peers run the same list.
Schedules write the compute; lowering (`lower.py`) adds the communication that the compute needs; passes
rewrite; the checker proves; the runtime and the simulator read.

    rank 0   LOAD  GATHER s0  F s0 m0  SEND a s0 m0   F s0 m1 ...   B s0 m0   ...   REDUCE s0   STEP
    rank 1   LOAD  GATHER s1  RECV a s0 m0  F s1 m0  B s1 m0  SEND g s1 m0 ...      REDUCE s1   STEP

Semantics, the same for checker, runtime and simulator:

- FORWARD / BACKWARD / BACKWARD_INPUT / BACKWARD_WEIGHT of (stage, micro_batch). BACKWARD is the two halves
  together.
- EXCHANGE: a coupled transfer. All its ``transfers`` (sends and receives, any peers) are posted together and
  the rank waits until every one has completed; a send completes only when the peer has posted the matching
  receive.
- SEND: posts one send and goes on. RECEIVE: posts one receive and goes on. WAIT: waits for the one posted
  receive that it names. A posted send's buffer is kept alive by the runtime until the end of the iteration's
  sends.
- A transfer is named by its payload: the activation that ``stage`` made for stage + 1, or the gradient that
  ``stage`` made for stage - 1, of one micro-batch. Between two stages on the same rank nothing is sent.
- GATHER / RELEASE: a stage's parameters become whole on this rank / may be dropped (ZeRO >= 1 / ZeRO 3).
- REDUCE: a stage's gradient sums are combined over data-parallel ranks (tied ones before that).
- START_GATHER, AWAIT_GATHER and START_REDUCE, AWAIT_REDUCE: the same two, posted and waited for. A gather
  that is posted after its stage's UPDATE belongs to the next iteration: there, posting it again does nothing.
- SYNC_TIED: gradients of parameters shared by the first and the last stage are summed between the ranks that
  hold them.
- LOAD: the step's tokens are there. STEP: CLIP, then UPDATE of every stage of the rank.
- CLIP: the global gradient norm is known. UPDATE: the optimizer moves a stage's parameters; after CLIP, or
  (``updates_early``) when that stage's gradients are reduced.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

__all__ = [
    "COMPUTE",
    "MAKES_WEIGHT_GRADIENT",
    "Action",
    "Kind",
    "Lowering",
    "Payload",
    "Program",
    "Transfer",
    "chunk_of",
]


class Kind(StrEnum):
    """What an action does."""

    LOAD = "load"
    GATHER = "gather"
    START_GATHER = "start_gather"
    AWAIT_GATHER = "await_gather"
    RELEASE = "release"
    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    BACKWARD_WEIGHT = "backward_weight"
    EXCHANGE = "exchange"
    SEND = "send"
    RECEIVE = "receive"
    WAIT = "wait"
    SYNC_TIED = "sync_tied"
    REDUCE = "reduce"
    START_REDUCE = "start_reduce"
    AWAIT_REDUCE = "await_reduce"
    CLIP = "clip"
    UPDATE = "update"
    STEP = "step"


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT})
"""What a schedule writes; everything else is added by lowering."""

MAKES_WEIGHT_GRADIENT = frozenset({Kind.BACKWARD, Kind.BACKWARD_WEIGHT})
"""Computes that add to a stage's gradient sums."""


_MOVES_A_CHUNK = frozenset(
    {
        Kind.GATHER,
        Kind.START_GATHER,
        Kind.AWAIT_GATHER,
        Kind.RELEASE,
        Kind.REDUCE,
        Kind.START_REDUCE,
        Kind.AWAIT_REDUCE,
    }
)


class Payload(StrEnum):
    """What travels between stages."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One tensor between two pipeline ranks. ``stage`` is the one that *made* it, ``peer`` the other rank."""

    payload: Payload
    stage: int
    micro_batch: int
    peer: int
    sends: bool


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does. ``stage`` is global (0 .. num_stages - 1); -1 where it has no meaning."""

    kind: Kind
    stage: int = -1
    micro_batch: int = -1
    transfers: tuple[Transfer, ...] = ()

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


def chunk_of(action: Action, num_stages: int) -> int:
    """Number of the chunk whose parameters or gradients it moves; -1: none. A stage's own chunk has the
    stage's number; what the first and the last stage share has the number after the last stage's."""
    if action.kind is Kind.SYNC_TIED:
        return num_stages
    return action.stage if action.kind in _MOVES_A_CHUNK else -1


@dataclass(frozen=True, slots=True)
class Lowering:
    """What a lowered program promises; the checker holds it to that."""

    zero: int
    """ZeRO stage: whether parameters are gathered (>= 1) and released (3)."""
    reduce: Literal["last", "each"]
    """REDUCE after a stage's last backward, or after each."""
    tied: bool
    """The first and the last stage share parameters."""
    training: bool
    """False: a forward-only program (validation)."""
    most_micro_batches: int = 0
    """Of any replica, where this one has fewer; 0: all have as many."""
    updates_early: bool = False
    """UPDATE may come before CLIP, when the stage's gradients are complete."""


@dataclass(frozen=True, slots=True)
class Program:
    """One iteration: ``ranks[r]`` is pipeline rank r's list of actions.

    ``stage_rank[s]`` is the pipeline rank that owns stage s. In the schedules written here stage s lives on
    rank s mod pp (the loop); where `cut_stages` has cut stages in chunks, each chunk is a stage of the
    program. ``lowering`` is None as long as the program holds computes only.
    """

    schedule: str
    num_micro_batches: int
    stage_rank: tuple[int, ...]
    ranks: tuple[tuple[Action, ...], ...]
    lowering: Lowering | None = None

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Model pieces over the whole pipeline."""
        return len(self.stage_rank)

    @property
    def virtual_stages(self) -> int:
        """Stages of one rank."""
        return self.num_stages // self.num_ranks

    @property
    def syncs_tied(self) -> bool:
        """Whether gradients of shared parameters must travel between two ranks."""
        lowering = self.lowering
        apart = self.stage_rank[0] != self.stage_rank[-1]
        return apart and lowering is not None and lowering.tied and lowering.training

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                yield rank, action
