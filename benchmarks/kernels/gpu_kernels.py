"""Operators of `benchmarks/kernels/gpu.py`: forward and backward of each, by each contender."""

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch.nn import functional as F

import gpu_float8
from gpu_timing import measured_seconds
from myriad.kernels.activation import activate
from myriad.kernels.attention import attention_by, attention_reference, split_heads
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.attention_choice import (
    AttentionPath,
    AttentionShape,
    FastestAttention,
    Scores,
    hindrance,
)
from myriad.kernels.attention_pieces import Joined, PieceGradients, join_pieces
from myriad.kernels.choice import has_triton
from myriad.kernels.config import Kernels
from myriad.kernels.cross_entropy import linear_cross_entropy
from myriad.kernels.documents import Documents
from myriad.kernels.float8 import multiplies_float8
from myriad.kernels.norm import LayerNorm, RMSNorm
from myriad.kernels.ring_plan import ring_plan
from myriad.kernels.rotary import Rotary, rotary_turns
from myriad.model.boundary import Boundary

__all__ = ["Ceilings", "ceilings", "print_ceilings", "print_kernels", "quickest_paths"]


class Ceilings(NamedTuple):
    """What the device reaches."""

    bytes_per_second: float
    """Rate of a copy, reads and writes together."""
    flops_per_second: float
    """Rate of a large bfloat16 product."""
    float8_flops_per_second: float | None
    """Rate of a float8 product with ready operands; None if the device has no float8."""


class Sizes(NamedTuple):
    """Dimensions of the measured operators."""

    tokens: int
    hidden: int
    ffn: int
    vocabulary: int
    square: int
    sequences: tuple[int, ...]
    windows: tuple[int | None, ...]
    heads: Heads
    batch_tokens: int


LARGE = Sizes(8192, 4096, 14336, 128256, 8192, (2048, 8192), (None, 512), Heads(32, 8, 128), 16384)
SMALL = Sizes(64, 64, 128, 512, 128, (64, 128), (None, 32), Heads(2, 1, 64), 128)


@dataclass
class Case:
    """An operator, the work it must do at least, and who does it."""

    name: str
    num_bytes: float
    flops: float
    contenders: dict[str, Callable[[], object]]


