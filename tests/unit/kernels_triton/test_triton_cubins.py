"""The kernels of attention and of float8 build for a Hopper GPU where there is none: one that does not fit
its shared memory, or whose block sizes spill registers, would be found on the first day of a cluster only."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

WANTED = [
    "forward:128:bfloat16",
    "backward_keys:128:bfloat16",
    "forward:80:float16:pieces",
    "backward_keys:128:bfloat16:pieces",
    "backward_queries:128:bfloat16:pieces",
    "forward:128:bfloat16:short",
    "forward:128:float32:pieces",
]
SHARED_BYTES = 227 * 1024
"""Of a block on compute capability 9.0 (CUDA C++ Programming Guide, technical specifications)."""
STACK_BYTES = {"bfloat16": 96, "float16": 96, "float32": 384}
"""Of a thread, for what finds no register: 56 with Triton 3.9, none with 3.6, in float32 360 and 320."""


def told_by(script: str, *wanted: str) -> list[dict[str, Any]]:
    """In a process of its own."""
    path = Path(__file__).with_name(script)
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    told = subprocess.run([sys.executable, path, *wanted], capture_output=True, text=True, env=environment)
    assert told.returncode == 0, told.stderr[-2000:]
    return [json.loads(line) for line in told.stdout.splitlines()]


def test_kernels_compile_for_hopper_and_fit_it() -> None:
    found = told_by("attention_cubins.py", *WANTED)
    assert len(found) == len(WANTED)
    for one in found:
        assert one["shared_bytes"] <= SHARED_BYTES, one
        assert one["stack_bytes"] <= STACK_BYTES[one["type"]], one
        assert (one["tensor_core_products"] > 0) == (one["type"] != "float32"), one


def test_float8_kernels_compile_for_hopper_and_fit_it() -> None:
    found = told_by("float8_cubins.py")
    assert {one["kernel"].split()[0] for one in found} == {"largest", "cast", "product"}
    for one in found:
        assert one["shared_bytes"] <= SHARED_BYTES and one["stack_bytes"] <= 64, one
        assert (one["tensor_core_products"] > 0) == one["kernel"].startswith("product"), one
        if one["kernel"].startswith("cast"):  # two programs of 256 threads share a multiprocessor
            assert one["registers"] <= 128, one


def test_kernels_of_experts_compile_for_hopper_and_fit_it() -> None:
    found = told_by("expert_cubins.py")
    assert {one["kernel"].split()[0] for one in found} == {"product", "weights", "sums", "gates"}
    for one in found:
        assert one["shared_bytes"] <= SHARED_BYTES and one["stack_bytes"] <= 64, one
        multiplies = one["kernel"].startswith(("product", "weights")) and one["type"] == "bf16"
        assert (one["tensor_core_products"] > 0) == multiplies, one


def test_norm_kernels_keep_rows_of_any_width_in_registers() -> None:
    found = told_by("norm_cubins.py")
    assert {one["hidden"] for one in found} >= {4096, 16384, 20480}
    for one in found:
        assert one["stack_bytes"] <= 32, one
