"""Sends and receives of activations and gradients between the stages of a pipeline.

    post             RECEIVE, SEND: start transfers; the tensor sent leaves the inbox
    await_receives   WAIT: put received tensors into the inbox
    exchange         EXCHANGE: post every receive, then every send, then wait for all of them
    await_sends      after the last action

No action waits for a posted send: a later message from the same peer proves that it has completed
(`myriad.program.proved_sends`).
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from myriad.comm.channel import Channel, PendingTransfer
from myriad.comm.groups import Groups
from myriad.program.actions import Action, Kind, Payload, PipelineTransfer
from myriad.program.in_flight import BACKWARDS, FORWARDS
from myriad.program.proved_sends import Message, ProvedSends, message_of
from myriad.telemetry.progress.operation_counters import Operation, counter_of_message, messages
from myriad.telemetry.spans import Recorder

__all__ = ["IdleWork", "PipelineTransfers", "TransferTables", "operation_of"]


class IdleWork(Protocol):
    """Work that a rank does while it waits for a message."""

    def wait(self, key: Hashable, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``wait`` returns; ``key`` is the same for the same tensor of each iteration."""
        ...


@dataclass
class TransferTables:
    """The tensors of one run of a program that come from, or go to, other stages."""

    proved_sends: ProvedSends = field(default_factory=dict)
    """Sends that are complete when a message has arrived, by that message."""
    inbox: dict[Message, torch.Tensor] = field(default_factory=dict)
    """Activations and gradients that arrived, or that a neighbouring stage on this rank computed."""
    posted: dict[Message, PendingTransfer] = field(default_factory=dict)
    """Receives that were posted and not waited for."""
    sent: dict[Message, PendingTransfer] = field(default_factory=dict)
    """Sends whose completion no later message has proved yet."""


