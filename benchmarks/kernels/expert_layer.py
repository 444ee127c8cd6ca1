"""Forward and backward of a layer of experts on one core, beside other ways to compute it: milliseconds of
processor time, the least of several micro-batches. All have the same weights, tokens and choices, and their
results and gradients are compared first.

    python benchmarks/kernels/expert_layer.py                      every shape, uniform and skewed loads
    python benchmarks/kernels/expert_layer.py --shapes mixtral --types bfloat16

    loop       a product for each expert and its tokens, results added where they belong (transformers)
    grouped    tokens sorted by expert, `torch.nn.functional.grouped_mm` (torchtitan)
    padded     tokens of each expert padded to those of the fullest one, one batched product (GShard without
               dropped tokens)
    blocks     tokens of each expert padded to blocks of 128, a batched product of blocks, each with a copy of
               its expert's weight (MegaBlocks' and ScatterMoE's tiles, of PyTorch's operators)
"""

import argparse
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from myriad.kernels.gradient import GradientSink, set_sink
from myriad.kernels.host_memory import keep_freed_memory
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.experts import Experts

_BLOCK = 128
_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""Largest difference of a result or gradient, as a share of the largest value."""


class _Shape(NamedTuple):
    hidden: int
    width: int
    experts: int
    chosen: int
    tokens: int


_SHAPES = {
    "tiny-moe": _Shape(64, 256, 8, 2, 2048),
    "mixtral": _Shape(512, 1792, 8, 2, 2048),
    "qwen3": _Shape(256, 96, 128, 8, 2048),
    "deepseek": _Shape(448, 128, 64, 6, 2048),
}
"""Small layers of the same proportions."""


class _Case:
    """Inputs, weights and choices that all ways share."""

    def __init__(self, shape: _Shape, dtype: torch.dtype, skew: float) -> None:
        generator = torch.Generator().manual_seed(0)

        def values(*sizes: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(sizes, generator=generator) * scale).to(dtype)

        self.shape, self.dtype = shape, dtype
        self.x = values(shape.tokens, shape.hidden).requires_grad_()
        self.wave = values(shape.tokens, shape.hidden)
        self.up = values(shape.experts, 2 * shape.width, shape.hidden, scale=shape.hidden**-0.5)
        self.down = values(shape.experts, shape.hidden, shape.width, scale=shape.width**-0.5)
        preference = torch.linspace(skew, 0, shape.experts)
        self.logits = torch.randn(shape.tokens, shape.experts, generator=generator) + preference
        self.gates, self.chosen = self.logits.softmax(-1).topk(shape.chosen, -1)
        self.gates = (self.gates / self.gates.sum(-1, keepdim=True)).requires_grad_()

    @property
    def load(self) -> float:
        """Tokens of the fullest expert over the mean."""
        counts = torch.bincount(self.chosen.flatten(), minlength=self.shape.experts)
        return float(counts.max() / counts.float().mean())


class _Way:
    """A way to compute the layer, whose weights are two tensors of all experts."""

    def __init__(self, case: _Case) -> None:
        self.case = case
        self.up, self.down = case.up.clone().requires_grad_(), case.down.clone().requires_grad_()

    def forward(self) -> torch.Tensor:
        raise NotImplementedError

    def gradients(self) -> list[torch.Tensor]:
        assert self.up.grad is not None and self.down.grad is not None
        return [self.up.grad.float(), self.down.grad.float()]

    def sorted_by_expert(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the pairs' order and their tokens, and the number of tokens of each expert."""
        wanted = self.case.chosen.flatten()
        order = wanted.argsort(stable=True)
        counts = torch.bincount(wanted, minlength=self.case.shape.experts)
        return order, order // self.case.shape.chosen, counts

    def summed(self, results: torch.Tensor, order: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        weighted = results * self.case.gates.flatten()[order][:, None].to(results.dtype)
        return torch.zeros_like(self.case.x).index_add(0, tokens, weighted)


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


class _Loop(_Way):
    def forward(self) -> torch.Tensor:
        case, out = self.case, torch.zeros_like(self.case.x)
        mask = F.one_hot(case.chosen, case.shape.experts).permute(2, 1, 0)
        for expert in mask.sum((1, 2)).nonzero().flatten().tolist():
            place, tokens = torch.where(mask[expert])
            result = F.linear(_swiglu(F.linear(case.x[tokens], self.up[expert])), self.down[expert])
            out = out.index_add(0, tokens, result * case.gates[tokens, place, None].to(result.dtype))
        return out


class _Grouped(_Way):
    def forward(self) -> torch.Tensor:
        order, tokens, counts = self.sorted_by_expert()
        ends = counts.cumsum(0).to(torch.int32)
        inner = _swiglu(F.grouped_mm(self.case.x[tokens], self.up.transpose(1, 2), offs=ends))
        return self.summed(F.grouped_mm(inner, self.down.transpose(1, 2), offs=ends), order, tokens)


class _Padded(_Way):
    def forward(self) -> torch.Tensor:
        case = self.case
        order, tokens, counts = self.sorted_by_expert()
        most, experts = int(counts.max()), case.chosen.flatten()[order]
        starts = counts.cumsum(0) - counts
        at = experts * most + torch.arange(len(order)) - starts[experts]
        rows = case.x.new_zeros(case.shape.experts * most, case.shape.hidden).index_copy(
            0, at, case.x[tokens]
        )
        inner = _swiglu(rows.view(case.shape.experts, most, -1) @ self.up.transpose(1, 2))
        results = (inner @ self.down.transpose(1, 2)).flatten(0, 1)
        return self.summed(results[at], order, tokens)


class _Blocks(_Way):
    def forward(self) -> torch.Tensor:
        case = self.case
        order, tokens, counts = self.sorted_by_expert()
        blocks, experts = -(-counts // _BLOCK), case.chosen.flatten()[order]
        first, starts = blocks.cumsum(0) - blocks, counts.cumsum(0) - counts
        at = first[experts] * _BLOCK + torch.arange(len(order)) - starts[experts]
        of_blocks = torch.arange(case.shape.experts).repeat_interleave(blocks)
        rows = case.x.new_zeros(len(of_blocks) * _BLOCK, case.shape.hidden).index_copy(0, at, case.x[tokens])
        inner = _swiglu(rows.view(len(of_blocks), _BLOCK, -1) @ self.up[of_blocks].transpose(1, 2))
        results = (inner @ self.down[of_blocks].transpose(1, 2)).flatten(0, 1)
        return self.summed(results[at], order, tokens)


class _Myriad(_Way):
    """The layer as training runs it: weights in a chunk's flat memory, gradients added in float32."""

    def __init__(self, case: _Case) -> None:
        super().__init__(case)
        shape = case.shape
        keys: dict[str, Any] = {"expert_hidden": shape.width, "experts_per_token": shape.chosen}
        config = ModelConfig(
            layers=1, hidden=shape.hidden, heads=1, activation="swiglu", experts=shape.experts, **keys
        )
        self._layer = Experts(config, Boundary()).to(case.dtype)
        flat = torch.empty(case.up.numel() + case.down.numel(), dtype=case.dtype)
        self._sums, start = torch.zeros(flat.numel()), 0
        self._totals: dict[str, list[torch.Tensor]] = {"up": [], "down": []}
        for name, weight in self._layer.experts.named_parameters():
            number, product, _ = name.split(".")
            end = start + weight.numel()
            weight.data = flat[start:end].view(weight.shape)
            weight.data.copy_((case.up if product == "up" else case.down)[int(number)])
            total = self._sums[start:end].view(weight.shape)
            set_sink(weight, GradientSink(total))
            self._totals[product].append(total)
            start = end
        self._layer.router.choose = lambda *_: (case.gates, case.chosen)  # type: ignore[method-assign]

    def forward(self) -> torch.Tensor:
        found = self._layer.steps(self.case.x[None], self.case.logits[None], Context())
        try:
            next(found)
        except StopIteration as done:
            result: torch.Tensor = done.value[0]
            return result
        raise AssertionError("one rank sends nothing")

    def gradients(self) -> list[torch.Tensor]:
        return [torch.stack(totals) for totals in self._totals.values()]


_WAYS: dict[str, Callable[[_Case], _Way]] = {
    "myriad": _Myriad,
    "loop": _Loop,
    "grouped": _Grouped,
    "padded": _Padded,
    "blocks": _Blocks,
}


def _run(way: _Way) -> tuple[float, torch.Tensor]:
    start = time.process_time()
    y = way.forward()
    y.backward(way.case.wave)
    return time.process_time() - start, y.detach()


def _compare(ways: dict[str, _Way], case: _Case) -> None:
    """Raise if a way has other results or gradients than the first."""
    expected: list[torch.Tensor] = []
    for name, way in ways.items():
        case.x.grad = case.gates.grad = None
        _, y = _run(way)
        assert case.x.grad is not None and case.gates.grad is not None
        found = [y.float(), case.x.grad.float(), case.gates.grad, *way.gradients()]
        expected = expected or found
        for one, other in zip(found, expected, strict=True):
            difference = float((one - other).abs().max() / other.abs().max())
            assert difference < _LIMITS[case.dtype], f"{name} differs by {difference:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=_SHAPES, default=list(_SHAPES))
    parser.add_argument(
        "--types", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"]
    )
    parser.add_argument(
        "--skews", nargs="+", type=float, default=[0.0, 2.0], help="preference of the first expert"
    )
    parser.add_argument("--repeats", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()  # as training does: for all ways here
    print(f"| layer | type | busiest expert | {' | '.join(_WAYS)} | best other / myriad |")
    print("|---|---|---|" + "---|" * (len(_WAYS) + 1))
    for name in asked.shapes:
        for kind in asked.types:
            for skew in asked.skews:
                case = _Case(_SHAPES[name], getattr(torch, kind), skew)
                ways = {label: make(case) for label, make in _WAYS.items()}
                _compare(ways, case)
                least = dict.fromkeys(ways, float("inf"))
                for _ in range(asked.repeats):  # in turns, so that all meet the same machine
                    for label, way in ways.items():
                        least[label] = min(least[label], 1e3 * _run(way)[0])
                cells = " | ".join(f"{least[label]:.1f}" for label in ways)
                best = min(value for label, value in least.items() if label != "myriad")
                print(
                    f"| {name} | {kind} | {case.load:.2f} | {cells} | {best / least['myriad']:.2f} x |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
