"""Check that this device's Triton kernels agree with their formulas. A rank runs it before it trains with
them; `myriad doctor` and tests on a GPU run it too.

Each case computes an operator and its gradients with Triton and, from the same values in float64, by the
library's simple operators. The result is the largest difference as a fraction of the largest value.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch.nn import functional as F

from myriad.kernels.activation import ACTIVATIONS, activate
from myriad.kernels.attention import attention, attention_reference, split_heads
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_pieces import Joined, PieceGradients, join_pieces
from myriad.kernels.choice import Operator, choose
from myriad.kernels.config import Kernels
from myriad.kernels.cross_entropy import linear_cross_entropy
from myriad.kernels.expert_sums import gate_gradients, sum_pairs
from myriad.kernels.float8 import BOTH, Float8, Kind, Scaling, scaled_reference, seen_reference
from myriad.kernels.gradient import GradientSink, PendingRows, accumulate_product, set_sink
from myriad.kernels.grouped import RowGroups, grouped_linear
from myriad.kernels.norm import LayerNorm, Norm, RMSNorm
from myriad.kernels.ring_plan import Piece, Pieces
from myriad.kernels.rotary import Rotary, rotary_reference, rotary_turns

__all__ = [
    "LIMITS",
    "Tried",
    "beyond_limits",
    "disagreements",
    "float8_disagreements",
    "library_disagreements",
    "library_doubts",
    "proved",
]

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Largest allowed difference: a few rounding errors. Wrong synchronisation or a wrong address exceeds it by
far."""

Tried = Operator | Literal["attention", "float8", "products", "float8 products"]
_Function = Callable[..., torch.Tensor]


class _Alone:
    """Peers of a single rank that has the whole vocabulary."""

    rank, size = 0, 1

    def start_stack(self, x: torch.Tensor) -> "_There":
        return _There(x)


class _There:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def wait(self) -> torch.Tensor:
        return self.x[None]


