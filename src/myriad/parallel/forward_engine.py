"""The forward half of an engine: one rank's part of a model and the program that evaluates it.

    engine = ForwardEngine(definition, groups, layers_of_stage, sample, ...)
    fill engine.all_shards(), then engine.loaded()
    loss, stopped = engine.evaluate(load)      forward only, over all ranks

It holds the parameters of this rank and nothing of their gradients or of an optimizer. `Engine` adds both to
it for training (`TrainingNeeds`). Every rank calls the same method at the same time.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from myriad.comm.collectives import all_reduce
from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups
from myriad.comm.layout import trains_alone
from myriad.comm.typed_collectives import gather_values
from myriad.errors import RunFailedError
from myriad.kernels.config import Kernels
from myriad.kernels.float8 import Float8
from myriad.kernels.host_memory import keep_freed_memory
from myriad.model.boundary import Boundary
from myriad.model.definition import Definition
from myriad.model.gpt import GPT
from myriad.model.tensor_shard import TensorShard
from myriad.parallel.batch import Batch
from myriad.parallel.layout_reader import LayoutReader
from myriad.parallel.model_state import ModelState
from myriad.parallel.optimizer_step import loss_weight, sum_over_world
from myriad.parallel.rank_model import (
    build_rank_model,
    make_expert_sharing,
    make_sharing,
    mark_float8_weights,
    shape_of_loss,
    shapes_between_stages,
)
from myriad.parallel.router_tables import make_router_tables
from myriad.parallel.runtime import Runtime
from myriad.parallel.tensor_parallel import GroupBoundary, make_boundary
from myriad.program.actions import Program
from myriad.program.build import build_program, count_chunks
from myriad.program.checker import exchange_order
from myriad.program.config import OverlapConfig
from myriad.program.device_needs import DeviceJob, check_device_job, queues_in
from myriad.program.partition import cut_ranges
from myriad.program.warm_up import warm_up_actions
from myriad.telemetry.spans import Recorder

__all__ = ["ForwardEngine", "TrainingNeeds", "check_on_device"]

_OVERLAP, _COMM = OverlapConfig(), CommConfig()


@dataclass(frozen=True)
class TrainingNeeds:
    """What training needs of a rank's model, beside what forward passes need."""

    orthogonalizes: bool
    """The optimizer orthogonalizes the updates of matrices between hidden values."""
    keeps_addresses: bool
    """Temporary memory is at fixed addresses."""
    float8: Float8 | None
    keeps_float8: bool
    most_micro_batches: int
    """Largest number of micro-batches of any replica in any iteration."""


