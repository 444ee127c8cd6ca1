"""What the ranks of a framework hold in memory where they differ from Myriad's, and what its logs report.

A framework's file has these values with their sources (``[memory]``, `myriad.planner.frameworks`). The
defaults are Myriad's, and the estimates of `docs/concepts/peak-memory.md` for a process on a GPU:

    tensors      what `myriad.planner.memory.rank_memory` counts, changed by the values here
    reserved     and workspace, and the slack of the caching allocator: a share of what comes and goes
    in all       and outside of the allocator: the driver's context, and communicators
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["BlockValues", "FrameworkMemory"]


@dataclass(frozen=True)
class BlockValues:
    """Values that a block keeps of each token, by width. Tensor-parallel ranks share all but
    ``gathered``; without sequence parallelism they do not share ``stream``."""

    stream: float
    """Values of the width of the residual stream: inputs of norms, and inputs of products that are kept as
    each rank's own part."""
    gathered: float
    """Values of the same width that each rank keeps of all tokens: gathered inputs of products."""
    attention: float
    """Values of the width of queries, keys, values and attention's output together; 1: each is kept once."""
    inner: float
    """Values of the inner width of the MLP beside those that the products up leave: 1: the input of the
    product down; 2: the activation's output too, where a gate multiplies it in another operator."""


@dataclass(frozen=True)
class FrameworkMemory:
    """Memory of a framework's ranks."""

    block_values: BlockValues | None = None
    """What a block without experts and latent attention keeps without recomputation; off: as Myriad's, or as
    the published formula (`myriad.planner.memory.layer_memory`)."""
    logits_kept_bytes: int = 4
    """Bytes of each logit from the head's forward to its backward, where the loss is not fused with them."""
    logits_forward_bytes: int = 2
    """Bytes of each logit in addition, at the highest moment of that forward (compute type of two bytes)."""
    logits_backward_bytes: int = 6
    """Bytes of each logit in addition, at the highest moment of that backward (compute type of two bytes)."""
    gradient_buffer_bytes: int = 4
    """Bytes of each parameter in the gradient buffer, to which micro-batches add."""
    gradient_copy_bytes: int = 0
    """Bytes of each parameter in gradient buckets that stay beside the float32 buffer, with replicas."""
    keeps_results: bool = True
    """Whether results of experts are kept for the gradients of their gates; False: gates multiply the
    activation, before the product down."""
    quantized_parameters: bool = False
    """Whether parameters of products in float8 or NVFP4 are kept in that format alone, in both forms, instead
    of the compute type: two bytes in float8."""
    frees_sent: bool = False
    """Whether a message to another stage is freed once it is sent, instead of when an answer proves that it
    arrived."""
    backward_gradient_bytes: int = 0
    """Bytes of each parameter's gradient that a backward leaves until its end; 0: it is added at once."""
    copies_gathered: bool = False
    """Whether the gather after an update with ZeRO 1 reads a copy, and writes into a copy of everything."""
    gather_buffers: int = 0
    """Buffers that stay, each of a gathered input of a product, where ranks are tensor-parallel; 0: gathered
    inputs come and go."""
    workspace_bytes: int = 0
    """Bytes that libraries such as cuBLAS take from the allocator and keep."""
    allocator_slack: float = 0.05
    """Share of temporary memory that the allocator holds without use: 0.049 on a CPU (fitted to the table of
    `docs/benchmarks/peak-memory.md`). Published values for GPUs are 0.15 on average with recomputation and
    offloading, and 0.33 at most (GMLake, arXiv 2401.08156): two deviations and more from this one."""
    tensor_slack: float = 0.05
    """The same of tensor-parallel ranks. Collectives on another stream keep their operands from being used
    again until the device is there, and the host allocates others meanwhile (record_stream)."""
    context_bytes: float = 0.3 * 2**30
    """Bytes of the CUDA context (since 11.7; github.com/pytorch/pytorch/issues/107667)."""
    group_bytes: float = 0.6 * 2**30
    """Bytes of the buffers of a group's communicator (544 to 688 MiB on A100;
    github.com/NVIDIA/nccl/issues/964)."""
    pair_bytes: float = 0.125 * 2**30
    """Bytes of a communicator in which a pair of ranks sends one way: 32 channels of NCCL_BUFFSIZE, 4 MiB."""
    reports: Literal["peak", "update"] = "peak"
    """The moment of an iteration that allocated bytes in the framework's tables are of. update: the highest
    after the last backward, because its log starts anew there."""
    reported_rank: Literal["fullest", "first"] = "fullest"
    """The pipeline rank that memory in the framework's tables is of."""
