"""The MLP of a block, with the shapes of one tensor-parallel rank.

Legend: B batch, S sequence, H hidden.
"""

from functools import partial

import torch
from torch import nn

from myriad.kernels.activation import activate, takes_bias
from myriad.kernels.grouped import RowGroups, grouped_linear
from myriad.kernels.linear import Linear, linear
from myriad.kernels.remade import Remade
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig

__all__ = ["MLP", "ExpertMLPs", "GatedMLP", "SharedMLP"]


class MLP(nn.Module):
    """MLP branch: ``[B, S, H]`` to this rank's partial sum, ``[B, S, H]``, without the last bias."""

    def __init__(self, config: ModelConfig, boundary: Boundary, width: int) -> None:
        """``width``: number of inner values, on all ranks together."""
        super().__init__()
        width //= boundary.size
        up_rows = config.up_matrices * width
        self.activation, self.kernels = config.activation, boundary.kernels
        self.later, self.remakes, self.boundary = boundary.later, boundary.remakes, boundary
        self.up = Linear(config.hidden, up_rows, bias=config.bias, later=boundary.later)
        self.down = Linear(width, config.hidden, bias=config.bias)

    def forward(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        return self.out(*self.inner(x, remade))

    def inner(self, x: torch.Tensor, remade: Remade | None = None) -> tuple[torch.Tensor, Remade | None]:
        """Map ``[B, S, H]`` to this rank's part of the inner width. The second result recomputes it in the
        backward."""
        return self.activate(self.first(x, remade))

    def first(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        """Return the first product, the input of the activation."""
        return linear(x, self.up.weight, self.bias_of_product(x), self.later, remade)

    def bias_of_product(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the bias that the first product adds; None if the activation adds it."""
        return None if takes_bias(x, self.kernels) else self.up.bias

    def activate(self, up: torch.Tensor) -> tuple[torch.Tensor, Remade | None]:
        """Apply the activation to the first product, and return the results of `inner`."""
        bias = self.up.bias if takes_bias(up, self.kernels) else None
        function = partial(activate, self.activation, bias=bias, kernels=self.kernels)
        if self.remakes:
            return function(up), Remade(function, up)
        return function(up, place=self.boundary.place), None

    def out(self, inner: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        """Multiply the inner values to this rank's partial sum."""
        return linear(inner, self.down.weight, later=self.later, remade=remade)


class ExpertMLPs(nn.ModuleDict):
    """The experts of a rank, which are MLPs, by number. They compute their tokens together."""

    def __init__(self, config: ModelConfig, boundary: Boundary, numbers: range) -> None:
        """``boundary``: of the ranks that share the width of each."""
        experts = [_Expert(config, config.expert_width // boundary.size) for _ in numbers]
        super().__init__({str(number): one for number, one in zip(numbers, experts, strict=True)})
        self._activation, self._boundary = config.activation, boundary

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Return what each expert computes of its tokens: ``[N, H]``, ordered by expert, of which it has
        ``counts`` ``[E]``. It is this rank's partial sum; the first tensor-parallel rank adds the biases, as
        results are multiplied by gates before they are summed over ranks."""
        groups, kernels, later = RowGroups(counts), self._boundary.kernels, self._boundary.later
        experts = [expert for expert in self.values() if isinstance(expert, _Expert)]
        weights, biases = _parameters([expert.up for expert in experts])
        up = grouped_linear(rows, groups, weights, biases, later, kernels=kernels)
        # no place: parts of a micro-batch give an expert different numbers of tokens
        function = partial(activate, self._activation, kernels=kernels)
        remade = Remade(function, up) if self._boundary.remakes else None
        weights, biases = _parameters([expert.down for expert in experts])
        biases = biases if self._boundary.rank == 0 else None
        return grouped_linear(function(up), groups, weights, biases, later, remade, kernels)


class _Expert(nn.Module):
    """The parameters of an expert."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.up = Linear(config.hidden, config.up_matrices * width, bias=config.bias)
        self.down = Linear(width, config.hidden, bias=config.bias)


def _parameters(products: list[Linear]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """Return the weights and, if there are any, the biases."""
    biases: list[torch.Tensor] = [product.bias for product in products if product.bias is not None]
    return [product.weight for product in products], biases or None


class SharedMLP(MLP):
    """The shared experts of a block. The last bias belongs to the partial sum, which is added to those of
    other experts: the first tensor-parallel rank adds it."""

    def out(self, inner: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        """Multiply the inner values to this rank's partial sum."""
        bias = self.down.bias if self.boundary.rank == 0 else None
        return linear(inner, self.down.weight, bias, self.later, remade)


class GatedMLP(SharedMLP):
    """Shared experts whose result for a token is multiplied by the sigmoid of another product of the token,
    which every tensor-parallel rank computes."""

    def __init__(self, config: ModelConfig, boundary: Boundary, width: int) -> None:
        super().__init__(config, boundary, width)
        self.gate = Linear(config.hidden, 1, later=boundary.later)

    def forward(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        gate: torch.Tensor = self.gate(x).sigmoid()
        return super().forward(x, remade) * gate
