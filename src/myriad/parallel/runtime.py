"""Runtime of one rank: execute the actions of a program, in order, on real tensors.

The runtime decides no order: the schedules and the passes did, and the checker proved it free of deadlock.
The tensors that an action needs are in one of four tables, each keyed as the program names things:

    inbox      activations and gradients that arrived (or were computed by a neighbouring stage on this rank)
    posted     receives in flight (``sent``: sends whose completion no later message has proved yet)
    saved      the backward of each forward that has not run yet (`myriad.parallel.compute`)
    deferred   weight parts of backwards whose input part has run (zero-bubble)
"""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch

from myriad.comm.channel import Channel, PendingTransfer
from myriad.comm.groups import Groups
from myriad.model.boundary import Boundary
from myriad.model.definition import Context
from myriad.parallel.chunk import Chunk
from myriad.parallel.compute import Backward, EagerCompute, StageCompute, WeightPart
from myriad.parallel.cuda_graphs import CapturedCompute, Capturer
from myriad.parallel.rank_model import RankModel, Stage
from myriad.program.actions import Action, Kind, Payload, Transfer, chunk_of
from myriad.program.in_flight import InFlight, next_is_backward
from myriad.program.static_places import tied_reduction
from myriad.telemetry.progress.operation_counters import Operation, counter_of_message, messages
from myriad.telemetry.spans import Recorder

__all__ = ["Batch", "Finisher", "IdleWork", "RankProgram", "Runtime", "operation_of"]

_Key = tuple[Payload, int, int]


@dataclass(frozen=True)
class Batch:
    """A data-parallel rank's share of one iteration; rows in micro-batch order."""

    inputs: torch.Tensor
    targets: torch.Tensor
    samples: torch.Tensor
    """Index of each row's sample in the whole run, int64."""


class Finisher(Protocol):
    """The end of an iteration: what the runtime calls when the gradients are complete."""

    def clip(self, loss_sum: torch.Tensor) -> None:
        """Compute the global gradient norm and begin the optimizer step."""
        ...

    def update(self, stage: int) -> None:
        """Update the parameters of a stage of the program."""
        ...


@dataclass(frozen=True, eq=False)
class RankProgram:
    """One rank's list of actions, and the indices between which the tied chunk is reduced. Two stages hold
    gradients of that chunk."""

    actions: Sequence[Action]
    tied_starts: int
    tied_ends: int
    immediate_backwards: Collection[tuple[int, int]] = ()
    """(stage, micro-batch) of forwards whose backward is the rank's next compute action."""

    @staticmethod
    def of(actions: Sequence[Action], tied_stages: Collection[int]) -> "RankProgram":
        """Build the plan. The tied chunk is reduced with the last reduction of the stages that hold it; both
        indices are -1 if there is no tied chunk."""
        starts, ends = tied_reduction(actions, tied_stages)
        return RankProgram(actions, starts, ends, next_is_backward(actions))


