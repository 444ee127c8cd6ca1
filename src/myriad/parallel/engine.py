"""The engine: one rank's part of a model, its optimizer and its programs, in a layout.

    engine = Engine(definition, job settings, groups, ...)
    result = engine.train_step(load, learning_rate)    one iteration: loss and gradient norm over all ranks
    loss, stopped = engine.evaluate(load)              forward only (`ForwardEngine`)
    engine.shards()                                    this rank's state, as parts of whole tensors

Every rank calls the same method at the same time.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups
from myriad.comm.layout import offloads_master
from myriad.kernels.config import Kernels
from myriad.kernels.float8 import Float8
from myriad.model.definition import Definition
from myriad.model.tensor_shard import TensorShard
from myriad.optim.config import OptimizerConfig
from myriad.optim.loss_scale import LossScaler
from myriad.parallel.batch import Batch
from myriad.parallel.cuda_graphs import Capturer
from myriad.parallel.diloco import DiLoCo
from myriad.parallel.forward_engine import ForwardEngine, TrainingNeeds, check_on_device
from myriad.parallel.optimizer_step import OptimizerStep, StepResult
from myriad.parallel.pipeline_transfers import IdleWork
from myriad.parallel.rank_model import (
    draw_initial,
    shape_of_loss,
)
from myriad.parallel.routing_tape import RoutingFolders, RoutingTape
from myriad.parallel.step_statistics import StepStatistics
from myriad.parallel.trial_steps import TrialSteps
from myriad.program.config import OverlapConfig
from myriad.telemetry.config import TelemetryConfig
from myriad.telemetry.spans import Recorder

__all__ = ["Engine"]

_OVERLAP, _COMM, _TELEMETRY = OverlapConfig(), CommConfig(), TelemetryConfig()


class Engine(ForwardEngine):
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
        routing: RoutingFolders = RoutingFolders(),
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
        change it. ``routing``: where the chosen experts of tokens are written and read.
        """
        layout = groups.grid.layout
        most_micro_batches = max(most_micro_batches, *(layout.shares or (num_micro_batches,)))
        needs = TrainingNeeds(
            optimizer.orthogonalizes, keeps_addresses, float8, keeps_float8, most_micro_batches
        )
        super().__init__(
            definition,
            groups,
            layers_of_stage,
            sample,
            num_micro_batches,
            seed=seed,
            dtype=dtype,
            device=device,
            recorder=recorder,
            overlap=overlap,
            comm=comm,
            kernels=kernels,
            needs=needs,
        )
        self.loss_scaler, self._keeps_addresses = loss_scaler, keeps_addresses or layout.zero < 2
        self._diloco = DiLoCo(groups, comm, self._model_state.regions) if self._trains_alone else None
        trained = self.programs[True].lowering
        assert trained is not None, "a program of a layout"
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
                definition,
                layout.shares or (num_micro_batches,) * layout.dp,
            ),
            router_tables=self._router_tables,
            before_update=lambda: self.before_update(),
            states_on_host=trained.states_on_host,
            offloads_master=offloads_master(layout, comm, dtype.itemsize),
        )
        self._routing = None
        if any(routing):
            self._routing = RoutingTape(routing, self.model, definition.names, groups)
        if self._optimizer_step.statistics.counts_micro_batches:
            self._runtime.around_backward = self._optimizer_step.statistics.count_micro_batch
        self._trial = TrialSteps(self._runtime, self._optimizer_step, groups, device, recorder)
        self.optimizer = self._optimizer_step.optimizer
        if draws_initial:
            self.draw_initial()
        self._sample = blank_batch(sample, device)
        self.before_update: Callable[[], None] = _do_nothing
        """Called in each iteration just before parameters and optimizer state change."""

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
            self.programs[training], self._plans[training] = program, self._runtime.plan_of(program)
        self._optimizer_step.statistics.change_shares(shares[True])
        self._runtime.transfers.connect(plan.actions for plan in self._plans.values())
        self._runtime.change_shapes(
            self._shapes_between_stages(sample),
            shape_of_loss(self._definition, self.boundary, self._own_positions(sample)),
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
        self._refresh()
        loss_factor = self._optimizer_step.begin(
            num_targets,
            learning_rate=learning_rate,
            signal=signal,
            number=number,
            skip=skip,
            refuses=refuses,
        )
        if self._routing is not None:
            self._routing.begin(number)
        self._runtime.run(self._plans[True], load, self._optimizer_step, loss_factor)
        self._optimizer_step.end()
        if self._routing is not None:
            self._routing.end(number)
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

    def shards(self, of_rank: int | None = None) -> Iterator[TensorShard]:
        """Return this rank's shards of the parameters and the optimizer state, as views of live memory.

        Their names are ``model.NAME`` and ``optimizer.STATE.NAME``; replicas that train alone add
        ``replica.N.optimizer...`` and ``outer.velocity.NAME``. A tensor that several ranks hold is returned
        by one of them only; data-parallel replicas return one share each. ``of_rank``: return the shares of
        this one of the ranks that hold the same state.
        """
        alike = "cp" if self._trains_alone else "dp_replicate"
        copy = None if of_rank is None else self.groups.grid.peers(alike).index(of_rank)
        return self._model_state.shards(self._states(owned_only=True), owned_only=True, copy=copy)

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
        shared = super()._states(owned_only=owned_only)
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

    def replicated(self, *, of_experts: bool = False) -> list[torch.Tensor]:
        """Return the tensors that data-parallel replicas hold bit for bit alike just before an update
        (replicas that train alone: after an agreement). With ZeRO 1 and 2 these are the gathered parameters;
        with ZeRO 3 they are the shards of the state, which the groups of ``layout.shard_group`` hold alike;
        with one group the list is empty. They do not include experts that lie on other ranks than the rest:
        ``of_experts`` returns these, which the ranks of ``expert_dp`` hold alike, with ZeRO 3 those of
        ``dp_replicate``."""
        layout = self.layout
        if layout.num_shard_groups == 1 and (layout.num_holders == 1 or layout.zero == 3):
            return []
        whole = layout.zero < 3
        chunks = [chunk for chunk in self.model.chunks if chunk.sharing.of_experts == of_experts]
        found = [chunk.values for chunk in chunks if whole]
        if layout.zero in (0, 3):
            found += [chunk.stored for chunk in chunks if not (whole and chunk.master_is_values)]
        if layout.zero in (0, 3) and self._model_state.is_replicated and not self._trains_alone:
            indices = [index for chunk in chunks for index in self._model_state.regions_of[chunk]]
            states = self._optimizer_step.optimizer_state().values()
            found += [tensors[index] for tensors in states for index in indices]
        return found

    def gather(self) -> None:
        """Gather the tensors that `replicated` returns, as each iteration does before it computes."""
        for chunk in self.model.chunks if self.layout.zero < 3 else ():
            chunk.start_gather(0)
            chunk.await_gather()

    def draw_initial(self, names: Collection[str] | None = None) -> None:
        """Set the parameters, or those of these full names, to the values of the definition's seed."""
        draw_initial(self._definition, self.model, names)
        self._mark_stale()
        self.restart_average()
        if self._diloco is not None:
            self._diloco.restart()

    def restart_average(self) -> None:
        """Set the moving average of the parameters, if there is one, to the current parameters: they were set
        without it."""
        if self._optimizer_step.average is not None:
            self._optimizer_step.average.restart(self._model_state.stored_values())

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
        for chunk in self.model.chunks:
            chunk.await_gather()  # the last update may have issued one, which reads the values
        self._optimizer_step.average.swap(self._model_state.stored_values())
        for chunk in self.model.chunks:
            chunk.mark_stale()
        self._mark_stale()

    def loaded(self) -> None:
        """Mark the state as loaded: the parameters must be gathered again."""
        super().loaded()
        if self._diloco is not None:
            self._diloco.restart()


def _do_nothing() -> None:
    """Default of `Engine.before_update`: no hook."""


def blank_batch(sample: Batch, device: torch.device) -> Batch:
    """Return a batch of zeros with the shapes and types of ``sample``, for `Engine.warm_up`."""
    tensors = (sample.inputs, sample.targets, sample.samples)
    inputs, targets, samples = (torch.zeros(one.shape, dtype=one.dtype, device=device) for one in tensors)
    return Batch(inputs, targets, samples, sample.documents)