def _values(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """Return random values that are equal on every device, rounded to the type."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)


def _results(function: _Function, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    wave = torch.arange(y.numel(), device=y.device).view(y.shape).sin().to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, wave)]


def _norm(norm: Norm, x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return stream and normed values concatenated. The weight is an input, so that its gradient is returned
    with theirs."""
    del norm.weight
    norm.weight = weight  # type: ignore[assignment]
    return torch.cat(norm.add(x, branch))


def _cases(
    dtype: torch.dtype, device: torch.device, rows: int, width: int
) -> Iterator[tuple[Tried, list[torch.Tensor], _Function, _Function]]:
    """Yield (operator, inputs, Triton's function, the formula)."""

    def values(*shape: int, seed: int) -> torch.Tensor:
        return _values(*shape, dtype=dtype, device=device, seed=seed)

    def norms(kernels: Kernels) -> Iterator[_Function]:
        for norm in (
            RMSNorm(width, 1e-5, kernels=kernels),
            LayerNorm(width, 1e-5, bias=False, kernels=kernels),
        ):
            yield lambda *inputs, norm=norm: _norm(norm, *inputs)

    inputs = [values(rows, width, seed=1), values(rows, width, seed=2), values(width, seed=3)]
    for ours, formula in zip(norms("triton"), norms("plain"), strict=True):
        yield "norm", inputs, ours, formula
    for name, formula in ACTIVATIONS.items():
        inputs = [values(rows, 2 * width, seed=4), values(2 * width, seed=5)]
        yield (
            "activation",
            inputs,
            lambda x, bias, name=name: activate(name, x, bias, "triton"),
            lambda x, bias, formula=formula: formula(x + bias),
        )
    heads = Heads(2, 1, 64)
    turns = rotary_turns(Rotary(1e4, 64), rows, device)
    yield (
        "rotary",
        [values(2, rows, 4 * 64, seed=6)],
        lambda x: torch.cat(split_heads(x, heads, turns, "triton"), 2),
        lambda x: _turned_heads(x.cpu().unflatten(2, (4, 64)), 3).to(device),
    )
    targets = torch.arange(rows, device=device) * 7 % 1000
    yield (
        "cross_entropy",
        [values(rows, width, seed=7), values(1024, width, seed=8) * 0.2],
        lambda x, weight: linear_cross_entropy(x, weight, targets, _Alone(), 1000, kernels="triton"),
        lambda x, weight: F.cross_entropy(x @ weight[:1000].t(), targets, reduction="sum"),
    )
    window = max(1, rows // 3)
    yield (
        "attention",
        [values(2, rows, 4 * 64, seed=9)],
        lambda x: attention(x, heads, window, kernels="triton"),
        lambda x: attention_reference(*split_heads(x, heads, None), window).flatten(2),
    )


def _turned_heads(x: torch.Tensor, num_turning: int) -> torch.Tensor:
    """Return ``x`` ``[B, S, N + 2 K, D]`` with queries and keys rotated."""
    return torch.cat([rotary_reference(x[:, :, :num_turning], 1e4), x[:, :, num_turning:]], 2)


def proved(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, *, float8: bool = False
) -> tuple[Kernels, str]:
    """Return the kernels that a rank should use, and a one-line notice if "auto" falls back to plain ones.

    Triton's kernels are first tested on the rank's own device, which takes seconds, most of them for
    compilation. If they are required, they are not tested. ``float8``: test the float8 kernels too.
    """
    if (
        kernels != "auto"
        or device.type != "cuda"
        or choose("norm", "cuda", "float32", 0, kernels)[0] != "triton"
    ):
        return kernels, ""
    wrong: list[str] = []
    try:
        for one in dict.fromkeys((dtype, torch.float32)):  # optimizers always update float32 values
            wrong += beyond_limits(disagreements(one, device), one)
        if float8:
            wrong += beyond_limits(float8_disagreements(device), torch.bfloat16)
    except Exception as error:  # any error of a compiler or a driver: the library's kernels remain
        return "plain", f"without Triton's kernels: {type(error).__name__}: {error}".partition("\n")[0]
    reason = f"without Triton's kernels: not what the formulas say on this device: {', '.join(wrong)}"
    return ("plain", reason) if wrong else (kernels, "")


def library_doubts(device: torch.device, dtype: torch.dtype, *, float8: Scaling | None) -> list[str]:
    """Return a line if PyTorch's own kernels compute wrongly on this GPU.

    A step spends most of its time in them and they have no replacement, so the rank continues;
    `myriad doctor` reports the node as bad."""
    if device.type != "cuda":
        return []
    try:
        wrong = beyond_limits(library_disagreements(dtype, device, scaling=float8), dtype)
    except Exception as error:  # any error of a driver
        return [
            f"a kernel of PyTorch fails on this device: {type(error).__name__}: {error}".partition("\n")[0]
        ]
    return [f"PyTorch's kernels are wrong on this device: {', '.join(wrong)}"] if wrong else []


def beyond_limits(found: dict[Tried, float], dtype: torch.dtype) -> list[str]:
    """Return the operators whose difference exceeds the limit, with the difference; NaN exceeds it."""
    return [f"{name} by {share:.1g}" for name, share in found.items() if not share <= LIMITS[dtype]]


def disagreements(
    dtype: torch.dtype, device: torch.device, rows: int = 300, width: int = 1000
) -> dict[Tried, float]:
    """Return the largest relative difference of each operator with a kernel."""
    worst: dict[Tried, float] = {}
    for operator, inputs, ours, formula in _cases(dtype, device, rows, width):
        expected = _results(formula, [x.double() for x in inputs])
        for found, right in zip(_results(ours, inputs), expected, strict=True):
            worst[operator] = max(worst.get(operator, 0.0), _share(found, right))
    worst["norm"] = max(worst["norm"], _of_sums_left(dtype, device, rows, width))
    worst["attention"] = max(worst["attention"], _of_pieces(dtype, device, rows))
    worst["experts"] = _of_experts(dtype, device, rows, min(width, 200))
    return worst | _of_optimizers(device, rows * width) if dtype == torch.float32 else worst


def _of_sums_left(dtype: torch.dtype, device: torch.device, rows: int, width: int) -> float:
    """Return the largest difference of the gradients of two norms' weights and biases. The partial sums of
    one norm are added up by the other's backward, and those of the other at the end."""
    parameters: list[torch.Tensor] = []
    pending = PendingRows()
    ways: tuple[tuple[Kernels, torch.dtype], ...] = (("triton", dtype), ("plain", torch.float64))
    for kernels, kind in ways:
        y = _values(rows, width, dtype=dtype, device=device, seed=11).to(kind)
        for seed in (12, 13):
            norm = LayerNorm(width, 1e-5, bias=True, kernels=kernels).to(device, kind)
            for parameter in norm.parameters():
                parameter.data.copy_(_values(width, dtype=dtype, device=device, seed=seed))
                if kind == dtype:
                    set_sink(parameter, GradientSink(torch.zeros(width, device=device), pending=pending))
                parameters.append(parameter)
            y = norm(y)
        wave = torch.arange(y.numel(), device=device).view(y.shape).sin().to(y.dtype)
        y.backward(wave)
    pending.add_up()
    ours, formula = parameters[:4], parameters[4:]
    found = [parameter.sink.total for parameter in ours]  # type: ignore[attr-defined]
    return _worst(found, tuple(parameter.grad for parameter in formula if parameter.grad is not None))


def _of_pieces(dtype: torch.dtype, device: torch.device, rows: int) -> float:
    """Return the largest difference of attention in pieces, and of its gradients: scores with a bound in a
    window, of whose keys the first third is read after the others, in two pieces for the same queries."""
    cut, window, how = rows // 3, max(1, rows // 2), Scores(softcap=2.0)
    counts = enumerate((2, 1, 1, 2), start=40)
    inputs = [_values(2, rows, count, 64, dtype=dtype, device=device, seed=seed) for seed, count in counts]
    leaves = [one.double().requires_grad_() for one in inputs[:3]]
    right = attention_reference(leaves[0], leaves[1], leaves[2], window, how)
    expected = right.detach(), *torch.autograd.grad(right, leaves, inputs[3].double())
    q, k, v, wave = inputs
    sums = torch.zeros(2, *k.shape, dtype=torch.float32, device=device)
    half, early, late = cut // 2, slice(0, cut), slice(cut, rows)
    own = Piece(slice(None), late, slice(0, rows - cut), 0, window)
    parts = (slice(0, half), slice(half, cut))
    before = [own._replace(queries=slice(0, rows), keys=part, offset=-part.start) for part in parts]
    steps = [(late, Pieces([own])), (early, Pieces(one for one in before if one.sizes[1]))]
    joined = Joined.nothing(q)
    for keys, pieces in steps:
        join_pieces(joined, q, k[:, keys], v[:, keys], pieces, how, "triton")
    gradients = PieceGradients(wave, q, joined, how, "triton")
    for keys, pieces in steps:
        gradients.add(pieces, k[:, keys], v[:, keys], *sums[:, :, keys])
    return max(map(_share, (joined.out, gradients.of_queries, *sums), expected))


def _of_experts(dtype: torch.dtype, device: torch.device, rows: int, width: int) -> float:
    """Return the largest difference of the products of four experts, one of which has no row, of their
    gradients, and of the sums of two results for each token with those of their gates."""
    first, tokens = rows // 3, rows // 2
    counts = torch.tensor([first, 0, rows - 2 * first, first], device=device)
    values = [_values(rows, width, dtype=dtype, device=device, seed=seed) for seed in (30, 31)]
    (x, wave), gates = values, _values(tokens, 2, dtype=torch.float32, device=device, seed=32)
    pairs = torch.arange(2 * tokens, device=device).flip(0)
    begins = torch.arange(0, 2 * tokens, 2, device=device)
    results: list[list[torch.Tensor]] = []
    ways: tuple[tuple[Kernels, torch.dtype], ...] = (("triton", dtype), ("plain", torch.float64))
    for kernels, kind in ways:
        weights = [
            torch.nn.Parameter(_values(width, width, dtype=dtype, device=device, seed=33 + number).to(kind))
            for number in range(4)
        ]
        totals = [
            torch.ones(width, width, device=device, dtype=torch.promote_types(kind, torch.float32))
            for _ in weights
        ]
        for weight, total in zip(weights, totals, strict=True):
            set_sink(weight, GradientSink(total))
        leaf = x.detach().to(kind, copy=True).requires_grad_()
        y = grouped_linear(leaf, RowGroups(counts), weights, kernels=kernels)
        y.backward(wave.to(kind))
        assert leaf.grad is not None
        own, factors = wave[: 2 * tokens].to(kind), gates.to(totals[0].dtype)
        sums = sum_pairs(own, pairs, begins, pairs, factors, kernels)
        of_rows, of_gates = gate_gradients(sums, own, pairs // 2, pairs, factors, kernels)
        results.append([y.detach(), leaf.grad, *totals, sums, of_rows, of_gates])
    found, right = results
    return _worst(found, tuple(right))


def library_disagreements(
    dtype: torch.dtype,
    device: torch.device,
    rows: int = 320,
    width: int = 256,
    *,
    scaling: Scaling | None = None,
) -> dict[Tried, float]:
    """Return the largest relative difference between PyTorch's kernels on ``device`` and float64 formulas.

    The check covers a weight's products (forward, backward, and added to a float32 gradient), and attention
    with grouped keys on the strides of a joined projection. With ``scaling`` it also covers the three float8
    products, against operands cast on the CPU."""
    x, weight, grad = (
        _values(*shape, dtype=dtype, device=device, seed=seed)
        for seed, shape in enumerate(((rows, width), (2 * width, width), (rows, 2 * width)), start=20)
    )
    total = torch.full((2 * width, width), 16.0, device=device)
    accumulate_product(total, grad, x)
    found = [x @ weight.t(), grad @ weight, total]
    wide = [one.double() for one in (x, weight, grad)]
    right = (wide[0] @ wide[1].t(), wide[2] @ wide[1], 16.0 + wide[2].t() @ wide[0])
    heads = Heads(4, 2, 64)
    fused = [_values(2, rows, 8 * 64, dtype=dtype, device=device, seed=23)]
    ours = _results(lambda x: attention(x, heads, None), fused)
    formula = _results(
        lambda x: attention_reference(*split_heads(x, heads, None), None).flatten(2), [fused[0].double()]
    )
    worst: dict[Tried, float] = {
        "products": _worst(found, right),
        "attention": _worst(ours, tuple(formula)),
    }
    if scaling is not None:
        worst["float8 products"] = _of_float8_products(Float8(scaling), x, weight, grad)
    return worst


def _of_float8_products(how: Float8, x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> float:
    """Compare float8 products with those of operands cast on the CPU, which rounds them the same way."""
    seen_x, seen_weight = how.seen(x, weight)
    rows, columns = how.gradient(grad)
    total = torch.ones(len(weight), x.shape[1], device=x.device)
    how.add_weight_gradient(total, columns, seen_x)
    found = [how.output(seen_x, seen_weight), how.input_gradient(rows, seen_weight), total]
    exact = how._replace(kernels="plain")
    host = [one.cpu() for one in (x, weight, grad)]
    host_x, host_weight = exact.seen(host[0], host[1])
    host_rows, host_columns = exact.gradient(host[2])
    sums = torch.ones(len(weight), x.shape[1])
    exact.add_weight_gradient(sums, host_columns, host_x)
    right = (exact.output(host_x, host_weight), exact.input_gradient(host_rows, host_weight), sums)
    return _worst(found, tuple(one.to(x.device, torch.float64) for one in right))


def float8_disagreements(device: torch.device, rows: int = 144, width: int = 272) -> dict[Tried, float]:
    """Return the largest difference of the float8 kernels. Operands that are not bitwise equal to the
    reference count as 1.0; for products of blocks, added to existing values, it is the largest relative
    difference."""
    from myriad.kernels.triton.float8_kernels import add_product_of_blocks
    from myriad.kernels.triton.scaling import largest
    from myriad.kernels.triton.scaling import scaled as scaled_in_triton

    x, dtype = _values(rows, width, dtype=torch.bfloat16, device=device, seed=10), torch.float8_e4m3fn
    kinds: tuple[Kind, ...] = ("tensor", "lines", "squares")
    expected = {kind: scaled_reference(seen_reference(x, kind), dtype, kind, BOTH) for kind in kinds}
    found = {
        kind: scaled_in_triton(x, dtype, kind, largest(x) if kind == "tensor" else None, BOTH)
        for kind in kinds
    }
    parts = [
        (part.float(), right.float())
        for kind in kinds
        for form, wanted in zip(found[kind], expected[kind], strict=True)
        for part, right in zip(form, wanted, strict=True)
    ]
    worst = 0.0 if all(torch.equal(*pair) for pair in parts) else 1.0
    (lines, across), (squares, _) = expected["lines"], expected["squares"]
    for a, b in ((lines, squares), (across, across)):
        total = torch.ones(len(a.values), len(b.values), device=device)
        add_product_of_blocks(total, *a, *b)
        right = 1.0 + a.restored(torch.float32).double() @ b.restored(torch.float32).double().t()
        worst = max(worst, _worst([total], (right,)))
    return {"float8": worst}


def _of_optimizers(device: torch.device, size: int) -> dict[Tried, float]:
    """Compare a step of AdamW and the first pass of LAMB, over memory whose size no block divides."""
    from myriad.kernels.triton.optimizer_kernels import (
        Coefficients,
        adamw,
        cut_blocks,
        lamb_move,
        lamb_update,
    )

    how = Coefficients(
        learning_rate=0.01, beta1=0.9, beta2=0.95, epsilon=1e-8, weight_decay=0.1, gradient_scale=0.5, step=3
    )
    start = [_values(size, dtype=torch.float32, device=device, seed=seed) for seed in range(4)]
    start[3].abs_()
    w, g, m, v = (x.double() for x in start)
    m, v = 0.9 * m + 0.05 * g, 0.95 * v + 0.05 * (0.5 * g) ** 2
    direction = m / (1 - 0.9**3) / ((v / (1 - 0.95**3)).sqrt() + 1e-8)
    moved = [x.clone() for x in start]
    adamw(moved[0], moved[1], moved[2], moved[3], how)
    found: dict[Tried, float] = {"adamw": _worst(moved, (w * 0.999 - 0.01 * direction, g, m, v))}
    moved = [x.clone() for x in start]
    blocks = cut_blocks([(0, 0, size // 3), (1, size // 3, size)], device)
    squares = lamb_update(moved[0], moved[1], moved[2], moved[3], blocks, how)
    update = direction + 0.1 * w
    sums = torch.stack(((w**2).sum(), (update**2).sum()))
    found["lamb"] = max(
        _worst(moved, (w, update, m, v)), float((squares.double().sum(0) / sums - 1).abs().max())
    )
    rates = torch.tensor([0.5, 0.25], device=device)
    lamb_move(moved[0], moved[1], blocks, rates)
    rate = torch.where(torch.arange(size, device=device) < size // 3, 0.5, 0.25)
    found["lamb"] = max(found["lamb"], _worst([moved[0]], (w - rate * update,)))
    return found


def _share(found: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest value, or of 1 if that is more."""
    share = ((found.double() - right).abs().max() / right.abs().max().clamp(min=1.0)).item()
    return share if share == share else float("inf")


def _worst(found: list[torch.Tensor], expected: tuple[torch.Tensor, ...]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs)