class IdleWork(Protocol):
    """Work that a rank does while it waits for a message."""

    def wait(self, key: Hashable, wait: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what ``wait`` returns; ``key`` is the same for the same tensor of each iteration."""
        ...


@dataclass
class _Iteration:
    """The state of one run of a program."""

    plan: RankProgram
    load: Callable[[], Batch]
    finisher: Finisher | None
    loss_scale: float
    loss_sum: torch.Tensor
    batch: Batch | None = None
    inbox: dict[_Key, torch.Tensor] = field(default_factory=dict)
    posted: dict[_Key, PendingTransfer] = field(default_factory=dict)
    sent: dict[_Key, PendingTransfer] = field(default_factory=dict)
    saved: dict[tuple[int, int], Backward] = field(default_factory=dict)
    deferred: dict[tuple[int, int], WeightPart] = field(default_factory=dict)

    @property
    def training(self) -> bool:
        """Whether this run computes gradients."""
        return self.finisher is not None


class Runtime:
    """Executes programs with this rank's pieces of the model."""

    def __init__(
        self,
        model: RankModel,
        boundary: Boundary,
        groups: Groups,
        shapes: Sequence[tuple[torch.Size, torch.dtype]],
        stage_rank: Sequence[int],
        micro_batch: int,
        device: torch.device,
        seed: int,
        recorder: Recorder,
        *,
        stream_is_sharded: bool,
    ) -> None:
        """``stream_is_sharded``: the tensors between stages differ among tensor-parallel ranks. If not, these
        ranks hold equal tensors and share the transfer."""
        self._model, self._shapes = model, shapes
        self._stage_rank, self._micro_batch, self._device = stage_rank, micro_batch, device
        self._seed, self._recorder = seed, recorder
        layers = {index: list(stage.layers.values()) for index, stage in model.stages.items()}
        pending = {index: [chunk.pending for chunk in stage.chunks] for index, stage in model.stages.items()}
        sinks = {
            index: [sink for chunk in stage.chunks for sink in chunk.sinks]
            for index, stage in model.stages.items()
        }
        self._eager = EagerCompute(layers, groups.grid.layout, sinks, pending, boundary.later)
        self._compute: StageCompute = self._eager
        self._spans: dict[RankProgram, Sequence[AbstractContextManager[None]]] = {}
        self._pipeline_position = groups.grid.index("pp"), groups.grid.layout.pp
        """This rank's index along the pipeline, and the number of pipeline ranks."""
        self.outputs: dict[tuple[int, int], torch.Tensor] = {}
        """(stage, micro-batch) to the sum of the forward's output, in this iteration."""
        self.idle: IdleWork | None = None
        """Work for the time in which this rank waits for a tensor of another stage; ``None``: the rank only
        waits."""
        self._channels: dict[Payload, Channel] = {}
        if groups.grid.layout.pp > 1:
            both_ways = groups.grid.layout.virtual_stages > 1
            split = None if stream_is_sharded else groups.along("tp", purpose="shared transfers")
            self._channels = {
                payload: Channel(groups, payload, both_ways=both_ways, split=split) for payload in Payload
            }
        self._tied_group = None if model.tied is None else groups.of(model.tied_peer, "tied")
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
        plan: RankProgram,
        load: Callable[[], Batch],
        finisher: Finisher | None,
        loss_scale: float = 1.0,
        *,
        alone: bool = False,
    ) -> torch.Tensor:
        """Execute every action and return this rank's sum of losses (float32; 0 where the last stage is on
        another rank).

        ``load`` is called at LOAD. Without a ``finisher`` no gradients are computed. ``alone``: the plan
        receives no messages; zeros replace the tensors that other ranks would send.
        """
        now = _Iteration(plan, load, finisher, loss_scale, torch.zeros((), device=self._device))
        if alone:
            now.inbox |= self._blank(plan.actions)
        self.outputs = {}
        self._forget_forms()
        for stage in self._model.stages.values():
            for layer in stage.layers.values():
                layer.train(now.training)
        tied = self._model.tied
        for index, (action, span) in enumerate(zip(plan.actions, self._spans_of(plan), strict=True)):
            with span:
                self._do[action.kind](action, now)
                if tied is not None and index == plan.tied_starts:
                    with self._span_of("reduce_tied", tied, action.stage):
                        tied.start_reduce()
                if tied is not None and index == plan.tied_ends:
                    with self._span_of("reduce_tied", tied, action.stage):
                        tied.await_reduce()
        self._await_sends(plan, now)
        self._forget_forms()
        return now.loss_sum

    def _forget_forms(self) -> None:
        """Drop the float8 forms of the weights. Weights may be written between two programs, so no program
        uses the forms of another one."""
        for chunk in self._model.chunks:
            chunk.forget_forms()

    def _await_sends(self, plan: RankProgram, now: _Iteration) -> None:
        """Wait for the sends whose completion no later message has proved. In training they have completed,
        because all ranks have synchronized since."""
        if not now.sent:
            return
        transfers = [t for action in plan.actions for t in action.transfers if t.sends]
        sent = {_counter(t, *self._pipeline_position) for t in transfers}
        waits = replace(messages(sent, waits=True), counters=())
        with self._recorder.span("sends", operation=waits, recorded=False):
            for posted in now.sent.values():
                posted.wait()

    def connect(self, plans: Iterable[RankProgram]) -> None:
        """Open the connections to all ranks with which the plans exchange tensors. All ranks call this
        together, before they run one of the plans."""
        transfers = [transfer for plan in plans for action in plan.actions for transfer in action.transfers]
        for payload, channel in self._channels.items():
            channel.connect({(t.peer, t.sends) for t in transfers if t.payload is payload}, self._device)

    def capture(self, capturer: Capturer, plan: RankProgram) -> CapturedCompute:
        """Capture the forwards and backwards of each stage in training, and replay them from now on. Each is
        captured once for each micro-batch that ``plan`` has in flight."""
        for stage in self._model.stages.values():
            for chunk in stage.chunks:
                chunk.prepare_replays()
        in_flight = InFlight.of(plan.actions)
        self._compute = found = CapturedCompute(self._eager, capturer, in_flight, self._recorder.silent)
        return found

    def _spans_of(self, plan: RankProgram) -> Sequence[AbstractContextManager[None]]:
        """Return a span for each action. The spans are made once per plan, so an iteration makes none."""
        if plan not in self._spans:
            self._spans[plan] = [
                self._recorder.span(
                    a.kind,
                    a.stage,
                    a.micro_batch,
                    self._chunk_of(a),
                    operation=operation_of(a, *self._pipeline_position),
                    follows=index > 0,
                )
                for index, a in enumerate(plan.actions)
            ]
        return self._spans[plan]

    def _chunk_of(self, action: Action) -> int:
        """Return the chunk number for an action's span; -1 if the stage has no parameters of its own."""
        number = chunk_of(action, len(self._stage_rank))
        is_own = 0 <= number < len(self._stage_rank)
        return -1 if is_own and not self._complete(action) else number

    def _span_of(self, name: str, chunk: Chunk, stage: int) -> AbstractContextManager[None]:
        """Return a span for the tied chunk, inside the span of the action.

        The action's span describes the stage's own chunk. The inner span has another name, so that the k-th
        span of an action kind still belongs to the k-th such action of the program.
        """
        if chunk is not self._model.tied:
            return nullcontext()
        return self._recorder.span(name, stage, -1, len(self._stage_rank))

    def _stage(self, action: Action) -> Stage:
        return self._model.stages[action.stage]

    def _load(self, action: Action, now: _Iteration) -> None:
        now.batch = now.load()

    # Parameters.

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

    # Gradients and the step.

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
        """Return the chunks that a stage reduces by itself. The tied chunk is not one: it also has gradients
        of another stage."""
        return [chunk for chunk in self._stage(action).chunks if chunk is not self._model.tied]

    def _sync_tied(self, action: Action, now: _Iteration) -> None:
        assert self._model.tied is not None
        self._model.tied.add_over(self._tied_group)

    def _clip(self, action: Action, now: _Iteration) -> None:
        assert now.finisher is not None
        now.finisher.clip(now.loss_sum)

    def _update(self, action: Action, now: _Iteration) -> None:
        assert now.finisher is not None
        now.finisher.update(action.stage)

    def _step(self, action: Action, now: _Iteration) -> None:
        self._clip(action, now)
        for stage in self._model.stages:
            self._update(replace(action, stage=stage), now)

    # Compute.

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
            immediate_backwards = key in now.plan.immediate_backwards
            x, now.saved[key] = self._compute.forward(
                stage, entering, context, backward_is_next=immediate_backwards
            )
            self.outputs[key] = x.detach().sum()
        else:
            x = self._eager.evaluate(stage, entering, context)
        if stage == len(self._stage_rank) - 1:
            now.loss_sum += x.detach()
        else:
            now.inbox[Payload.ACTIVATION, stage, micro_batch] = x.detach()

    def _backward(self, action: Action, now: _Iteration) -> None:
        backward, gradient = self._begin_backward(action, now)
        self._end_backward(action, now, backward.whole(gradient))

    def _backward_input(self, action: Action, now: _Iteration) -> None:
        backward, gradient = self._begin_backward(action, now)
        entering, now.deferred[action.stage, action.micro_batch] = backward.in_parts(gradient)
        self._end_backward(action, now, entering)

    def _backward_weight(self, action: Action, now: _Iteration) -> None:
        self._start_gradients(action)  # a reduction after the input half may have freed them
        now.deferred.pop((action.stage, action.micro_batch))()

    def _start_gradients(self, action: Action) -> None:
        for chunk in self._stage(action).chunks:
            chunk.start_gradients()

    def _begin_backward(self, action: Action, now: _Iteration) -> tuple[Backward, torch.Tensor]:
        """Return the saved backward, and the gradient of the forward's output."""
        stage, micro_batch = action.stage, action.micro_batch
        self._start_gradients(action)
        if stage == len(self._stage_rank) - 1:
            gradient = torch.full_like(now.loss_sum, now.loss_scale)
        else:
            gradient = now.inbox.pop((Payload.GRADIENT, stage + 1, micro_batch))
        return now.saved.pop((stage, micro_batch)), gradient

    def _end_backward(self, action: Action, now: _Iteration, entering: torch.Tensor | None) -> None:
        if action.stage > 0:
            assert entering is not None
            now.inbox[Payload.GRADIENT, action.stage, action.micro_batch] = entering

    # Transfers.

    def _blank(self, actions: Sequence[Action]) -> dict[_Key, torch.Tensor]:
        """Return zeros for the input of each forward and backward that would come from another rank."""
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
        """Post every receive, then every send, then wait for all of them (a coupled exchange)."""
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

    def _send(self, transfer: Transfer, now: _Iteration) -> PendingTransfer:
        tensor = now.inbox.pop(_key(transfer))
        return self._channels[transfer.payload].send(tensor, transfer.peer, self._tag(transfer))

    def _receive(self, transfer: Transfer, now: _Iteration) -> None:
        made_after = transfer.stage if transfer.payload is Payload.ACTIVATION else transfer.stage - 1
        shape, dtype = self._shapes[made_after]
        tensor = torch.empty(shape, dtype=dtype, device=self._device)
        received = self._channels[transfer.payload].receive(tensor, transfer.peer, self._tag(transfer))
        now.posted[_key(transfer)] = received

    def _arrive(self, transfer: Transfer, now: _Iteration) -> None:
        """Complete a receive. A received gradient proves that the peer has received the matching activation,
        so the send of that activation is completed too."""
        key, posted = _key(transfer), now.posted.pop(_key(transfer))
        fills = self.idle is not None and now.training
        now.inbox[key] = self.idle.wait(key, posted.wait) if fills and self.idle else posted.wait()
        answered = (Payload.ACTIVATION, transfer.stage - 1, transfer.micro_batch)
        if transfer.payload is Payload.GRADIENT and answered in now.sent:
            now.sent.pop(answered).wait()


def operation_of(action: Action, rank: int, length: int) -> Operation | None:
    """Return how the messages of an action are counted for ``rank`` of a pipeline of ``length`` ranks.
    ``None``: the action has no messages, or another action counts them."""
    if action.kind not in (Kind.SEND, Kind.WAIT, Kind.EXCHANGE):
        return None
    counters = [_counter(transfer, rank, length) for transfer in action.transfers]
    return messages(counters, waits=action.kind is not Kind.SEND)


def _counter(transfer: Transfer, rank: int, length: int) -> int:
    sends = transfer.sends
    up = (transfer.peer - rank if sends else rank - transfer.peer) % length == 1
    return counter_of_message(transfer.payload, up=up, sends=sends)


def _key(transfer: Transfer) -> _Key:
    return transfer.payload, transfer.stage, transfer.micro_batch
