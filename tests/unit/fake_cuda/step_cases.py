"""The steps that are taken on a fake CUDA device: a sample in which every axis of the layout, precision,
optimizer and kind of recomputation meets others, and the shapes whose launches a layer
docs/benchmarks/launches.md lists.

No torch here: tests list the cases by it.
"""

from dataclasses import dataclass

from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout
from myriad.kernels.config import Kernels
from myriad.model.config import ModelConfig
from myriad.optim.config import OptimizerConfig, Precision
from myriad.program.config import OverlapConfig

_PLAIN, _TURNS, _FLAT = OptimizerConfig(), OverlapConfig(), CommConfig(hierarchy="flat", node_size=8)


@dataclass(frozen=True)
class StepCase:
    """One rank of a job."""

    layout: Layout
    model: ModelConfig
    precision: Precision = "bfloat16"
    optimizer: OptimizerConfig = _PLAIN
    overlap: OverlapConfig = _TURNS
    comm: CommConfig = _FLAT
    kernels: Kernels = "auto"
    micro_batches: int = 1
    rank: int = 0


_SMALL = ModelConfig(
    layers=2,
    hidden=512,
    heads=16,
    kv_heads=8,
    vocabulary=4096,
    sequence=256,
    activation="swiglu",
    norm="rms",
    tied=False,
)
_GPT = _SMALL.model_copy(
    update={"activation": "gelu", "norm": "layer", "bias": True, "position": "learned", "tied": True}
)
_DROPPING_GPT = _GPT.model_copy(update={"layers": 1, "dropout": 0.1})
_LAMB = OptimizerConfig(name="lamb")
_MUON = OptimizerConfig(name="muon")
_UNCLIPPED = OptimizerConfig(clip_norm=None)
_IN_PARTS = OverlapConfig(tensor_message=4096)
_EARLY = OverlapConfig(optimizer_in_backward=True)


def _model(**changes: object) -> ModelConfig:
    return _SMALL.model_copy(update=changes)


STEPS: dict[str, StepCase] = {
    "one": StepCase(Layout(), _SMALL, micro_batches=2),
    "one-float8-lamb-full": StepCase(Layout(recompute="full"), _SMALL, "float8", _LAMB),
    "one-offload": StepCase(
        Layout(offload_activations=1, offload_optimizer=True), _model(layers=5), micro_batches=2
    ),
    "one-early": StepCase(Layout(), _SMALL, optimizer=_UNCLIPPED, overlap=_EARLY),
    "one-window-parallel": StepCase(Layout(), _model(window=64, block="parallel")),
    "cp2": StepCase(Layout(cp=2), _SMALL),
    "cp2-window-softcap": StepCase(Layout(cp=2), _model(window=64, attention_softcap=30.0)),
    "zero1-lamb-selective": StepCase(Layout(dp=4, zero=1, recompute="selective"), _SMALL, optimizer=_LAMB),
    "zero2-each-blocks": StepCase(
        Layout(dp=4, zero=2, reduce="each"), _SMALL, "float8-blocks", micro_batches=2
    ),
    "zero3-full": StepCase(Layout(dp=4, zero=3, recompute="full"), _GPT, micro_batches=2),
    "zero3-float32": StepCase(Layout(dp=2, zero=3), _SMALL, "float32"),
    "node-int8": StepCase(
        Layout(dp=16, zero=1),
        _model(layers=1),
        comm=CommConfig(hierarchy="node", node_size=8, compress_gradients="int8", compress_parameters="int8"),
    ),
    "diloco": StepCase(Layout(dp=4), _SMALL, comm=CommConfig(hierarchy="flat", sync_every=2)),
    "tp2-gpt-dropout-selective": StepCase(
        Layout(tp=2, recompute="selective"), _DROPPING_GPT, overlap=_IN_PARTS
    ),
    "tp2-float8-lamb-full": StepCase(
        Layout(tp=2, recompute="full"), _model(layers=1), "float8", _LAMB, _IN_PARTS
    ),
    "tp2-float8-17-of-16-positions": StepCase(
        Layout(tp=2), _model(sequence=272), "float8", overlap=_IN_PARTS
    ),
    "tp2-plain": StepCase(Layout(tp=2), _SMALL, kernels="plain", optimizer=_LAMB),
    "dp2-tp2-muon": StepCase(Layout(dp=2, tp=2, zero=1), _SMALL, optimizer=_MUON),
    "pp4-full": StepCase(Layout(pp=4, recompute="full"), _SMALL, micro_batches=4, rank=1),
    "pp4-zero-bubble-float8-lamb": StepCase(
        Layout(pp=4, schedule="zero-bubble"), _SMALL, "float8", _LAMB, micro_batches=4, rank=3
    ),
    "pp2-v-tied": StepCase(
        Layout(pp=2, schedule="zero-bubble-v", virtual_stages=2), _model(tied=True), micro_batches=4
    ),
    "dp2-pp2-tp2-blocks-lamb-selective": StepCase(
        Layout(dp=2, pp=2, tp=2, zero=1, schedule="zero-bubble", recompute="selective"),
        _SMALL,
        "float8-blocks",
        _LAMB,
        micro_batches=2,
        rank=3,
    ),
}
"""By name. Ranks are chosen so that first, middle and last stages are among them."""

