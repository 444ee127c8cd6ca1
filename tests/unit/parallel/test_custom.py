"""If these break: what a person writes about an own model is silently not done, or is refused without saying
why."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from myriad.errors import BadInputError
from myriad.model.boundary import Boundary
from myriad.model.definition import Shard, shard_of
from myriad.parallel.custom import Layer, LayerList


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))


class SharesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.b.weight = self.a.weight


def loss(output: torch.Tensor, targets: Any) -> torch.Tensor:
    return (output - targets).square().sum()


def make(*extra: Callable[[], nn.Module], **keys: Any) -> LayerList:
    layers = [Layer("wide", Wide), Layer("out", lambda: nn.Linear(8, 8))]
    return LayerList([*layers, *(Layer(f"extra{i}", maker) for i, maker in enumerate(extra))], loss, **keys)


class OneOfTwo(Boundary):
    rank, size = 1, 2


@pytest.mark.parametrize("pattern", ["wide.up", "*.up", "wide.[u]p", "w*"])
def test_a_rule_reaches_the_linears_it_matches_however_it_is_written(pattern: str) -> None:
    """A linear built as a part but loaded as a whole would train on wrong values without an error."""
    model = make(tensor_parallel={pattern: "column"})
    built = model.build(0, OneOfTwo())
    for name, parameter in built.named_parameters():
        full, shard = model.initial(0)[name], shard_of(model, f"wide.{name}")
        part = full if shard is None else shard.take(full, 1, 2)
        assert part.shape == parameter.shape, name
    assert shard_of(model, "wide.up.weight") == shard_of(model, "wide.up.bias") == Shard(0)
    assert shard_of(model, "wide.norm.weight") is None


def test_a_layer_that_is_a_linear_itself_is_cut_too() -> None:
    model = make(tensor_parallel={"out": "row"})
    assert model.build(1, OneOfTwo()).get_parameter("weight").shape == (8, 4)
    assert shard_of(model, "out.weight") == Shard(1) and shard_of(model, "out.bias") is None


def test_names_are_those_of_the_modules() -> None:
    """They are what a person writes in `tied`, and what stands in a checkpoint."""
    names = [name for name, _ in make().build(0, Boundary()).named_parameters()]
    assert names == [name for name, _ in Wide().named_parameters()]


def test_kinds_are_given_or_class_names() -> None:
    assert make().kinds == ["Wide", "Linear"]
    assert LayerList([Layer("a", Wide, kind="first"), Layer("b", Wide)], loss).kinds == ["first", "Wide"]


@pytest.mark.parametrize(
    ("extra", "keys", "key", "says"),
    [
        ((), {"tensor_parallel": {"wide.upp": "column"}}, "tensor_parallel", "wide.up, wide.down, out"),
        ((), {"tensor_parallel": {"*.norm": "column"}}, "tensor_parallel", "must match a linear"),
        ((), {"tensor_parallel": {"wide.up": "rows"}}, "tensor_parallel.wide.up", "column or row"),
        ((), {"tied": {"out.weigt": "wide.up.weight"}}, "tied", "out.weight"),
        ((), {"tied": {"out.weight": "wide.up"}}, "tied", "wide.up.weight"),
        ((Counting,), {}, "layers.extra0", "parameters only"),
        ((SharesInside,), {}, "layers.extra0", "tied"),
    ],
)
def test_what_cannot_be_done_is_reported_in_one_line(
    extra: tuple[Any, ...], keys: dict[str, Any], key: str, says: str
) -> None:
    with pytest.raises(BadInputError) as caught:
        make(*extra, **keys)
    assert caught.value.key == key and says in caught.value.allowed
    assert "\n" not in str(caught.value)


def test_two_layers_of_one_name_are_refused() -> None:
    with pytest.raises(BadInputError, match="names must differ"):
        LayerList([Layer("a", Wide), Layer("a", Wide)], loss)


def test_a_width_that_ranks_cannot_share_is_refused() -> None:
    class OneOfThree(Boundary):
        rank, size = 1, 3

    with pytest.raises(BadInputError, match=r"tensor_parallel\.wide\.up = 32: must be divisible by tp = 3"):
        make(tensor_parallel={"wide.up": "column"}).build(0, OneOfThree())
