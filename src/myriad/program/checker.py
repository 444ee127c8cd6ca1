"""The checker: proves that a program is complete, in order and deadlock-free, and computes its bubble.

Two proofs, each linear in the number of actions:

1. Each rank alone (`_check_rank`): every compute action runs once, every input is there before its use and is
   sent after it is computed, parameters are whole when used, gradients are reduced after their backwards, and
   nothing is used while it is in host memory. The list is walked once with the state that a runtime would
   have: transfers (`_PayloadState`), parameters and gradients (`chunk_check.py`), copies to host memory
   (`offload_check.py`). Every payload that another rank uses is computed and then sent, once. Every receive
   is posted once, and waited for before its payload is used. At the end nothing may be missing or left over.
   A pair is a forward and, directly after it, a backward that does not need it.
2. All ranks together (`timeline.py`): the program is simulated. Sends and receives must match in the same
   order on both sides, and every rank must reach its end.

The bubble of a rank is the time in which it computes nothing, in units of a whole rank's forward. With p
ranks and at least p micro-batches, GPipe and 1F1B have 3 (p - 1), interleaving 3 (p - 1) / v, zero-bubble
(ZB-H1) p - 1.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from myriad.program.actions import (
    COMPUTE,
    MAKES_WEIGHT_GRADIENT,
    SEMANTICS,
    Action,
    Kind,
    Payload,
    PipelineTransfer,
    Program,
    user_of,
)
from myriad.program.chunk_check import Chunks
from myriad.program.in_flight import FORWARDS
from myriad.program.offload_check import Copies
from myriad.program.timeline import ProgramError, needed_transfer, timeline

__all__ = ["ProgramCost", "check", "exchange_order"]


@dataclass(frozen=True, slots=True)
class ProgramCost:
    """The cost of a checked program. Times are in units of a whole rank's forward (backward 2, each half 1,
    transfers 0)."""

    makespan: float
    """Time from the first action to the last."""
    bubble: tuple[float, ...]
    """Time of each rank without compute."""
    bubble_ratio: float
    """The bubbles' share of all ranks' time."""
    peak_in_flight: tuple[float, ...]
    """Largest number of micro-batches whose activations each rank holds on its device at once (1 of v stages
    counts 1/v)."""


def check(program: Program) -> ProgramCost:
    """Prove a program and return its costs. Raises `ProgramError` with the rank and the action."""
    _check_form(program)
    for rank in range(program.num_ranks):
        _check_rank(program, rank)
    spans = timeline(program)
    makespan = spans.makespan
    bubble = tuple(makespan - spans.busy(rank) for rank in range(program.num_ranks))
    ratio = sum(bubble) / (makespan * program.num_ranks) if makespan else 0.0
    peaks = tuple(_peak(program, rank) for rank in range(program.num_ranks))
    return ProgramCost(makespan, bubble, ratio, peaks)


def exchange_order(actions: Iterable[Action]) -> str:
    """Return a hash of the order in which a rank's compute actions exchange tokens. Ranks that share experts
    run the same list; with two orders they would wait for each other forever."""
    computes = " ".join(str(action) for action in actions if action.kind in COMPUTE)
    return hashlib.sha256(computes.encode()).hexdigest()


def _check_form(program: Program) -> None:
    owners = set(program.stage_rank)
    if program.num_micro_batches < 1 or not program.stage_rank or owners != set(range(program.num_ranks)):
        raise ProgramError("every rank needs at least one stage, and there must be at least one micro-batch")
    per_rank = program.num_stages / program.num_ranks
    if any(program.stage_rank.count(rank) != per_rank for rank in owners):
        raise ProgramError(f"ranks own different numbers of stages: {program.stage_rank}")


def _peak(program: Program, rank: int) -> float:
    held = peak = 0
    for action in program.ranks[rank]:
        if action.kind in FORWARDS or action.kind is Kind.START_FETCH:
            held += 1
            peak = max(peak, held)
        elif action.kind in MAKES_WEIGHT_GRADIENT or action.kind is Kind.AWAIT_OFFLOAD:
            held -= 1
    forward_only = program.lowering is not None and not program.lowering.training
    return (1 if forward_only else peak) / program.virtual_stages


def _check_rank(program: Program, rank: int) -> None:
    """Raise `ProgramError` at the first wrong action, or for what is missing at the end."""
    state = _RankState(program, rank)
    for index, action in enumerate(program.ranks[rank]):
        if wrong := state.fault(action):
            raise ProgramError(wrong, rank, index, action)
    if wrong := state.fault_at_end():
        raise ProgramError(wrong, rank)


class _RankState:
    """The state of a rank between two actions. A ``..._fault`` method returns what is wrong, or None."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.lowering = program, program.lowering
        self.stages = [stage for stage, owner in enumerate(program.stage_rank) if owner == rank]
        self.done: set[tuple[Kind, int, int]] = set()
        self.payloads, self.chunks = _PayloadState(program, rank), Chunks(program, self.stages)
        self.copies = Copies(program, self.stages)
        self.paired: Action | None = None
        """The forward of an open pair."""

    def fault(self, action: Action) -> str | None:
        if wrong := self._pair_fault(action):
            return wrong
        if action.kind in COMPUTE:
            return self._compute_fault(action)
        if self.lowering is None:
            return "a program that is not lowered holds computes only"
        does = SEMANTICS[action.kind]
        rules: _PayloadState | Chunks | Copies = self.chunks
        if does.posts or does.waits:
            rules = self.payloads
        elif does.starts_copy or does.ends_copy:
            rules = self.copies
        return self.chunks.late_fault(action) or self.copies.state_fault(action) or rules.fault(action)

    def _pair_fault(self, action: Action) -> str | None:
        """Check that a pair is a forward and, directly after it, a backward that does not need it."""
        pairs, forward = SEMANTICS[action.kind].pairs, self.paired
        self.paired = action if pairs == "opens" else None
        if (pairs == "closes") != (forward is not None):
            return "the two compute actions of a pair follow each other directly"
        if forward is None:
            return None
        same = (forward.stage, forward.micro_batch) == (action.stage, action.micro_batch)
        return "is paired with its own forward" if same else None

    def fault_at_end(self) -> str | None:
        if self.paired is not None:
            return f"{self.paired} is paired with nothing"
        if (wrong := self._missing_computes()) or self.lowering is None:
            return wrong
        missing = self.chunks.missing_step() or self.payloads.fault_at_end()
        return missing or self.chunks.fault_at_end() or self.copies.fault_at_end()

    def _compute_fault(self, action: Action) -> str | None:
        stage, micro_batch, kind = action.stage, action.micro_batch, _alone(action.kind)
        if stage not in self.stages or not 0 <= micro_batch < self.program.num_micro_batches:
            return f"not a stage of this rank ({self.stages}) or not a micro-batch of the program"
        if (kind, stage, micro_batch) in self.done:
            return "computed twice"
        if wrong := self._order_fault(action) or self.payloads.input_fault(action):
            return wrong
        if wrong := self.chunks.compute_fault(action) or self.copies.compute_fault(action):
            return wrong
        self.done.add((kind, stage, micro_batch))
        self.payloads.computed(action)
        self.chunks.computed(action)
        return None

    def _order_fault(self, action: Action) -> str | None:
        where = (action.stage, action.micro_batch)
        kind = _alone(action.kind)
        if kind is Kind.FORWARD:
            return None
        if self.lowering is not None and not self.lowering.training:
            return "a forward-only program has no backward"
        if (Kind.FORWARD, *where) not in self.done:
            return "backward before its forward"
        if kind is Kind.BACKWARD_WEIGHT:
            return None if (Kind.BACKWARD_INPUT, *where) in self.done else "weight half before its input half"
        other = Kind.BACKWARD_INPUT if kind is Kind.BACKWARD else Kind.BACKWARD
        return "both a whole and a split backward" if (other, *where) in self.done else None

    def _missing_computes(self) -> str | None:
        training = self.lowering is None or self.lowering.training
        for stage in self.stages:
            for micro_batch in range(self.program.num_micro_batches):
                where = (stage, micro_batch)
                if (Kind.FORWARD, *where) not in self.done:
                    return f"forward of stage {stage}, micro-batch {micro_batch} is missing"
                whole, half = (Kind.BACKWARD, *where), (Kind.BACKWARD_WEIGHT, *where)
                if training and whole not in self.done and half not in self.done:
                    return f"backward of stage {stage}, micro-batch {micro_batch} is missing or half"
        return None


