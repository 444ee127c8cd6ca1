"""One rank's reader of a program: does each action, in order, on real tensors.

Nothing here decides an order: schedules and passes did, and the checker proved it. What an action needs is in
one of four places, each keyed as the program names things:

    inbox      activations and gradients that arrived (or were made by the neighbouring stage on this rank)
    posted     receives under way
    saved      (input, output) of a forward whose backward is to come
    deferred   weight-gradient products whose weight part is to come (zero-bubble)
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from myriad.comm.channel import Channel, Posted
from myriad.comm.groups import Groups
from myriad.kernels.gradient import DeferredProduct, apply_deferred
from myriad.model.definition import Context
from myriad.parallel.pieces import Pieces, Stage
from myriad.program.actions import Action, Kind, Payload, Transfer
from myriad.telemetry.spans import Recorder

__all__ = ["COMMUNICATION", "Batch", "Runtime"]

COMMUNICATION = ("exchange", "wait", "gather", "reduce", "sync_tied", "tensor_comm")
"""Span names in which a rank waits for others."""

_Key = tuple[Payload, int, int]


@dataclass(frozen=True)
class Batch:
    """A data-parallel rank's share of one iteration; rows in micro-batch order."""

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor
    """Index of each row's sample in the whole run, int64."""


@dataclass
class _Iteration:
    """What one run of a program holds."""

    training: bool
    loss_scale: float
    batch: Batch | None = None
    loss_sum: torch.Tensor | None = None
    inbox: dict[_Key, torch.Tensor] = field(default_factory=dict)
    posted: dict[_Key, Posted] = field(default_factory=dict)
    sent: list[Posted] = field(default_factory=list)
    saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    deferred: dict[tuple[int, int], list[DeferredProduct]] = field(default_factory=dict)


