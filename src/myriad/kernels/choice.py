"""Choice of the kernel that computes an operator, by device, type and shape. No other module chooses.

    triton     Myriad's kernel, one pass over memory forward and one backward; on CUDA with triton installed
    library    one call of PyTorch's own fused operator
    plain      PyTorch's simple operators one after another; on a CPU in pieces that stay in a core's cache

Operators call `runs_triton` with the tensor; `myriad doctor` prints `explain`. A job may request "plain", or
require "triton": then `check_kernels` raises an error before the start if a kernel cannot run. With
TRITON_INTERPRET=1 in the environment, Triton's kernels also run on a CPU if "triton" is requested, element by
element and thousands of times slower. Tests use this where there is no GPU.

No torch here, so that tools can report the choice without it.
"""

import os
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from myriad.errors import BadInputError
from myriad.kernels.config import Kernels

if TYPE_CHECKING:
    import torch

__all__ = [
    "NO_TRITON",
    "Choice",
    "Operator",
    "check_kernels",
    "choose",
    "explain",
    "fallback",
    "has_triton",
    "in_interpreter",
    "runs_triton",
]

Operator = Literal["norm", "activation", "rotary", "cross_entropy", "experts", "adamw", "lamb"]

NO_TRITON = "triton is not installed: pip install 'myriad-train[gpu]'"
_TYPES = ("float32", "bfloat16", "float16")
_MOST_WIDTH: dict[Operator, int] = {"rotary": 512}
"""Largest width of an operator's Triton kernel. One program holds the pairs of one head in registers."""
_WITHOUT: dict[Operator, tuple[Literal["library", "plain"], str]] = {
    "norm": ("library", "its fused kernel; on a CPU RMSNorm goes back through LayerNorm's"),
    "activation": ("library", "one call each way; swiglu and relu2 keep only their input"),
    "rotary": ("plain", "one complex product each way"),
    "cross_entropy": ("plain", "in chunks of tokens, whose tiles stay in cache on a CPU"),
    "experts": ("library", "one call for the products of all experts each way"),
    "adamw": ("library", "its fused step over flat memory"),
    "lamb": ("plain", "in blocks over flat memory, which stay in cache on a CPU"),
}


class Choice(NamedTuple):
    """A kernel and the reason for its choice."""

    kernel: Literal["triton", "library", "plain"]
    why: str


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Return whether triton is installed. Whether its kernels can run here is not checked."""
    return find_spec("triton") is not None


def in_interpreter() -> bool:
    """Return whether Triton's kernels run in its interpreter, on a CPU."""
    return os.environ.get("TRITON_INTERPRET", "") in ("1", "true", "on", "yes")


def _hindrance(device: str, kernels: Kernels) -> str:
    """Return why no Triton kernel runs on the device; empty if they run."""
    if kernels == "plain":
        return "plain kernels were asked for"
    if device != "cuda" and not (device == "cpu" and kernels == "triton" and in_interpreter()):
        return "no CUDA device"
    return "" if has_triton() else NO_TRITON


def choose(operator: Operator, device: str, dtype: str, width: int, kernels: Kernels) -> Choice:
    """Choose the kernel for rows of ``width`` values of ``dtype`` (e.g. "float32") on a ``device`` type (e.g.
    "cuda")."""
    hindrance = _hindrance(device, kernels)
    most = _MOST_WIDTH.get(operator, width)
    if not hindrance and dtype not in _TYPES:
        hindrance = f"{dtype} has none, only {', '.join(_TYPES)}"
    if not hindrance and width > most:
        hindrance = f"a width of {width} is more than {most}"
    if not hindrance:
        return Choice("triton", "in Triton's interpreter" if device == "cpu" else "one pass each way")
    kernel, what = _WITHOUT[operator]
    return Choice(kernel, f"{hindrance}; {what}")


_choose = lru_cache(maxsize=256)(choose)


def runs_triton(operator: Operator, x: "torch.Tensor", kernels: Kernels, width: int = 0) -> bool:
    """Return whether ``operator`` computes ``x`` with a Triton kernel."""
    device = x.device.type
    if device == "cpu" and kernels != "triton":  # shortcut for the most common case
        return False
    return _choose(operator, device, str(x.dtype)[6:], width, kernels).kernel == "triton"


def explain(device: str, dtype: str, kernels: Kernels, widths: Mapping[str, int]) -> dict[Operator, Choice]:
    """Return the choice of every operator. ``widths``: width by operator, where it decides."""
    operators: tuple[Operator, ...] = get_args(Operator)
    return {name: choose(name, device, dtype, widths.get(name, 0), kernels) for name in operators}


def check_kernels(kernels: Kernels, device: str, dtype: str, widths: Mapping[str, int]) -> None:
    """Raise `BadInputError` if "triton" is required and one of its kernels cannot run."""
    if kernels != "triton":
        return
    for name, choice in explain(device, dtype, kernels, widths).items():
        if choice.kernel != "triton":
            reason = choice.why.partition("; ")[0]
            allowed = f"auto or plain here: no kernel for {name}: {reason}"
            raise BadInputError("train.kernels", kernels, allowed)


def fallback(kernels: Kernels, device: str, dtype: str, widths: Mapping[str, int]) -> str:
    """Return a one-line notice for a GPU that lacks some Triton kernels under "auto"; else empty."""
    if kernels != "auto" or device != "cuda":
        return ""
    without = {n: c for n, c in explain(device, dtype, kernels, widths).items() if c.kernel != "triton"}
    if not without:
        return ""
    reason = next(iter(without.values())).why.partition("; ")[0]
    return f"without Triton's kernels for {', '.join(without)}: {reason}"
