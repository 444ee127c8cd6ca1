"""The input of a prediction: a model, its layout, and the profile of the framework that runs it."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout, offloads_master, trains_alone
from myriad.model.config import ModelConfig
from myriad.optim.config import OptimizerName
from myriad.planner.cost.module_gathers import ModuleGathers
from myriad.planner.cost.operator_costs import optimizer_bytes
from myriad.planner.cost.snapshot_costs import SnapshotSchedule
from myriad.planner.memory.framework_memory import FrameworkMemory
from myriad.program.config import OverlapConfig

__all__ = [
    "FULL_WINDOWS",
    "AttendedShares",
    "FrameworkProfile",
    "NewtonSchulz",
    "Recompute",
    "Workload",
    "rank_model",
]

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class FrameworkProfile:
    """The properties of a framework that affect its speed and memory. The defaults are Myriad's."""

    attention: Literal["plain", "flash", "flash-triton", "flash2", "flash3"] = "flash2"
    """Attention kernel. plain: batched products and a softmax that keeps the scores; flash, flash2, flash3:
    that version of FlashAttention; flash-triton: the first one in Triton, which also cuts the sequence among
    multiprocessors."""
    fused: bool = True
    """Whether norm, activation and dropout are one operator each."""
    fused_add_norm: bool = True
    """Whether a residual sum is computed by the norm after it, in one operator; never on a CPU."""
    fused_loss: bool = True
    """Whether logits and loss are computed together, a part of the rows at a time."""
    exchange_seconds: float = 0.0
    """Seconds of a coupled send and receive in addition to its message. Megatron-LM waits for the device
    after each (torch.cuda.synchronize in p2p_communication.py), and then has nothing launched."""
    batch_seconds: float | None = None
    """The same with other schedules than 1f1b, whose batches of sends and receives a framework waits for
    without waiting for the device; off: as exchange_seconds."""
    sequence_parallel: bool = True
    """Whether the residual stream is sharded along the sequence among tensor-parallel ranks."""
    hides_input_grad_comm: bool = False
    """Whether one all-reduce or reduce-scatter of each backward, that of an input's gradient, overlaps with
    the weight's gradient where tensor-parallel communication is not cut in parts."""
    quantization: Literal["tensor", "blocks", "nvfp4"] | None = None
    """Format of the inputs of the blocks' matrix products: float8 with one scale for a whole matrix or one
    for each block, or NVFP4 (`myriad.planner.cost.quantization_costs`); off: the compute type."""
    keeps_quantized: bool = True
    """Whether a weight is converted once a step instead of for each micro-batch, where ZeRO 3 does not free
    it."""
    gathers_quantized: bool = False
    """Whether what tensor-parallel ranks gather for a product is converted before, and travels in its format,
    as in Transformer Engine. Unless a matrix has one scale, gradients travel in both forms. It describes
    other systems."""
    keeps_quantized_inputs: bool = False
    """Whether the converted form of a product's input is kept for the weight's gradient, as in Transformer
    Engine, instead of being made again from the input; in NVFP4 it always is. It describes other systems."""
    knows_float8_scales: bool = False
    """Whether the scale of a whole matrix follows from earlier steps (delayed scaling), so that no pass
    searches the largest value before, and a norm writes float8 itself. It describes other systems."""
    adds_float8_apart: bool = True
    """Whether with one scale a product writes a weight's gradient in the compute type, and another pass adds
    it to the gradient buffer, instead of the product itself."""
    cuda_graphs: bool = False
    """Whether a captured graph launches a stage's operators at once."""
    gradient_bytes: int = 4
    """Bytes of one element of a gradient in a collective."""
    host_seconds: float = 0.0
    """Seconds of each iteration in which accelerators wait for Python or for the batch."""
    dp_comm_at_ends: bool = False
    """Whether data-parallel communication without overlap runs in one piece, before the first and after the
    last compute action (Megatron-LM), instead of stage by stage."""
    bucket_bytes: int | None = None
    """Bytes of gradients, in the compute type, from which on a bucket is complete where ZeRO 0 reduces bucket
    by bucket (DistributedDataParallel); off: chunk by chunk. It describes other systems; the search's closed
    form ignores it."""
    sharded_at_ends: bool = False
    """Whether ZeRO 1 and 2 reduce all gradients by one all-reduce after the last backward, and gather all
    parameters at once. It describes other systems; the search's closed form ignores it."""
    validates_later: bool = False
    """Whether zero-bubble schedules update parameters before the norm of all ranks is known and correct them
    afterwards, and sum the gradients of a shared embedding behind weights' gradients, so that no rank waits
    for all others at the end (arXiv 2401.10241, section 4). It describes other systems."""
    norm_in_replica: bool = False
    """Whether the ranks of a replica reduce the gradient norm, and replicas the loss, instead of all ranks
    both. It describes other systems."""
    pp_outermost: bool = False
    """Whether pipeline stages are the outermost axis of the rank grid and replicas of a stage are adjacent
    (Megatron-LM: dp inside pp). Otherwise replicas are outermost, and the stages of each are adjacent. It
    describes other systems; the search's closed form ignores it."""
    module_gathers: ModuleGathers | None = None
    """Settings of ZeRO 3 that gathers the parameters of one module at a time and waits for the device, as
    DeepSpeed does; off: chunk by chunk, by the program. It describes other systems; the search's closed form
    ignores it."""
    gathers_arrived: bool = False
    """Whether tensor-parallel ranks that share the width of experts route a part of the sequence each, and
    gather the tokens that arrive for an expert (Megatron-Core's all-to-all dispatcher), where ranks share
    experts. Otherwise each routes the whole sequence. It describes other systems."""
    grouped_experts: bool = True
    """Whether one kernel multiplies the tokens of all experts of a rank, as Myriad's and Megatron-Core's
    grouped GEMM, instead of one for each expert."""
    fused_expert_mlp: bool = False
    """Whether one kernel multiplies the tokens of all experts, computes the activation and converts its
    result to float8, forward and backward. It describes other systems."""
    fused_permutation: bool = True
    """Whether a kernel copies tokens in the order of experts, and one sums their results times their gates,
    each in one pass of memory, as Myriad's and Transformer Engine's. Otherwise results are multiplied by
    their gates in float32, in passes of their own, and then summed."""
    permutation_ratio: float = 1.0
    """Share that these kernels reach of the rate of other operators that only move memory, where
    fused_permutation. It describes other systems."""
    eager_expert_bias: bool = False
    """Whether biases of experts' results, which gates multiply in float32, and the clamp of clamped_swiglu
    are passes of their own over the experts' tokens, unless graphs are captured. It describes other
    systems."""
    adds_gradients_apart: bool = False
    """Whether each micro-batch writes a weight's gradient in the compute type, and another pass adds it to
    the gradient buffer, instead of the product itself. It describes other systems."""
    casts_gradients: bool = False
    """Whether gradients that are added apart are first copied to float32, in a pass of their own, and added
    to a float32 buffer, whatever type they are reduced in. It describes other systems."""
    parameter_copy_bytes: float = 0.0
    """Bytes that each micro-batch moves for each element of a matrix to copy it out of the buffer that was
    gathered, and to copy, convert and divide its gradient for the reduction, where state is sharded (FSDP);
    0: products read the gathered matrix and add to the gradient buffer themselves. It describes other
    systems; the search's closed form counts it for one rank too."""
    sums_gradients_apart: bool = False
    """Whether passes of their own over activations sum the gradients of biases, those of norms' factors, and
    the two of a residual stream, and join those of queries, keys and values, as PyTorch's operators do
    outside torch.compile. It describes other systems."""
    eager_operators: bool = False
    """Whether RMSNorm, rotary positions and gates are operators of PyTorch one by one, in float32 (Llama's
    modules without torch.compile). It describes other systems."""
    unpads_attention: bool = False
    """Whether attention copies queries, keys and values without the padding, and its result back. It
    describes other systems."""
    all_reduces_gradients: bool = False
    """Whether ZeRO 1 and 2 reduce gradients by all-reduces, which send twice as much as reduce-scatters. It
    describes other systems; the search's closed form ignores it."""
    optimizer_bytes: float | None = None
    """Bytes that an optimizer of several operators moves for each parameter, with all passes over gradients
    that follow their reduction; off: those of one fused operator
    (`myriad.planner.cost.operator_costs.optimizer_bytes`)."""
    norms_in_float32: bool = False
    """Whether the input of a norm is first converted to float32, in a pass of its own, and its gradient
    back."""
    repeats_norms: bool = False
    """Whether backwards repeat norms, and the residual sums before them, where layout.recompute = none. It
    describes other systems; the search's closed form ignores it."""
    recomputed_ratio: float = 1.0
    """Share of a layer's forward that layout.recompute = full repeats: below 1 where some products are kept.
    It describes other systems."""
    selective_attention: bool = False
    """Whether layout.recompute = selective repeats attention alone, as Megatron-LM's core attention, with
    any kernel. With a flash kernel it saves no memory. It describes other systems."""
    selective_products: bool = False
    """Whether layout.recompute = selective also repeats products: every second one of a block, and in float8
    all that the backward needs (torchtitan's option op). It describes other systems."""
    selective_blocks: float | None = None
    """Share of blocks whose forward layout.recompute = selective repeats, in place of parts of each block;
    off: parts of each. It describes other systems."""
    gathers_sequences: bool = False
    """Whether ranks that share sequences gather all keys and values before attention, again in the backward,
    and reduce their gradients after it, with nothing behind which that could hide, instead of sending them
    around a ring. It describes other systems; the fabric counts the messages of a ring."""
    shared_attention_ratio: float = 1.0
    """Factor on the seconds of attention where ranks share sequences. It describes other systems."""
    broadcast_seconds: float = 0.0
    """Seconds in addition to its bytes of each broadcast, where ZeRO 1 and 2 return updated parameters by a
    broadcast from each rank in turn instead of by an all-gather. It describes other systems; the search's
    closed form ignores it."""
    host_block_seconds: float = 0.0
    """Host seconds to launch the forward and backward of a block for one micro-batch. The device computes
    meanwhile, so that a block takes at least as long. It describes other systems."""
    host_routed_block_seconds: float = 0.0
    """The same of a block with experts, apart from its experts; it takes the place of host_block_seconds
    there. It describes other systems."""
    host_quantized_seconds: float = 0.0
    """The same in addition where products are quantized. It describes other systems."""
    host_chunk_seconds: float = 0.0
    """Host seconds of the forward and backward of a chunk of blocks with experts, for one micro-batch, apart
    from its blocks: the pipeline's schedule, modules around blocks, messages. It describes other systems; the
    search's closed form ignores it."""
    captures_attention: bool = False
    """Whether captured graphs launch what a block with experts has before its tokens travel, so that only
    host_expert_seconds are left. It describes other systems."""
    host_expert_seconds: float = 0.0
    """Host seconds to launch the products of one expert of a rank, forward and backward, with what converts
    its tokens and gradients, for one micro-batch. It describes other systems."""
    products_ratio: float = 1.0
    """Share that its matrix products reach of the rate that others reach on the same accelerator. It
    describes other systems."""
    blocks_launches: bool = False
    """Whether the host waits for each operator (CUDA_LAUNCH_BLOCKING = 1), so that the host's seconds of a
    block add to the device's. It describes other systems."""
    hides_expert_comm: bool = False
    """Whether the exchanges of tokens of one micro-batch travel behind the compute of another (1F1B with
    pairs of a forward and a backward, DualPipe). It describes other systems."""
    hides_in_phases: bool = False
    """Whether, where hides_expert_comm, each exchange travels beside one part of a block and the next part
    waits for it (Megatron-Core's pairs of a forward and a backward), instead of behind all compute. It
    describes other systems."""
    exchange_busy_ratio: float | None = None
    """Share of these exchanges' time by which the compute beside them slows down; off: that of the link. It
    describes other systems."""
    waits_for_exchanges: bool = False
    """Whether ranks wait for each exchange of tokens, unless hides_expert_comm: shared experts are computed
    before or after, and a backward computes both gradients of a matrix before the next exchange starts
    (Megatron-Core). Otherwise results return behind shared experts, and gradients travel behind weights'
    gradients. It describes other systems."""
    orders_on_arrival: bool = False
    """Whether tokens that travel once for several experts are sent in their own order, and copied in the
    order of experts on arrival, as with DeepEP. Otherwise each hop packs its rows. It describes other
    systems."""
    dispatch_seconds: float = 0.0
    """Seconds of each exchange of tokens that travel once for several experts, apart from its kernels: calls
    and the numbers of tokens; none with cuda_graphs. It describes other systems."""
    overlaps_hops: bool = False
    """Whether tokens travel between nodes and inside them at once with layout.expert_dispatch = node, as with
    DeepEP. It describes other systems."""
    tensor_parts: int | None = None
    """Number of parts into which a micro-batch's products are cut so that tensor-parallel communication
    overlaps with them; off: the number of `myriad.model.overlap_parts`."""
    memory: FrameworkMemory = field(default_factory=FrameworkMemory)
    """Values about memory, which do not affect speed."""

    def update_bytes(self, optimizer: OptimizerName, value_bytes: int, ema_every: int) -> float:
        """Return the bytes that an update moves for each parameter. ``value_bytes``: bytes of one element of
        the compute type; ``ema_every``: steps between updates of a moving average, 0: there is none."""
        return self.optimizer_bytes or optimizer_bytes(optimizer, value_bytes, ema_every)


