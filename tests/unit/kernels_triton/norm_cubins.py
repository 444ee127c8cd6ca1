"""Compiles the norm's kernels for sm_90 as each hidden size starts them, without a GPU: a line of JSON for
each. Run by test_triton_cubins.py in a process of its own, for Triton's interpreter must be off.

python norm_cubins.py
"""

import json
from typing import Any

import triton
from attention_cubins import resources
from compile_kernels import TYPES
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from myriad.kernels.triton import norm_kernels


def compiled(way: str, hidden: int, *, is_layer: bool) -> dict[str, Any]:
    """LayerNorm with a bias or RMSNorm in bfloat16, with the residual sum and what it adds up in passing."""
    kernel, block, warps = norm_kernels.kernel_of(way, hidden)
    own = {"HAS_BRANCH": True} if way == "forward" else {"HAS_STREAM": True, "NUM_LEFT": 1 + is_layer}
    constants = {"IS_LAYER": is_layer, "HAS_BIAS": is_layer, "BLOCK": block} | own
    signature = {
        name: "constexpr" if name in constants else TYPES[name] or "*bf16" for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"num_warps": warps, "enable_fp_fusion": True}
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    registers, stack = resources(made.asm["cubin"])
    name = "layer" if is_layer else "rms"
    return {"kernel": f"{name} {way}", "hidden": hidden, "registers": registers, "stack_bytes": stack}


if __name__ == "__main__":
    for hidden in (4096, 16384, 20480):
        for way in ("forward", "backward"):
            for is_layer in (False, True):
                print(json.dumps(compiled(way, hidden, is_layer=is_layer)), flush=True)
