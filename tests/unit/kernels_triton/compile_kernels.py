"""Compiles every kernel of `myriad.kernels` for sm_90, without a GPU: a line for each cubin.

python compile_kernels.py bf16
"""

from collections.abc import Iterator
from typing import Any, get_args

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from myriad.kernels.config import GATED, Activation
from myriad.kernels.triton import activation_kernels as triton_activation
from myriad.kernels.triton import cross_entropy_kernels as triton_cross_entropy
from myriad.kernels.triton import norm_kernels
from myriad.kernels.triton import optimizer_kernels as triton_optimizer
from myriad.kernels.triton import rotary_kernels as triton_rotary

POINTERS = {
    "means weight_sums bias_sums left_weight left_bias left_weight_total left_bias_total "
    "roots turns facts tops totals logits values gradients exp_avg exp_avg_sq "
    "squares rates updates stays": "*fp32",
    "targets starts stops owners": "*i64",
    "x branch weight bias stream y grad grad_y grad_stream out q k v fused": "",
}
NUMBERS = {
    "epsilon learning_rate kept_ratio scale beta1 rest1 beta2 rest2 correction1 root_correction2 "
    "weight_decay gain": "fp32",
    "x_stride branch_stride grad_y_stride grad_stream_stride stream_stride batch_stride position_stride "
    "head_stride turns_stride stride out_stride rows width size sequence num_heads num_pairs first_row "
    "num_valid q_batch q_position q_head k_batch k_position k_head v_batch v_position v_head "
    "y_batch y_position fused_batch fused_position num_kv_heads left_programs left_width": "i32",
}
TYPES = {
    name: kind for table in (POINTERS, NUMBERS) for names, kind in table.items() for name in names.split()
}


def cases() -> Iterator[tuple[Any, dict[str, Any]]]:
    """Kernels with their constants: every branch at least once."""
    for layer in (True, False):
        flags = {"IS_LAYER": layer, "HAS_BIAS": layer, "BLOCK": 4096}
        yield norm_kernels.forward_kernel, flags | {"HAS_BRANCH": layer}
        yield norm_kernels.backward_kernel, flags | {"HAS_STREAM": layer, "NUM_LEFT": 1 + layer}
        yield norm_kernels.wide_forward_kernel, flags | {"HAS_BRANCH": layer}
        yield norm_kernels.wide_backward_kernel, flags | {"HAS_STREAM": layer, "NUM_LEFT": 1 + layer}
    for name in get_args(Activation):
        flags = {"NAME": name, "IS_GATED": name in GATED, "HAS_BIAS": name != "relu2", "BLOCK": 1024}
        yield triton_activation.forward_kernel, flags
        yield triton_activation.backward_kernel, flags
    for kernel in (triton_rotary.turn_kernel, triton_rotary.join_kernel):
        yield kernel, {"HEADS": 16, "PAIRS": 64}
    yield triton_cross_entropy.facts_kernel, {"BLOCK": 4096}
    yield triton_cross_entropy.gradient_kernel, {"BLOCK": 4096}
    for may_stay in (True, False):
        yield triton_optimizer.adamw_kernel, {"MAY_STAY": may_stay, "BLOCK": 2048}
    yield triton_optimizer.lamb_update_kernel, {"BLOCK": 2048}
    yield triton_optimizer.lamb_move_kernel, {"BLOCK": 2048}


def compile_kernel(kernel: Any, constants: dict[str, Any], dtype: str) -> int:
    """Bytes of the cubin."""
    signature = {
        name: "constexpr" if name in constants else TYPES[name] or f"*{dtype}" for name in kernel.arg_names
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert made.asm["cubin"].startswith(b"\x7fELF")
    return len(made.asm["cubin"])


if __name__ == "__main__":
    for number, (kernel, constants) in enumerate(cases()):
        assert compile_kernel(kernel, constants, ("fp32", "bf16", "fp16", "bf16")[number % 4]) > 0
        print(f"{kernel.__module__}.{kernel.__name__}.cubin")
