"""What one rank has made, sent and received: the part of the static check that knows transfers.

Every payload that another rank uses is made, then sent, once; every receive is posted once, and waited for
before its payload is used. `myriad.program.rank_check` walks the rank's list and asks.
"""

from collections.abc import Callable

from myriad.program.actions import Action, Kind, Payload, Program, Transfer
from myriad.program.timeline import needed_transfer

__all__ = ["Payloads"]

_Payload = tuple[Payload, int, int]
"""Payload, the stage that made it, micro-batch."""


class Payloads:
    """Of one rank, between two actions. A ``..._fault`` method says what is wrong, or nothing."""

    def __init__(self, program: Program, rank: int) -> None:
        self.program, self.rank = program, rank
        self.made: set[_Payload] = set()
        self.sent: set[_Payload] = set()
        self.posted: set[_Payload] = set()
        self.received: set[_Payload] = set()
        self.handlers: dict[Kind, Callable[[Action], str | None]] = {
            Kind.EXCHANGE: self._exchange_fault,
            Kind.SEND: self._send_fault,
            Kind.RECEIVE: self._receive_fault,
            Kind.WAIT: self._wait_fault,
        }

    def input_fault(self, action: Action) -> str | None:
        """A compute's input has been made here, or received."""
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
        """It is there now."""
        if action.kind is Kind.FORWARD:
            self.made.add((Payload.ACTIVATION, action.stage, action.micro_batch))
        elif action.kind is not Kind.BACKWARD_WEIGHT:
            self.made.add((Payload.GRADIENT, action.stage, action.micro_batch))

    def fault_at_end(self) -> str | None:
        """Nothing is under way, or kept from who needs it."""
        if self.posted != self.received:
            return f"receives are posted and never waited for: {sorted(self.posted - self.received)[:3]}"
        if unsent := self._unsent():
            return f"payloads are made and never sent: {unsent[:3]}"
        return None

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

    def _unsent(self) -> list[_Payload]:
        owners, unsent = self.program.stage_rank, []
        for key in self.made - self.sent:
            user = key[1] + (1 if key[0] is Payload.ACTIVATION else -1)
            if 0 <= user < len(owners) and owners[user] != self.rank:
                unsent.append(key)
        return sorted(unsent)
