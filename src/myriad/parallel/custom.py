"""Models made of the user's own torch modules, a list of layers, in any layout.

    model = LayerList(
        [Layer("in", make_in), *(Layer(f"mix.{i}", make_mix) for i in range(8)), Layer("out", make_out)],
        loss=lambda output, targets: cross_entropy(output, targets, reduction="sum"),
        tensor_parallel={"mix.*.up": "column", "mix.*.down": "row"},
    )

Each maker builds one whole layer. The layer's own initialisation runs under a seed that depends on the
layer alone, so every layout starts from the same values. A layer takes the output of the layer before.
Between a column-parallel linear and the next row-parallel one, only element-wise operations (or operations
on whole heads) are allowed, because each rank has its own part there. Linears are replaced wherever they
are, so that the runtime can schedule their weight gradients (zero-bubble schedules)."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from glob import escape
from typing import Any, Literal

import torch
from torch import nn

from myriad.errors import BadInputError
from myriad.kernels.linear import linear
from myriad.kernels.random import key_of
from myriad.model.boundary import Boundary
from myriad.model.definition import Context, Shard

__all__ = ["Layer", "LayerList", "Loss"]

Loss = Callable[[torch.Tensor, Any], torch.Tensor]
"""Loss function: (output of the last layer, targets) to the *sum* of losses over all targets."""


@dataclass(frozen=True)
class Layer:
    """One layer: its name, its maker, and its kind for ``partition = "type:REGEX"`` (default: the module's
    class name)."""

    name: str
    make: Callable[[], nn.Module]
    kind: str | None = None


class LayerList:
    """A `Definition` made of the user's modules."""

    def __init__(
        self,
        layers: Sequence[Layer],
        loss: Loss,
        *,
        tensor_parallel: Mapping[str, Literal["column", "row"]] | None = None,
        tied: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        """``tensor_parallel``: fnmatch pattern of a linear's full name to how ranks shard it. ``tied``: full
        name of a parameter to the full name of the parameter that it shares. Raises `BadInputError` for rules
        that match nothing and for state that is no parameter."""
        self._layers, self._loss, self._seed = tuple(layers), loss, seed
        self._rules, self._tied = dict(tensor_parallel or {}), dict(tied or {})
        if len({layer.name for layer in layers}) < len(layers):
            raise BadInputError("layers", [layer.name for layer in layers], "names must differ")
        with torch.device("meta"):
            self._shapes = [layer.make() for layer in layers]
        self._check_rules()
        for layer, module in zip(layers, self._shapes, strict=True):
            self._check_state(layer.name, module)

    sequence_parallel = False

    @property
    def names(self) -> Sequence[str]:
        """Layer names, in order."""
        return [layer.name for layer in self._layers]

    @cached_property
    def kinds(self) -> Sequence[str]:
        """Return the layers' kinds as given, or the modules' class names."""
        pairs = zip(self._layers, self._shapes, strict=True)
        return [layer.kind or type(module).__name__ for layer, module in pairs]

    @cached_property
    def shards(self) -> Mapping[str, Shard]:
        """Return the shards of the linears, under full names without patterns. Column shards the rows of the
        weight and the bias; row shards the columns of the weight."""
        found: dict[str, Shard] = {}
        for name in self._linears():
            rule = self._rule(name)
            if rule is not None:
                found[escape(f"{name}.weight")] = Shard(0 if rule == "column" else 1)
            if rule == "column":
                found[escape(f"{name}.bias")] = Shard(0)
        return found

    @property
    def tied(self) -> Mapping[str, str]:
        """Tied parameters, as given."""
        return self._tied

    def build(self, index: int, boundary: Boundary) -> nn.Module:
        """Build a layer with its linears replaced. The last layer ends in the loss. Raises `BadInputError` if
        ranks share sequences: a layer may relate any of its positions."""
        if boundary.context is not None:
            raise BadInputError("layout.cp", boundary.context.num_ranks, "1 with a model of your own")
        last = index == len(self._layers) - 1
        layer = self._replaced(self._layers[index].make(), self._layers[index].name, boundary)
        return _adapt(layer, self._loss if last else None)

    def initial(self, index: int, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Return what the module's own initialisation gives under this layer's seed."""
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(key_of(self._seed, self._layers[index].name) % 2**63)
            layer = self._layers[index].make()
        return {
            name: parameter.detach().float()
            for name, parameter in layer.named_parameters()
            if names is None or name in names
        }

    def _replaced(self, module: nn.Module, path: str, boundary: Boundary) -> nn.Module:
        if type(module) is nn.Linear:
            return _ParallelLinear(module, self._rule(path), boundary, path)
        for name, child in module.named_children():
            setattr(module, name, self._replaced(child, f"{path}.{name}", boundary))
        return module

    def _rule(self, name: str) -> Literal["column", "row"] | None:
        return next((rule for pattern, rule in self._rules.items() if fnmatchcase(name, pattern)), None)

    def _linears(self) -> list[str]:
        """Return the full names of all linears."""
        return [
            f"{layer.name}.{path}".rstrip(".")
            for layer, whole in zip(self._layers, self._shapes, strict=True)
            for path, module in whole.named_modules()
            if type(module) is nn.Linear
        ]

    def _check_rules(self) -> None:
        linears, parameters = self._linears(), set()
        for pattern, rule in self._rules.items():
            if rule not in ("column", "row"):
                raise BadInputError(f"tensor_parallel.{pattern}", rule, "column or row")
            if not any(fnmatchcase(name, pattern) for name in linears):
                allowed = f"must match a linear; they are {', '.join(linears) or 'none'}"
                raise BadInputError("tensor_parallel", pattern, allowed)
        for layer, module in zip(self._layers, self._shapes, strict=True):
            named = module.named_parameters(remove_duplicate=False)
            parameters |= {f"{layer.name}.{path}" for path, _ in named}
        for name in (*self._tied, *self._tied.values()):
            if name not in parameters:
                near = ", ".join(get_close_matches(name, parameters, 3)) or ", ".join(sorted(parameters))
                raise BadInputError("tied", name, f"no parameter has this name; near it: {near}")

    def _check_state(self, name: str, module: nn.Module) -> None:
        """Check that a layer's state consists of parameters only, each under one name: ranks synchronize
        nothing else. Raises `BadInputError` otherwise."""
        for path, _ in module.named_buffers():
            raise BadInputError(
                f"layers.{name}", path, "a buffer; layers keep their state in parameters only"
            )
        once = {path for path, _ in module.named_parameters()}
        for path, _ in module.named_parameters(remove_duplicate=False):
            if path not in once and f"{name}.{path}" not in self._tied:
                raise BadInputError(f"layers.{name}", path, "shares another's values: name both in `tied`")


def _adapt(module: nn.Module, loss: Loss | None) -> nn.Module:
    """Replace the module's forward by one that the runtime can call. A wrapping module would change the names
    of its parameters."""
    inner: Callable[[torch.Tensor], torch.Tensor] = module.forward

    def forward(x: torch.Tensor, context: Context) -> torch.Tensor:
        output = inner(x)
        return output if loss is None else loss(output, context.targets)

    module.forward = forward
    return module


class _ParallelLinear(nn.Module):
    """A linear that is sharded by columns (its outputs), by rows (its inputs) or not at all."""

    def __init__(
        self, whole: nn.Linear, rule: Literal["column", "row"] | None, boundary: Boundary, name: str
    ) -> None:
        super().__init__()
        outputs, inputs = whole.weight.shape
        cut = {"column": outputs, "row": inputs}.get(rule or "", 0)
        if cut % boundary.size:
            raise BadInputError(f"tensor_parallel.{name}", cut, f"must be divisible by tp = {boundary.size}")
        outputs //= boundary.size if rule == "column" else 1
        inputs //= boundary.size if rule == "row" else 1
        self.weight = nn.Parameter(whole.weight.new_empty(outputs, inputs))
        self.bias = nn.Parameter(whole.weight.new_empty(outputs)) if whole.bias is not None else None
        self._rule, self._boundary = rule, boundary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._rule == "column":
            return linear(self._boundary.copy(x), self.weight, self.bias, self._boundary.later)
        if self._rule == "row":
            y = self._boundary.join(linear(x, self.weight, later=self._boundary.later))
            return y if self.bias is None else y + self.bias
        return linear(x, self.weight, self.bias)
