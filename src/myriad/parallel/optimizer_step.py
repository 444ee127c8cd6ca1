"""The optimizer step of one rank: what CLIP and UPDATE, the last actions of a program, do.

    step.begin(num_targets, learning_rate=...)    before the first action; returns the factor of the loss
    step.clip(loss_sum, ..) sum loss, signal and squared norms over all ranks in one message, and decide
                            alike on every rank: update, skip, skip and lower the loss scale, or fail
    step.orthogonalize(kind, stage)   the actions before the update of one stage's matrices, with Muon
    step.update(stage)      update one stage's parameters, or drop its gradients
    step.end()              count the step

With early updates, a stage is updated as soon as its gradients are complete, so UPDATE comes before CLIP.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise

import torch

from myriad.comm.collectives import all_reduce
from myriad.comm.groups import Groups
from myriad.errors import RunFailedError
from myriad.kernels.config import Kernels
from myriad.optim.config import OptimizerConfig
from myriad.optim.gradient_noise import NoiseEstimate
from myriad.optim.loss_scale import LossScaler
from myriad.optim.muon import MatrixPart, Muon, newton_schulz_dtype
from myriad.optim.optimizer import build_optimizer
from myriad.optim.parameter_norms import clip_scale, squared_norms
from myriad.optim.weight_average import WeightAverage
from myriad.parallel.chunk import Chunk
from myriad.parallel.first_non_finite import describe_first_non_finite
from myriad.parallel.matrix_exchange import MatrixExchange, MatrixPeers, make_exchanges
from myriad.parallel.model_state import ModelState, ParameterSums
from myriad.parallel.partial_gradients import PartialGradients
from myriad.parallel.qk_clip import QKClip
from myriad.parallel.rank_model import RankModel
from myriad.parallel.router_tables import RouterTable
from myriad.parallel.state_offload import StateOffload
from myriad.parallel.step_statistics import ExpertLoad, LayerNorms, StepStatistics
from myriad.parallel.user_means import UserMeans
from myriad.program.actions import Kind
from myriad.telemetry.spans import Recorder

__all__ = ["OptimizerStep", "StepResult", "loss_weight", "sum_over_world"]

_Outputs = Mapping[tuple[int, int], torch.Tensor]
"""(stage, micro-batch) to the sum of its forward's output."""


Refuses = Callable[[float, float], bool]
"""A function of loss and gradient norm, equal on all ranks, that returns whether to skip the update."""

_DIGEST_BITS, _DIGEST_PARTS = 22, 3
"""A digest of 64 bits is summed in parts, so that float64 holds the sum over any number of ranks exactly."""


@dataclass(frozen=True)
class StepResult:
    """The result of one iteration, equal on every rank."""

    loss: float
    """Mean loss over the targets of the global batch."""
    grad_norm: float
    """Global gradient norm before clipping."""
    signal: float
    """Sum of the ``signal`` values of all ranks in this step."""
    further_losses: tuple[float, ...] = ()
    """Terms that training adds to the loss, divided by the number of targets."""
    skipped: bool = False
    """Whether the step was skipped: parameters and optimizer state are unchanged."""
    overflow: bool = False
    """Whether the step was skipped because gradients overflowed at the loss scale. The scale was lowered."""
    loss_scale: float | None = None
    """Factor by which this step's loss was scaled; ``None``: this precision has no loss scale."""
    data_digest: int = 0
    """Hash of the rows of all replicas, below 2^64: the sum of the rows' own hashes."""
    noise: NoiseEstimate | None = None
    """The averages of the gradient noise scale, if the job asks for them and the step was not skipped."""
    max_attention_score: float | None = None
    """Largest attention score of the step, if the job bounds it."""
    expert_load: ExpertLoad | None = None
    """The expert with most tokens, if the model has experts."""
    expert_loads: Mapping[str, tuple[float, ...]] | None = None
    """Load of each expert by block, in the steps for which the job asks for them."""
    router_entropy: float | None = None
    """Mean entropy of routers' scores, 1 if all experts have equal ones, if the model has experts."""
    dropped_share: float | None = None
    """Share of the pairs of a token and an expert that were dropped, if experts have a capacity."""
    layer_norms: LayerNorms | None = None
    """Norms of each layer, in the steps for which the job asks for them."""
    user: Mapping[str, float | None] = field(default_factory=dict)
    """Means of the values that all ranks gave to `myriad.log`; ``None``: not finite."""


