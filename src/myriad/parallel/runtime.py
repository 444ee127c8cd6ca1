"""One rank's reader of a program: does each action, in order, on real tensors.

Nothing here decides an order: schedules and passes did, and the checker proved it. What an action needs is in
one of four places, each keyed as the program names things:

    inbox      activations and gradients that arrived (or were made by the neighbouring stage on this rank)
    posted     receives under way (``sent``: sends that nothing says have arrived)
    saved      the backward of each forward that has none yet (`myriad.parallel.compute`)
    deferred   weight-gradient products whose weight part is to come (zero-bubble)
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from myriad.comm.channel import Channel, Posted
from myriad.comm.groups import Groups
from myriad.kernels.gradient import DeferredProduct, apply_deferred
from myriad.model.boundary import Boundary
from myriad.model.definition import Context
from myriad.parallel.captured import Captured, Capturer
from myriad.parallel.chunk import Chunk
from myriad.parallel.compute import Backward, Computes, Eager
from myriad.parallel.pieces import Pieces, Stage
from myriad.parallel.recompute import next_is_backward
from myriad.program.actions import Action, Kind, Payload, Transfer, chunk_of
from myriad.telemetry.spans import Recorder

__all__ = ["Batch", "Finisher", "Idle", "Plan", "Runtime"]

_Key = tuple[Payload, int, int]


@dataclass(frozen=True)
class Batch:
    """A data-parallel rank's share of one iteration; rows in micro-batch order."""

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor
    """Index of each row's sample in the whole run, int64."""


class Finisher(Protocol):
    """What a runtime asks for when the gradients are there."""

    def clip(self, loss_sum: torch.Tensor) -> None:
        """Finds the global gradient norm and begins the optimizer's step."""
        ...

    def update(self, stage: int) -> None:
        """Moves the parameters of a stage of the program."""
        ...


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's list, and where in it the tied chunk, of which two stages hold gradients, is reduced."""

    actions: Sequence[Action]
    tied_starts: int
    tied_ends: int
    turns: Collection[tuple[int, int]] = ()
    """(stage, micro-batch) of forwards whose backward the rank does next."""

    @staticmethod
    def of(actions: Sequence[Action], tied_stages: Collection[int]) -> "Plan":
        """The tied chunk goes with the last reduction of the stages that hold it; -1 where there is none."""

        def last(*kinds: Kind) -> int:
            found = (i for i, a in enumerate(actions) if a.kind in kinds and a.stage in tied_stages)
            return max(found, default=-1)

        starts, ends = last(Kind.REDUCE, Kind.START_REDUCE), last(Kind.REDUCE, Kind.AWAIT_REDUCE)
        return Plan(actions, starts, ends, next_is_backward(actions))


