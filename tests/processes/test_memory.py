"""If these break: a rank holds more memory, or other memory, than the table of `myriad.parallel.chunk` and
`docs/concepts/memory.md` say."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ranks import run_ranks

from myriad.comm.layout import Layout


def load_benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "memory" / "memory.py"
    spec = importlib.util.spec_from_file_location("memory_benchmark", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["memory_benchmark"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


BENCHMARK: Any = load_benchmark()
SMALL = {"layers": 4, "hidden": 32, "vocabulary": 90, "bias": True, "norm": "layer"}


@pytest.mark.parametrize(
    ("dp", "dtype", "tied"), [(3, torch.float32, True), (2, torch.bfloat16, False)], ids=str
)
def test_a_rank_holds_to_the_byte_what_the_formula_predicts(dp: int, dtype: torch.dtype, tied: bool) -> None:
    layouts = [
        Layout(dp=dp, zero=zero, reduce=reduce, virtual_stages=3) for zero, reduce in BENCHMARK.SETTINGS
    ]
    model = BENCHMARK.MODEL.model_copy(update=SMALL | {"tied": tied})
    for rank in run_ranks(dp, BENCHMARK.measure, layouts, dtype, model):
        for layout, (found, sizes) in zip(layouts, rank, strict=True):
            assert found == BENCHMARK.formula(layout, dtype, sizes), f"zero {layout.zero} {layout.reduce}"


def test_more_sharding_never_holds_more_between_steps() -> None:
    sizes = BENCHMARK.Sizes(stages=(4000, 4000, 4000), tied=0)
    for dtype in (torch.float32, torch.bfloat16):
        rest = [BENCHMARK.formula(Layout(dp=4, zero=zero), dtype, sizes).stepped.total for zero in range(4)]
        assert rest == sorted(rest, reverse=True)