@dataclass(frozen=True)
class _Arguments:
    """The arguments of the iteration in progress (`OptimizerStep.begin`)."""

    num_targets: int
    learning_rate: float
    signal: float
    number: int
    refuses: Refuses | None


class OptimizerStep:
    """Completes the gradients of each iteration and updates the parameters (a `Finisher`)."""

    def __init__(
        self,
        model: RankModel,
        state: ModelState,
        groups: Groups,
        config: OptimizerConfig,
        outputs: _Outputs,
        *,
        dtype: torch.dtype,
        updates_early: bool,
        trains_alone: bool,
        loss_scaler: LossScaler | None,
        kernels: Kernels,
        recorder: Recorder,
        statistics: StepStatistics,
        router_tables: Sequence[RouterTable],
        before_update: Callable[[], None],
        states_on_host: frozenset[int] = frozenset(),
        offloads_master: bool = False,
    ) -> None:
        """``outputs``: sums of the iteration's outputs, from which a non-finite value is located.
        ``dtype``: type of the computation.
        ``trains_alone``: replicas have their own gradients at the step. ``before_update`` is called in each
        iteration just before parameters and optimizer state change. ``states_on_host``: stages of the program
        whose state is in host memory between updates; with ``offloads_master`` their master values, too."""
        assert not updates_early or (config.name, config.clip_norm) == ("adamw", None), "a job's rule"
        assert not updates_early or loss_scaler is None, "a job's rule"
        self._model, self._state, self._groups, self._outputs = model, state, groups, outputs
        self._clip_norm, self._updates_early, self._scaler = config.clip_norm, updates_early, loss_scaler
        self._recorder, self._before_update, self.statistics = recorder, before_update, statistics
        assert not (router_tables and (updates_early or trains_alone)), "a job's rule"
        self._router_tables = router_tables
        layout, device = groups.grid.layout, state.counts.device
        self._num_replicas = layout.dp if trains_alone else 1
        """Number of replicas that have their own gradients at the step."""
        self._partial_gradients = PartialGradients([row for _, row in state.rows], groups)
        parameter_sums = ParameterSums(state, groups) if config.name == "lamb" else None
        num_rows = len(state.rows)
        self._exchanges: dict[Chunk, MatrixExchange] = {}
        if config.orthogonalizes:
            sent = newton_schulz_dtype(config.muon_precision, dtype)
            of_experts = [chunk for chunk in model.chunks if chunk.sharing.of_experts]
            others = [chunk for chunk in model.chunks if not chunk.sharing.of_experts]
            peers = MatrixPeers.of(groups, device, trains_alone=trains_alone)
            self._exchanges = make_exchanges(others, peers, config, sent)
            if layout.folds_experts:
                peers = MatrixPeers.of(groups, device, trains_alone=trains_alone, of_experts=True)
                self._exchanges |= make_exchanges(of_experts, peers, config, sent)
        own_states = states_on_host & model.stages.keys()
        on_host = [chunk for stage in own_states for chunk in self._updated_with(stage)]
        self.optimizer = build_optimizer(
            config,
            state.regions,
            num_rows,
            parameter_sums,
            kernels,
            self._matrix_parts(),
            on_host=[index for chunk in on_host for index in state.regions_of[chunk]],
        )
        self.offload = StateOffload(self.optimizer.host, model.chunks, on_host if offloads_master else ())
        self.average: WeightAverage | None = None
        """The moving average of the parameters, if the job keeps one."""
        self._qk_clip = None if config.qk_clip is None else QKClip(config.qk_clip, model, groups, device)
        self._user_means = UserMeans(groups)
        if config.ema_decay is not None:
            self.average = WeightAverage(config.ema_decay, config.ema_every, state.regions)
        self.squares = torch.zeros(num_rows, dtype=torch.float64, device=device)
        """Squared norm of the gradient of each row of the table of parameters, as far as it is complete."""
        self._now = _Arguments(1, 0.0, 0.0, 0, None)
        self._skips, self._completes = False, False
        self._result: StepResult | None = None

    def _matrix_parts(self) -> list[list[MatrixPart]]:
        """Return the parts of matrices in each region."""
        found: list[list[MatrixPart]] = [[] for _ in self._state.regions]
        for chunk, exchange in self._exchanges.items():
            for index in self._state.regions_of[chunk]:
                found[index] = exchange.parts_of(self._state.regions[index])
        return found

    def begin(
        self,
        num_targets: int,
        *,
        learning_rate: float = 0.0,
        signal: float = 0.0,
        number: int = 0,
        skip: bool = False,
        refuses: Refuses | None = None,
    ) -> float:
        """Set the arguments of the next iteration (`Engine.train_step` has them), and return the factor by
        which each micro-batch's sum of losses is multiplied before the backward. ``number``: number of the
        step, which messages name."""
        self._now = _Arguments(num_targets, learning_rate, signal, number, refuses)
        self._skips, self._completes, self._result = skip, False, None
        self.statistics.begin(0 if skip else number)
        if self._qk_clip is not None:
            self._qk_clip.begin()
        return self._loss_scale * self._num_replicas / num_targets

    def change(self, weight_decay: float, clip_norm: float | None) -> None:
        """Use another weight decay and clipping norm from the next iteration on."""
        assert clip_norm is None or not self._updates_early, "a job's rule"
        self._clip_norm = clip_norm
        self.optimizer.config = self.optimizer.config.model_copy(update={"weight_decay": weight_decay})

    @property
    def result(self) -> StepResult:
        """The result of the iteration, once CLIP has run."""
        assert self._result is not None, "the checker proved that a training program clips"
        return self._result

    @property
    def _loss_scale(self) -> float:
        """Factor by which the loss is multiplied in this step."""
        return 1.0 if self._scaler is None else self._scaler.scale

    def clip(self, loss_sum: torch.Tensor, digest: int) -> None:
        """Compute the norm of the complete gradients of all ranks and begin the optimizer step. With early
        updates the parameters are updated already, and no step begins."""
        if not self._updates_early:
            self._complete(self._model.chunks)
        at = self._sections(loss_sum.numel())
        sums = sum_over_world(self._own_sums(at, loss_sum, digest), self._groups, self._recorder)
        found = {name: sums[place] for name, place in at.items()}
        loads = self.statistics.loads_in(found["statistics"])
        scale = self._loss_scale
        norms = [norm / scale**2 for norm in found["norms"]]
        loss, *further = found["losses"]
        whole = (int(one) << part * _DIGEST_BITS for part, one in enumerate(found["digest"]))
        result = StepResult(
            loss,
            math.sqrt(sum(norms) / self._num_replicas),
            found["signal"][0],
            tuple(further),
            loss_scale=None if self._scaler is None else scale,
            max_attention_score=max(found["scores"], default=None),
            expert_load=self.statistics.largest_load(loads),
            expert_loads=self.statistics.all_loads(loads),
            router_entropy=self.statistics.router_entropy(found["statistics"]),
            dropped_share=self.statistics.dropped_share(found["statistics"]),
            data_digest=sum(whole) % 2**64,
            user=self._user_means.means(found["user"]),
        )
        self._result = self._decide(result)
        if not self._result.skipped:
            noise = self.statistics.noise_of(found["statistics"], scale, self._now.num_targets)
            self._result = replace(self._result, noise=noise)
        for table in () if self._skips else self._router_tables:
            table.move(loads)
        if not (self._skips or self._updates_early):
            norm = math.sqrt(norms[self._state.replica])
            self.optimizer.begin(self._now.learning_rate, clip_scale(norm, self._clip_norm) / scale)

    def _sections(self, num_losses: int) -> dict[str, slice]:
        """Return the places of the values that CLIP sums over all ranks in one message."""
        sizes = {
            "signal": 1,
            "norms": self._num_replicas,  # replicas that train alone have a norm each
            "losses": num_losses,
            "digest": _DIGEST_PARTS,
            "statistics": self.statistics.num_sums,
            "scores": 0 if self._qk_clip is None else self._qk_clip.num_slots,
            "user": self._user_means.num_sums,
        }
        ends = accumulate(sizes.values(), initial=0)
        return {name: slice(start, stop) for name, (start, stop) in zip(sizes, pairwise(ends), strict=True)}

    def _own_sums(self, at: Mapping[str, slice], loss_sum: torch.Tensor, digest: int) -> torch.Tensor:
        """Return this rank's part of the message of CLIP."""
        own = self.squares.new_zeros(at["user"].stop)
        # Assigning a number would copy it from the host and wait for the device; fill_ does not.
        own[at["signal"]].fill_(self._now.signal)
        own[at["norms"]][self._state.replica] = (self.squares * self._state.counts).sum()
        losses = (loss_sum / self._now.num_targets).double() * loss_weight(self._groups)
        own[at["losses"]] = losses
        if all(self._groups.grid.index(axis) == 0 for axis in ("tp", "pp", "cp")):
            for part in range(_DIGEST_PARTS):
                own[at["digest"]][part].fill_(digest >> part * _DIGEST_BITS & 2**_DIGEST_BITS - 1)
        self.statistics.write_sums(own[at["statistics"]], self.squares)
        if self._qk_clip is not None:
            self._qk_clip.reduce(own[at["scores"]])
        self._user_means.write_sums(own[at["user"]])
        return own

    def _decide(self, result: StepResult) -> StepResult:
        """Decide whether the step is skipped, and return the result that says so."""
        if self._skips:
            return replace(result, skipped=True)
        if not (math.isfinite(result.grad_norm) and math.isfinite(result.loss)):
            self._skip_overflow(result.loss)
            return replace(result, skipped=True, overflow=True)
        if self._now.refuses is not None and self._now.refuses(result.loss, result.grad_norm):
            assert not self._updates_early, "a job's rule"
            self._skips = True
            return replace(result, skipped=True)
        return result

    @property
    def orthogonalizes(self) -> bool:
        """Whether the optimizer orthogonalizes matrices before it updates a stage."""
        return isinstance(self.optimizer, Muon)

    def orthogonalize(self, kind: Kind, stage: int) -> None:
        """Run an action of `ORTHOGONALIZATION` on the matrices of a stage; nothing if the step is skipped."""
        for chunk in self._model.stages[stage].chunks if not self._skips else ():
            exchange = self._exchanges.get(chunk)
            if exchange is None:
                continue
            if kind is Kind.START_GATHER_MOMENTUM:
                assert isinstance(self.optimizer, Muon)
                self.optimizer.write_directions(self._state.regions_of[chunk])
            exchange.do(kind)

    def copy_state(self, kind: Kind, stage: int) -> None:
        """Run an action of `COPIES_STATE` on the state of a stage, also if the step is skipped."""
        chunks = self._updated_with(stage)
        regions = [index for chunk in chunks for index in self._state.regions_of[chunk]]
        self.offload.run(kind, regions, chunks)

    def _updated_with(self, stage: int) -> list[Chunk]:
        """Return the chunks that are updated with a stage. Tied parameters are updated with the first stage
        of this rank that holds them."""
        left = None if (stage,) == self._model.tied_stages[:1] else self._model.tied
        return [chunk for chunk in self._model.stages[stage].chunks if chunk is not left]

    def update(self, stage: int) -> None:
        """Update the parameters of a stage and of `_updated_with` it.

        Early updates stop at the first non-finite gradient and leave the remaining parameters unchanged;
        `clip` then detects it.
        """
        chunks = self._updated_with(stage)
        stays = None
        if self._updates_early:
            self._complete(chunks)
            self.optimizer.begin(self._now.learning_rate, 1.0)
            stays = (~torch.isfinite(self.squares.sum())).float()
        for chunk in chunks:
            if self._skips:
                chunk.restart()  # the gradient residuals that transfers keep may be non-finite too
            else:
                before = self.statistics.before_update(chunk)
                self.optimizer.update(self._state.regions_of[chunk], stays)
                if self._qk_clip is not None:
                    self._qk_clip.clip(chunk)
                for table in self._router_tables:
                    table.write(chunk)
                self.statistics.after_update(chunk, before)
                if self.average is not None:
                    self.average.update(self._state.regions_of[chunk], self.optimizer.steps_done + 1)
                chunk.end_iteration()

    def optimizer_state(self) -> dict[str, list[torch.Tensor]]:
        """Return the state to store beside the parameters: the optimizer's, and the average as ``ema``. Each
        name has a tensor for each region, as in `Optimizer.state`."""
        found = self.optimizer.state()
        return found if self.average is None else found | {"ema": self.average.averages}

    def end(self) -> None:
        """Count the step unless it was skipped, and grow the loss scale when it is time to."""
        if self._skips:
            return
        self.optimizer.end()
        if self.statistics.is_due:
            sums = sum_over_world(self.statistics.layer_sums(self.squares), self._groups, self._recorder)
            norms = self.statistics.layer_norms(sums, self.result.loss_scale or 1.0)
            self._result = replace(self.result, layer_norms=norms)
        ratio = 1.0 if self._scaler is None else self._scaler.moved()
        if ratio != 1.0:
            for chunk in self._model.chunks:
                chunk.rescale_kept(ratio)

    def _complete(self, chunks: Sequence[Chunk]) -> None:
        """Finish the gradients of these chunks before the update: sum them over tensor-parallel ranks, and
        add up their squared norms."""
        if not self._completes:
            self._completes = True
            self._before_update()
            self.squares.zero_()
        self._partial_gradients.sum(chunks)
        state = self._state
        if regions := [state.regions[index] for chunk in chunks for index in state.regions_of[chunk]]:
            self.squares += squared_norms(regions, len(state.rows))

    def _skip_overflow(self, loss: float) -> None:
        """Handle a non-finite gradient or loss. All ranks skip the step if the loss scale explains it; the
        scale never makes the loss non-finite. Raises `RunFailedError` otherwise."""
        if self._scaler is None or not math.isfinite(loss):
            self._fail_non_finite(f"{loss}")
        elif not self._scaler.overflowed():
            self._fail_non_finite(f"{loss}, {self._scaler.fault}")
        self._skips = True

    def _fail_non_finite(self, loss: str) -> None:
        """Raise `RunFailedError` with the rank that produced the first non-finite value, and the name of its
        tensor."""
        where = describe_first_non_finite(
            self._model, self._state.rows, self._outputs, self.squares, self._groups
        )
        raise RunFailedError(f"step {self._now.number}: loss is {loss}; {where}")


def sum_over_world(own: torch.Tensor, groups: Groups, recorder: Recorder) -> list[float]:
    """Sum ``own`` over all ranks. The host waits for the device here, and collects recorded spans
    meanwhile."""
    with recorder.span("all_reduce", recorded=False):
        total = all_reduce(own, groups.world)
        recorder.collect()
        numbers: list[float] = total.tolist()
        recorder.align_clocks()
    return numbers


def loss_weight(groups: Groups) -> float:
    """Return the weight of this rank's loss in the global sum: one of the tensor-parallel ranks, which all
    have the same loss, counts it."""
    return 1.0 if groups.grid.index("tp") == 0 else 0.0
