"""If these break, a parallel block computes or learns something else than its two branches."""

import pytest
import torch
from torch.nn import functional as F

from myriad.kernels.float8 import Float8
from myriad.kernels.gradient import GradientSink, apply_deferred, set_sink
from myriad.kernels.linear import linear
from myriad.kernels.linear_pair import linear_pair, linear_sum
from myriad.kernels.remade import Remade


def weights_of(*, beside: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows 5 and 3 of width 4, in one piece of memory side by side, or apart."""
    flat = torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    parts = (flat[:20], flat[20:32]) if beside else (flat[:20], flat[24:36])
    first, second = (part.view(-1, 4).requires_grad_() for part in parts)
    return first, second


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_pair_is_two_products_and_its_gradients_theirs(beside: bool, has_bias: bool) -> None:
    weights = weights_of(beside=beside, dtype=torch.float64)
    x = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    biases = [torch.randn(n, dtype=torch.float64, requires_grad=True) if has_bias else None for n in (5, 3)]
    leaves = [x, *weights, *(bias for bias in biases if bias is not None)]
    found = linear_pair(x, weights, tuple(biases), as_one=True)
    expected = [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    assert (found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()) == beside
    waves = [torch.randn_like(y) for y in expected]
    for one, other in zip(
        [*found, *torch.autograd.grad(found, leaves, waves)],
        [*expected, *torch.autograd.grad(expected, leaves, waves)],
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_sum_is_the_sum_of_two_products() -> None:
    weights = tuple(torch.randn(4, n, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    mixed, inner = (torch.randn(2, 3, n, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    found, expected = linear_sum(mixed, inner, weights), mixed @ weights[0].t() + inner @ weights[1].t()
    wave, leaves = torch.randn_like(expected), [mixed, inner, *weights]
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, leaves, wave), torch.autograd.grad(expected, leaves, wave), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_sinks_later_and_what_is_made_again_get_the_bits_of_what_is_kept_and_done_at_once() -> None:
    x = torch.randn(6, 4)

    def totals(*, later: bool, again: bool) -> list[torch.Tensor]:
        weights = weights_of(beside=True, dtype=torch.float32)
        sinks = [GradientSink(torch.ones_like(weight)) for weight in weights]
        for weight, sink in zip(weights, sinks, strict=True):
            set_sink(weight, sink)
        products = [] if later else None
        source = x.clone().requires_grad_()
        remade = Remade(torch.sin, source, 2) if again else None
        fused, up = linear_pair(source.sin(), weights, (None, None), products, remade, as_one=True)
        (fused.sum() * up.sum()).backward()
        assert all(weight.grad is None for weight in weights)
        assert not later or all((sink.total == 1).all() for sink in sinks)
        apply_deferred(products or [])
        return [source.grad, *(sink.total for sink in sinks)]

    expected = totals(later=False, again=False)
    for later, again in ((True, False), (False, True), (True, True)):
        assert all(map(torch.equal, totals(later=later, again=again), expected))


def test_weights_in_float8_are_multiplied_each_with_its_own_scales() -> None:
    weights = tuple(torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)) for rows in (16, 48))
    for weight in weights:
        set_sink(weight, GradientSink(torch.zeros_like(weight), float8=Float8("tensor")))
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    found = linear_pair(x, weights, (None, None), as_one=True)
    assert all(torch.equal(y, linear(x, weight)) for y, weight in zip(found, weights, strict=True))
    assert not torch.equal(found[0], x @ weights[0].t())
    down = tuple(weight.t().contiguous() for weight in weights)
    for weight in down:
        set_sink(weight, GradientSink(torch.zeros_like(weight), float8=Float8("tensor")))
    expected = linear(found[0], down[0]) + linear(found[1], down[1])
    assert torch.equal(linear_sum(*found, down), expected)
