"""Compiles the attention kernels for sm_90, without a GPU: a line of JSON for each. Run by
test_triton_cubins.py in a process of its own, for Triton's interpreter must be off.

python attention_cubins.py backward_keys:128:bfloat16 backward_keys:128:bfloat16:pieces

``pieces``: of ranks that share sequences, with a bound of scores; results are added to earlier ones.
``short``: in the tiles of short pieces."""

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

from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_flash import FlashCall
from myriad.kernels.triton import attention_backward, attention_forward

_TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def compiled(name: str, width: int, dtype: torch.dtype, *, pieces: bool, short: bool) -> dict[str, Any]:
    """One kernel, as it would be launched for rows of that head size and type."""
    how = Scores(softcap=50.0 if pieces else None)
    constants = FlashCall(width, 2, dtype, how, adds=pieces, short=short).constants(name)
    constants |= {"has_sinks": not pieces} if name == "forward" else {}
    options = {key: constants.pop(key) for key in ("num_warps", "num_stages")}
    kernel = getattr(attention_forward if name == "forward" else attention_backward, name)
    signature, attributes = {}, {}
    results = ("out_pointer", "grad_q_pointer", "grad_k_pointer", "grad_v_pointer") if pieces else ()
    for index, argument in enumerate(kernel.arg_names):
        floats = argument in ("logs_pointer", "products_pointer", *results)
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("tiles_pointer", "ranges_pointer"):
            signature[argument] = "*i32"
        elif argument.endswith("_pointer"):
            signature[argument] = "*fp32" if floats else _TYPES[dtype]
        else:
            signature[argument] = "fp32" if argument.endswith(("scale", "gain")) else "i32"
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
        "type": str(dtype).removeprefix("torch."),
        "pieces": pieces,
        "short": short,
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
        name, width, dtype, *more = line.split(":")
        kinds = {kind: kind in more for kind in ("pieces", "short")}
        found = compiled(name, int(width), getattr(torch, dtype), **kinds)
        print(json.dumps(found), flush=True)
