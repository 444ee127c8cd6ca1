"""If these break: a model whose sequences lie position by position in memory learns something else, or copies
what it was to leave where it lies."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from myriad.kernels.activation import activate
from myriad.kernels.attention import attention
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.embedding import embedding
from myriad.kernels.gradient import GradientSink, set_sink
from myriad.kernels.linear import linear
from myriad.kernels.linear_pair import linear_pair, linear_sum
from myriad.kernels.memory_order import (
    empty_in_order,
    is_sequence_first,
    lay_gradient_first,
    lay_sequence_first,
)
from myriad.kernels.norm import LayerNorm, RMSNorm
from myriad.kernels.random import dropout
from myriad.kernels.remade import Remade
from myriad.kernels.rotary import Rotary, rotary_turns

B, S, H = 3, 128, 32
HEADS = Heads(4, 2, 8)
Tensors = Sequence[torch.Tensor]


def make(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


WEIGHT, OTHER = make(48, H), make(H, 48)


def remade_linear(x: torch.Tensor) -> torch.Tensor:
    """Its backward takes the input from elsewhere, in the order of the source."""
    return linear(x, WEIGHT, remade=Remade(lambda source: source + 0, x))


def into_a_sink(x: torch.Tensor) -> torch.Tensor:
    weight = WEIGHT.clone().requires_grad_()
    set_sink(weight, GradientSink(torch.zeros_like(weight)))
    return linear(x, weight)


def norm_of(kind: Any) -> Callable[[torch.Tensor], Tensors]:
    norm = kind(H, 1e-5) if kind is RMSNorm else kind(H, 1e-5, bias=True)
    torch.nn.init.normal_(norm.weight)
    if norm.bias is not None:
        torch.nn.init.normal_(norm.bias)
    return lambda x: (*norm.add(x, None), *norm.add(x, x * 2))


def attend(path_length: int, window: int | None, *, turned: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    weight = make(HEADS.width * (HEADS.num_heads + 2 * HEADS.num_kv_heads), H)
    turns = rotary_turns(Rotary(1e4, HEADS.width), path_length, torch.device("cpu"), 0) if turned else None
    return lambda x: attention(linear(x[:, :path_length], weight), HEADS, window, turns)


OPERATORS: dict[str, Callable[[torch.Tensor], torch.Tensor | Tensors]] = {
    "linear": lambda x: linear(x, WEIGHT),
    "linear with bias": lambda x: linear(x, WEIGHT, WEIGHT[:, 0]),
    "linear into a sink": into_a_sink,
    "linear of what is made again": remade_linear,
    "pair": lambda x: linear_pair(x, (WEIGHT, WEIGHT), (None, None), as_one=False),
    "sum": lambda x: linear_sum(linear(x, WEIGHT), linear(x, WEIGHT), (OTHER, OTHER)),
    "rms norm": norm_of(RMSNorm),
    "layer norm": norm_of(LayerNorm),
    "gelu": lambda x: activate("gelu", x),
    "swiglu": lambda x: activate("swiglu", x),
    "dropout": lambda x: dropout(x, 0.5, 7, torch.arange(B), torch.arange(3, 3 + x.shape[1])),
    "attention in blocks": attend(S, None, turned=True),
    "attention in blocks, window": attend(S, 16, turned=False),
}


def found(operator: Callable[[torch.Tensor], torch.Tensor | Tensors], x: torch.Tensor) -> list[torch.Tensor]:
    """Results and the gradient of ``x``."""
    x = x.detach().requires_grad_()
    results = operator(x)
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    torch.manual_seed(1)
    torch.autograd.backward(results, [lay_like(x, torch.randn(result.shape)) for result in results])
    assert x.grad is not None
    return [*(result.detach() for result in results), x.grad]


def lay_like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return lay_sequence_first(other) if is_sequence_first(x) else other


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_gives_the_same_in_the_order_of_what_it_takes(name: str) -> None:
    torch.manual_seed(0)
    x = make(B, S, H)
    expected = found(OPERATORS[name], x)
    turned = found(OPERATORS[name], lay_sequence_first(x))
    for one, other in zip(expected, turned, strict=True):
        torch.testing.assert_close(other, one)
        assert not is_sequence_first(one) and is_sequence_first(other), "an operator changed the order"


@pytest.mark.parametrize("length", [100, S])  # not in blocks: the library's kernel; in blocks
@pytest.mark.parametrize("window", [None, 20])
def test_attention_on_any_path_sees_the_same_sequence(length: int, window: int | None) -> None:
    torch.manual_seed(0)
    x, operator = make(B, length, H), attend(length, window, turned=True)
    for one, other in zip(found(operator, x), found(operator, lay_sequence_first(x)), strict=True):
        torch.testing.assert_close(other, one)


@pytest.mark.parametrize("first_row", [0, 5])
def test_rows_of_tokens_are_found_in_the_order_of_the_tokens(first_row: int) -> None:
    torch.manual_seed(0)
    tokens, gradient = torch.randint(20, (B, S)), make(B, S, H)
    results = []
    for laid in (tokens, lay_sequence_first(tokens)):
        weight = make(10, H) if not results else results[0][2]
        sink = GradientSink(torch.zeros(10, H))
        own = weight.clone().requires_grad_()
        set_sink(own, sink)
        rows = embedding(laid, own, first_row, 20)
        rows.backward(gradient)
        assert is_sequence_first(rows) == is_sequence_first(laid)
        results.append((rows.detach(), sink.total, weight))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one)


def test_one_sequence_or_one_position_lies_both_ways() -> None:
    for shape in ((1, 5, 2), (5, 1, 2), (1, 1, 2)):
        x = make(*shape)
        assert not is_sequence_first(x)
        assert lay_sequence_first(x).data_ptr() == x.data_ptr(), "nothing to copy"
    assert not is_sequence_first(make(1).expand(3, 4)), "one value seen many times"


def test_memory_is_made_in_the_order_of_a_tensor() -> None:
    assert empty_in_order(make(2, 3, 4), 2, 3, 7).stride() == (21, 7, 1)
    assert empty_in_order(lay_sequence_first(make(2, 3, 4)), 2, 3, 7).stride() == (7, 14, 1)


def test_a_gradient_is_laid_where_it_enters() -> None:
    x, seen = make(2, 3, 4).requires_grad_(), []
    x.register_hook(lambda gradient: seen.append(is_sequence_first(gradient)))
    lay_gradient_first(x).backward(make(2, 3, 4))
    assert seen == [True]