@dataclass(frozen=True)
class NewtonSchulz:
    """How Muon orthogonalizes a matrix."""

    iterations: int = 5
    value_bytes: int | None = None
    """Bytes of one element; off: those of the compute type."""


@dataclass(frozen=True)
class AttendedShares:
    """Shares of the query-key pairs of full windows that packed documents attend to."""

    whole: float = 1.0
    """In layers without a window of attention."""
    windowed: float = 1.0

    def of(self, window: int | None) -> float:
        """Return the share in a layer with this window of attention."""
        return self.whole if window is None else self.windowed


FULL_WINDOWS = AttendedShares()
"""The shares of joined documents."""


@dataclass(frozen=True)
class Workload:
    """One iteration of a job."""

    model: ModelConfig
    layout: Layout
    global_batch: int
    """Number of sequences of an iteration."""
    overlap: OverlapConfig = field(default_factory=OverlapConfig)
    profile: FrameworkProfile = FrameworkProfile()
    comm: CommConfig = field(default_factory=CommConfig)
    """Settings of the data-parallel collectives."""
    snapshots: SnapshotSchedule = field(default_factory=SnapshotSchedule)
    """How often snapshots are taken, copied and stored."""
    optimizer: OptimizerName = "adamw"
    newton_schulz: NewtonSchulz = field(default_factory=NewtonSchulz)
    """With Muon, how it orthogonalizes."""
    qk_clip: bool = False
    """Whether each training forward finds the largest attention scores."""
    ema_every: int = 0
    """Steps between updates of the moving average of the parameters; 0: there is none."""
    copies_gradients: bool = False
    """Whether each backward copies the gradients of its stage, to find what it adds."""
    attended: AttendedShares = FULL_WINDOWS
    """What packed documents leave of attention."""
    generates: bool = False
    """Whether texts are generated between steps, with caches of keys and values."""
    value_bytes: int = 2
    """Bytes of one element of the compute type; 2: bfloat16 or float16."""

    @property
    def rank_model(self) -> ModelConfig:
        """The model with the positions of a sequence that one rank has (`rank_model`)."""
        return rank_model(self.model, self.layout.cp)

    @property
    def layer_profile(self) -> FrameworkProfile:
        """The profile for the times of layers: one rank alone copies no gathered parameters."""
        copies = self.profile.parameter_copy_bytes and self.layout.num_shards == 1
        return replace(self.profile, parameter_copy_bytes=0.0) if copies else self.profile

    @property
    def validates_later(self) -> bool:
        """Whether iterations end without waiting for all ranks (`FrameworkProfile.validates_later`)."""
        return self.profile.validates_later and "zero-bubble" in self.layout.schedule_name

    @property
    def exchange_seconds(self) -> float:
        """Seconds of a coupled send and receive in addition to its message."""
        profile, batched = self.profile, self.layout.schedule_name != "1f1b"
        return (
            profile.batch_seconds
            if batched and profile.batch_seconds is not None
            else profile.exchange_seconds
        )

    @property
    def sharded_at_ends(self) -> bool:
        """Whether state is sharded and reduced at once (`FrameworkProfile.sharded_at_ends`)."""
        return self.profile.sharded_at_ends and 0 < self.layout.zero < 3

    @property
    def dp_comm_at_ends(self) -> bool:
        """Whether data-parallel communication runs before the first and after the last compute action."""
        return self.profile.dp_comm_at_ends or self.sharded_at_ends

    @property
    def orthogonalizes(self) -> bool:
        """Whether the optimizer orthogonalizes matrices."""
        return self.optimizer == "muon"

    @property
    def offloads_master(self) -> bool:
        """Whether master values are part of the optimizer state in host memory."""
        return offloads_master(self.layout, self.comm, self.value_bytes)

    @property
    def trains_alone(self) -> bool:
        """Whether replicas train alone between agreements."""
        return trains_alone(self.layout, self.comm)

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one element of a matrix that is orthogonalized."""
        return self.newton_schulz.value_bytes or self.value_bytes

    @property
    def blocks_per_chunk(self) -> float:
        """Mean number of blocks of a chunk of a pipeline rank; without pipeline stages, all."""
        layout = self.layout
        return self.model.layers / (layout.pp * layout.virtual_stages if layout.pp > 1 else 1)

    @property
    def recompute(self) -> Recompute:
        """What the backward recomputes."""
        return self.layout.recompute

    @property
    def micro_batches_per_replica(self) -> tuple[int, ...]:
        """Number of micro-batches of each replica's pipeline."""
        return self.layout.shares_of(self.global_batch)

    @property
    def num_micro_batches(self) -> int:
        """Number of micro-batches of one pipeline; where replicas differ, the largest."""
        return max(self.micro_batches_per_replica)

    @property
    def quantized_kept_over(self) -> int:
        """Number of micro-batches for which a weight is converted once; 1: for each."""
        profile = self.profile
        keeps = profile.quantization is not None and profile.keeps_quantized and not profile.cuda_graphs
        return self.num_micro_batches if keeps and self.layout.zero < 3 else 1

    @property
    def model_flops(self) -> float:
        """FLOPs of one iteration, as MFU counts them."""
        model, sequence, batch = self.model, self.model.sequence, self.global_batch
        if self.attended == FULL_WINDOWS:
            return model.flops_per_token() * sequence * batch
        window = min(model.window or sequence, sequence)
        pairs = self.attended.whole * sequence * (sequence + 1) / 2
        window_pairs = self.attended.windowed * (window * sequence - window * (window - 1) / 2)
        return model.flops_of_documents(sequence * batch, round(pairs * batch), round(window_pairs * batch))


@lru_cache(maxsize=64)
def rank_model(model: ModelConfig, cp: int) -> ModelConfig:
    """Return the model with the positions of a sequence that one of ``cp`` ranks has. Everything but
    attention and a table of positions costs the same for them as for a whole sequence of this length."""
    return model if cp == 1 else model.model_copy(update={"sequence": model.sequence // cp})
