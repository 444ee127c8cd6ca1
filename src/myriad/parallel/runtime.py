"""Runtime of one rank: execute the actions of a program, in order, on real tensors.

The runtime decides no order: the schedules and the passes did, and the checker proved it free of deadlock.
The tensors that an action needs are in the tables of `myriad.parallel.iteration`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from myriad.comm.groups import Groups
from myriad.model.boundary import Boundary
from myriad.model.definition import Context
from myriad.parallel.activation_offload import ActivationOffload
from myriad.parallel.batch import Batch
from myriad.parallel.chunk import Chunk
from myriad.parallel.compute import Backward, EagerCompute, StageCompute
from myriad.parallel.cuda_graphs import CapturedCompute, Capturer
from myriad.parallel.iteration import Finisher, Iteration
from myriad.parallel.paired_forward import PairedForward, PairedSteps
from myriad.parallel.pipeline_transfers import PipelineTransfers, TransferTables
from myriad.parallel.rank_model import RankModel, Stage
from myriad.program.actions import (
    COPIES_ACTIVATIONS,
    COPIES_STATE,
    ORTHOGONALIZATION,
    SEMANTICS,
    Action,
    Kind,
    Payload,
    Program,
    chunk_of,
)
from myriad.program.in_flight import InFlight, RankProgram
from myriad.program.proved_sends import proved_sends
from myriad.program.warm_up import warm_up_actions
from myriad.telemetry.spans import Recorder

__all__ = ["Runtime"]


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
        loss_shape: torch.Size,
    ) -> None:
        """``stream_is_sharded``: the tensors between stages differ among tensor-parallel ranks. If not, these
        ranks hold equal tensors and share the transfer."""
        self._model, self._num_stages, self._micro_batch = model, len(stage_rank), micro_batch
        self._device, self._seed, self._recorder, self._loss_shape = device, seed, recorder, loss_shape
        self._peers, self._boundary = boundary.context, boundary
        self._pipeline_rank = groups.grid.index("pp")
        layers = {index: list(stage.layers.values()) for index, stage in model.stages.items()}
        pending = {index: [chunk.pending for chunk in stage.chunks] for index, stage in model.stages.items()}
        sinks = {
            index: [sink for chunk in stage.chunks for sink in chunk.sinks]
            for index, stage in model.stages.items()
        }
        self._eager = EagerCompute(layers, groups.grid.layout, sinks, pending, boundary.later)
        self._compute: StageCompute = self._eager
        self._spans: dict[RankProgram, Sequence[AbstractContextManager[None]]] = {}
        self.outputs: dict[tuple[int, int], torch.Tensor] = {}
        """(stage, micro-batch) to the sum of the forward's output, in this iteration."""
        self.transfers = PipelineTransfers(
            groups, shapes, len(stage_rank), device, recorder, stream_is_sharded=stream_is_sharded
        )
        self.offload = ActivationOffload(device)
        self.around_backward: Callable[[Sequence[Chunk]], AbstractContextManager[None]] | None = None
        """Context in which a backward adds the gradients of one micro-batch to the chunks of its stage."""
        self._tied_group = None if model.tied is None else groups.of(model.tied_peer, "tied")
        self._do: Mapping[Kind, Callable[[Action, Iteration], None]] = {
            Kind.LOAD: self._load,
            Kind.GATHER: self._gather,
            Kind.START_GATHER: self._start_gather,
            Kind.AWAIT_GATHER: self._await_gather,
            Kind.RELEASE: self._release,
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.BACKWARD_INPUT: self._backward_input,
            Kind.BACKWARD_WEIGHT: self._backward_weight,
            Kind.PAIRED_FORWARD: self._open_pair,
            Kind.PAIRED_BACKWARD: self._run_pair,
            Kind.EXCHANGE: self._exchange,
            Kind.SEND: self._post,
            Kind.RECEIVE: self._post,
            Kind.WAIT: self._await_receives,
            Kind.SYNC_TIED: self._sync_tied,
            Kind.REDUCE: self._reduce,
            Kind.START_REDUCE: self._start_reduce,
            Kind.AWAIT_REDUCE: self._await_reduce,
            Kind.REDUCE_ACROSS: self._reduce_across,
            Kind.START_REDUCE_ACROSS: self._start_across,
            Kind.AWAIT_REDUCE_ACROSS: self._await_across,
            Kind.CLIP: self._clip,
            **dict.fromkeys(ORTHOGONALIZATION, self._orthogonalize),
            **dict.fromkeys(COPIES_ACTIVATIONS, self._copy_activations),
            **dict.fromkeys(COPIES_STATE, self._copy_state),
            Kind.UPDATE: self._update,
            Kind.STEP: self._step,
        }

    def plan_of(self, program: Program) -> RankProgram:
        """Return what `run` executes of a program on this rank."""
        rank = self._pipeline_rank
        return RankProgram.of(program.ranks[rank], self._model.tied_stages, proved_sends(program, rank))

    def warm_up_plan_of(self, program: Program) -> RankProgram:
        """Return what `run` executes ``alone`` of a program on this rank: one micro-batch."""
        return RankProgram.of(warm_up_actions(program, self._pipeline_rank), self._model.tied_stages)

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
        another rank), in the shape in which the last layer returns it.

        ``load`` is called at LOAD. Without a ``finisher`` no gradients are computed. ``alone``: the plan
        receives no messages; zeros replace the tensors that other ranks would send.
        """
        loss_sum = torch.zeros(self._loss_shape, device=self._device)
        tables = TransferTables(plan.proved_sends)
        now = Iteration(plan, load, finisher, loss_scale, loss_sum, tensors=tables)
        if alone:
            now.tensors.inbox |= self.transfers.blank(plan.actions)
        self.outputs.clear()
        self.offload.restart()
        self._forget_forms()
        for stage in self._model.stages.values():
            for layer in stage.layers.values():
                layer.train(now.training)
        tied = self._model.tied
        for index, (action, span) in enumerate(zip(plan.actions, self._spans_of(plan), strict=True)):
            with span:
                if SEMANTICS[action.kind].pairs is None:
                    self._complete_pairs(now)
                self._do[action.kind](action, now)
                if tied is not None and index == plan.tied_starts:
                    with self._span_of("reduce_tied", tied, action.stage):
                        tied.start_reduce()
                        tied.start_across()
                if tied is not None and index == plan.tied_ends:
                    with self._span_of("reduce_tied", tied, action.stage):
                        tied.await_reduce()
                        tied.await_across()
        self.transfers.await_sends(plan.actions, now.tensors)
        self._forget_forms()
        return now.loss_sum

    def forget_spans(self) -> None:
        """Drop the spans of all programs, because other programs follow."""
        self._spans.clear()

    def change_shapes(self, shapes: Sequence[tuple[torch.Size, torch.dtype]], loss_shape: torch.Size) -> None:
        """Use other shapes of the tensors between stages and of the loss from the next program on."""
        self.transfers.shapes, self._loss_shape = shapes, loss_shape

    def _forget_forms(self) -> None:
        """Drop the float8 forms of the weights. Weights may be written between two programs, so no program
        uses the forms of another one."""
        for chunk in self._model.chunks:
            chunk.forget_forms()

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
                    operation=self.transfers.operation_of(a),
                    follows=index > 0,
                )
                for index, a in enumerate(plan.actions)
            ]
        return self._spans[plan]

    def _chunk_of(self, action: Action) -> int:
        """Return the chunk number for an action's span; -1 if the stage has no parameters of its own."""
        number = chunk_of(action, self._num_stages)
        is_own = 0 <= number < self._num_stages
        return -1 if is_own and not self._complete(action) else number

    def _span_of(self, name: str, chunk: Chunk, stage: int) -> AbstractContextManager[None]:
        """Return a span for the tied chunk, inside the span of the action.

        The action's span describes the stage's own chunk. The inner span has another name, so that the k-th
        span of an action kind still belongs to the k-th such action of the program.
        """
        if chunk is not self._model.tied:
            return nullcontext()
        return self._recorder.span(name, stage, -1, self._num_stages)

    def _stage(self, action: Action) -> Stage:
        return self._model.stages[action.stage]

    def _load(self, action: Action, now: Iteration) -> None:
        now.batch = now.load()

    # Parameters.

    def _gather(self, action: Action, now: Iteration) -> None:
        self._start_gather(action, now)
        self._await_gather(action, now)

    def _start_gather(self, action: Action, now: Iteration) -> None:
        for chunk in self._stage(action).chunks:
            with self._span_of("gather_tied", chunk, action.stage):
                chunk.start_gather(action.stage)

    def _await_gather(self, action: Action, now: Iteration) -> None:
        for chunk in self._stage(action).chunks:
            with self._span_of("gather_tied", chunk, action.stage):
                chunk.await_gather()

    def _release(self, action: Action, now: Iteration) -> None:
        for chunk in self._stage(action).chunks:
            chunk.release(action.stage)

    # Gradients and the step.

    def _reduce(self, action: Action, now: Iteration) -> None:
        self._start_reduce(action, now)
        self._await_reduce(action, now)

    def _start_reduce(self, action: Action, now: Iteration) -> None:
        for chunk in self._complete(action):
            chunk.start_reduce()

    def _await_reduce(self, action: Action, now: Iteration) -> None:
        for chunk in self._complete(action):
            chunk.await_reduce()

    def _reduce_across(self, action: Action, now: Iteration) -> None:
        self._start_across(action, now)
        self._await_across(action, now)

    def _start_across(self, action: Action, now: Iteration) -> None:
        for chunk in self._complete(action):
            chunk.start_across()

    def _await_across(self, action: Action, now: Iteration) -> None:
        for chunk in self._complete(action):
            chunk.await_across()

    def _complete(self, action: Action) -> list[Chunk]:
        """Return the chunks that a stage reduces by itself. The tied chunk is not one: it also has gradients
        of another stage."""
        return [chunk for chunk in self._stage(action).chunks if chunk is not self._model.tied]

    def _sync_tied(self, action: Action, now: Iteration) -> None:
        assert self._model.tied is not None
        self._model.tied.add_over(self._tied_group)

    def _clip(self, action: Action, now: Iteration) -> None:
        assert now.finisher is not None
        assert now.batch is not None
        now.finisher.clip(now.loss_sum, now.batch.digest)

    def _orthogonalize(self, action: Action, now: Iteration) -> None:
        assert now.finisher is not None
        now.finisher.orthogonalize(action.kind, action.stage)

    def _copy_state(self, action: Action, now: Iteration) -> None:
        assert now.finisher is not None
        now.finisher.copy_state(action.kind, action.stage)

    def _copy_activations(self, action: Action, now: Iteration) -> None:
        self.offload.run(action.kind, action.stage, action.micro_batch)

    def _update(self, action: Action, now: Iteration) -> None:
        assert now.finisher is not None
        now.finisher.update(action.stage)

    def _step(self, action: Action, now: Iteration) -> None:
        self._clip(action, now)
        assert now.finisher is not None
        before = ORTHOGONALIZATION if now.finisher.orthogonalizes else ()
        for stage in self._model.stages:
            for kind in before:
                now.finisher.orthogonalize(kind, stage)
            now.finisher.update(stage)

    # Compute.

    def _rows(self, values: torch.Tensor, micro_batch: int) -> torch.Tensor:
        return values[micro_batch * self._micro_batch : (micro_batch + 1) * self._micro_batch]

    def _context(self, micro_batch: int, now: Iteration) -> Context:
        assert now.batch is not None
        own = now.batch.rows(micro_batch * self._micro_batch, (micro_batch + 1) * self._micro_batch)
        share = None if self._peers is None else self._peers.share(own.targets.shape[1], own.documents)
        return Context(
            own.targets if share is None else share.take(own.targets),
            own.documents,
            samples=own.samples,
            seed=self._seed,
            record=own.record,
            share=share,
            sequence_targets=None if share is None else own.targets,
            loss_scale=now.loss_scale,
        )

    def _entering(self, action: Action, context: Context, now: Iteration) -> torch.Tensor:
        """Return the input of a forward."""
        stage, micro_batch = action.stage, action.micro_batch
        if stage > 0:
            entering = now.tensors.inbox.pop((Payload.ACTIVATION, stage - 1, micro_batch)).detach()
            return entering.requires_grad_(now.training)
        assert now.batch is not None
        entering = self._rows(now.batch.inputs, micro_batch)
        return entering if context.share is None else context.share.take(entering)

    def _forward(self, action: Action, now: Iteration) -> None:
        stage, micro_batch = key = action.stage, action.micro_batch
        context = self._context(micro_batch, now)
        entering = self._entering(action, context, now)
        if now.training:
            immediate_backwards = key in now.plan.immediate_backwards
            with self.offload.collecting(*key) if key in now.plan.offloaded else nullcontext():
                x, now.saved[key] = self._compute.forward(
                    stage, entering, context, backward_is_next=immediate_backwards
                )
            before = now.saved.get((stage - 1, micro_batch))
            if key in now.plan.offloaded and before is not None and before.keeps_output:
                self.offload.share(*key, entering)
            self.outputs[key] = x.detach().sum()
        else:
            x = self._eager.evaluate(stage, entering, context)
        self._end_forward(action, now, x)

    def _end_forward(self, action: Action, now: Iteration, x: torch.Tensor) -> None:
        if action.stage == self._num_stages - 1:
            now.loss_sum += x.detach()
        else:
            now.tensors.inbox[Payload.ACTIVATION, action.stage, action.micro_batch] = x.detach()

    def _open_pair(self, action: Action, now: Iteration) -> None:
        now.opened = action

    def _run_pair(self, action: Action, now: Iteration) -> None:
        """Run a backward, and inside it the forward that opened the pair, as far as that comes."""
        assert now.opened is not None, "the checker has proved it"
        if (action.stage, action.micro_batch) not in now.saved:  # the forward of this backward has not ended
            self._complete_pairs(now)
        steps = self._forward_steps(now.opened, now)
        now.opened, now.paired = None, PairedForward(steps) if now.paired is None else now.paired.then(steps)
        self._boundary.meanwhile, self._eager.leaves_products = now.paired.advance, True
        try:
            self._backward(action, now)
        finally:
            self._boundary.meanwhile, self._eager.leaves_products = None, False

    def _forward_steps(self, action: Action, now: Iteration) -> PairedSteps:
        key, context = (action.stage, action.micro_batch), self._context(action.micro_batch, now)
        entering = self._entering(action, context, now)
        x, now.saved[key] = yield from self._eager.forward_in_steps(action.stage, entering, context)
        self.outputs[key] = x.detach().sum()
        self._end_forward(action, now, x)

    def _complete_pairs(self, now: Iteration) -> None:
        """Complete what pairs have left to the next one: the end of a forward, and weight products."""
        if now.paired is not None:
            self._eager.compute_products()  # while the forward's last results travel
            now.paired.finish()
            now.paired = None

    def _backward(self, action: Action, now: Iteration) -> None:
        backward, gradient = self._begin_backward(action, now)
        with self._around(action):
            entering = backward.whole(gradient)
        self._end_backward(action, now, entering)

    def _backward_input(self, action: Action, now: Iteration) -> None:
        backward, gradient = self._begin_backward(action, now)
        with self._around(action):
            entering, now.deferred[action.stage, action.micro_batch] = backward.in_parts(gradient)
        self._end_backward(action, now, entering)

    def _backward_weight(self, action: Action, now: Iteration) -> None:
        self._start_gradients(action)  # a reduction after the input half may have freed them
        with self._around(action):
            now.deferred.pop((action.stage, action.micro_batch))()

    def _around(self, action: Action) -> AbstractContextManager[None]:
        around = self.around_backward
        return nullcontext() if around is None else around(self._stage(action).chunks)

    def _start_gradients(self, action: Action) -> None:
        for chunk in self._stage(action).chunks:
            chunk.start_gradients()

    def _begin_backward(self, action: Action, now: Iteration) -> tuple[Backward, torch.Tensor]:
        """Return the saved backward, and the gradient of the forward's output."""
        stage, micro_batch = action.stage, action.micro_batch
        self._start_gradients(action)
        if stage == self._num_stages - 1:
            gradient = torch.full_like(now.loss_sum, now.loss_scale)
        else:
            gradient = now.tensors.inbox.pop((Payload.GRADIENT, stage + 1, micro_batch))
        return now.saved.pop((stage, micro_batch)), gradient

    def _end_backward(self, action: Action, now: Iteration, entering: torch.Tensor | None) -> None:
        if action.stage > 0:
            assert entering is not None
            now.tensors.inbox[Payload.GRADIENT, action.stage, action.micro_batch] = entering

    # Transfers.

    def _exchange(self, action: Action, now: Iteration) -> None:
        self.transfers.exchange(action.transfers, now.tensors, fills_waits=now.training)

    def _post(self, action: Action, now: Iteration) -> None:
        self.transfers.post(action.transfers, now.tensors)

    def _await_receives(self, action: Action, now: Iteration) -> None:
        self.transfers.await_receives(action.transfers, now.tensors, fills_waits=now.training)