class PipelineTransfers:
    """This rank's connections to the ranks that hold the neighbouring stages."""

    def __init__(
        self,
        groups: Groups,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        num_stages: int,
        device: torch.device,
        recorder: Recorder,
        *,
        stream_is_sharded: bool,
    ) -> None:
        """``shapes``: shape of the tensor that each stage but the last sends to the next one.
        ``stream_is_sharded``: the tensors between stages differ among tensor-parallel ranks. If not, these
        ranks hold equal tensors and share the transfer."""
        self.shapes, self._num_stages, self._device, self._recorder = shapes, num_stages, device, recorder
        self._pipeline_position = groups.grid.index("pp"), groups.grid.layout.pp
        """This rank's index along the pipeline, and the number of pipeline ranks."""
        self.idle: IdleWork | None = None
        """Work for the time in which this rank waits for a tensor of another stage; ``None``: the rank only
        waits."""
        self.channels: dict[Payload, Channel] = {}
        """The connections for each payload; empty if there is one pipeline rank."""
        if groups.grid.layout.pp > 1:
            both_ways = groups.grid.layout.virtual_stages > 1
            split = None if stream_is_sharded else groups.along("tp", purpose="shared transfers")
            self.channels = {
                payload: Channel(groups, payload, both_ways=both_ways, split=split) for payload in Payload
            }

    def connect(self, programs: Iterable[Sequence[Action]]) -> None:
        """Open the connections to all ranks with which the programs exchange tensors. All ranks call this
        together, before they run one of the programs."""
        transfers = [transfer for actions in programs for action in actions for transfer in action.transfers]
        for payload, channel in self.channels.items():
            channel.connect({(t.peer, t.sends) for t in transfers if t.payload is payload}, self._device)

    def operation_of(self, action: Action) -> Operation | None:
        """Return how the messages of an action are counted; ``None``: not for this action."""
        return operation_of(action, *self._pipeline_position)

    def blank(self, actions: Sequence[Action]) -> dict[Message, torch.Tensor]:
        """Return zeros for the input of each forward and backward that would come from another rank."""
        mine = {action.stage for action in actions if action.kind in FORWARDS}
        blank: dict[Message, torch.Tensor] = {}
        for action in actions:
            forward = action.kind in FORWARDS
            if not forward and action.kind not in BACKWARDS:
                continue
            payload, maker = (
                (Payload.ACTIVATION, action.stage - 1) if forward else (Payload.GRADIENT, action.stage + 1)
            )
            if 0 <= maker < self._num_stages and maker not in mine:
                shape, dtype = self.shapes[min(maker, action.stage)]
                key = (payload, maker, action.micro_batch)
                blank[key] = torch.zeros(shape, dtype=dtype, device=self._device)
        return blank

    def exchange(
        self, transfers: Sequence[PipelineTransfer], tables: TransferTables, *, fills_waits: bool
    ) -> None:
        """Post every receive, then every send, then wait for all of them (a coupled exchange).
        ``fills_waits``: do the idle work while this rank waits."""
        receives = [transfer for transfer in transfers if not transfer.sends]
        for transfer in receives:
            self._receive(transfer, tables)
        sent = [self._send(transfer, tables) for transfer in transfers if transfer.sends]
        self.await_receives(receives, tables, fills_waits=fills_waits)
        for posted in sent:
            posted.wait()

    def post(self, transfers: Sequence[PipelineTransfer], tables: TransferTables) -> None:
        """Start sends and receives, and wait for none."""
        for transfer in transfers:
            if transfer.sends:
                tables.sent[message_of(transfer)] = self._send(transfer, tables)
            else:
                self._receive(transfer, tables)

    def await_receives(
        self, transfers: Sequence[PipelineTransfer], tables: TransferTables, *, fills_waits: bool
    ) -> None:
        """Complete receives, and drop the sends that they prove to be complete."""
        for transfer in transfers:
            key = message_of(transfer)
            posted = tables.posted.pop(key)
            fills = self.idle is not None and fills_waits
            tables.inbox[key] = self.idle.wait(key, posted.wait) if fills and self.idle else posted.wait()
            for sent in tables.proved_sends.get(key, ()):
                if sent in tables.sent:
                    tables.sent.pop(sent).wait()

    def await_sends(self, actions: Sequence[Action], tables: TransferTables) -> None:
        """Wait for the sends of ``actions`` whose completion no later message has proved. In training they
        have completed, because all ranks have synchronized since."""
        if not tables.sent:
            return
        transfers = [t for action in actions for t in action.transfers if t.sends]
        sent = {_counter(t, *self._pipeline_position) for t in transfers}
        waits = replace(messages(sent, waits=True), counters=())
        with self._recorder.span("sends", operation=waits, recorded=False):
            for posted in tables.sent.values():
                posted.wait()

    def _tag(self, transfer: PipelineTransfer) -> int:
        return transfer.micro_batch * self._num_stages + transfer.stage

    def _send(self, transfer: PipelineTransfer, tables: TransferTables) -> PendingTransfer:
        tensor = tables.inbox.pop(message_of(transfer))
        return self.channels[transfer.payload].send(tensor, transfer.peer, self._tag(transfer))

    def _receive(self, transfer: PipelineTransfer, tables: TransferTables) -> None:
        made_after = transfer.stage if transfer.payload is Payload.ACTIVATION else transfer.stage - 1
        shape, dtype = self.shapes[made_after]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        received = self.channels[transfer.payload].receive(tensor, transfer.peer, self._tag(transfer))
        tables.posted[message_of(transfer)] = received


def operation_of(action: Action, rank: int, length: int) -> Operation | None:
    """Return how the messages of an action are counted for ``rank`` of a pipeline of ``length`` ranks.
    ``None``: the action has no messages, or another action counts them."""
    if action.kind not in (Kind.SEND, Kind.WAIT, Kind.EXCHANGE):
        return None
    counters = [_counter(transfer, rank, length) for transfer in action.transfers]
    return messages(counters, waits=action.kind is not Kind.SEND)


def _counter(transfer: PipelineTransfer, rank: int, length: int) -> int:
    sends = transfer.sends
    up = (transfer.peer - rank if sends else rank - transfer.peer) % length == 1
    return counter_of_message(transfer.payload, up=up, sends=sends)