class Runtime:
    """Executes programs with this rank's pieces of the model."""

    def __init__(
        self,
        pieces: Pieces,
        groups: Groups,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        stage_rank: Sequence[int],
        micro_batch: int,
        device: torch.device,
        seed: int,
        recorder: Recorder,
    ) -> None:
        self._pieces, self._groups, self._shapes = pieces, groups, shapes
        self._stage_rank, self._micro_batch, self._device = stage_rank, micro_batch, device
        self._seed, self._recorder = seed, recorder
        self._channels: dict[Payload, Channel] = {}
        if groups.grid.layout.pp > 1:
            both_ways = groups.grid.layout.virtual_stages > 1
            self._channels = {payload: Channel(groups, payload, both_ways=both_ways) for payload in Payload}
        self._do: Mapping[Kind, Callable[[Action, _Iteration], None]] = {
            Kind.GATHER: self._gather,
            Kind.RELEASE: self._release,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.EXCHANGE: self._exchange,
            Kind.SEND: self._post,
            Kind.RECEIVE: self._post,
            Kind.WAIT: self._wait,
            Kind.SYNC_TIED: self._sync_tied,
            Kind.REDUCE: self._reduce,
        }

    def run(
        self,
        actions: Sequence[Action],
        load: Callable[[], Batch],
        step: Callable[[torch.Tensor], None] | None,
        loss_scale: float = 1.0,
    ) -> torch.Tensor:
        """Does every action. ``load`` is called at LOAD; ``step`` at STEP, with this rank's sum of losses;
        without it nothing is differentiated. Gives that sum: float32, 0 where the last stage is elsewhere."""
        now = _Iteration(training=step is not None, loss_scale=loss_scale)
        now.loss_sum = torch.zeros((), device=self._device)
        last_reduce = max((i for i, action in enumerate(actions) if action.kind is Kind.REDUCE), default=-1)
        for stage in self._pieces.stages.values():
            for layer in stage.layers.values():
                layer.train(now.training)
        for index, action in enumerate(actions):
            with self._recorder.span(action.kind, action.stage, action.micro_batch):
                if action.kind is Kind.LOAD:
                    now.batch = load()
                elif action.kind is Kind.STEP:
                    assert step is not None
                    self._finish_sends(now)
                    step(now.loss_sum)
                else:
                    self._do[action.kind](action, now)
                if index == last_reduce and self._pieces.tied is not None:
                    self._pieces.tied.reduce()
        self._finish_sends(now)
        return now.loss_sum

    def _stage(self, action: Action) -> Stage:
        return self._pieces.stages[action.stage]

    # parameters

    def _gather(self, action: Action, now: _Iteration) -> None:
        for chunk in self._stage(action).chunks:
            chunk.gather()

    def _release(self, action: Action, now: _Iteration) -> None:
        for chunk in self._stage(action).chunks:
            chunk.release()

    def _reduce(self, action: Action, now: _Iteration) -> None:
        for chunk in self._stage(action).chunks:
            if chunk is not self._pieces.tied:
                chunk.reduce()

    def _sync_tied(self, action: Action, now: _Iteration) -> None:
        assert self._pieces.tied is not None
        self._pieces.tied.add_over(self._groups.of(self._pieces.tied_peer, "tied"))

    # compute

    def _rows(self, values: torch.Tensor, micro_batch: int) -> torch.Tensor:
        return values[micro_batch * self._micro_batch : (micro_batch + 1) * self._micro_batch]

    def _context(self, micro_batch: int, now: _Iteration) -> Context:
        assert now.batch is not None
        targets, samples = (self._rows(x, micro_batch) for x in (now.batch.targets, now.batch.samples))
        return Context(targets=targets, samples=samples, seed=self._seed)

    def _forward(self, action: Action, now: _Iteration) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        if stage == 0:
            assert now.batch is not None
            entering = self._rows(now.batch.inputs, micro_batch)
        else:
            entering = now.inbox.pop((Payload.ACTIVATION, stage - 1, micro_batch)).detach()
            entering.requires_grad_(now.training)
        context = self._context(micro_batch, now)
        with torch.set_grad_enabled(now.training):
            x = entering
            for layer in self._stage(action).layers.values():
                x = layer(x, context)
        if stage == len(self._stage_rank) - 1:
            assert now.loss_sum is not None
            now.loss_sum += x.detach()
        else:
            now.inbox[Payload.ACTIVATION, stage, micro_batch] = x.detach()
        if now.training:
            now.saved[stage, micro_batch] = (entering, x)

    def _backward(self, action: Action, now: _Iteration) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        for chunk in self._stage(action).chunks:
            chunk.start_gradients()
        entered, left = now.saved.pop((stage, micro_batch))
        if stage == len(self._stage_rank) - 1:
            gradient = torch.full_like(left, now.loss_scale)
        else:
            gradient = now.inbox.pop((Payload.GRADIENT, stage + 1, micro_batch))
        torch.autograd.backward(left, gradient)
        if stage > 0:
            assert entered.grad is not None
            now.inbox[Payload.GRADIENT, stage, micro_batch] = entered.grad

    def _backward_input(self, action: Action, now: _Iteration) -> None:
        products: list[DeferredProduct] = []
        sinks = [sink for chunk in self._stage(action).chunks for sink in chunk.sinks]
        for sink in sinks:
            sink.deferred = products
        self._backward(action, now)
        for sink in sinks:
            sink.deferred = None
        now.deferred[action.stage, action.micro_batch] = products

    def _backward_weight(self, action: Action, now: _Iteration) -> None:
        apply_deferred(now.deferred.pop((action.stage, action.micro_batch)))

    # transfers

    def _exchange(self, action: Action, now: _Iteration) -> None:
        """Posts every receive, then every send, then waits for all: coupled."""
        for transfer in action.transfers:
            if not transfer.sends:
                self._receive(transfer, now)
        sent = [self._send(transfer, now) for transfer in action.transfers if transfer.sends]
        for transfer in action.transfers:
            if not transfer.sends:
                self._arrive(transfer, now)
        for posted in sent:
            posted.wait()

    def _post(self, action: Action, now: _Iteration) -> None:
        for transfer in action.transfers:
            if transfer.sends:
                now.sent.append(self._send(transfer, now))
            else:
                self._receive(transfer, now)

    def _wait(self, action: Action, now: _Iteration) -> None:
        for transfer in action.transfers:
            self._arrive(transfer, now)

    def _tag(self, transfer: Transfer) -> int:
        return transfer.micro_batch * len(self._stage_rank) + transfer.stage

    def _send(self, transfer: Transfer, now: _Iteration) -> Posted:
        tensor = now.inbox.pop((transfer.payload, transfer.stage, transfer.micro_batch))
        return self._channels[transfer.payload].send(tensor, transfer.peer, self._tag(transfer))

    def _receive(self, transfer: Transfer, now: _Iteration) -> None:
        made_after = transfer.stage if transfer.payload is Payload.ACTIVATION else transfer.stage - 1
        shape, dtype = self._shapes[made_after]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        key = (transfer.payload, transfer.stage, transfer.micro_batch)
        now.posted[key] = self._channels[transfer.payload].receive(tensor, transfer.peer, self._tag(transfer))

    def _arrive(self, transfer: Transfer, now: _Iteration) -> None:
        key = (transfer.payload, transfer.stage, transfer.micro_batch)
        now.inbox[key] = now.posted.pop(key).wait()

    def _finish_sends(self, now: _Iteration) -> None:
        for posted in now.sent:
            posted.wait()
        now.sent.clear()
