"""If these break: a sum that a block leaves to the next layer is lost, made twice, or changes what is learnt,
or its branch takes memory for longer than the sum takes to make."""

import weakref

import pytest
import torch
from torch import nn

from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import GPT
from myriad.model.interleave import SteppedLayer, run_layers
from myriad.model.residual import Residual
from myriad.parallel.recompute import Segment, differentiate, run_in_segments

MODEL = ModelConfig(layers=3, hidden=16, heads=2, vocabulary=40, vocabulary_multiple=8, sequence=6)


def make_layers(config: ModelConfig, *, remakes: bool = False) -> list[nn.Module]:
    boundary, definition = Boundary(), GPT(config, 1)
    boundary.remakes = remakes
    layers = [definition.build(index, boundary) for index in range(config.layers + 2)]
    generator = torch.Generator().manual_seed(2)
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data.normal_(0.0, 0.3, generator=generator)
    return layers


def make_batch(config: ModelConfig) -> tuple[torch.Tensor, Context]:
    tokens = torch.randint(config.vocabulary, (2, config.sequence + 1))
    return tokens[:, :-1], Context(targets=tokens[:, 1:], samples=torch.arange(2), seed=5)


def results(layers: list[nn.Module], segments: list[Segment], loss: torch.Tensor, context: Context):
    differentiate(segments, torch.ones(()), context)
    return [loss.detach(), *(parameter.grad for layer in layers for parameter in layer.parameters())]


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "half"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("block", ["serial", "parallel"])
def test_bits_are_those_of_sums_made_where_a_block_ends(block: str, dropout: float, recompute: str) -> None:
    config = MODEL.model_copy(update={"block": block, "dropout": dropout, "norm": "layer", "bias": True})
    x, context = make_batch(config)
    expected, found = make_layers(config), make_layers(config, remakes=recompute == "selective")
    stream = x
    for layer in expected:  # each for itself: its output is the sum
        stream = layer(stream, context)
    if recompute in ("full", "half"):
        ratio = 1.0 if recompute == "full" else 0.5
        segments, loss = run_in_segments(found, x, context, keep_last=False, ratio=ratio)
    else:
        loss = run_layers(found, x, context)
        segments = [Segment(found, x, loss)]
    whole = results(expected, [Segment(expected, x, stream)], stream, context)
    for one, other in zip(results(found, segments, loss, context), whole, strict=True):
        assert torch.equal(one, other)


class Watching(SteppedLayer):
    """Hands on a branch and checks whether it is still referenced."""

    boundary = Boundary()

    def steps(self, x, context):
        branch = x * 3
        self.branch = weakref.ref(branch)
        yield None
        return Residual(x, branch)


def test_layers_that_know_of_no_branch_are_given_the_sum() -> None:
    given = []

    class Plain(nn.Module):
        def forward(self, x, context):
            given.append(x)
            return x

    class Stepped(SteppedLayer):
        boundary = Boundary()

        def steps(self, x, context):
            given.append(x)
            yield None
            return x

    x = torch.randn(2, 3, 4)
    assert torch.equal(run_layers([Watching(), Plain(), Watching(), Stepped()], x, Context()), 16 * x)
    assert torch.equal(run_layers([Watching()], x, Context()), 4 * x), "the end of a stage"
    assert [torch.equal(one, factor * x) for one, factor in zip(given, (4, 16), strict=True)] == [True] * 2


@pytest.mark.parametrize("index", [1, -1], ids=["block", "head"])
def test_a_branch_is_given_up_when_it_is_added(index: int) -> None:
    layer, watching, seen = make_layers(MODEL)[index], Watching(), []
    layer.boundary.start_all_gather = lambda x: Arriving(x, lambda: seen.append(watching.branch()))
    _, context = make_batch(MODEL)
    run_layers([watching, layer], torch.randn(2, MODEL.sequence, MODEL.hidden), context)
    assert seen and set(seen) == {None}


class Arriving:
    """Says when it is waited for."""

    def __init__(self, x, say):
        self.x, self.say = x, say

    def wait(self):
        self.say()
        return self.x