class Idle(Protocol):
    """What fills the time in which a rank waits."""

    def wait(self, key: Hashable, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``wait`` returns; ``key`` is the same for the same tensor of each iteration."""
        ...


@dataclass
class _Iteration:
    """What one run of a program holds."""

    plan: Plan
    load: Callable[[], Batch]
    finisher: Finisher | None
    loss_scale: float
    loss_sum: torch.Tensor
    batch: Batch | None = None
    inbox: dict[_Key, torch.Tensor] = field(default_factory=dict)
    posted: dict[_Key, Posted] = field(default_factory=dict)
    sent: dict[_Key, Posted] = field(default_factory=dict)
    saved: dict[tuple[int, int], Backward] = field(default_factory=dict)
    deferred: dict[tuple[int, int], list[DeferredProduct]] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        """Something is differentiated."""
        return self.finisher is not None


class Runtime:
    """Executes programs with this rank's pieces of the model."""

    def __init__(
        self,
        pieces: Pieces,
        boundary: Boundary,
        groups: Groups,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        stage_rank: Sequence[int],
        micro_batch: int,
        device: torch.device,
        seed: int,
        recorder: Recorder,
        *,
        stream_is_cut: bool,
    ) -> None:
        """``stream_is_cut``: what travels between stages differs among tensor-parallel ranks; else they hold
        the same and share its transfers."""
        self._pieces, self._shapes = pieces, shapes
        self._stage_rank, self._micro_batch, self._device = stage_rank, micro_batch, device
        self._seed, self._recorder = seed, recorder
        layers = {index: list(stage.layers.values()) for index, stage in pieces.stages.items()}
        self._eager = Eager(layers, groups.grid.layout, boundary.later)
        self._computes: Computes = self._eager
        self._spans: dict[Plan, Sequence[AbstractContextManager[None]]] = {}
        self.outputs: dict[tuple[int, int], torch.Tensor] = {}
        """(stage, micro-batch) to the sum of what its forward gave, in this iteration."""
        self.idle: Idle | None = None
        """Work for the time in which this rank waits for a tensor of another stage."""
        self._channels: dict[Payload, Channel] = {}
        if groups.grid.layout.pp > 1:
            both_ways = groups.grid.layout.virtual_stages > 1
            split = None if stream_is_cut else groups.along("tp", purpose="shared transfers")
            self._channels = {
                payload: Channel(groups, payload, both_ways=both_ways, split=split) for payload in Payload
            }
        self._tied_group = None if pieces.tied is None else groups.of(pieces.tied_peer, "tied")
        self._do: Mapping[Kind, Callable[[Action, _Iteration], None]] = {
            Kind.LOAD: self._load,
            Kind.GATHER: self._gather,
            Kind.START_GATHER: self._start_gather,
            Kind.AWAIT_GATHER: self._await_gather,
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
            Kind.START_REDUCE: self._start_reduce,
            Kind.AWAIT_REDUCE: self._await_reduce,
            Kind.CLIP: self._clip,
            Kind.UPDATE: self._update,
            Kind.STEP: self._step,
        }

    def run(
        self,
        plan: Plan,
        load: Callable[[], Batch],
        finisher: Finisher | None,
        loss_scale: float = 1.0,
        *,
        alone: bool = False,
    ) -> torch.Tensor:
        """Does every action. ``load`` is called at LOAD; without a ``finisher`` nothing is differentiated.
        ``alone``: the plan receives nothing, zeros take the place of what other ranks would send. Gives this
        rank's sum of losses: float32, 0 where the last stage is elsewhere."""
        now = _Iteration(plan, load, finisher, loss_scale, torch.zeros((), device=self._device))
        if alone:
            now.inbox |= self._blank(plan.actions)
        self.outputs = {}
        for stage in self._pieces.stages.values():
            for layer in stage.layers.values():
                layer.train(now.training)
        tied = self._pieces.tied
        for index, (action, span) in enumerate(zip(plan.actions, self._spans_of(plan), strict=True)):
            with span:
                self._do[action.kind](action, now)
                if tied is not None and index == plan.tied_starts:
                    with self._span_of("reduce_tied", tied, action.stage):
                        tied.start_reduce()
                if tied is not None and index == plan.tied_ends:
                    with self._span_of("reduce_tied", tied, action.stage):
                        tied.await_reduce()
        for posted in now.sent.values():
            posted.wait()
        return now.loss_sum

    def connect(self, plans: Iterable[Plan]) -> None:
        """Open the connections to all ranks with which the plans exchange tensors. All ranks call this
        together, before they run one of the plans."""
        transfers = [transfer for plan in plans for action in plan.actions for transfer in action.transfers]
        for payload, channel in self._channels.items():
            channel.connect({(t.peer, t.sends) for t in transfers if t.payload is payload}, self._device)

    def capture(self, capturer: Capturer) -> None:
        """From now on each stage's forwards and backwards in training are captured once and replayed; the
        programs must let them (`myriad.parallel.captured.comes_in_turn`)."""
        self._computes = Captured(self._eager, capturer)

    def _spans_of(self, plan: Plan) -> Sequence[AbstractContextManager[None]]:
        """Found once: an iteration asks for none."""
        if plan not in self._spans:
            self._spans[plan] = [
                self._recorder.span(a.kind, a.stage, a.micro_batch, self._chunk_of(a)) for a in plan.actions
            ]
        return self._spans[plan]

    def _chunk_of(self, action: Action) -> int:
        """Of which an action's span tells; -1 where its stage has no parameters of its own."""
        number = chunk_of(action, len(self._stage_rank))
        is_own = 0 <= number < len(self._stage_rank)
        return -1 if is_own and not self._complete(action) else number

    def _span_of(self, name: str, chunk: Chunk, stage: int) -> AbstractContextManager[None]:
        """Inside of the action's, which is its stage's own chunk's: for the tied one. Not named as an action,
        so that the k-th of those is the program's k-th."""
        if chunk is not self._pieces.tied:
            return nullcontext()
        return self._recorder.span(name, stage, -1, len(self._stage_rank))

    def _stage(self, action: Action) -> Stage:
        return self._pieces.stages[action.stage]

    def _load(self, action: Action, now: _Iteration) -> None:
        now.batch = now.load()

    # parameters

    def _gather(self, action: Action, now: _Iteration) -> None:
        self._start_gather(action, now)
        self._await_gather(action, now)

    def _start_gather(self, action: Action, now: _Iteration) -> None:
        for chunk in self._stage(action).chunks:
            with self._span_of("gather_tied", chunk, action.stage):
                chunk.start_gather(action.stage)

    def _await_gather(self, action: Action, now: _Iteration) -> None:
        for chunk in self._stage(action).chunks:
            with self._span_of("gather_tied", chunk, action.stage):
                chunk.await_gather()

    def _release(self, action: Action, now: _Iteration) -> None:
        for chunk in self._stage(action).chunks:
            chunk.release(action.stage)

    # gradients and the step

    def _reduce(self, action: Action, now: _Iteration) -> None:
        self._start_reduce(action, now)
        self._await_reduce(action, now)

    def _start_reduce(self, action: Action, now: _Iteration) -> None:
        for chunk in self._complete(action):
            chunk.start_reduce()

    def _await_reduce(self, action: Action, now: _Iteration) -> None:
        for chunk in self._complete(action):
            chunk.await_reduce()

    def _complete(self, action: Action) -> list[Chunk]:
        """What a stage reduces by itself: not the tied chunk, which has another stage's gradients too."""
        return [chunk for chunk in self._stage(action).chunks if chunk is not self._pieces.tied]

    def _sync_tied(self, action: Action, now: _Iteration) -> None:
        assert self._pieces.tied is not None
        self._pieces.tied.add_over(self._tied_group)

    def _clip(self, action: Action, now: _Iteration) -> None:
        assert now.finisher is not None
        now.finisher.clip(now.loss_sum)

    def _update(self, action: Action, now: _Iteration) -> None:
        assert now.finisher is not None
        now.finisher.update(action.stage)

    def _step(self, action: Action, now: _Iteration) -> None:
        self._clip(action, now)
        for stage in self._pieces.stages:
            self._update(replace(action, stage=stage), now)

    # compute

    def _rows(self, values: torch.Tensor, micro_batch: int) -> torch.Tensor:
        return values[micro_batch * self._micro_batch : (micro_batch + 1) * self._micro_batch]

    def _context(self, micro_batch: int, now: _Iteration) -> Context:
        assert now.batch is not None
        targets, samples = (self._rows(x, micro_batch) for x in (now.batch.targets, now.batch.samples))
        return Context(targets=targets, samples=samples, seed=self._seed)

    def _forward(self, action: Action, now: _Iteration) -> None:
        stage, micro_batch = key = action.stage, action.micro_batch
        if stage == 0:
            assert now.batch is not None
            entering = self._rows(now.batch.inputs, micro_batch)
        else:
            entering = now.inbox.pop((Payload.ACTIVATION, stage - 1, micro_batch)).detach()
            entering.requires_grad_(now.training)
        context = self._context(micro_batch, now)
        if now.training:
            turns = key in now.plan.turns
            x, now.saved[key] = self._computes.forward(stage, entering, context, backward_is_next=turns)
            self.outputs[key] = x.detach().sum()
        else:
            x = self._eager.evaluate(stage, entering, context)
        if stage == len(self._stage_rank) - 1:
            now.loss_sum += x.detach()
        else:
            now.inbox[Payload.ACTIVATION, stage, micro_batch] = x.detach()

    def _backward(self, action: Action, now: _Iteration) -> None:
        stage, micro_batch = action.stage, action.micro_batch
        for chunk in self._stage(action).chunks:
            chunk.start_gradients()
        if stage == len(self._stage_rank) - 1:
            gradient = torch.full_like(now.loss_sum, now.loss_scale)
        else:
            gradient = now.inbox.pop((Payload.GRADIENT, stage + 1, micro_batch))
        entering = now.saved.pop((stage, micro_batch))(gradient)
        if stage > 0:
            assert entering is not None
            now.inbox[Payload.GRADIENT, stage, micro_batch] = entering

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

    def _blank(self, actions: Sequence[Action]) -> dict[_Key, torch.Tensor]:
        """Zeros for each forward and backward that would receive what it needs from another rank."""
        mine = {action.stage for action in actions if action.kind is Kind.FORWARD}
        blank: dict[_Key, torch.Tensor] = {}
        for action in actions:
            forward = action.kind is Kind.FORWARD
            if not forward and action.kind not in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                continue
            payload, maker = (
                (Payload.ACTIVATION, action.stage - 1) if forward else (Payload.GRADIENT, action.stage + 1)
            )
            if 0 <= maker < len(self._stage_rank) and maker not in mine:
                shape, dtype = self._shapes[min(maker, action.stage)]
                key = (payload, maker, action.micro_batch)
                blank[key] = torch.zeros(shape, dtype=dtype, device=self._device)
        return blank

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
                now.sent[_key(transfer)] = self._send(transfer, now)
            else:
                self._receive(transfer, now)

    def _wait(self, action: Action, now: _Iteration) -> None:
        for transfer in action.transfers:
            self._arrive(transfer, now)

    def _tag(self, transfer: Transfer) -> int:
        return transfer.micro_batch * len(self._stage_rank) + transfer.stage

    def _send(self, transfer: Transfer, now: _Iteration) -> Posted:
        tensor = now.inbox.pop(_key(transfer))
        return self._channels[transfer.payload].send(tensor, transfer.peer, self._tag(transfer))

    def _receive(self, transfer: Transfer, now: _Iteration) -> None:
        made_after = transfer.stage if transfer.payload is Payload.ACTIVATION else transfer.stage - 1
        shape, dtype = self._shapes[made_after]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        received = self._channels[transfer.payload].receive(tensor, transfer.peer, self._tag(transfer))
        now.posted[_key(transfer)] = received

    def _arrive(self, transfer: Transfer, now: _Iteration) -> None:
        """A gradient says that the activation it belongs to was received: that is given up."""
        key, posted = _key(transfer), now.posted.pop(_key(transfer))
        fills = self.idle is not None and now.training
        now.inbox[key] = self.idle.wait(key, posted.wait) if fills and self.idle else posted.wait()
        answered = (Payload.ACTIVATION, transfer.stage - 1, transfer.micro_batch)
        if transfer.payload is Payload.GRADIENT and answered in now.sent:
            now.sent.pop(answered).wait()


def _key(transfer: Transfer) -> _Key:
    return transfer.payload, transfer.stage, transfer.micro_batch
