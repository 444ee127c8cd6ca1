"""Static check of one rank's transfers: what it has computed, sent and received.

Every payload that another rank uses is computed and then sent, once. Every receive is posted once, and waited
for before its payload is used. `myriad.program.rank_check` walks the rank's list and calls this module.
"""

from myriad.program.actions import SEMANTICS, Action, Kind, Payload, PipelineTransfer, Program, user_of
from myriad.program.timeline import needed_transfer

__all__ = ["Payloads"]

_Payload = tuple[Payload, int, int]
"""Payload, the stage that produced it, and its micro-batch."""


class Payloads:
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
