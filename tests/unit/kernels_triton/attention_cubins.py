"""Compiles the attention kernels for sm_90, without a GPU: a line of JSON for each. Run by
test_triton_cubins.py in a process of its own, for Triton's interpreter must be off."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from myriad.kernels.attention_flash import Sizes
from myriad.kernels.triton import attention_backward, attention_forward

_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compiled(name: str, width: int, dtype: torch.dtype) -> dict[str, Any]:
    """One kernel, as it would be launched for rows of that head size and type."""
    constants = Sizes(1, 2048, 16, 2, width, 512, dtype, width**-0.5).constants(name)
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    kernel = getattr(attention_forward if name == "forward" else attention_backward, name)
    signature, attributes = {}, {}
    for index, argument in enumerate(kernel.arg_names):
        floats = argument in ("logs_pointer", "products_pointer")
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument.endswith("_pointer"):
            signature[argument] = "*fp32" if floats else _TYPES[dtype]
        else:
            signature[argument] = "fp32" if argument.endswith("scale") else "i32"
        if (signature[argument] == "i32" and argument not in ("window", "num_heads")) or "*" in signature[
            argument
        ]:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, stack = resources(made.asm["cubin"])
    return {
        "kernel": name,
        "width": width,
        "shared_bytes": made.metadata.shared,
        "registers": registers,
        "stack_bytes": stack,
        "tensor_core_products": made.asm["ptx"].count("wgmma.mma_async"),
    }


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes that did not fit there."""
    tool = Path(next(iter(triton.backends.nvidia.__path__))) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        told = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout)
    assert found, told
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    for line in sys.argv[1:]:
        name, width, dtype = line.split(":")
        print(json.dumps(compiled(name, int(width), getattr(torch, dtype))), flush=True)
