"""How the systems behind the published tables compute, as far as they say it.

What a paper leaves open is open here too, and fixed by one rule for all rows of all tables (`published`).
What had to be assumed stands beside it.
"""

from dataclasses import dataclass, replace

from myriad.planner.module_gathers import ModuleGathers
from myriad.planner.work import Practice
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
    "System",
]

_EXCHANGE_SECONDS = 9e-4
"""Of a coupled send and receive, besides its message: the device is waited for, and then for whatever the
slower neighbour does. Fit to MegaScale's table 3, row "PP overlap"."""
_HOST_SECONDS = 0.04
"""Of an iteration of Megatron-LM: the batch's broadcast, the optimizer's checks, logging. Assumed."""
_MEGASCALE_HOST_SECONDS = 0.15
"""Of an iteration at MegaScale: fit to its table 3's last row, whose batch is three times as large."""
_CODE_SECONDS = 0.20
"""What MegaScale's data pipeline and "removal of problematic code" gained (its table 3: 1.8 % of 11.4 s)."""

_TENSOR_PARTS = 4
"""In which tensors that travel behind a product are cut: Transformer Engine's ``num_splits``. MegaScale does
not state its own."""


@dataclass(frozen=True)
class System:
    """A framework at one time."""

    practice: Practice
    overlap: OverlapConfig


_THEIRS = Practice(fused_loss=False, sums_in_norms=False)
"""Of all of them: Megatron-LM makes a residual sum with the bias and dropout before it
(`megatron/core/fusions/fused_bias_dropout.py`), not with the norm after it; no other's paper says more."""

_NOTHING_HIDDEN = OverlapConfig(pipeline=False, data=False, tensor=False, optimizer=False)

MEGATRON_2021 = System(
    replace(
        _THEIRS,
        attention="plain",
        exchange_seconds=_EXCHANGE_SECONDS,
        sequence_parallel=False,
        gradient_bytes=2,
        at_the_ends=True,
        host_seconds=_HOST_SECONDS,
    ),
    _NOTHING_HIDDEN,
)
"""Megatron-LM of arXiv 2104.04473: fp16 gradients, no flash attention, no sequence parallelism."""

MEGATRON_2_4 = System(replace(MEGATRON_2021.practice, stages_apart=True), _NOTHING_HIDDEN)
"""Megatron-LM v2.4 of July 2021, by its sources of June to August: `p2p_communication.py` waits for every
send and receive and then for the device; `model/distributed.py` sums gradients after the last backward, in
fp16; `mpu/initialize.py` puts replicas of a stage next to each other and stages furthest apart. The
backward's sums behind weights' gradients came on 30 August 2021."""

DEEPSPEED_0_4_2 = System(
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

MEGATRON_2022 = System(replace(MEGATRON_2021.practice, sums_hide=True), _NOTHING_HIDDEN)
"""Megatron-LM of arXiv 2205.05198: the backward's sums travel behind the weights' gradients, by default from
its commit cf7efd4f5a of 30 August 2021 on; with sequence parallelism its scatters do."""

MEGATRON_2022_SEQUENCE = System(replace(MEGATRON_2022.practice, sequence_parallel=True), _NOTHING_HIDDEN)
"""The same with sequence parallelism."""

MEGATRON_2023 = System(
    replace(
        _THEIRS,
        attention="flash",
        fused=False,
        exchange_seconds=_EXCHANGE_SECONDS,
        at_the_ends=True,
        host_seconds=_MEGASCALE_HOST_SECONDS + _CODE_SECONDS,
    ),
    _NOTHING_HIDDEN,
)
"""Megatron-LM as MegaScale's baseline: bf16 with float32 gradients, distributed optimizer, FlashAttention;
norm and GeLU of "fine-grained kernels" (arXiv 2402.15627, section 3.3). Its code has `sums_hide` too, but
with that its rows would be predicted quicker still: what waits there instead is not known."""

MEGASCALE = System(
    replace(_THEIRS, host_seconds=_MEGASCALE_HOST_SECONDS, tensor_parts=_TENSOR_PARTS),
    OverlapConfig(optimizer=False),
)
"""arXiv 2402.15627, section 3: parameters are gathered from the start of an iteration on."""

MEGATRON_CORE = System(
    replace(_THEIRS, host_seconds=_HOST_SECONDS, tensor_parts=_TENSOR_PARTS), OverlapConfig()
)
"""Megatron-Core r0.8.0, all its overlaps on."""

LLAMA_3 = System(replace(_THEIRS, host_seconds=_HOST_SECONDS), OverlapConfig(tensor=False))
"""arXiv 2407.21783, section 3.3.2: pipeline and FSDP are overlapped; of tensor parallelism it says
nothing."""
