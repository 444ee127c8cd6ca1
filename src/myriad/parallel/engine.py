"""A model in a layout: what a trainer holds of this rank.

    engine = Engine(definition, job settings, groups, ...)
    result = engine.train_step(load, learning_rate)    one iteration: loss and gradient norm over all ranks
    loss = engine.evaluate(load)                       forward only
    engine.rectangles()                                this rank's state, as parts of whole tensors

Every rank calls the same method at the same time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from myriad.comm.collectives import all_reduce, sum_in_order
from myriad.comm.config import CommConfig
from myriad.comm.courier import Courier
from myriad.comm.groups import Groups
from myriad.errors import BadInputError, RunFailedError
from myriad.kernels.config import Kernels
from myriad.kernels.float8 import Float8
from myriad.kernels.host_memory import keep_freed_memory
from myriad.model.boundary import Boundary
from myriad.model.definition import Definition
from myriad.model.rectangle import Rectangle
from myriad.optim.clip import clip_scale, squared_norms
from myriad.optim.config import OptimizerConfig
from myriad.optim.loss_scale import LossScaler
from myriad.optim.optimizer import build_optimizer
from myriad.parallel.agreement import Agreement
from myriad.parallel.captured import Capturer, comes_in_turn
from myriad.parallel.chunk import Chunk, Sharing
from myriad.parallel.device_start import blank_batch, check_on_device
from myriad.parallel.float8_weights import multiply_in_float8
from myriad.parallel.held import Held
from myriad.parallel.non_finite import Finding, first_finding
from myriad.parallel.pieces import build_pieces, draw_initial, shapes_between_stages
from myriad.parallel.runtime import Batch, Idle, Plan, Runtime
from myriad.parallel.tensor import make_boundary
from myriad.program.build import build_program, count_chunks
from myriad.program.config import OverlapConfig
from myriad.program.device_needs import DeviceJob
from myriad.program.partition import cut_ranges
from myriad.program.warm_up import warm_up_actions
from myriad.telemetry.spans import Recorder

__all__ = ["Engine", "StepResult"]

_OVERLAP, _COMM = OverlapConfig(), CommConfig()


@dataclass(frozen=True)
class StepResult:
    """One iteration, as every rank knows it."""

    loss: float
    """Mean over the targets of the global batch."""
    grad_norm: float
    """Global norm before clipping."""
    signal: float
    """Sum of what the ranks signalled in this step."""
    skipped: bool = False
    """Nothing moved."""
    overflow: bool = False
    """Nothing moved, as gradients overflowed at the loss scale; the scale was lowered."""
    loss_scale: float | None = None
    """Factor of this step's loss; ``None``: this precision has no loss scale."""


