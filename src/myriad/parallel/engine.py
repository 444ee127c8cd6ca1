"""The engine: one rank's part of a model, its optimizer and its programs, in a layout.

    engine = Engine(definition, job settings, groups, ...)
    result = engine.train_step(load, learning_rate)    one iteration: loss and gradient norm over all ranks
    loss = engine.evaluate(load)                       forward only
    engine.shards()                                    this rank's state, as parts of whole tensors

Every rank calls the same method at the same time.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from myriad.comm.collectives import all_reduce
from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups
from myriad.kernels.config import Kernels
from myriad.kernels.float8 import Float8
from myriad.kernels.host_memory import keep_freed_memory
from myriad.model.boundary import Boundary
from myriad.model.definition import Definition
from myriad.model.tensor_shard import TensorShard
from myriad.optim.config import OptimizerConfig
from myriad.optim.loss_scale import LossScaler
from myriad.parallel.cuda_graphs import Capturer
from myriad.parallel.diloco import DiLoCo
from myriad.parallel.model_state import ModelState
from myriad.parallel.optimizer_step import OptimizerStep, StepResult, loss_weight, sum_over_world
from myriad.parallel.pipeline_transfers import IdleWork
from myriad.parallel.rank_model import (
    build_rank_model,
    draw_initial,
    make_sharing,
    mark_float8_weights,
    shape_of_loss,
    shapes_between_stages,
)
from myriad.parallel.runtime import Batch, Runtime
from myriad.parallel.step_statistics import StepStatistics
from myriad.parallel.tensor_parallel import make_boundary
from myriad.parallel.trial_steps import TrialSteps
from myriad.program.actions import Program
from myriad.program.build import build_program, count_chunks
from myriad.program.config import OverlapConfig
from myriad.program.device_needs import DeviceJob, check_device_job, queues_in
from myriad.program.in_flight import RankProgram
from myriad.program.partition import cut_ranges
from myriad.program.warm_up import warm_up_actions
from myriad.telemetry.config import TelemetryConfig
from myriad.telemetry.spans import Recorder

__all__ = ["Engine"]

_OVERLAP, _COMM, _TELEMETRY = OverlapConfig(), CommConfig(), TelemetryConfig()


class Engine:
    """One rank's part of a model, its optimizer and its programs."""

    def __init__(
        self,
        definition: Definition,
        groups: Groups,
        layers_of_stage: Sequence[range],
        sample: Batch,
        num_micro_batches: int,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        recorder: Recorder,
        overlap: OverlapConfig = _OVERLAP,
        comm: CommConfig = _COMM,
        kernels: Kernels = "auto",
        float8: Float8 | None = None,
        keeps_float8: bool = True,
        loss_scaler: LossScaler | None = None,
        draws_initial: bool = True,
        keeps_addresses: bool = False,
        telemetry: TelemetryConfig = _TELEMETRY,
        most_micro_batches: int = 0,
    ) -> None:
        """Build this rank's layers, memory, programs and optimizer. Raises `BadInputError` for programs that
        may deadlock on this rank's GPU.

        ``sample``: one micro-batch, or tensors of its shapes and types. ``num_micro_batches``: the number of
        this rank's replica. ``keeps_float8``: convert weights to float8 once a step, where ZeRO 3 does not
        free them after each micro-batch. ``loss_scaler``: scales the loss in training, which float16 needs.
        ``draws_initial``: set the parameters to the seed's values; if not, they have no values until a state
        is loaded or `draw_initial` is called. ``keeps_addresses``: allocate temporary memory at fixed
        addresses, as `capture` needs it. ``telemetry``: which statistics of a step to collect.
        ``most_micro_batches``: the largest number of any replica in any iteration, if `change_batches` will
        change it.
        """
        if device.type == "cpu":
            keep_freed_memory()
        layout = groups.grid.layout
        self.groups, self.layout, self.recorder = groups, layout, recorder
        self.loss_scaler = loss_scaler
        orthogonalizes = optimizer.orthogonalizes
        num_chunks = count_chunks(layout, overlap, layers_of_stage)
        layers = cut_ranges(layers_of_stage, num_chunks)
        shares, cut = layout.shares or (num_micro_batches,), definition.sequence_parallel
        tied = bool(definition.tied)
        self._device_job = DeviceJob(layout, overlap, comm, shares, tied, num_chunks, not cut, orthogonalizes)
        check_on_device(device, self._device_job)
        self.programs = {
            training: self._build_program(shares, num_micro_batches, training=training)
            for training in (True, False)
        }
        most_micro_batches = max(most_micro_batches, *shares)
        stage_rank = self.programs[True].stage_rank
        self.boundary: Boundary = make_boundary(groups, overlap, recorder, kernels)
        if float8 is not None:
            self.boundary.token_multiple = float8.token_multiple
        self._trains_alone = comm.sync_every > 1 and layout.dp > 1
        frees = overlap.updates_early and layout.zero < 2 and most_micro_batches == 1
        sharing = self._sharing = make_sharing(
            groups, overlap, comm, device, trains_alone=self._trains_alone, frees_grad_buffer=frees
        )
        own = groups.grid.index("pp")
        self._keeps_addresses = keeps_addresses or layout.zero < 2
        runs = [one.ranks[own] for one in self.programs.values()]
        runs += [warm_up_actions(one, own) for one in self.programs.values()]
        self.model = build_rank_model(
            definition,
            layers,
            stage_rank,
            groups,
            self.boundary,
            sharing,
            dtype,
            device,
            runs if keeps_addresses else (),
            orthogonalizes=orthogonalizes,
        )
        self._definition, self._layers, self._dtype = definition, layers, dtype
        if float8 is not None:
            keeps = keeps_float8 and most_micro_batches > 1 and layout.zero < 3
            mark_float8_weights(self.model, len(definition.names), float8, keeps=keeps)
        travels = layers if layout.pp > 1 else []
        shapes = shapes_between_stages(definition, travels, self.boundary, sample.inputs, dtype)
        self._runtime = Runtime(
            self.model,
            self.boundary,
            groups,
            shapes,
            stage_rank,
            layout.micro_batch,
            device,
            seed,
            recorder,
            stream_is_sharded=definition.sequence_parallel,
            loss_shape=shape_of_loss(definition, self.boundary, sample.inputs),
        )
        self._plans = {training: self._plan_of(program) for training, program in self.programs.items()}
        self._runtime.transfers.connect(plan.actions for plan in self._plans.values())
        self._model_state = ModelState(self.model, groups, device, trains_alone=self._trains_alone)
        self._diloco = DiLoCo(groups, comm, self._model_state.regions) if self._trains_alone else None
        self._optimizer_step = OptimizerStep(
            self.model,
            self._model_state,
            groups,
            optimizer,
            self._runtime.outputs,
            dtype=dtype,
            updates_early=overlap.updates_early,
            trains_alone=self._trains_alone,
            loss_scaler=loss_scaler,
            kernels=kernels,
            recorder=recorder,
            statistics=StepStatistics(
                telemetry,
                self.model,
                self._model_state,
                groups,
                definition.names,
                layout.shares or (1,) * layout.dp,
            ),
            before_update=lambda: self.before_update(),
        )
        self._trial = TrialSteps(self._runtime, self._optimizer_step, groups, device, recorder)
        self.optimizer = self._optimizer_step.optimizer
        if draws_initial:
            self.draw_initial()
        self._device, self._sample = device, blank_batch(sample, device)
        self.before_update: Callable[[], None] = _do_nothing
        """Called in each iteration just before parameters and optimizer state change."""

    def _build_program(self, shares: Sequence[int], own: int, *, training: bool) -> Program:
        """Return the checked program of this rank's replica, which has ``own`` micro-batches. ``shares``:
        those of each replica, or of all replicas if they are equal."""
        job = self._device_job
        return build_program(
            self.layout,
            job.overlap,
            own,
            tied=job.tied,
            training=training,
            num_chunks=job.num_chunks,
            most_micro_batches=max(shares),
            orthogonalizes=job.orthogonalizes,
        )

    def _plan_of(self, program: Program) -> RankProgram:
        return self._runtime.plan_of(program.ranks[self.groups.grid.index("pp")])

    def change_batches(self, shares: Mapping[bool, Sequence[int]], sample: Batch) -> None:
        """Use other numbers of micro-batches, or micro-batches of another shape, from the next iteration on.
        State and connections stay.

        ``shares``: the micro-batches of each replica in training (``True``) and validation (``False``).
        ``sample``: one micro-batch, or tensors of its shapes and types. All ranks call it together, between
        two iterations. Raises `BadInputError` for programs that may deadlock on this rank's GPU.
        """
        replica = self.groups.grid.index("dp")
        self._runtime.forget_spans()
        for training, numbers in shares.items():
            check_on_device(self._device, replace(self._device_job, shares=tuple(numbers)))
            program = self._build_program(numbers, numbers[replica], training=training)
            self.programs[training], self._plans[training] = program, self._plan_of(program)
        self._optimizer_step.statistics.change_shares(shares[True])
        self._runtime.transfers.connect(plan.actions for plan in self._plans.values())
        travels = self._layers if self.layout.pp > 1 else []
        self._runtime.change_shapes(
            shapes_between_stages(self._definition, travels, self.boundary, sample.inputs, self._dtype),
            shape_of_loss(self._definition, self.boundary, sample.inputs),
        )
        self._sample = blank_batch(sample, self._device)

    def change_optimizer(self, weight_decay: float, clip_norm: float | None) -> None:
        """Use another weight decay and clipping norm from the next iteration on. All ranks call it."""
        self._optimizer_step.change(weight_decay, clip_norm)

    def train_step(
        self,
        load: Callable[[], Batch],
        learning_rate: float,
        num_targets: int,
        signal: float = 0.0,
        *,
        step: int | None = None,
        skip: bool = False,
        refuses: Callable[[float, float], bool] | None = None,
    ) -> StepResult:
        """Run one iteration and return its result.

        ``num_targets``: targets in the global batch. ``signal``: a number that is summed over all ranks, in a
        reduction that takes place anyway. ``step``: the step number for messages. ``skip``: skip the update
        whatever the gradients are; the optimizer counts no step. ``refuses``: a function of the loss and the
        norm that returns whether to skip the update; it must return the same on all ranks.

        Raises `RunFailedError` on every rank if the loss or a gradient is non-finite. If a gradient overflows
        at the loss scale, all ranks skip the step and lower the scale instead.
        """
        number = self.optimizer.steps_done + 1 if step is None else step
        loss_factor = self._optimizer_step.begin(
            num_targets,
            learning_rate=learning_rate,
            signal=signal,
            number=number,
            skip=skip,
            refuses=refuses,
        )
        self._runtime.run(self._plans[True], load, self._optimizer_step, loss_factor)
        self._optimizer_step.end()
        if self._diloco is not None and self._diloco.is_due(number):
            self._diloco.agree()
            for chunk in self.model.chunks:
                chunk.mark_stale()
        return self._optimizer_step.result

    def fill_waits(self, idle: IdleWork | None) -> None:
        """Run ``idle`` from now on while this rank waits for a tensor of another stage; ``None``: only
        wait."""
        self._runtime.transfers.idle = idle

    def capture(self, capturer: Capturer, load: Callable[[], Batch], num_targets: int) -> None:
        """Capture the compute actions of training once, and replay them from now on.

        Two iterations without an update are compared, because the captures must give the same result as eager
        execution. Torch's generators are left as they were. All ranks call this together, before their first
        step. Raises `BadInputError` on every rank if the results differ or a capture fails on any of them.
        """
        assert self._keeps_addresses, "captures need `keeps_addresses`"
        self._trial.capture(capturer, self.programs, load, num_targets, self._sample)

    def warm_up(self) -> None:
        """Load the kernels of each stage's forward and backward by computing one micro-batch of zeros,
        without a message to another stage. State, generators and the results of later steps stay unchanged.
        All ranks call this together, before their first step."""
        self._trial.compute_alone(self.programs, (False, True), self._sample)

    def evaluate(self, load: Callable[[], Batch], *, stops: bool = False) -> tuple[float, bool]:
        """Return the sum of losses over the batch of all data-parallel ranks, and whether any rank set
        ``stops``. No state changes."""
        with self.recorder.evaluating():
            loss_sum = self._runtime.run(self._plans[False], load, None)
        # filled: a copy from the host would wait for the device
        stopping = loss_sum.new_full((), float(stops), dtype=torch.float64)
        loss_sum = loss_sum.reshape(-1)[0]
        own = torch.stack([loss_sum.double() * loss_weight(self.groups), stopping])
        total, num_stopping = sum_over_world(own, self.groups, self.recorder)
        return total, num_stopping > 0

    def sum_of_losses(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of what each has of the losses of evaluated batches; tensor-parallel
        ranks have the same, which counts once. A collective call of all ranks."""
        return all_reduce(own * loss_weight(self.groups), self.groups.world)

    def shards(self) -> Iterator[TensorShard]:
        """Return this rank's shards of the parameters and the optimizer state, as views of live memory.

        Their names are ``model.NAME`` and ``optimizer.STATE.NAME``; replicas that train alone add
        ``replica.N.optimizer...`` and ``outer.velocity.NAME``. A tensor that several ranks hold is returned
        by one of them only; data-parallel replicas return one share each.
        """
        return self._model_state.shards(self._states(owned_only=True), owned_only=True)

    def all_shards(self) -> Iterator[TensorShard]:
        """Return the shards of everything that this rank holds, which a load fills."""
        return self._model_state.shards(self._states(owned_only=False), owned_only=False)

    def _states(self, *, owned_only: bool) -> dict[str, Sequence[torch.Tensor]]:
        """Return state names, each with one tensor per region, shaped like the region's values."""
        replica = self._model_state.replica
        prefix = f"replica.{replica}." if replica else ""
        own: dict[str, Sequence[torch.Tensor]] = {
            f"{prefix}optimizer.{name}": tensors
            for name, tensors in self._optimizer_step.optimizer_state().items()
        }
        if owned_only and replica:
            return own
        shared = {"model": [region.values for region in self._model_state.regions]}
        if self._diloco is not None:
            shared["outer.velocity"] = self._diloco.outer.velocity
        return shared | own

    def progress(self) -> dict[str, Any]:
        """Return what a checkpoint stores beside tensors; `load_progress` continues from it."""
        found: dict[str, Any] = {"optimizer_steps": self.optimizer.steps_done}
        if self.loss_scaler is not None:
            found["loss_scale"] = self.loss_scaler.state()
        if (noise := self._optimizer_step.statistics.noise) is not None:
            found["noise_scale"] = noise.state()
        return found

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        """Continue from `progress`. Raises `BadInputError` for values that no run writes."""
        self.optimizer.steps_done = progress["optimizer_steps"]
        if self.loss_scaler is not None and "loss_scale" in progress:
            self.loss_scaler.load(progress["loss_scale"])
        if (noise := self._optimizer_step.statistics.noise) is not None and "noise_scale" in progress:
            noise.load(progress["noise_scale"])

    def replicated(self) -> list[torch.Tensor]:
        """Return the tensors that data-parallel replicas hold bit for bit alike just before an update
        (replicas that train alone: after an agreement). With ZeRO 1 and 2 these are the gathered parameters;
        with ZeRO 3 they are the shards of the state, which the groups of ``layout.shard_group`` hold alike;
        with one group the list is empty."""
        layout = self.layout
        if layout.num_shard_groups == 1 and (layout.dp == 1 or layout.zero == 3):
            return []
        whole = layout.zero < 3
        found = [chunk.values for chunk in self.model.chunks if whole]
        if layout.zero in (0, 3):
            found += [chunk.master for chunk in self.model.chunks if not (whole and chunk.master_is_values)]
        if layout.zero in (0, 3) and self._model_state.is_replicated:
            found += [
                tensor for tensors in self._optimizer_step.optimizer_state().values() for tensor in tensors
            ]
        return found

    def gather(self) -> None:
        """Gather the tensors that `replicated` returns, as each iteration does before it computes."""
        for chunk in self.model.chunks if self.layout.zero < 3 else ():
            chunk.start_gather(0)
            chunk.await_gather()

    def draw_initial(self, names: Collection[str] | None = None) -> None:
        """Set the parameters, or those of these full names, to the values of the definition's seed."""
        draw_initial(self._definition, self.model, self.boundary, names)
        self.restart_average()
        if self._diloco is not None:
            self._diloco.restart()

    def restart_average(self) -> None:
        """Set the moving average of the parameters, if there is one, to the current parameters: they were set
        without it."""
        if self._optimizer_step.average is not None:
            self._optimizer_step.average.restart()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the moving average of the parameters inside the block. Afterwards all bits are as they
        were. No snapshot may be copied meanwhile."""
        self._swap_average()
        try:
            yield
        finally:
            self._swap_average()

    def _swap_average(self) -> None:
        assert self._optimizer_step.average is not None, "a job's rule"
        self._optimizer_step.average.swap()
        for chunk in self.model.chunks:
            chunk.mark_stale()

    def loaded(self) -> None:
        """Mark the state as loaded: the parameters must be gathered again."""
        for chunk in self.model.chunks:
            chunk.restart()
        if self._diloco is not None:
            self._diloco.restart()

    def close(self) -> None:
        """Wait for the collectives in flight. The engine cannot be used afterwards."""
        for chunk in self.model.chunks:
            chunk.await_gather()
        self._sharing.scheduler.close()
        if self._sharing.across is not None:
            self._sharing.across.close()


def _do_nothing() -> None:
    """Default of `Engine.before_update`: no hook."""


def check_on_device(device: torch.device, job: DeviceJob) -> None:
    """Check that the programs are proved deadlock-free on this rank's device. Raises `BadInputError`
    otherwise."""
    if device.type == "cuda" and job.shape.pp > 1:
        check_device_job(job, queues_in(os.environ, job.shape, job.overlap))


def blank_batch(sample: Batch, device: torch.device) -> Batch:
    """Return a batch of zeros with the shapes and types of ``sample``, for `Engine.warm_up`."""
    tensors = (sample.inputs, sample.targets, sample.samples)
    inputs, targets, samples = (torch.zeros(one.shape, dtype=one.dtype, device=device) for one in tensors)
    return Batch(inputs, targets, samples, sample.documents)
