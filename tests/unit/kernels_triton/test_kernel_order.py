"""If these break: Triton's kernels give other numbers, or another order in memory, where sequences lie
position by position (`myriad.kernels.memory_order`)."""

import pytest
import torch

pytest.importorskip("triton")

from myriad.kernels.activation import activate
from myriad.kernels.attention import split_heads
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.attention_flash import flash_attention
from myriad.kernels.memory_order import is_sequence_first, lay_sequence_first
from myriad.kernels.norm import LayerNorm, RMSNorm
from myriad.kernels.rotary import Rotary, rotary_turns
from myriad.kernels.side_by_side import places_of

B, S, HEADS = 2, 5, Heads(4, 2, 16)


def differentiated(operator, x):
    """Results, and the gradient of ``x``; gradients of results lie as ``x`` does."""
    x = x.detach().requires_grad_()
    results = operator(x)
    torch.manual_seed(1)
    grads = [torch.randn(result.shape) for result in results]
    torch.autograd.backward(results, [lay_sequence_first(g) if is_sequence_first(x) else g for g in grads])
    return [*(result.detach() for result in results), x.grad]


def norm_of(kind):
    norm = kind(16, 1e-5, kernels="triton", **({} if kind is RMSNorm else {"bias": True}))
    torch.nn.init.normal_(norm.weight)
    if norm.bias is not None:
        torch.nn.init.normal_(norm.bias)
    return lambda x: norm.add(x, x * 2)


def turned_heads(x):
    turns = rotary_turns(Rotary(1e4, HEADS.width), S, torch.device("cpu"), 0)
    return split_heads(x, HEADS, turns, "triton")


def attended(x):
    q, k, v = turned_heads(x)
    return [flash_attention(q, k, v, 3)]


@pytest.mark.parametrize(
    ("operator", "width"),
    [
        (norm_of(RMSNorm), 16),
        (norm_of(LayerNorm), 16),
        (lambda x: [activate("swiglu", x, kernels="triton")], 16),
        (lambda x: [activate("gelu", x, torch.ones(16), kernels="triton")], 16),
        (turned_heads, 128),
        (attended, 128),
    ],
    ids=["rms norm", "layer norm", "swiglu", "gelu", "rotary", "attention"],
)
def test_kernels_give_the_same_in_the_order_of_what_they_take(operator, width):
    torch.manual_seed(0)
    x = torch.randn(B, S, width)
    expected, found = differentiated(operator, x), differentiated(operator, lay_sequence_first(x))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one)
        assert not is_sequence_first(one) and is_sequence_first(other)


@pytest.mark.parametrize("name", ["swiglu", "gelu"])
def test_activations_of_parts_are_written_beside_each_other(name):
    torch.manual_seed(0)
    sizes, found = [3, 2], []
    for place, size in zip(places_of([B * size for size in sizes]), sizes, strict=True):
        x = lay_sequence_first(torch.randn(B, size, 16)).requires_grad_()
        own = x.detach().clone().requires_grad_()
        y, expected = activate(name, x, kernels="triton", place=place), activate(name, own, kernels="triton")
        found.append((x, y, own, expected))
    gradients = []
    for x, y, own, expected in reversed(found):  # as the backward goes
        x.register_hook(lambda gradient: gradients.append(gradient.data_ptr()))
        gradient = lay_sequence_first(torch.randn(y.shape))
        y.backward(gradient)
        expected.backward(gradient)
        torch.testing.assert_close(y, expected)
        torch.testing.assert_close(x.grad, own.grad)
    first, second = (y.data_ptr() for _, y, _, _ in found)
    assert second - first == found[0][1].numel() * 4
    assert gradients[0] - gradients[1] == found[0][0].numel() * 4
