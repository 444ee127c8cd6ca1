"""What is to be predicted: a model, how it is spread, and how well the framework that runs it does each
thing."""

from dataclasses import dataclass, field
from typing import Literal

from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.module_gathers import ModuleGathers
from myriad.planner.saving import Saves
from myriad.program.config import OverlapConfig

__all__ = ["Practice", "Recompute", "Work"]

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Practice:
    """How a framework computes. The defaults are Myriad's."""

    attention: Literal["plain", "flash", "flash2", "flash3"] = "flash2"
    """plain: batched products and a softmax that keeps the scores; flash: which FlashAttention."""
    fused: bool = True
    """Norm, activation and dropout in one operator each."""
    sums_in_norms: bool = True
    """A residual sum is made by the norm after it, in one operator; never on a CPU."""
    fused_loss: bool = True
    """Logits and loss are computed together, a part of the rows at a time."""
    exchange_seconds: float = 0.0
    """What a coupled send and receive costs besides its message: Megatron-LM waits for the device after each
    (torch.cuda.synchronize in p2p_communication.py), and then has nothing launched."""
    sequence_parallel: bool = True
    """The residual stream is cut along the sequence among tensor-parallel ranks."""
    sums_hide: bool = False
    """Where tensor-parallel communication is not cut in parts, one sum or scatter of each backward, that of
    an input's gradient, travels behind the weight's."""
    float8: Literal["tensor", "blocks"] | None = None
    """The blocks' products are in 8 bits: what has a scale of its own (`myriad.planner.float8`)."""
    cuda_graphs: bool = False
    """A stage's operators are started at once, by a captured graph."""
    gradient_bytes: int = 4
    """Of one element of a gradient that travels."""
    host_seconds: float = 0.0
    """Of each iteration, in which accelerators wait for Python or for the batch."""
    at_the_ends: bool = False
    """Data-parallel communication that is not overlapped comes in one piece, before the first compute and
    after the last one (Megatron-LM), not stage by stage between them."""
    stages_apart: bool = False
    """Pipeline stages are the outermost axis of the rank grid, replicas of a stage lie next to each other
    (Megatron-LM: dp inside pp); otherwise replicas are outermost, and the stages of each lie together. Of
    other systems: the search's closed form ignores it."""
    module_gathers: ModuleGathers | None = None
    """ZeRO 3 gathers the parameters of one module at a time and waits for the device, as DeepSpeed does; off:
    chunk by chunk, as the program says. Of other systems: the search's closed form ignores it."""
    tensor_parts: int | None = None
    """In which a micro-batch's products are cut so that tensor-parallel communication travels behind them;
    off: those of `myriad.model.parts`."""


@dataclass(frozen=True)
class Work:
    """One iteration of a job."""

    model: ModelConfig
    layout: Layout
    global_batch: int
    """Sequences."""
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    practice: Practice = Practice()
    comm: CommConfig = field(default_factory=CommConfig)
    """Which way data-parallel sums take."""
    saves: Saves = field(default_factory=Saves)
    """When snapshots are taken."""
    optimizer: Literal["adamw", "lamb"] = "adamw"
    value_bytes: int = 2
    """Bytes of one element of the compute type; 2: bfloat16 or float16."""

    @property
    def recompute(self) -> Recompute:
        """What the backward computes again."""
        return self.layout.recompute

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of each pipeline."""
        return self.layout.shares_of(self.global_batch)

    @property
    def num_micro_batches(self) -> int:
        """Of one pipeline; where shares differ, of one that has most."""
        return max(self.shares)

    @property
    def model_flops(self) -> float:
        """Of one iteration, as MFU counts them."""
        return self.model.flops_per_token() * self.model.sequence * self.global_batch
