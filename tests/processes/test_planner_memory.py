"""If these break: the planner says that a rank needs more or less memory than a real one does."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ranks import run_ranks

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
CASES: list[tuple[dict[str, Any], str, int, int]] = [
    ({}, "llama", 2, 2),
    ({"micro_batch": 2, "recompute": "full"}, "serial", 2, 2),
    ({"pp": 2, "schedule": "zero-bubble"}, "gpt2", 4, 4),
    ({"dp": 2, "pp": 2, "zero": 2, "reduce": "each", "virtual_stages": 2}, "gpt2", 2, 2),
    ({"dp": 2, "zero": 3}, "llama", 2, 2),
    ({"tp": 2, "micro_batch": 2}, "parallel", 2, 2),
]


@pytest.mark.parametrize(("layout", "model", "micro_batches", "value_bytes"), CASES, ids=str)
def test_a_rank_needs_what_the_planner_predicts(
    layout: dict[str, Any], model: str, micro_batches: int, value_bytes: int
) -> None:
    case = BENCHMARK.Case(layout, model, micro_batches, value_bytes)
    ranks = run_ranks(case.work.layout.world, BENCHMARK.measure, case)
    assert all(abs(error) < 0.05 for error in BENCHMARK.errors_of(case, ranks)), case
