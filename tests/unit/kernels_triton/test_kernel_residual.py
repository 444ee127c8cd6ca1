"""If these break: sums and norms go over memory one after the other again where one kernel does both, or
where layers are cut into stages and segments shows in what is learnt."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from myriad.kernels.norm import Norm
from myriad.kernels.triton import fused_add_norm as triton_norm
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import GPT
from myriad.model.interleave import run_layers
from myriad.parallel.recompute import Segment, differentiate, run_in_segments

MODEL = ModelConfig(layers=2, hidden=16, heads=2, vocabulary=40, vocabulary_multiple=8, sequence=6)


class Sums(TorchDispatchMode):
    """Counts additions of two tensors that have the stream's shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape, self.found = shape, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor):
            self.found += all(isinstance(x, torch.Tensor) and x.shape == self.shape for x in args[:2])
        return function(*args, **(kwargs or {}))


def make_layers(block: str, kernels: str) -> list[nn.Module]:
    """Of which the norms alone go by ``kernels``."""
    boundary, definition = Boundary(), GPT(MODEL.model_copy(update={"block": block}), 1)
    layers = [definition.build(index, boundary) for index in range(MODEL.layers + 2)]
    generator = torch.Generator().manual_seed(2)
    for module in nn.ModuleList(layers).modules():
        if isinstance(module, Norm):
            module.kernels = kernels
    for parameter in nn.ModuleList(layers).parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    return layers


def results(layers: list[nn.Module], *, each_alone: bool = False) -> list[torch.Tensor]:
    tokens = torch.arange(2 * MODEL.sequence + 2).view(2, -1) * 7 % MODEL.vocabulary
    x, context = tokens[:, :-1], Context(targets=tokens[:, 1:], samples=torch.arange(2), seed=5)
    if each_alone:
        segments, loss = run_in_segments(layers, x, context, keep_last=False)
    else:
        loss = run_layers(layers, x, context)
        segments = [Segment(layers, x, loss)]
    differentiate(segments, torch.ones(()), context)
    return [loss.detach(), *(parameter.grad for layer in layers for parameter in layer.parameters())]


@pytest.mark.parametrize(("block", "norms"), [("serial", 2), ("parallel", 1)])
def test_every_sum_is_made_by_a_norm_and_has_the_same_bits(block: str, norms: int, monkeypatch) -> None:
    seen, launch, shape = Counter(), triton_norm.launch, (2, MODEL.sequence, MODEL.hidden)

    def count(kernel: Any, *args: Any, **options: Any) -> None:
        seen.update(key for key in ("HAS_BRANCH", "HAS_STREAM") if options.get(key))
        launch(kernel, *args, **options)

    monkeypatch.setattr(triton_norm, "launch", count)
    with Sums(shape) as sums:
        together = results(make_layers(block, "triton"))
    # the first norm has no branch before it, and nothing comes down the stream to the head's
    assert seen == {"HAS_BRANCH": norms * MODEL.layers, "HAS_STREAM": norms * MODEL.layers}
    assert sums.found == 0
    with Sums(shape) as sums:
        results(make_layers(block, "plain"))
    assert sums.found >= norms * MODEL.layers, "the library adds by itself"
    for one, other in zip(results(make_layers(block, "triton"), each_alone=True), together, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_layer", [True, False])
def test_where_a_branch_is_added_shows_in_no_bit(is_layer: bool) -> None:
    """In a half precision, where a value rounded once more would show; in float16, for the interpreter cuts
    bfloat16 off instead of rounding it."""
    generator = torch.Generator().manual_seed(1)
    x, branch, *grads = torch.randn(4, 9, 40, generator=generator).half()
    weight = torch.randn(40, generator=generator).half().requires_grad_()
    found = []
    for here in (True, False):
        leaves = [x.clone().requires_grad_(), branch.clone().requires_grad_()]
        pair = leaves if here else (leaves[0] + leaves[1], None)
        outputs = triton_norm.add_norm(*pair, weight, None, 1e-5, is_layer=is_layer)
        found.append([*outputs, *torch.autograd.grad(outputs, [*leaves, weight], grads)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
