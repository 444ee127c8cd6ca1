"""Whether this device's Triton kernels give what the formulas say: asked before a rank trains with them, by
`myriad doctor`, and by tests on a GPU.

Each case computes an operator and its gradients with Triton and, from the same values in float64, by the
library's simple operators; the largest difference counts as a share of the largest value.
"""

from collections.abc import Callable, Iterator
from typing import Literal

import torch
from torch.nn import functional as F

from myriad.kernels.activation import ACTIVATIONS, activate
from myriad.kernels.attention import attention, attention_reference, split_heads
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.choice import Operator, choose
from myriad.kernels.config import Kernels
from myriad.kernels.cross_entropy import linear_cross_entropy
from myriad.kernels.float8 import BOTH, Kind, scaled_reference, seen_reference
from myriad.kernels.norm import LayerNorm, Norm, RMSNorm
from myriad.kernels.rotary import rotary_reference, rotary_turns

__all__ = ["LIMITS", "Tried", "beyond_limits", "disagreements", "float8_disagreements", "proved"]

LIMITS = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Of a difference: some roundings. Wrong synchronisation or a wrong address is far beyond it."""

Tried = Operator | Literal["attention", "float8"]
_Function = Callable[..., torch.Tensor]


class _Alone:
    """One rank has the whole vocabulary."""

    rank, size = 0, 1

    def start_stack(self, x: torch.Tensor) -> "_There":
        return _There(x)


class _There:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def wait(self) -> torch.Tensor:
        return self.x[None]


def _values(*shape: int, dtype: torch.dtype, device: torch.device, seed: int) -> torch.Tensor:
    """The same on every device, rounded to the type."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cpu").to(device, dtype)


def _results(function: _Function, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    wave = torch.arange(y.numel(), device=y.device).view(y.shape).sin().to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, wave)]


def _norm(norm: Norm, x: torch.Tensor, branch: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Stream and normed side by side; the gradient of the weight is asked for with those of the inputs."""
    del norm.weight
    norm.weight = weight  # type: ignore[assignment]
    return torch.cat(norm.add(x, branch))


def _cases(
    dtype: torch.dtype, device: torch.device, rows: int, width: int
) -> Iterator[tuple[Tried, list[torch.Tensor], _Function, _Function]]:
    """(operator, inputs, Triton's function, the formula)."""

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
    turns = rotary_turns(1e4, 64, rows, device)
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
    """``x`` ``[B, S, N + 2 K, D]``, queries and keys turned."""
    return torch.cat([rotary_reference(x[:, :, :num_turning], 1e4), x[:, :, num_turning:]], 2)


def proved(
    kernels: Kernels, device: torch.device, dtype: torch.dtype, *, float8: bool = False
) -> tuple[Kernels, str]:
    """What a rank is to compute with, and a line where that is not what "auto" means: Triton's kernels are
    tried on the rank's own device first, a second or two with compiling. Insisted on, they are not tried.
    ``float8``: whether it needs those as well."""
    if (
        kernels != "auto"
        or device.type != "cuda"
        or choose("norm", "cuda", "float32", 0, kernels)[0] != "triton"
    ):
        return kernels, ""
    wrong: list[str] = []
    try:
        for one in dict.fromkeys((dtype, torch.float32)):  # what optimizers move is float32 in any case
            wrong += beyond_limits(disagreements(one, device), one)
        if float8:
            wrong += beyond_limits(float8_disagreements(device), torch.bfloat16)
    except Exception as error:  # whatever a compiler or a driver raises: the library's kernels are there
        return "plain", f"without Triton's kernels: {type(error).__name__}: {error}".partition("\n")[0]
    told = f"without Triton's kernels: not what the formulas say on this device: {', '.join(wrong)}"
    return ("plain", told) if wrong else (kernels, "")


def beyond_limits(found: dict[Tried, float], dtype: torch.dtype) -> list[str]:
    """Which of `disagreements` are too large, in words; NaN is."""
    return [f"{name} by {share:.1g}" for name, share in found.items() if not share <= LIMITS[dtype]]


def disagreements(
    dtype: torch.dtype, device: torch.device, rows: int = 300, width: int = 1000
) -> dict[Tried, float]:
    """For each operator with a kernel, its worst difference."""
    worst: dict[Tried, float] = {}
    for operator, inputs, ours, formula in _cases(dtype, device, rows, width):
        expected = _results(formula, [x.double() for x in inputs])
        for found, right in zip(_results(ours, inputs), expected, strict=True):
            share = ((found.double() - right).abs().max() / right.abs().max().clamp(min=1.0)).item()
            worst[operator] = max(worst.get(operator, 0.0), share if share == share else float("inf"))
    return worst | _of_optimizers(device, rows * width) if dtype == torch.float32 else worst


def float8_disagreements(device: torch.device, rows: int = 144, width: int = 272) -> dict[Tried, float]:
    """Operands that are not the reference's to the bit count as wholly wrong; of products of blocks, added to
    what is there, the largest difference."""
    from myriad.kernels.triton.float8 import add_product_of_blocks
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
    """A step of AdamW and the first pass of LAMB, over memory that no block divides."""
    from myriad.kernels.triton.optimizer import Coefficients, adamw, cut_blocks, lamb_move, lamb_update

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


def _worst(found: list[torch.Tensor], expected: tuple[torch.Tensor, ...]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((one.double() - other).abs().max() / other.abs().max()) for one, other in pairs)
