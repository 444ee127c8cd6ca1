"""The ``[train]`` section of a job, and what changes during a run: ``train.batch_ramp`` and ``[[phases]]``.

A phase holds new values of the job's own keys. Each is checked by the section that declares the key, and
holds until a later phase changes it. `myriad.job.job_steps` computes the values of each step.
"""

from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from myriad.config import Config, Count, Size
from myriad.data.config import DataConfig
from myriad.kernels.config import Kernels
from myriad.model.config import ModelConfig
from myriad.optim.config import OptimizerConfig, Precision

__all__ = ["PHASE_KEYS", "SCHEDULE_KEYS", "BatchRamp", "Phase", "TrainConfig"]

SCHEDULE_KEYS = ("learning_rate", "final_learning_rate_ratio", "decay", "decay_ratio", "warmup_steps")
"""Keys of ``[optimizer]`` that form the learning-rate schedule."""

PHASE_KEYS = {
    "data": ("corpus", "mixture"),
    "model": ("sequence",),
    "train": ("global_batch",),
    "optimizer": (*SCHEDULE_KEYS, "weight_decay", "clip_norm"),
}
"""Keys that a phase can change, by section."""


class BatchRamp(Config):
    """A global batch that grows in equal stages up to ``train.global_batch``."""

    start: int | None = Field(None, ge=1, le=2**24)
    """Sequences in the first iteration. off: no ramp."""
    increment: int | None = Field(None, ge=1, le=2**24)
    """Sequences that each stage adds; it divides train.global_batch - train.batch_ramp.start. off: as many
    as the start."""
    until_samples: Count | None = None
    """Samples after which the batch is train.global_batch, e.g. "10M"; all stages take equally many. off:
    until_tokens or until_steps instead."""
    until_tokens: Count | None = None
    """The same in tokens, e.g. "20B". off: until_samples or until_steps instead."""
    until_steps: Count | None = None
    """The same in steps. off: until_samples or until_tokens instead."""


class TrainConfig(Config):
    """Length, batch size, precision and device of the training."""

    steps: int = Field(100, ge=1)
    """Number of iterations of the whole run."""
    global_batch: int = Field(8, ge=1, le=2**24)
    """Sequences per iteration, over all ranks and micro-batches."""
    batch_ramp: BatchRamp = BatchRamp()
    """A global batch that grows in equal stages up to train.global_batch, in place."""
    seed: int = Field(1, ge=0)
    """Seed of the initial weights, the sample order and dropout."""
    precision: Precision = "auto"
    """Number format of the computation: float32, bfloat16, float16 (with a dynamic loss scale, see
    loss_scale), float8 (matrix products of the blocks in 8 bits, one scale per tensor) or float8-blocks
    (one scale per 128 values). auto: bfloat16 where the device multiplies it natively, float16 on GPUs that
    support only that (V100), else float32. A CPU emulates float8; a GPU without float8 is refused."""
    keep_float8_weights: bool = True
    """With float8, convert weights once per step instead of once per micro-batch; needs 2 bytes more per
    parameter. No effect with one micro-batch, layout.zero = 3 or train.cuda_graphs. Turn it off if memory is
    short."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda if this machine has a GPU for each of its ranks, else cpu. cuda: refuse to start without
    enough GPUs."""
    kernels: Kernels = "auto"
    """auto: Myriad's Triton kernels on a GPU if triton is installed and supports the shape (`myriad doctor`
    lists them). plain: PyTorch's operators. triton: refuse to start if one of the Triton kernels cannot
    run."""
    deterministic: bool = False
    """Use GPU kernels that add in a fixed order, so that two equal runs give equal bits; slower. Needs
    train.kernels = auto or triton. false: use the fastest kernels, whose results differ by rounding. CPUs
    always add in a fixed order."""
    cuda_graphs: bool = False
    """On a GPU, start all operators of a stage's forward or backward at once, as a captured CUDA graph: for
    models whose operators take less time than Python needs to start them. Activations of all micro-batches in
    flight stay reserved, and with layout.zero = 2 or 3 what else comes and goes (`myriad simulate` counts
    both). Needs overlap.tensor = turns or off if layout.tp > 1, train.memory_budget = off and
    overlap.optimizer_in_backward = false. false: start operators one by one."""
    memory_budget: Size | None = Field(None, ge=1)
    """Memory that a rank may use, e.g. "64 GiB", as the planner counts it. If the layout needs more,
    recompute as few layers as make it fit. off: no limit."""
    memory_offload: Literal["auto"] | None = None
    """auto: recompute only what train.memory_budget needs with all of the optimizer's state in host memory,
    and keep that of as few chunks there as make it fit (layout.offload_optimizer_ratio). off: only
    recompute."""
    threads: int = Field(0, ge=0)
    """CPU threads of each rank; 0: divide the cores among the ranks of the machine."""
    validate_every: int = Field(0, ge=0)
    """Steps between validations on held-out text. The last step is always validated; 0: only the last."""
    validate_ema: bool = False
    """Validate the moving average of the parameters (optimizer.ema_decay) beside the parameters, which takes
    as long again."""
    collect_garbage_every: int = Field(100, ge=0)
    """Steps between Python garbage collections, which all ranks run after the same step; 0: leave them to
    Python."""
    init_from: str | None = None
    """Initial weights: a run, a checkpoint or a Hugging Face folder. off: random, from train.seed."""
    replay_routing: str | None = None
    """Folder RUN/routing of another run (telemetry.routing) with the same data: its tokens' experts are used
    in each step instead of those that the router would choose. off: the router chooses."""
    sample_prompt: str | None = None
    """Text that the model continues after the last step; off: no sample."""