class ForwardEngine:
    """One rank's part of a model and the program that evaluates it."""

    def __init__(
        self,
        definition: Definition,
        groups: Groups,
        layers_of_stage: Sequence[range],
        sample: Batch,
        num_micro_batches: int,
        *,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        recorder: Recorder,
        overlap: OverlapConfig = _OVERLAP,
        comm: CommConfig = _COMM,
        kernels: Kernels = "auto",
        needs: TrainingNeeds | None = None,
    ) -> None:
        """Build this rank's layers, memory and programs; the parameters have no values. Raises
        `BadInputError` for programs that may deadlock on this rank's GPU.

        ``sample``: one micro-batch, or tensors of its shapes and types. ``num_micro_batches``: the number of
        this rank's replica. ``needs``: what training adds; ``None``: only forward passes are computed.
        """
        if device.type == "cpu":
            keep_freed_memory()
        self.groups, self.layout, self.recorder = groups, groups.grid.layout, recorder
        self._definition, self._dtype, self._device = definition, dtype, device
        self._trains_alone = needs is not None and trains_alone(self.layout, comm)
        self._build_programs(layers_of_stage, num_micro_batches, overlap, comm, needs)
        self.boundary: Boundary = make_boundary(groups, overlap, recorder, kernels, device)
        if needs is not None and needs.float8 is not None:
            self.boundary.token_multiple = needs.float8.token_multiple
        self._uses_float8 = needs is not None and needs.float8 is not None
        one_backward = needs is not None and needs.most_micro_batches == 1
        self._sharing = make_sharing(
            groups,
            overlap,
            comm,
            device,
            trains_alone=self._trains_alone,
            has_gradients=needs is not None,
            frees_grad_buffer=one_backward and overlap.updates_early and self.layout.zero < 2,
        )
        self._expert_sharing = None
        if self.layout.folds_experts:
            self._expert_sharing = make_expert_sharing(
                self._sharing, groups, overlap, comm, device, trains_alone=self._trains_alone
            )
        self._build_model(needs)
        self._start_runtime(sample, seed)
        self._check_order()
        self._model_state = ModelState(self.model, groups, device, trains_alone=self._trains_alone)
        self._router_tables = make_router_tables(definition, self.model, self._model_state, groups)
        self.reader: LayoutReader | None = None
        """Reads texts with caches of keys and values, once `open_reader` has made it."""

    def _build_programs(
        self,
        layers_of_stage: Sequence[range],
        num_micro_batches: int,
        overlap: OverlapConfig,
        comm: CommConfig,
        needs: TrainingNeeds | None,
    ) -> None:
        definition, layout = self._definition, self.layout
        num_chunks = count_chunks(layout, overlap, layers_of_stage)
        self._layers = cut_ranges(layers_of_stage, num_chunks)
        shares, cut = layout.shares or (num_micro_batches,), definition.sequence_parallel
        orthogonalizes = needs is not None and needs.orthogonalizes
        self._device_job = DeviceJob(
            layout, overlap, comm, shares, bool(definition.tied), num_chunks, not cut, orthogonalizes
        )
        check_on_device(self._device, self._device_job)
        self.programs = {
            training: self._build_program(shares, num_micro_batches, training=training)
            for training in ((False,) if needs is None else (True, False))
        }
        """Programs of training (``True``) and of evaluation (``False``)."""

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

    def _build_model(self, needs: TrainingNeeds | None) -> None:
        definition, own = self._definition, self.groups.grid.index("pp")
        runs = [one.ranks[own] for one in self.programs.values()]
        runs += [warm_up_actions(one, own) for one in self.programs.values()]
        self.model = build_rank_model(
            definition,
            self._layers,
            self.programs[False].stage_rank,
            self.groups,
            self.boundary,
            self._sharing,
            self._expert_sharing,
            self._dtype,
            self._device,
            runs if needs is not None and needs.keeps_addresses else (),
            orthogonalizes=self._device_job.orthogonalizes,
        )
        if needs is not None and needs.float8 is not None:
            keeps = needs.keeps_float8 and needs.most_micro_batches > 1 and self.layout.zero < 3
            mark_float8_weights(self.model, len(definition.names), needs.float8, keeps=keeps)

    def _start_runtime(self, sample: Batch, seed: int) -> None:
        definition = self._definition
        self._runtime = Runtime(
            self.model,
            self.boundary,
            self.groups,
            self._shapes_between_stages(sample),
            self.programs[False].stage_rank,
            self.layout.micro_batch,
            self._device,
            seed,
            self.recorder,
            stream_is_sharded=definition.sequence_parallel,
            loss_shape=shape_of_loss(definition, self.boundary, self._own_positions(sample)),
        )
        self._plans = {
            training: self._runtime.plan_of(program) for training, program in self.programs.items()
        }
        self._runtime.transfers.connect(plan.actions for plan in self._plans.values())

    def _check_order(self) -> None:
        """Check that ranks that share experts exchange tokens in one order. A collective call of them."""
        if self.layout.ep == 1:
            return
        own = [exchange_order(plan.actions) for plan in self._plans.values()]
        orders = gather_values(own, list[str], self.groups.along("ep", purpose="experts"))
        others = [rank for rank, one in zip(self.groups.grid.peers("ep"), orders, strict=True) if one != own]
        if others:
            raise RunFailedError(
                f"ranks that share experts run other programs than rank {self.groups.grid.rank}: {others}; "
                "all ranks need the same job and the same release"
            )

    def _shapes_between_stages(self, sample: Batch) -> Sequence[tuple[torch.Size, torch.dtype]]:
        travels = self._layers if self.layout.pp > 1 else []
        return shapes_between_stages(
            self._definition, travels, self.boundary, self._own_positions(sample), self._dtype
        )

    def _own_positions(self, sample: Batch) -> torch.Tensor:
        """Return the inputs of a batch at the positions that this rank has of each sequence."""
        peers, inputs = self.boundary.context, sample.inputs
        return inputs if peers is None else peers.share(inputs.shape[1]).take(inputs)

    def evaluate(self, load: Callable[[], Batch], *, stops: bool = False) -> tuple[float, bool]:
        """Return the sum of losses over the batch of all data-parallel ranks, and whether any rank set
        ``stops``. No state changes."""
        self._refresh()
        with self.recorder.evaluating():
            loss_sum = self._runtime.run(self._plans[False], load, None)
        # filled: a copy from the host would wait for the device
        stopping = loss_sum.new_full((), float(stops), dtype=torch.float64)
        loss_sum = loss_sum.reshape(-1)[0]
        own = torch.stack([loss_sum.double() * loss_weight(self.groups), stopping])
        total, num_stopping = sum_over_world(own, self.groups, self.recorder)
        return total, num_stopping > 0

    def open_reader(self) -> None:
        """Make `reader`, if the model is one of Myriad's own and does not compute in float8, whose scales
        depend on the tokens that are computed together. A collective call of all ranks, before the first
        step."""
        definition = self._definition
        if self.reader is not None or not isinstance(definition, GPT) or self._uses_float8:
            return
        assert isinstance(self.boundary, GroupBoundary)
        stage_rank = self.programs[False].stage_rank
        self.reader = LayoutReader(
            definition.config, self.model, self.boundary, self.groups, stage_rank, self._dtype, self._device
        )

    @contextmanager
    def reading(self, stops: Callable[[], bool]) -> Iterator[LayoutReader]:
        """Read texts inside the block. All ranks enter it together. ``stops`` returns whether this rank was
        asked to stop."""
        assert self.reader is not None, "`open_reader` has made it"
        self._refresh()
        self.reader.stops = stops
        with self.recorder.evaluating():
            yield self.reader

    def sum_of_losses(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks of what each has of the losses of evaluated batches; tensor-parallel
        ranks have the same, which counts once. A collective call of all ranks."""
        return all_reduce(own * loss_weight(self.groups), self.groups.world)

    def all_shards(self) -> Iterator[TensorShard]:
        """Return the shards of everything that this rank holds, which a load fills. Names of parameters begin
        with ``model.``."""
        return self._model_state.shards(self._states(owned_only=False), owned_only=False)

    def _states(self, *, owned_only: bool) -> dict[str, Sequence[torch.Tensor]]:
        """Return state names, each with one tensor per region, shaped like the region's values."""
        return {"model": self._model_state.stored_values()}

    def loaded(self) -> None:
        """Mark the state as loaded: the parameters must be gathered again."""
        for chunk in self.model.chunks:
            chunk.restart()
        self._mark_stale()

    def _mark_stale(self) -> None:
        """Mark what is computed from the parameters as stale: they were set."""
        for table in self._router_tables:
            table.mark_stale()

    def _refresh(self) -> None:
        """Compute what is stale. A collective call of all ranks."""
        for table in self._router_tables:
            table.refresh()

    def close(self) -> None:
        """Wait for the collectives in flight. The engine cannot be used afterwards."""
        for chunk in self.model.chunks:
            chunk.await_gather()
        self._sharing.scheduler.close()
        if self._expert_sharing is not None:
            self._expert_sharing.scheduler.close()
        if self._sharing.across is not None:
            self._sharing.across.close()


def check_on_device(device: torch.device, job: DeviceJob) -> None:
    """Check that the programs are proved deadlock-free on this rank's device. Raises `BadInputError`
    otherwise."""
    if device.type == "cuda" and job.shape.pp > 1:
        check_device_job(job, queues_in(os.environ, job.shape, job.overlap))
