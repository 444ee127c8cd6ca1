"""If these break: the planner says that a rank needs more or less memory than a real one does."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.usefixtures("dynamo")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "memory"


def load_benchmark() -> ModuleType:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location(
            "planner_memory_benchmark", BENCHMARKS / "planner_memory.py"
        )
        assert spec is not None and spec.loader is not None
        module = sys.modules["planner_memory_benchmark"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(BENCHMARKS))


BENCHMARK: Any = load_benchmark()
GPT2 = BENCHMARK.GPT2.model_copy(update={"hidden": 128, "vocabulary": 4096})
LLAMA = BENCHMARK.LLAMA.model_copy(
    update={"layers": 4, "hidden": 128, "ffn_hidden": 352, "sequence": 384, "vocabulary": 2048}
)
SMALL = GPT2.model_copy(update={"layers": 2, "vocabulary": 512, "sequence": 128})
SHORT = BENCHMARK.PARALLEL.model_copy(
    update={"layers": 2, "hidden": 128, "sequence": 256, "window": 64, "vocabulary": 2048}
)
EXPERTS: dict[str, Any] = {
    "layers": 4, "position": "rotary", "norm": "rms", "bias": False, "experts": 8, "expert_hidden": 256,
    "dense_layers": 1, "router_groups": 4, "router_group_limit": 2, "balance_bias_rate": 0.001,
    "shared_experts": 1, "shared_expert_gate": True,
}  # fmt: skip
MIXED = GPT2.model_copy(update=EXPERTS)
SMALL_MOE = BENCHMARK.MOE.model_copy(
    update={"layers": 2, "hidden": 128, "expert_hidden": 128, "vocabulary": 2048}
)
OSS: dict[str, Any] = {
    "bias": True, "attention_bias": "all", "router_logit_bias": True, "attention_sinks": True,
    "activation": "clamped_swiglu", "window": 64, "window_pattern": (True, False), "kv_heads": 2,
}  # fmt: skip
BENCHMARK.MODELS |= {"gpt2": GPT2, "llama": LLAMA, "gpt-oss": SMALL_MOE.model_copy(update=OSS)}
BENCHMARK.MODELS |= {"small": SMALL, "short parallel": SHORT, "experts": MIXED, "small-moe": SMALL_MOE}
CASES: list[tuple[dict[str, Any], str, int, int]] = [
    ({}, "llama", 2, 4),
    ({"micro_batch": 2, "recompute": "full"}, "gpt2", 2, 4),
    ({"pp": 2, "schedule": "zero-bubble"}, "gpt2", 4, 4),
    ({"dp": 2, "pp": 2, "zero": 2, "reduce": "each", "virtual_stages": 2}, "gpt2", 2, 4),
    ({"tp": 2}, "short parallel", 2, 4),
    ({"cp": 2}, "small", 2, 2),
    ({"pp": 2}, "experts", 2, 4),
    ({}, "small", 2, 2),
    ({"dp": 2, "zero": 3}, "small", 2, 2),
    ({"tp": 4, "ep": 2, "etp": 2, "micro_batch": 2}, "small-moe", 2, 4),
    ({"dp": 2, "ep": 2, "zero": 1, "micro_batch": 2}, "gpt-oss", 2, 4),
]
"""Layout, model, micro-batches, and bytes of a value. Models have half the width of the benchmark's, because
most of the time is products. Cores without instructions for bfloat16 multiply it ten times as slowly, so
these cases are smaller, and closer to what is predicted."""


@pytest.mark.parametrize(("layout", "model", "micro_batches", "value_bytes"), CASES, ids=str)
def test_a_rank_needs_what_the_planner_predicts(
    layout: dict[str, Any], model: str, micro_batches: int, value_bytes: int
) -> None:
    case = BENCHMARK.Case(layout, model, micro_batches, value_bytes)
    ranks = run_ranks(case.work.layout.world, BENCHMARK.measure, case)
    most = 0.01 if value_bytes == 2 else 0.05
    assert all(abs(error) < most for error in BENCHMARK.errors_of(case, ranks)), case