class Engine:
    """One rank's share of a model, its optimizer and its programs."""

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
        loss_scaler: LossScaler | None = None,
        draws_initial: bool = True,
    ) -> None:
        """``sample``: one micro-batch, or tensors of its shapes and types; ``num_micro_batches``: of this
        rank's replica; ``loss_scaler``: scales the loss in training, which float16 needs;
        ``draws_initial``: parameters have the seed's values; else they have none until a state is loaded or
        `draw_initial` is called. Raises `BadInputError` for programs that may deadlock on this rank's GPU."""
        if device.type == "cpu":
            keep_freed_memory()
        layout = groups.grid.layout
        self.groups, self.layout, self.recorder = groups, layout, recorder
        self._clip_norm, self._updates_early = optimizer.clip_norm, overlap.updates_early
        assert not self._updates_early or (optimizer.name, self._clip_norm) == ("adamw", None), "a job's rule"
        assert not self._updates_early or loss_scaler is None, "a job's rule"
        self.loss_scaler = loss_scaler
        num_chunks = count_chunks(layout, overlap, layers_of_stage)
        layers = cut_ranges(layers_of_stage, num_chunks)
        self.programs = {
            training: build_program(
                layout,
                overlap,
                num_micro_batches,
                tied=bool(definition.tied),
                training=training,
                num_chunks=num_chunks,
                most_micro_batches=max(layout.shares or (num_micro_batches,)),
            )
            for training in (True, False)
        }
        shares, cut = layout.shares or (num_micro_batches,), definition.sequence_parallel
        check_on_device(
            device, DeviceJob(layout, overlap, comm, shares, bool(definition.tied), num_chunks, not cut)
        )
        stage_rank = self.programs[True].stage_rank
        self.boundary: Boundary = make_boundary(groups, overlap, recorder, kernels)
        if float8 is not None:
            self.boundary.token_multiple = float8.token_multiple
        self._trains_alone = comm.sync_every > 1 and layout.dp > 1
        self._courier = Courier(groups, None if self._trains_alone else "dp", overlap, comm, device)
        exact = comm.compress_parameters is None
        dp_rank, dp_size = (0, 1) if self._trains_alone else (groups.grid.index("dp"), layout.dp)
        frees = self._updates_early and layout.zero < 2 and max(layout.shares or (num_micro_batches,)) == 1
        sharing = Sharing(self._courier, dp_rank, dp_size, layout.zero, exact, frees)
        self.pieces = build_pieces(
            definition, layers, stage_rank, groups, self.boundary, sharing, dtype, device
        )
        self._definition = definition
        if draws_initial:
            self.draw_initial()
        if float8 is not None:
            multiply_in_float8(self.pieces, len(definition.names), float8)
        travels = layers if layout.pp > 1 else []
        shapes = shapes_between_stages(definition, travels, self.boundary, sample.inputs, dtype)
        self._runtime = Runtime(
            self.pieces,
            self.boundary,
            groups,
            shapes,
            stage_rank,
            layout.micro_batch,
            device,
            seed,
            recorder,
            stream_is_cut=definition.sequence_parallel,
        )
        self._plans = {
            training: Plan.of(program.ranks[groups.grid.index("pp")], self.pieces.tied_stages)
            for training, program in self.programs.items()
        }
        self._runtime.connect(self._plans.values())
        self._held = Held(self.pieces, groups, device, trains_alone=self._trains_alone)
        regions, num_parameters = self._held.regions, len(self._held.entries)
        self._agreement = Agreement(groups, comm, regions) if self._trains_alone else None
        self._whole_rows = torch.tensor([[entry.cut is None] for _, entry in self._held.entries]).to(device)
        """``[num_parameters, 1]``: what tensor-parallel ranks hold alike."""
        axes = ("dp", "tp") if layout.zero else ("tp",)
        self._table_group = groups.along(*axes) if optimizer.name == "lamb" else None
        self.optimizer = build_optimizer(optimizer, regions, num_parameters, self._reduce_table, kernels)
        self._squares = torch.zeros(num_parameters, dtype=torch.float64, device=device)
        """Of each parameter's gradient, as far as it is complete."""
        self._device, self._sample = device, blank_batch(sample, device)
        self._step, self._skips, self._moves = 0, False, False
        self._refuses: Callable[[float, float], bool] | None = None
        self.before_update: Callable[[], None] = _do_nothing
        """Called in each iteration when parameters and optimizer state are about to change."""

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
        """One iteration. ``num_targets``: targets in the global batch; ``signal``: a number that all ranks
        learn the sum of, with a reduction that takes place anyway; ``step``: its number, for messages;
        ``skip``: nothing moves, whatever the gradients are, and the optimizer counts no step; ``refuses``:
        told the loss and the norm, says on all ranks alike that it is to be so. Raises
        `RunFailedError` on every rank when the loss or a gradient is not finite; a gradient that overflows at
        the loss scale makes all ranks skip the step instead, and lowers the scale."""
        self._refuses = refuses
        self._skips, self._step = skip, self.optimizer.steps_done + 1 if step is None else step
        result = self._iterate(self._plans[True], load, _Finisher(self, num_targets, learning_rate, signal))
        if not self._skips:
            self.optimizer.end()
            self._grow_loss_scale()
        if self._agreement is not None and self._agreement.is_due(self._step):
            self._agreement.agree()
            for chunk in self.pieces.chunks:
                chunk.mark_stale()
        return result

    @property
    def _loss_scale(self) -> float:
        """What the loss is multiplied by in this step."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    def _grow_loss_scale(self) -> None:
        if self.loss_scaler is None:
            return
        ratio = self.loss_scaler.moved()
        if ratio != 1.0:
            for chunk in self.pieces.chunks:
                chunk.rescale_kept(ratio)

    def _iterate(self, plan: Plan, load: Callable[[], Batch], finisher: "_Finisher") -> StepResult:
        self._moves = False
        scale = self._loss_scale * self._num_replicas / finisher.num_targets
        self._runtime.run(plan, load, finisher, scale)
        assert finisher.result is not None, "the checker proved that a training program clips"
        return finisher.result

    def fill_waits(self, idle: Idle | None) -> None:
        """From now on ``idle`` works while this rank waits for a tensor of another stage; ``None``: nothing
        does."""
        self._runtime.idle = idle

    def capture(self, capturer: Capturer, load: Callable[[], Batch], num_targets: int) -> None:
        """From now on the computes of training are captured once and replayed, which must give what they give
        as ever: two iterations in which nothing moves are compared. Raises `BadInputError` where they do not,
        or cannot be captured."""
        assert comes_in_turn(self._plans[True].actions), "a job's rule"
        plan = replace(self._plans[True])  # one of its own: its spans are not a step's
        with capturer.warming():
            expected = self._try(plan, load, num_targets)
        self._runtime.capture(capturer)
        try:
            problem = _difference(expected, self._try(plan, load, num_targets))
        except RuntimeError as error:
            problem = f"{type(error).__name__}: {error}".partition("\n")[0]
        if problem:
            raise BadInputError("train.cuda_graphs", True, f"false, as a capture fails here: {problem}")

    def warm_up(self) -> None:
        """Load the kernels of each stage's forward and backward, by computing one micro-batch of zeros
        without a message to another stage, and leave the state, generators and results of later steps as they
        were. All ranks call it together, before their first step."""
        rank, tied_stages = self.groups.grid.index("pp"), self.pieces.tied_stages
        devices = [self._device] if self._device.type == "cuda" else []
        self._refuses, self._skips = None, True
        with torch.random.fork_rng(devices), self.recorder.evaluating():
            for training, program in sorted(self.programs.items()):
                plan = Plan.of(warm_up_actions(program, rank), tied_stages)
                finisher = _Finisher(self, self._sample.targets.numel(), 0.0, 0.0) if training else None
                self._moves = False
                self._runtime.run(plan, lambda: self._sample, finisher, alone=True)
        self.recorder.take_totals()  # its time belongs to no step

    def _try(self, plan: Plan, load: Callable[[], Batch], num_targets: int) -> tuple[float, torch.Tensor]:
        """Loss, and squared norms of the parameters' gradients, of an iteration in which nothing moves."""
        self._refuses, self._skips = None, True
        with self.recorder.evaluating():
            result = self._iterate(plan, load, _Finisher(self, num_targets, 0.0, 0.0))
        return result.loss, self._squares.clone()

    def evaluate(self, load: Callable[[], Batch], *, stops: bool = False) -> tuple[float, bool]:
        """Return the sum of losses over the batch of all data-parallel ranks, and whether any rank
        ``stops``; nothing changes."""
        with self.recorder.evaluating():
            loss_sum = self._runtime.run(self._plans[False], load, None)
        stopping = loss_sum.new_full((), float(stops), dtype=torch.float64)  # filled: a copy would wait
        own = torch.stack([loss_sum.double() * self._counts_loss, stopping])
        total, num_stopping = all_reduce(own, self.groups.world).tolist()
        return total, num_stopping > 0

    @property
    def _counts_loss(self) -> float:
        """One of the tensor-parallel ranks, which all have the same loss, counts it."""
        return 1.0 if self.groups.grid.index("tp") == 0 else 0.0

    def clip(self, loss: torch.Tensor, learning_rate: float, signal: float) -> StepResult:
        """Gradients of all ranks are complete: finds their norm and begins the optimizer's step, unless
        everything has moved already."""
        if not self._updates_early:
            self._complete(self.pieces.chunks)
        squares = self._squares
        # replicas that train alone have a norm each: all travel in one message
        own = squares.new_zeros(2 + self._num_replicas)
        own[0] = loss.double() * self._counts_loss
        own[1].fill_(signal)  # an assignment would copy it from the host, and wait for the device
        own[2 + self._held.replica] = (squares * self._held.counts).sum()
        total_loss, total_signal, *norms = all_reduce(own, self.groups.world).tolist()
        self.recorder.settle_clock()
        scale = self._loss_scale
        norms = [norm / scale**2 for norm in norms]
        whole_norm = math.sqrt(sum(norms) / self._num_replicas)
        shown = None if self.loss_scaler is None else scale
        result = StepResult(total_loss, whole_norm, total_signal, loss_scale=shown)
        if self._skips:
            return replace(result, skipped=True)
        if not (math.isfinite(whole_norm) and math.isfinite(total_loss)):
            self._skip_overflow(squares, total_loss)
            return replace(result, skipped=True, overflow=True)
        if self._refuses is not None and self._refuses(total_loss, whole_norm):
            assert not self._updates_early, "a job's rule"
            self._skips = True
            return replace(result, skipped=True)
        if not self._updates_early:
            norm = math.sqrt(norms[self._held.replica])
            self.optimizer.begin(learning_rate, clip_scale(norm, self._clip_norm) / scale)
        return result

    @property
    def _num_replicas(self) -> int:
        """Replicas with gradients of their own at the step."""
        return self.layout.dp if self._trains_alone else 1

    def update(self, stage: int, learning_rate: float) -> None:
        """Moves the parameters of a stage; tied ones with the first stage of this rank that holds them. Early
        updates leave them as they are from the first gradient on that is not finite: `clip` will see it."""
        left = None if (stage,) == self.pieces.tied_stages[:1] else self.pieces.tied
        chunks = [chunk for chunk in self.pieces.stages[stage].chunks if chunk is not left]
        stays = None
        if self._updates_early:
            self._complete(chunks)
            self.optimizer.begin(learning_rate, 1.0)
            stays = (~torch.isfinite(self._squares.sum())).float()
        for chunk in chunks:
            if self._skips:
                chunk.restart()  # what transfers keep of these gradients may be no number either
            else:
                self.optimizer.update(self._held.regions_of[chunk], stays)
                chunk.end_iteration()

    def _complete(self, chunks: Sequence[Chunk]) -> None:
        """All that is left to do with these chunks' gradients before they may move."""
        if not self._moves:
            self._moves = True
            self.before_update()
            self._squares.zero_()
        self._sum_over_tp(chunks)
        held = self._held
        if regions := [held.regions[index] for chunk in chunks for index in held.regions_of[chunk]]:
            self._squares += squared_norms(regions, len(held.entries))

    def _sum_over_tp(self, chunks: Sequence[Chunk]) -> None:
        """Adds up the gradients of what tensor-parallel ranks hold alike, in one message."""
        group = self.groups.along("tp")
        parts = [part for chunk in chunks for part in chunk.partial_gradients()]
        if group is None or not parts:
            return
        flat = sum_in_order(torch.cat(parts), group)
        torch._foreach_copy_(parts, flat.split([len(part) for part in parts]))

    def _skip_overflow(self, squares: torch.Tensor, loss: float) -> None:
        """Gradients or the loss are not finite: let all ranks skip the step if the loss scale explains it,
        which never changes the loss. Raises `RunFailedError` if not."""
        scaler = self.loss_scaler
        if scaler is None or not math.isfinite(loss):
            self._fail_non_finite(squares, f"{loss}")
        elif not scaler.overflowed():
            self._fail_non_finite(squares, f"{loss}, {scaler.fault}")
        self._skips = True

    def _fail_non_finite(self, squares: torch.Tensor, loss: str) -> None:
        """Names the rank that made the first number that is not finite, and what it is."""
        last_stage = self.layout.num_stages - 1
        found = first_finding(self.pieces, self._held.entries, self._runtime.outputs, squares, last_stage)
        everyone: list[Finding | None] = [found]
        if self.groups.world is not None:
            everyone = [None] * self.layout.world
            dist.all_gather_object(everyone, found)
        firsts = [(one.order, rank, one.name) for rank, one in enumerate(everyone) if one is not None]
        _, rank, name = min(firsts, default=((), 0, "loss"))
        step = self._step
        raise RunFailedError(f"step {step}: loss is {loss}; first bad tensor is the {name}, on rank {rank}")

    def _reduce_table(self, table: torch.Tensor) -> torch.Tensor:
        """Adds up what the ranks hold of each parameter (LAMB's norms), each element once."""
        if self.groups.grid.index("tp") > 0:
            table.masked_fill_(self._whole_rows, 0.0)
        return all_reduce(table, self._table_group)

    def rectangles(self) -> Iterator[Rectangle]:
        """This rank's part of parameters and optimizer state, as views of live memory, under the names
        ``model.NAME`` and ``optimizer.STATE.NAME`` (of replicas that train alone: ``replica.N.optimizer...``
        too, and ``outer.velocity.NAME``); what several ranks hold alike comes from one of them only, each of
        data-parallel replicas giving its share."""
        return self._held.rectangles(self._states(owned_only=True), owned_only=True)

    def all_rectangles(self) -> Iterator[Rectangle]:
        """The same with everything this rank holds: what a load fills."""
        return self._held.rectangles(self._states(owned_only=False), owned_only=False)

    def _states(self, *, owned_only: bool) -> dict[str, Sequence[torch.Tensor]]:
        """Name to a tensor like each region's values."""
        replica = self._held.replica
        prefix = f"replica.{replica}." if replica else ""
        own: dict[str, Sequence[torch.Tensor]] = {
            f"{prefix}optimizer.{name}": tensors for name, tensors in self.optimizer.state().items()
        }
        if owned_only and replica:
            return own
        shared = {"model": [region.values for region in self._held.regions]}
        if self._agreement is not None:
            shared["outer.velocity"] = self._agreement.outer.velocity
        return shared | own

    def replicated(self) -> list[torch.Tensor]:
        """What data-parallel replicas hold alike, bit for bit, when an update is about to begin (those that
        train alone: after they agreed). With ZeRO 1 and 2 that is the parameters, which were gathered; with
        ZeRO 3 nothing stays gathered."""
        if self.layout.dp == 1 or self.layout.zero == 3:
            return []
        found = [chunk.values for chunk in self.pieces.chunks]
        if self.layout.zero == 0:
            found += [chunk.master for chunk in self.pieces.chunks if not chunk.master_is_values]
        if self._held.is_replicated:
            found += [tensor for tensors in self.optimizer.state().values() for tensor in tensors]
        return found

    def gather(self) -> None:
        """Makes what is `replicated` whole, as each iteration does before it computes."""
        for chunk in self.pieces.chunks if self.layout.zero < 3 else ():
            chunk.start_gather(0)
            chunk.await_gather()

    def draw_initial(self) -> None:
        """Set the parameters to the values of the definition's seed."""
        draw_initial(self._definition, self.pieces, self.boundary)

    def loaded(self) -> None:
        """The state was written into: whole parameters must be gathered anew."""
        for chunk in self.pieces.chunks:
            chunk.restart()
        if self._agreement is not None:
            self._agreement.restart()

    def close(self) -> None:
        """Waits for what is still under way; the engine is of no use afterwards."""
        for chunk in self.pieces.chunks:
            chunk.await_gather()
        self._courier.close()


@dataclass
class _Finisher:
    """The end of one iteration."""

    engine: Engine
    num_targets: int
    learning_rate: float
    signal: float
    result: StepResult | None = None

    def clip(self, loss_sum: torch.Tensor) -> None:
        self.result = self.engine.clip(loss_sum / self.num_targets, self.learning_rate, self.signal)

    def update(self, stage: int) -> None:
        self.engine.update(stage, self.learning_rate)


def _difference(expected: tuple[float, torch.Tensor], found: tuple[float, torch.Tensor]) -> str:
    """Between losses and squared norms of each parameter's gradient, in words, if it is more than sums in
    another order make."""
    (loss, squares), (own_loss, own_squares) = expected, found
    if not math.isclose(loss, own_loss, rel_tol=1e-3) and not math.isnan(loss):
        return f"it gives a loss of {own_loss:.6g} instead of {loss:.6g}"
    least = 1e-6 * float(squares[squares.isfinite()].sum())
    same = torch.isclose(own_squares, squares, rtol=1e-2, atol=least, equal_nan=True)
    wrong = int((~same).sum())
    return f"it gives other gradients of {wrong} of {len(same)} parameters" if wrong else ""


def _do_nothing() -> None:
    """Nobody reads the state."""