class _ChangedKeys(Config):
    """Some keys of a section, with new values. Keys that are not set stay as they are."""

    @model_serializer(mode="wrap")
    def _set_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if key in self.model_fields_set}

    def changes(self) -> dict[str, Any]:
        """Return the new values by key."""
        return {key: getattr(self, key) for key in self.model_fields_set}


class PhaseData(_ChangedKeys, DataConfig):
    """Keys of ``[data]`` with new values."""


class PhaseModel(_ChangedKeys, ModelConfig):
    """Keys of ``[model]`` with new values."""


class PhaseTrain(_ChangedKeys, TrainConfig):
    """Keys of ``[train]`` with new values."""


class PhaseOptimizer(_ChangedKeys, OptimizerConfig):
    """Keys of ``[optimizer]`` with new values."""


class Phase(Config):
    """Values that hold from a step on."""

    name: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]*)?$")
    """Name in events and charts. Default: the number of the phase; the run begins with phase 1."""
    at_step: int | None = Field(None, ge=1)
    """Steps done before the phase begins. off: at_tokens instead."""
    at_tokens: Count | None = None
    """Tokens after which the phase begins, with the next step, e.g. "2B". off: at_step instead."""
    data: PhaseData = PhaseData()
    """New values of data.corpus or data.mixture."""
    model: PhaseModel = PhaseModel()
    """New value of model.sequence."""
    train: PhaseTrain = PhaseTrain()
    """New value of train.global_batch."""
    optimizer: PhaseOptimizer = PhaseOptimizer()
    """New values of the learning-rate schedule, optimizer.weight_decay or optimizer.clip_norm."""

    @model_serializer(mode="wrap")
    def _set_keys(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values = handler(self)
        return {key: value for key, value in values.items() if value not in (None, "", {})}

    def sections(self) -> dict[str, dict[str, Any]]:
        """Return the new values by section and key."""
        parts = {"data": self.data, "model": self.model, "train": self.train, "optimizer": self.optimizer}
        return {section: changed for section, part in parts.items() if (changed := part.changes())}

    def sets(self, section: str, *keys: str) -> bool:
        """Return whether the phase changes any of these keys."""
        return not self.sections().get(section, {}).keys().isdisjoint(keys)
