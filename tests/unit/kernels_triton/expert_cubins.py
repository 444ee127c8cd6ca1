"""Compiles the kernels of experts for sm_90, without a GPU: a line of JSON for each. Run by
test_triton_cubins.py in a process of its own, for Triton's interpreter must be off.

python expert_cubins.py
"""

import json
from collections.abc import Iterator
from typing import Any

import torch
import triton
from attention_cubins import resources
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from myriad.kernels.triton import expert_kernels, grouped_kernels

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
INDICES = ("places_pointer", "begins_pointer", "pairs_pointer", "tokens_pointer")
ADDRESSES = ("weights_pointer", "biases_pointer", "totals_pointer")


def cases() -> Iterator[tuple[str, Any, torch.dtype, dict[str, Any]]]:
    """Name, kernel, type of the values, constants: as they are launched. Products forward and backward
    differ in which stride of a weight is 1."""
    for dtype in TYPES:
        how = grouped_kernels.tiles(dtype)
        sizes = {"row_size": how["row"], "column_size": how["column"], "inner_size": how["inner"]}
        plain = {"upcast": False, "precision": how["precision"]}
        for unit, has_bias in (("weight_column", True), ("weight_row", False)):
            flags = {**sizes, **plain, "groups": 128, "has_bias": has_bias, unit: 1}
            yield f"product {unit}", grouped_kernels.product_kernel, dtype, flags
        flags = {"output_size": how["row"], "input_size": how["column"], "row_size": how["inner"], **plain}
        for accumulate in (True, False):
            yield "weights", grouped_kernels.weight_kernel, dtype, {**flags, "accumulate": accumulate}
        for has_gates in (True, False):
            yield "sums", expert_kernels.sum_kernel, dtype, {"has_gates": has_gates, "block": 1024}
        yield "gates", expert_kernels.gradient_kernel, dtype, {"block": 1024}


def compiled(name: str, kernel: Any, dtype: torch.dtype, constants: dict[str, Any]) -> dict[str, Any]:
    """Of matrices that are contiguous, whose lengths are multiples of 16."""
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            continue
        signature[argument] = TYPES[dtype] if argument.endswith("_pointer") else "i32"
        if argument in INDICES + ADDRESSES:
            signature[argument] = "*i64"
        elif argument == "ends_pointer":
            signature[argument] = "*i32"
        elif "gates_pointer" in argument:
            signature[argument] = "*fp32"
        if argument not in ("num_groups", "num_tokens", "num_pairs"):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    is_product = name.startswith(("product", "weights"))
    options = grouped_kernels.tiles(dtype)["options"] if is_product else {"num_warps": 4}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, stack = resources(made.asm["cubin"])
    return {
        "kernel": name,
        "type": TYPES[dtype][1:],
        "shared_bytes": made.metadata.shared,
        "registers": registers,
        "stack_bytes": stack,
        "tensor_core_products": made.asm["ptx"].count("wgmma.mma_async"),
    }


if __name__ == "__main__":
    for case in cases():
        print(json.dumps(compiled(*case)), flush=True)
