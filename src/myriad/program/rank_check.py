"""One rank's list against what the whole program needs from it: the static half of the checker.

The list is walked once with the state a runtime would have: what has been computed, received and sent, which
parameters are whole, which gradient sums are not reduced yet. Whatever an action needs must be there when it
comes; at the end nothing may be missing or left over.
"""

from collections.abc import Callable

from myriad.program.actions import (
    COMPUTE,
    MAKES_WEIGHT_GRADIENT,
    Action,
    Kind,
    Payload,
    Program,
    Transfer,
)
from myriad.program.timeline import ProgramError, needed_transfer

__all__ = ["check_rank"]

_Payload = tuple[Payload, int, int]
"""Payload, the stage that made it, micro-batch."""


def check_rank(program: Program, rank: int) -> None:
    """Raises `ProgramError` at the first action that is wrong, or for what is missing at the end."""
    state = _RankState(program, rank)
    for index, action in enumerate(program.ranks[rank]):
        if wrong := state.fault(action):
            raise ProgramError(wrong, rank, index, action)
    if wrong := state.fault_at_end():
        raise ProgramError(wrong, rank)


class _RankState:
    """What a rank holds between two actions. A ``_..._fault`` method says what is wrong, or nothing."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank, self.lowering = program, rank, program.lowering
        self.stages = [stage for stage, owner in enumerate(program.stage_rank) if owner == rank]
        self.done: set[tuple[Kind, int, int]] = set()
        self.made: set[_Payload] = set()
        self.sent: set[_Payload] = set()
        self.posted: set[_Payload] = set()
        self.received: set[_Payload] = set()
        self.whole: set[int] = set()
        self.gathering: set[int] = set()
        self.reducing: set[int] = set()
        self.updated: set[int] = set()
        self.early: set[int] = set()
        """Stages whose gather is posted before the batch is loaded."""
        self.loaded = self.clipped = self.stepped = False
        self.unreduced: dict[int, int] = dict.fromkeys(self.stages, 0)
        self.num_weight_gradients: dict[int, int] = dict.fromkeys(self.stages, 0)
        self.num_reduces: dict[int, int] = dict.fromkeys(self.stages, 0)
        self.synced = False
        self.handlers: dict[Kind, Callable[[Action], str | None]] = {
            Kind.LOAD: self._load_fault,
            Kind.GATHER: self._gather_fault,
            Kind.START_GATHER: self._start_gather_fault,
            Kind.AWAIT_GATHER: self._await_gather_fault,
            Kind.RELEASE: self._release_fault,
            Kind.EXCHANGE: self._exchange_fault,
            Kind.SEND: self._send_fault,
            Kind.RECEIVE: self._receive_fault,
            Kind.WAIT: self._wait_fault,
            Kind.SYNC_TIED: self._sync_fault,
            Kind.REDUCE: self._reduce_fault,
            Kind.START_REDUCE: self._start_reduce_fault,
            Kind.AWAIT_REDUCE: self._await_reduce_fault,
            Kind.CLIP: self._clip_fault,
            Kind.UPDATE: self._update_fault,
            Kind.STEP: self._step_fault,
        }

    def fault(self, action: Action) -> str | None:
        if action.kind in COMPUTE:
            return self._compute_fault(action)
        if self.lowering is None:
            return "a program that is not lowered holds computes only"
        if self.stepped or (self.clipped and action.kind not in (Kind.UPDATE, Kind.START_GATHER)):
            return "comes after the step, or after the gradients were clipped"
        return self.handlers[action.kind](action)

    def fault_at_end(self) -> str | None:
        return self._missing_computes() or self._missing_communication()

    # Computes

    def _compute_fault(self, action: Action) -> str | None:
        stage, micro_batch, kind = action.stage, action.micro_batch, action.kind
        if action.stage not in self.unreduced or not 0 <= micro_batch < self.program.num_micro_batches:
            return f"not a stage of this rank ({self.stages}) or not a micro-batch of the program"
        if (kind, stage, micro_batch) in self.done:
            return "computed twice"
        if wrong := self._order_fault(action) or self._input_fault(action):
            return wrong
        if self.lowering is not None and self.lowering.zero >= 1 and stage not in self.whole:
            return "its parameters are not gathered"
        if self.lowering is not None and not self.loaded:
            return "computes before the batch is loaded"
        if stage in self.updated:
            return "computes with parameters that are those of the next iteration"
        if kind in MAKES_WEIGHT_GRADIENT and stage in self.reducing:
            return "adds to gradients that are being reduced"
        self.done.add((kind, stage, micro_batch))
        if kind is Kind.FORWARD:
            self.made.add((Payload.ACTIVATION, stage, micro_batch))
        elif kind is not Kind.BACKWARD_WEIGHT:
            self.made.add((Payload.GRADIENT, stage, micro_batch))
        if kind in MAKES_WEIGHT_GRADIENT:
            self.unreduced[stage] += 1
            self.num_weight_gradients[stage] += 1
        return None

    def _order_fault(self, action: Action) -> str | None:
        where = (action.stage, action.micro_batch)
        if action.kind is Kind.FORWARD:
            return None
        if self.lowering is not None and not self.lowering.training:
            return "a forward-only program has no backward"
        if (Kind.FORWARD, *where) not in self.done:
            return "backward before its forward"
        if action.kind is Kind.BACKWARD_WEIGHT:
            return None if (Kind.BACKWARD_INPUT, *where) in self.done else "weight half before its input half"
        other = Kind.BACKWARD_INPUT if action.kind is Kind.BACKWARD else Kind.BACKWARD
        return "both a whole and a split backward" if (other, *where) in self.done else None

    def _input_fault(self, action: Action) -> str | None:
        needed = needed_transfer(self.program, action)
        if needed is None:
            return None
        payload, stage, owner = needed
        key = (payload, stage, action.micro_batch)
        if owner == self.rank:
            return None if key in self.made else f"stage {stage} of this rank has not made its {payload} yet"
        if self.lowering is None or key in self.received:
            return None
        return f"the {payload} of stage {stage} is not there: no exchange or wait before"

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

    # Transfers

    def _transfer_fault(self, transfer: Transfer) -> str | None:
        """Whether it is one of those the computes need, between the right ranks."""
        program, owners = self.program, self.program.stage_rank
        user = transfer.stage + (1 if transfer.payload is Payload.ACTIVATION else -1)
        in_range = 0 <= transfer.stage < program.num_stages and 0 <= user < program.num_stages
        if not in_range or not 0 <= transfer.micro_batch < program.num_micro_batches:
            return "nobody uses that payload"
        ends = (self.rank, transfer.peer) if transfer.sends else (transfer.peer, self.rank)
        if ends != (owners[transfer.stage], owners[user]) or transfer.peer == self.rank:
            return f"this payload goes from rank {owners[transfer.stage]} to rank {owners[user]}"
        return None

    def _sent_fault(self, transfer: Transfer) -> str | None:
        key = (transfer.payload, transfer.stage, transfer.micro_batch)
        if wrong := self._transfer_fault(transfer):
            return wrong
        if key not in self.made:
            return f"sends the {transfer.payload} of stage {transfer.stage} before it is made"
        if key in self.sent:
            return "sent twice"
        self.sent.add(key)
        return None

    def _posted_fault(self, transfer: Transfer) -> str | None:
        key = (transfer.payload, transfer.stage, transfer.micro_batch)
        if wrong := self._transfer_fault(transfer):
            return wrong
        if key in self.posted:
            return "received twice"
        self.posted.add(key)
        return None

    def _exchange_fault(self, action: Action) -> str | None:
        if not action.transfers:
            return "an exchange of nothing"
        for transfer in action.transfers:
            if wrong := self._sent_fault(transfer) if transfer.sends else self._posted_fault(transfer):
                return wrong
            if not transfer.sends:
                self.received.add((transfer.payload, transfer.stage, transfer.micro_batch))
        return None

    def _send_fault(self, action: Action) -> str | None:
        if len(action.transfers) != 1 or not action.transfers[0].sends:
            return "a send has exactly one outgoing transfer"
        return self._sent_fault(action.transfers[0])

    def _receive_fault(self, action: Action) -> str | None:
        if len(action.transfers) != 1 or action.transfers[0].sends:
            return "a receive has exactly one incoming transfer"
        return self._posted_fault(action.transfers[0])

    def _wait_fault(self, action: Action) -> str | None:
        if len(action.transfers) != 1 or action.transfers[0].sends:
            return "a wait names exactly one incoming transfer"
        transfer = action.transfers[0]
        key = (transfer.payload, transfer.stage, transfer.micro_batch)
        if key not in self.posted:
            return "waits for a receive that is not posted"
        if key in self.received:
            return "waits for what is already there"
        self.received.add(key)
        return None

    # Parameters and gradients

    def _own_stage_fault(self, action: Action) -> str | None:
        return None if action.stage in self.unreduced else f"not a stage of this rank ({self.stages})"

    def _load_fault(self, action: Action) -> str | None:
        if self.loaded:
            return "loads twice"
        self.loaded = True
        return None

    def _gather_fault(self, action: Action) -> str | None:
        return self._start_gather_fault(action) or self._await_gather_fault(action)

    def _start_gather_fault(self, action: Action) -> str | None:
        assert self.lowering is not None
        if self.lowering.zero == 0:
            return "parameters are never sharded with ZeRO 0"
        if action.stage in self.whole | self.gathering:
            return "its parameters are whole already, or on their way"
        moved = self.clipped or action.stage in self.updated
        if moved and not {action.stage} <= self.early & self.updated:
            return "only what is updated, and gathered before a batch is loaded, is gathered for the next one"
        if moved and self._shares(action.stage) and 0 not in self.updated:
            return "what it shares with the first stage moves with that one"
        if not self.loaded:
            self.early.add(action.stage)
        self.gathering.add(action.stage)
        return self._own_stage_fault(action)

    def _await_gather_fault(self, action: Action) -> str | None:
        if action.stage not in self.gathering:
            return "waits for a gather that is not posted"
        self.gathering.remove(action.stage)
        self.whole.add(action.stage)
        return None

    def _release_fault(self, action: Action) -> str | None:
        assert self.lowering is not None
        if self.lowering.zero < 3 or action.stage not in self.whole:
            return "releases parameters that are not gathered, or without ZeRO 3"
        self.whole.remove(action.stage)
        return None

    def _sync_fault(self, action: Action) -> str | None:
        mine = {0, self.program.num_stages - 1} & set(self.stages)
        if not self.program.syncs_tied or action.stage not in mine or self.synced:
            return "no tied parameters to sum here, or summed twice"
        if self.num_weight_gradients[action.stage] < self.program.num_micro_batches:
            return "sums tied gradients before the stage's last backward"
        self.synced = True
        return None

    def _reduce_fault(self, action: Action) -> str | None:
        return self._start_reduce_fault(action) or self._await_reduce_fault(action)

    def _start_reduce_fault(self, action: Action) -> str | None:
        assert self.lowering is not None
        if wrong := self._own_stage_fault(action):
            return wrong
        stage = action.stage
        is_last = self.num_weight_gradients[stage] == self.program.num_micro_batches
        if self.lowering.reduce == "last" and not is_last:
            return "reduces before the stage's last backward"
        if self.unreduced[stage] == 0 and not self._reduces_for_others:
            return "nothing new to reduce"
        is_final = self.num_reduces[stage] + 1 == self._num_wanted_reduces
        if is_final and self._must_sync(stage) and not self.synced:
            return "reduces before the tied gradients are summed"
        if stage in self.reducing:
            return "its gradients are being reduced already"
        self.reducing.add(stage)
        self.unreduced[stage] = 0
        self.num_reduces[stage] += 1
        return None

    def _await_reduce_fault(self, action: Action) -> str | None:
        if action.stage not in self.reducing:
            return "waits for a reduction that is not posted"
        self.reducing.remove(action.stage)
        return None

    def _clip_fault(self, action: Action) -> str | None:
        assert self.lowering is not None
        if not self.lowering.training:
            return "only a training program steps"
        self.clipped = True
        if self.reducing:
            return f"the gradients of stages {sorted(self.reducing)} are still being reduced"
        return self._missing_reduces()

    def _update_fault(self, action: Action) -> str | None:
        if wrong := self._own_stage_fault(action):
            return wrong
        if action.stage in self.updated or not (self.clipped or self._is_complete(action.stage)):
            return "updates before the norm is known, or its gradients are complete, or twice"
        if self.lowering is not None and self.lowering.zero == 3 and action.stage in self.whole:
            return "its parameters are never released"
        self.updated.add(action.stage)
        self.whole.discard(action.stage)
        return None

    def _is_complete(self, stage: int) -> bool:
        """A stage that may be updated early has all its gradients, and those that it shares."""
        assert self.lowering is not None
        stages = [0, self.program.num_stages - 1] if stage == 0 and self._shares(stage) else [stage]
        return self.lowering.updates_early and all(
            self.num_weight_gradients[one] == self.program.num_micro_batches
            and self.num_reduces[one] == self._num_wanted_reduces
            and one not in self.reducing
            for one in stages
        )

    def _shares(self, stage: int) -> bool:
        """It is the first or the last one, and both are here and share parameters."""
        ends = {0, self.program.num_stages - 1}
        return self.lowering is not None and self.lowering.tied and stage in ends <= self.unreduced.keys()

    def _step_fault(self, action: Action) -> str | None:
        self.updated.update(self.stages)
        self.stepped = True
        return self._clip_fault(action)

    def _must_sync(self, stage: int) -> bool:
        return self.program.syncs_tied and stage in (0, self.program.num_stages - 1)

    def _missing_communication(self) -> str | None:
        lowering = self.lowering
        if lowering is None:
            return None
        if not self.loaded:
            return "never loads a batch"
        if lowering.training and self.updated != set(self.stages):
            return (
                f"does not end with step: stages {sorted(set(self.stages) - self.updated)} are never updated"
            )
        if lowering.training and not self.clipped:
            return "never finds the gradients' norm: neither clips nor steps"
        if self.posted != self.received:
            return f"receives are posted and never waited for: {sorted(self.posted - self.received)[:3]}"
        if unsent := self._unsent():
            return f"payloads are made and never sent: {unsent[:3]}"
        if lowering.zero == 3 and self.whole:
            return f"parameters of stages {sorted(self.whole)} are never released"
        if self.gathering != (self.early if self.clipped and not self.stepped else set()):
            return f"gathers under way at the end: {sorted(self.gathering)}"
        if any(self._must_sync(stage) for stage in self.stages) and not self.synced:
            return "tied gradients are never summed"
        return self._missing_reduces() if lowering.training else None

    def _unsent(self) -> list[_Payload]:
        owners, unsent = self.program.stage_rank, []
        for key in self.made - self.sent:
            user = key[1] + (1 if key[0] is Payload.ACTIVATION else -1)
            if 0 <= user < len(owners) and owners[user] != self.rank:
                unsent.append(key)
        return sorted(unsent)

    @property
    def _reduces_for_others(self) -> bool:
        """A replica with more micro-batches reduces more often, and this one with it."""
        assert self.lowering is not None
        return self.lowering.reduce == "each" and bool(self.lowering.most_micro_batches)

    @property
    def _num_wanted_reduces(self) -> int:
        assert self.lowering is not None
        if self.lowering.reduce == "last":
            return 1
        return self.lowering.most_micro_batches or self.program.num_micro_batches

    def _missing_reduces(self) -> str | None:
        wanted = self._num_wanted_reduces
        for stage in self.stages:
            if self.unreduced[stage]:
                return f"gradients of stage {stage} are never reduced"
            if self.num_reduces[stage] != wanted:
                return f"stage {stage} is reduced {self.num_reduces[stage]} times, not {wanted}"
        return None