def ceilings(device: torch.device, small: bool) -> Ceilings:
    """Measured now, on this device."""
    size = (SMALL if small else LARGE).square
    source = torch.empty(2**20 if small else 2**29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copied = 2 * source.numel() / measured_seconds(lambda: target.copy_(source), device)
    a, b = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    flops = 2.0 * size**3
    product = flops / measured_seconds(lambda: a @ b, device)
    if not multiplies_float8(device):
        return Ceilings(copied, product, None)
    one = torch.ones((), device=device)
    x, y = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t().contiguous().t()
    quick = partial(torch._scaled_mm, x, y, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)
    return Ceilings(copied, product, flops / measured_seconds(quick, device))


def print_ceilings(found: Ceilings) -> None:
    """One line."""
    quick = found.float8_flops_per_second
    told = f"{quick / 1e12:,.3g} TFLOP/s" if quick else "no such instructions"
    print(
        f"ceilings: copy {found.bytes_per_second / 1e9:,.4g} GB/s, bf16 product "
        f"{found.flops_per_second / 1e12:,.4g} TFLOP/s, float8 {told}"
    )


def both_ways(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> Callable[[], object]:
    """Forward, and the gradients of all inputs that want one."""
    wanted = [x for x in inputs if x.requires_grad]
    grad: list[torch.Tensor] = []

    def run() -> object:
        out = function(*inputs)
        if not grad:
            grad.append(torch.randn_like(out))
        return torch.autograd.grad(out, wanted, grad[0])

    return run


def _liger(module: str, name: str) -> Any:
    """An operator of Liger, where that is installed and the device is one of its."""
    try:
        return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply
    except (ImportError, AttributeError):
        return None


def _values(device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_()


def cases(device: torch.device, sizes: Sizes, compiles: bool) -> Iterator[Case]:
    """Each made when it is asked for, so that memory is given back."""
    yield from _streaming(device, sizes, compiles)
    yield _cross_entropy(device, sizes)
    yield from _float8(device, sizes)
    for sequence in sizes.sequences:
        for window in sizes.windows:
            yield _attention(device, sizes, sequence, window)
    sequence, window = sizes.batch_tokens, sizes.windows[-1]
    yield _pieces(device, sizes, "full", None, sequence)
    yield _pieces(device, sizes, f"window {window}", window, sequence)
    yield _pieces(device, sizes, f"documents of {sequence // 32}", None, sequence // 32)


def _streaming(device: torch.device, sizes: Sizes, compiles: bool) -> Iterator[Case]:
    """Operators that only read and write: the least bytes are inputs and outputs, once each way."""
    tokens, hidden, ffn = sizes.tokens, sizes.hidden, sizes.ffn
    liger = device.type == "cuda"
    x, value = _values(device, tokens, hidden), 2.0 * tokens * hidden
    for name, make in (("RMSNorm", RMSNorm), ("LayerNorm", partial(LayerNorm, bias=True))):
        norms = {kernels: make(hidden, 1e-5, kernels=kernels) for kernels in ("auto", "plain")}
        for norm in norms.values():
            norm.to(device)
            norm.weight.data.fill_(1.0)
            if norm.bias is not None:
                norm.bias.data.zero_()
        contenders = {"myriad": norms["auto"], "torch eager": norms["plain"]}
        if compiles:
            contenders["torch.compile"] = torch.compile(norms["plain"])
        yield Case(name, 5 * value, 0, {n: both_ways(f, x) for n, f in contenders.items()})
    up, wide = _values(device, tokens, 2 * ffn), 2.0 * tokens * ffn
    swiglu = {
        "myriad": partial(activate, "swiglu"),
        "torch eager": _plain_swiglu,
    }
    if compiles:
        swiglu["torch.compile"] = torch.compile(_plain_swiglu)
    runs = {n: both_ways(f, up) for n, f in swiglu.items()}
    if liger and (found := _liger("swiglu", "LigerSiLUMulFunction")):
        gate, side = (part.detach().contiguous().requires_grad_() for part in up.chunk(2, -1))
        runs["liger"] = both_ways(found, gate, side)
    yield Case("SwiGLU", 8 * wide, 0, runs)
    del up
    inner, bias = _values(device, tokens, ffn), _values(device, ffn)
    gelu = {"myriad": partial(activate, "gelu"), "torch eager": _plain_gelu}
    if compiles:
        gelu["torch.compile"] = torch.compile(_plain_gelu)
    yield Case("GELU with bias", 5 * wide, 0, {n: both_ways(f, inner, bias) for n, f in gelu.items()})
    del inner
    heads = sizes.heads
    fused = _values(device, 1, tokens, (heads.num_heads + 2 * heads.num_kv_heads) * heads.width)
    turns = rotary_turns(Rotary(10000.0, heads.width), tokens, device)

    def heads_of(x: torch.Tensor, kernels: Kernels) -> torch.Tensor:
        return torch.cat(split_heads(x, heads, turns, kernels), 2)

    contenders: dict[str, Kernels] = {"myriad": "auto", "torch eager": "plain"}
    runs = {name: both_ways(partial(heads_of, kernels=kind), fused) for name, kind in contenders.items()}
    yield Case("rotary", 4 * 2.0 * fused.numel(), 0, runs)


def _plain_swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _plain_gelu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.gelu(x + bias)


def _cross_entropy(device: torch.device, sizes: Sizes) -> Case:
    """Output projection and loss: three products."""
    x, weight = _values(device, sizes.tokens, sizes.hidden), _values(device, sizes.vocabulary, sizes.hidden)
    targets = torch.randint(sizes.vocabulary, (sizes.tokens,), device=device)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, weight, targets, Boundary(), sizes.vocabulary)

    def plain(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy((x @ weight.t()).float(), targets, reduction="sum")

    runs = {"myriad": both_ways(ours, x, weight), "torch eager": both_ways(plain, x, weight)}
    found = _liger("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction")
    if found and device.type == "cuda":
        runs["liger"] = both_ways(lambda x, weight: found(x, weight, targets)[0], x, weight)
    return Case("output and loss", 0, 6.0 * sizes.tokens * sizes.hidden * sizes.vocabulary, runs)


def _float8(device: torch.device, sizes: Sizes) -> Iterator[Case]:
    """Making both forms of an operand, and the three products of an MLP's first matrix with that."""
    tokens, inner, outer = sizes.tokens, sizes.hidden, sizes.ffn
    x, weight = _values(device, tokens, inner).detach(), _values(device, outer, inner).detach()
    grad = torch.randn(tokens, outer, device=device, dtype=torch.bfloat16)
    if device.type == "cpu" or multiplies_float8(device):
        for kind, name in gpu_float8.KINDS.items():
            yield Case(name, gpu_float8.moved_bytes(grad, kind), 0, gpu_float8.makers(grad, kind))
    yield Case("MLP's first matrix", 0, 6.0 * tokens * inner * outer, gpu_float8.products(x, weight, grad))


def _shape(device: torch.device, sizes: Sizes, sequence: int, window: int | None) -> AttentionShape:
    return AttentionShape(device.type, "bfloat16", sequence, sizes.heads.width, window)


def _attention(device: torch.device, sizes: Sizes, sequence: int, window: int | None) -> Case:
    """Every path that takes the shape; of the FLOPs the attended pairs alone count."""
    batch, heads = max(1, sizes.batch_tokens // sequence), sizes.heads
    shape = _shape(device, sizes, sequence, window)
    q, k, v = (
        _values(device, batch, sequence, count, heads.width)
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)
    )
    able = [path for path in get_args(AttentionPath) if path != "blocks" and not hindrance(path, shape)]
    if device.type == "cpu":
        able = [path for path in able if path not in ("flex", "triton")]
    runs: dict[str, Callable[[], object]] = {
        path: both_ways(partial(attention_by, path, window=window), q, k, v) for path in able
    }
    if not runs:
        runs["formula"] = both_ways(partial(attention_reference, window=window), q, k, v)
    span = min(window or sequence, sequence)
    pairs = span * sequence - span * (span - 1) / 2
    flops = 3.5 * 4.0 * batch * heads.num_heads * heads.width * pairs
    return Case(f"attention, {sequence}, {f'window {window}' if window else 'full'}", 0, flops, runs)


def _pieces(device: torch.device, sizes: Sizes, name: str, window: int | None, document: int) -> Case:
    """A rank of four that share sequences, with its own keys: sequences of documents of that length."""
    sequence, heads, ranks = sizes.batch_tokens, sizes.heads, 4
    documents = Documents(torch.empty(0), [[document] * (sequence // document)])
    pieces = ring_plan(sequence, window, 1, ranks, documents).steps[0]
    q, k, v, wave = (
        _values(device, 1, sequence // ranks, count, heads.width).detach()
        for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads, heads.num_heads)
    )
    sums = torch.zeros(2, *k.shape, device=device)

    def run(kernels: Kernels) -> object:
        joined = Joined.nothing(q)
        join_pieces(joined, q, k, v, pieces, Scores(), kernels)
        gradients = PieceGradients(wave, q, joined._replace(out=joined.out.to(q.dtype)), Scores(), kernels)
        gradients.add(pieces, k, v, sums[0], sums[1])
        return gradients

    flops = 3.5 * 4.0 * heads.num_heads * heads.width * sum(piece.num_pairs for piece in pieces)
    able: tuple[Kernels, ...] = ("plain", "triton") if device.type == "cuda" and has_triton() else ("plain",)
    return Case(f"pieces, {name}", 0, flops, {kernels: partial(run, kernels) for kernels in able})


def print_kernels(
    device: torch.device, limits: Ceilings, *, small: bool, compiles: bool, deadline: float
) -> None:
    """The table."""
    sizes = SMALL if small else LARGE
    print(f"\n{'forward and backward':32}{'by':>16}{'ms':>10}{'achieved':>20}{'of ceiling':>12}")
    for case in cases(device, sizes, compiles):
        if time.monotonic() > deadline:
            print(f"{case.name:32}{'left out: no time':>16}")
            continue
        for name, run in case.contenders.items():
            print(_row(case, name, run, device, limits), flush=True)


def _row(case: Case, name: str, run: Callable[[], object], device: torch.device, limits: Ceilings) -> str:
    try:
        seconds = measured_seconds(run, device)
    except (RuntimeError, NotImplementedError, TypeError) as error:
        return f"{case.name:32}{name:>16}{'-':>10}   {str(error).splitlines()[0][:60]}"
    if case.flops:
        quick = limits.float8_flops_per_second if name.startswith("float8") else None
        rate, ceiling = case.flops / seconds, quick or limits.flops_per_second
        achieved = f"{rate / 1e12:.4g} TFLOP/s"
    else:
        rate, ceiling = case.num_bytes / seconds, limits.bytes_per_second
        achieved = f"{rate / 1e9:.4g} GB/s"
    return f"{case.name:32}{name:>16}{1e3 * seconds:>10.3f}{achieved:>20}{rate / ceiling:>12.0%}"


def quickest_paths(device: torch.device, small: bool) -> list[FastestAttention]:
    """Return the path with the quickest forward and backward for each shape."""
    sizes = SMALL if small else LARGE
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = []
    for sequence in sizes.sequences:
        for window in sizes.windows:
            taken = {}
            for path, run in _attention(device, sizes, sequence, window).contenders.items():
                try:
                    taken[path] = measured_seconds(run, device)
                except (RuntimeError, NotImplementedError, TypeError) as error:
                    print(f"{sequence}, {window}, {path}: {str(error).splitlines()[0][:80]}")
            best: Any = min(taken, key=lambda path: taken[path])
            told = ", ".join(f"{path} {1e3 * seconds:.3f}" for path, seconds in taken.items())
            print(f"attention {sequence}, window {window}: {best} ({told} ms)", flush=True)
            found.append(FastestAttention(name, "bfloat16", sequence, sizes.heads.width, window, best))
    return found