def _alone(kind: Kind) -> Kind:
    """Return what a compute action in a pair is without it."""
    return {Kind.PAIRED_FORWARD: Kind.FORWARD, Kind.PAIRED_BACKWARD: Kind.BACKWARD}.get(kind, kind)


_Payload = tuple[Payload, int, int]
"""Payload, the stage that produced it, and its micro-batch."""


class _PayloadState:
    """The transfers of one rank between two actions. A ``..._fault`` method returns what is wrong, or
    None."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.made: set[_Payload] = set()
        self.sent: set[_Payload] = set()
        self.posted: set[_Payload] = set()
        self.received: set[_Payload] = set()

    def fault(self, action: Action) -> str | None:
        """Check an action with transfers, and record what it posts and receives."""
        does = SEMANTICS[action.kind]
        if wrong := self._form_fault(action):
            return wrong
        for transfer in action.transfers:
            wrong = self._posted_fault(transfer) if does.posts else None
            wrong = wrong or (self._arrived_fault(transfer) if does.waits else None)
            if wrong:
                return wrong
        return None

    def input_fault(self, action: Action) -> str | None:
        """Check that a compute action's input was computed on this rank or received."""
        needed = needed_transfer(self.program, action)
        if needed is None:
            return None
        payload, stage, owner = needed
        key = (payload, stage, action.micro_batch)
        if owner == self.rank:
            return None if key in self.made else f"stage {stage} of this rank has not made its {payload} yet"
        if self.program.lowering is None or key in self.received:
            return None
        return f"the {payload} of stage {stage} is not there: no exchange or wait before"

    def computed(self, action: Action) -> None:
        """Record the output of a compute action."""
        if payload := SEMANTICS[action.kind].makes:
            self.made.add((payload, action.stage, action.micro_batch))

    def fault_at_end(self) -> str | None:
        """Check that no receive is in flight and every payload that another rank needs is sent."""
        if self.posted != self.received:
            return f"receives are posted and never waited for: {sorted(self.posted - self.received)[:3]}"
        if unsent := self._unsent():
            return f"payloads are made and never sent: {unsent[:3]}"
        return None

    def _transfer_fault(self, transfer: PipelineTransfer) -> str | None:
        """Check that the compute actions need this transfer, between these ranks."""
        program, owners = self.program, self.program.stage_rank
        user = user_of(transfer.payload, transfer.stage)
        in_range = 0 <= transfer.stage < program.num_stages and 0 <= user < program.num_stages
        if not in_range or not 0 <= transfer.micro_batch < program.num_micro_batches:
            return "no stage uses that payload"
        ends = (self.rank, transfer.peer) if transfer.sends else (transfer.peer, self.rank)
        if ends != (owners[transfer.stage], owners[user]) or transfer.peer == self.rank:
            return f"this payload goes from rank {owners[transfer.stage]} to rank {owners[user]}"
        return None

    def _sent_fault(self, transfer: PipelineTransfer) -> str | None:
        key = (transfer.payload, transfer.stage, transfer.micro_batch)
        if wrong := self._transfer_fault(transfer):
            return wrong
        if key not in self.made:
            return f"sends the {transfer.payload} of stage {transfer.stage} before it is made"
        if key in self.sent:
            return "sent twice"
        self.sent.add(key)
        return None

    def _form_fault(self, action: Action) -> str | None:
        """Check the number of transfers and their direction."""
        if action.kind is Kind.EXCHANGE:
            return None if action.transfers else "an exchange of nothing"
        sends = action.kind is Kind.SEND
        if len(action.transfers) == 1 and action.transfers[0].sends == sends:
            return None
        return f"a {action.kind} has exactly one {'outgoing' if sends else 'incoming'} transfer"

    def _posted_fault(self, transfer: PipelineTransfer) -> str | None:
        if transfer.sends:
            return self._sent_fault(transfer)
        key = (transfer.payload, transfer.stage, transfer.micro_batch)
        if wrong := self._transfer_fault(transfer):
            return wrong
        if key in self.posted:
            return "received twice"
        self.posted.add(key)
        return None

    def _arrived_fault(self, transfer: PipelineTransfer) -> str | None:
        if transfer.sends:
            return None
        key = (transfer.payload, transfer.stage, transfer.micro_batch)
        if key not in self.posted:
            return "waits for a receive that is not posted"
        if key in self.received:
            return "waits for what is already there"
        self.received.add(key)
        return None

    def _unsent(self) -> list[_Payload]:
        owners, unsent = self.program.stage_rank, []
        for key in self.made - self.sent:
            user = user_of(key[0], key[1])
            if 0 <= user < len(owners) and owners[user] != self.rank:
                unsent.append(key)
        return sorted(unsent)
