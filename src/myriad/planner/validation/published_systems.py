"""Framework profiles of the systems in the published tables, as far as their papers describe them.

Values that a paper leaves open are open here too, and one rule fixes them for all rows of all tables
(`published_rows`). Assumed values are marked as such.
"""

from dataclasses import dataclass, replace

from myriad.planner.cost.module_gathers import ModuleGathers
from myriad.planner.workload import FrameworkProfile
from myriad.program.config import OverlapConfig

__all__ = [
    "DEEPSPEED_0_4_2",
    "LLAMA_3",
    "MEGASCALE",
    "MEGATRON_2_4",
    "MEGATRON_2021",
    "MEGATRON_2022",
    "MEGATRON_2022_SEQUENCE",
    "MEGATRON_2023",
    "MEGATRON_CORE",
    "PublishedSystem",
]

_EXCHANGE_SECONDS = 9e-4
"""Seconds of a coupled send and receive in addition to its message: the framework waits for the device, and
then for the slower neighbour. Fit to MegaScale's table 3, row "PP overlap"."""
_HOST_SECONDS = 0.04
"""Host seconds of an iteration of Megatron-LM: the batch's broadcast, the optimizer's checks, logging.
Assumed."""
_MEGASCALE_HOST_SECONDS = 0.15
"""Host seconds of an iteration at MegaScale: fit to the last row of its table 3, whose batch is three times
as large."""
_CODE_SECONDS = 0.20
"""Seconds that MegaScale's data pipeline and "removal of problematic code" saved (its table 3: 1.8 % of 11.4
s)."""

_TENSOR_PARTS = 4
"""Number of parts into which tensors are cut to overlap with a product: Transformer Engine's ``num_splits``.
MegaScale does not state its own."""


@dataclass(frozen=True)
class PublishedSystem:
    """A framework at one point in time."""

    profile: FrameworkProfile
    overlap: OverlapConfig


_THEIRS = FrameworkProfile(fused_loss=False, fused_add_norm=False)
"""Profile common to all systems. Megatron-LM fuses a residual sum with the bias and dropout before it
(`megatron/core/fusions/fused_bias_dropout.py`), not with the norm after it; the other papers do not mention
it."""

_NOTHING_HIDDEN = OverlapConfig(pipeline=False, data=False, tensor=False, optimizer=False)

MEGATRON_2021 = PublishedSystem(
    replace(
        _THEIRS,
        attention="plain",
        exchange_seconds=_EXCHANGE_SECONDS,
        sequence_parallel=False,
        gradient_bytes=2,
        dp_comm_at_ends=True,
        host_seconds=_HOST_SECONDS,
    ),
    _NOTHING_HIDDEN,
)
"""Megatron-LM of arXiv 2104.04473: fp16 gradients, no flash attention, no sequence parallelism."""

MEGATRON_2_4 = PublishedSystem(replace(MEGATRON_2021.profile, pp_outermost=True), _NOTHING_HIDDEN)
"""Megatron-LM v2.4 of July 2021, by its sources of June to August. `p2p_communication.py` waits for every
send and receive and then for the device. `model/distributed.py` sums gradients after the last backward, in
fp16. `mpu/initialize.py` puts replicas of a stage next to each other and stages farthest apart. The overlap
of the backward's all-reduces with weights' gradients came on 30 August 2021."""

DEEPSPEED_0_4_2 = PublishedSystem(
    replace(
        _THEIRS,
        attention="plain",
        sequence_parallel=False,
        gradient_bytes=2,
        host_seconds=_HOST_SECONDS,
        module_gathers=ModuleGathers(prefetch_elements=1e7, bucket_elements=1e7),
    ),
    _NOTHING_HIDDEN,
)
"""DeepSpeed v0.4.2 of 28 June 2021 with ZeRO 3, its keys from DeepSpeedExamples'
`Megatron-LM-v1.1.5-ZeRO3/examples/ds_zero_stage_3_config.json`: prefetch and reduce buckets of 1e7 elements,
no offload, one accumulation step. Kernels are Megatron-LM v1.1.5's: fused softmax, norm and GeLU, no flash
attention."""

MEGATRON_2022 = PublishedSystem(replace(MEGATRON_2021.profile, hides_input_grad_comm=True), _NOTHING_HIDDEN)
"""Megatron-LM of arXiv 2205.05198. The backward's all-reduces overlap with the weights' gradients, by default
from its commit cf7efd4f5a of 30 August 2021 on; with sequence parallelism its reduce-scatters do."""

MEGATRON_2022_SEQUENCE = PublishedSystem(
    replace(MEGATRON_2022.profile, sequence_parallel=True), _NOTHING_HIDDEN
)
"""Megatron-LM of arXiv 2205.05198 with sequence parallelism."""

MEGATRON_2023 = PublishedSystem(
    replace(
        _THEIRS,
        attention="flash",
        fused=False,
        exchange_seconds=_EXCHANGE_SECONDS,
        dp_comm_at_ends=True,
        host_seconds=_MEGASCALE_HOST_SECONDS + _CODE_SECONDS,
    ),
    _NOTHING_HIDDEN,
)
"""Megatron-LM as MegaScale's baseline: bf16 with float32 gradients, distributed optimizer, FlashAttention;
norm and GeLU are unfused "fine-grained kernels" (arXiv 2402.15627, section 3.3). Its code has
`hides_input_grad_comm` as well, but that would make the predictions of its rows faster still. The wait that
the published times contain instead is unknown."""

MEGASCALE = PublishedSystem(
    replace(_THEIRS, host_seconds=_MEGASCALE_HOST_SECONDS, tensor_parts=_TENSOR_PARTS),
    OverlapConfig(optimizer=False),
)
"""MegaScale of arXiv 2402.15627, section 3: parameters are gathered from the start of an iteration on."""

MEGATRON_CORE = PublishedSystem(
    replace(_THEIRS, host_seconds=_HOST_SECONDS, tensor_parts=_TENSOR_PARTS), OverlapConfig()
)
"""Megatron-Core r0.8.0, all its overlaps on."""

LLAMA_3 = PublishedSystem(replace(_THEIRS, host_seconds=_HOST_SECONDS), OverlapConfig(tensor=False))
"""Llama 3 of arXiv 2407.21783, section 3.3.2: pipeline and FSDP are overlapped; the paper does not describe
tensor parallelism."""
