"""Whole training steps on a fake CUDA device: a tensor on the wrong device or of the wrong type, a launch too
many a layer, or a moment in which the host waits for the device, none of which a CPU would show."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_library import LIBRARY, library, missing
from step_cases import STEPS

_HERE = Path(__file__).parent
_BUDGETS = {
    "Llama-3-8B": 22,
    "Llama-3-8B, float8": 58,
    "Llama-3-8B, float8, third micro-batch": 46,
    "Llama-3-8B, tp 8, micro-batch 2": 58,
    "Llama-3-8B, tp 8, micro-batch 2, overlap.tensor off": 30,
}
"""Most launches a layer, forward and backward; docs/benchmarks/launches.md has these numbers and more."""


_SUMS_BYTES = {"one": 17.5, "zero1-lamb-selective": 11.5, "zero2-each-blocks": 21.7, "zero3-full": 24.3}
"""Most bytes of gradient sums that are read and written for each parameter; see docs/concepts/step.md."""


@pytest.fixture(scope="module")
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := missing():
        pytest.skip(reason)
    cache = getattr(request.config, "cache", None)
    folder = Path(cache.mkdir("fake_cuda")) if cache is not None else tmp_path_factory.mktemp("fake_cuda")
    try:
        return library(folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the fake CUDA driver does not compile here: {error.stderr.splitlines()[:1]}")


@pytest.fixture(scope="module")
def counted(driver: Path) -> dict[str, dict[str, Any]]:
    """What a process of its own counts, by case."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {LIBRARY: str(driver), "OMP_NUM_THREADS": "1"}
    names = [*STEPS, *_BUDGETS]
    command = [sys.executable, str(_HERE / "run_cases.py"), *names]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    assert [one["name"] for one in found] == names, ended.stderr[-4000:]
    return {one["name"]: one for one in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_step_computes_on_the_gpu_alone(counted: dict[str, dict[str, Any]], name: str) -> None:
    assert counted[name].get("error") is None
    assert sum(counted[name]["launches"].values()) > 100, "it computed"


@pytest.mark.parametrize("name", STEPS)
def test_the_host_waits_for_the_device_once_a_step(counted: dict[str, dict[str, Any]], name: str) -> None:
    at_clip = {"tolist in parallel/optimizer_step.py:sum_over_world": 1}
    if STEPS[name].kernels == "plain" and STEPS[name].optimizer.name == "lamb":
        at_clip["tolist in optim/optimizer.py:begin"] = (
            1  # its ratios, which Triton's kernel reads on the device
        )
    assert counted[name].get("waits") == at_clip
    assert counted[name].get("validation_waits") == {"tolist in parallel/optimizer_step.py:sum_over_world": 1}


@pytest.mark.parametrize("name", _BUDGETS)
def test_a_layer_keeps_its_budget_of_launches(counted: dict[str, dict[str, Any]], name: str) -> None:
    assert 0 < sum(counted[name]["launches"].values()) <= _BUDGETS[name], counted[name]["launches"]


@pytest.mark.parametrize("name", _SUMS_BYTES)
def test_gradient_sums_are_not_read_or_written_more_often(
    counted: dict[str, dict[str, Any]], name: str
) -> None:
    by_operator = counted[name]["sums_bytes"]
    assert _SUMS_BYTES[name] / 2 < sum(by_operator.values()) <= _SUMS_BYTES[name], by_operator
