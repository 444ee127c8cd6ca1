"""Compiles the kernels of float8 for sm_90, without a GPU: a line of JSON for each. Run by
test_triton_cubins.py in a process of its own, for Triton's interpreter must be off.

python float8_cubins.py
"""

import json
from collections.abc import Iterator
from typing import Any

import triton
from attention_cubins import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from myriad.kernels.triton import float8_kernels, grouped_float8_kernels, scaling

POINTERS = {
    "x_pointer": "*bf16",
    "largest_pointer": "*i32",
    "rows_pointer": "*fp8e5",
    "columns_pointer": "*fp8e5",
    "a_pointer": "*fp8e5",
    "b_pointer": "*fp8e4nv",
    "grad_pointer": "*fp8e5",
    "like_pointer": "*fp8e4nv",
    "ends_pointer": "*i32",
    "weights_pointer": "*i64",
    "weight_scales_pointer": "*i64",
    "totals_pointer": "*i64",
    "out_pointer": "*bf16",
}
"""What is not here is float32."""
CAST = {"shift": 15, "size": 128, "block": 1024}
PRODUCT = {"row_size": 128, "column_size": 128, "inner_size": 128, "group": 8, "upcast": False}


def cases() -> Iterator[tuple[str, Any, dict[str, Any], dict[str, Any]]]:
    """Name, kernel, constants and options, as they are launched."""
    yield "largest", scaling.largest_kernel, {"height": 64, "width": 128}, {}
    for kind in ("tensor", "lines", "squares"):
        flags = {"kind": kind, "gives_rows": True, "gives_columns": True}
        options = {} if kind == "tensor" else {"maxnreg": 128}
        yield f"cast {kind}", scaling.cast_kernel, CAST | flags, options
    for height, accumulate in ((128, False), (1, True)):
        flags = {"b_height": height, "accumulate": accumulate}
        yield f"product {height}", float8_kernels.product_kernel, PRODUCT | flags, {"num_stages": 3}
    flags = {"size": 128, "upcast": False}
    stages = {"num_stages": 3}
    product = grouped_float8_kernels.float8_product_kernel
    yield "product of groups", product, {**flags, "groups": 128}, stages
    for accumulate in (True, False):
        weight = grouped_float8_kernels.float8_weight_kernel
        yield "product of weights", weight, {**flags, "accumulate": accumulate}, stages


def compiled(name: str, kernel: Any, constants: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Of matrices that are contiguous, whose lengths are multiples of 16."""
    given = constants | {argument: 1 for argument in kernel.arg_names if argument == "x_column"}
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in given:
            signature[argument] = "constexpr"
            continue
        pointer = argument.endswith("_pointer")
        signature[argument] = POINTERS.get(argument, "*fp32") if pointer else "i32"
        if name == "product of weights" and argument == "x_pointer":
            signature[argument] = "*fp8e4nv"
        attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, given, attributes)
    target = GPUTarget("cuda", 90, 32)
    made = triton.compile(source, target=target, options={"num_warps": 8, **options})
    registers, stack = resources(made.asm["cubin"])
    return {
        "kernel": name,
        "shared_bytes": made.metadata.shared,
        "registers": registers,
        "stack_bytes": stack,
        "tensor_core_products": made.asm["ptx"].count("wgmma.mma_async"),
    }


if __name__ == "__main__":
    for case in cases():
        print(json.dumps(compiled(*case)), flush=True)