_LLAMA = ModelConfig(
    hidden=4096,
    heads=32,
    kv_heads=8,
    ffn_hidden=14336,
    vocabulary=32768,
    sequence=8192,
    activation="swiglu",
    norm="rms",
    tied=False,
)
_GPT_1B = ModelConfig(
    hidden=2048,
    heads=16,
    vocabulary=50304,
    sequence=2048,
    activation="gelu_tanh",
    norm="layer",
    bias=True,
    position="learned",
)
_QWEN3 = _LLAMA.model_copy(
    update={"hidden": 2048, "kv_heads": 4, "head_dim": 128, "qk_norm": "head"}
    | {"experts": 128, "experts_per_token": 8, "expert_hidden": 768}
)
_ALONE, _TP8 = Layout(), Layout(tp=8)

LAYERS: dict[str, StepCase] = {
    "Llama-3-8B": StepCase(_ALONE, _LLAMA),
    "Llama-3-8B, recompute selective": StepCase(Layout(recompute="selective"), _LLAMA),
    "Llama-3-8B, recompute full": StepCase(Layout(recompute="full"), _LLAMA),
    "Llama-3-8B, parallel block": StepCase(_ALONE, _LLAMA.model_copy(update={"block": "parallel"})),
    "Llama-3-8B, window 1,024": StepCase(_ALONE, _LLAMA.model_copy(update={"window": 1024})),
    "Llama-3-8B, float8": StepCase(_ALONE, _LLAMA, "float8"),
    "Llama-3-8B, float8-blocks": StepCase(_ALONE, _LLAMA, "float8-blocks"),
    "Llama-3-8B, float8, third micro-batch": StepCase(_ALONE, _LLAMA, "float8", micro_batches=3),
    "Llama-3-8B, float8-blocks, third micro-batch": StepCase(
        _ALONE, _LLAMA, "float8-blocks", micro_batches=3
    ),
    "Llama-3-8B, kernels plain": StepCase(_ALONE, _LLAMA, kernels="plain"),
    "GPT 1.3B": StepCase(_ALONE, _GPT_1B),
    "GPT 1.3B, dropout": StepCase(_ALONE, _GPT_1B.model_copy(update={"dropout": 0.1})),
    "Llama-3-8B, tp 8, overlap.tensor off": StepCase(_TP8, _LLAMA, overlap=OverlapConfig(tensor=None)),
    "Llama-3-8B, tp 8": StepCase(_TP8, _LLAMA),
    "Llama-3-8B, tp 8, micro-batch 2": StepCase(Layout(tp=8, micro_batch=2), _LLAMA),
    "Llama-3-8B, tp 8, micro-batch 4": StepCase(Layout(tp=8, micro_batch=4), _LLAMA),
    "Llama-3-8B, tp 8, micro-batch 2, overlap.tensor off": StepCase(
        Layout(tp=8, micro_batch=2), _LLAMA, overlap=OverlapConfig(tensor=None)
    ),
    "Llama-3-8B, tp 8, micro-batch 4, window 1,024": StepCase(
        Layout(tp=8, micro_batch=4), _LLAMA.model_copy(update={"window": 1024})
    ),
    "GPT 1.3B, tp 8, micro-batch 4": StepCase(Layout(tp=8, micro_batch=4), _GPT_1B),
    "Mixtral 8x7B": StepCase(_ALONE, _LLAMA.model_copy(update={"experts": 8})),
    "Qwen3 30B-A3B": StepCase(_ALONE, _QWEN3),
}
"""Whose launches a layer `benchmarks/kernels/launches.py` prints."""

_GPT2 = ModelConfig(
    layers=12,
    hidden=768,
    heads=12,
    vocabulary=50304,
    sequence=1024,
    activation="gelu_tanh",
    norm="layer",
    bias=True,
    position="learned",
)

CAPTURED: dict[str, StepCase] = {
    "GPT-2 124M, one sequence": StepCase(_ALONE, _GPT2),
    "GPT-2 124M, dp 8, ZeRO 2, one sequence": StepCase(Layout(dp=8, zero=2), _GPT2),
    "Llama-3-8B, 8 layers, tp 8, 4 micro-batches": StepCase(
        _TP8, _LLAMA.model_copy(update={"layers": 8}), micro_batches=4
    ),
    "Llama-3-8B, 32 layers, pp 4 (rank 1), 8 micro-batches": StepCase(
        Layout(pp=4), _LLAMA.model_copy(update={"layers": 32}), micro_batches=8, rank=1
    ),
    "Llama-3-8B, 8 layers, dp 8, ZeRO 3": StepCase(
        Layout(dp=8, zero=3), _LLAMA.model_copy(update={"layers": 8})
    ),
}
"""Whose launches a step with and without captured stages `benchmarks/kernels/launches.py --graphs` prints."""
