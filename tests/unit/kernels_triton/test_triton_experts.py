"""If these break, a GPU computes experts that are not those of the definition: the kernels run in Triton's
interpreter, against the same formulas in float64: experts without tokens, sizes that no tile divides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from test_kernel_operators import TYPES, assert_close, normal

from myriad.kernels.gradient import GradientSink, apply_deferred, set_sink
from myriad.kernels.grouped import RowGroups, grouped_linear
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.expert_dispatch import Combine, Dispatch, Places
from myriad.model.experts import Experts

COUNTS = st.lists(st.sampled_from([0, 0, 1, 5, 128, 130]), min_size=1, max_size=5)


def parameters(number: int, *shape: int, dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(normal(*shape, dtype=dtype, seed=7 + seed)) for seed in range(number)]


@settings(max_examples=8, deadline=None)
@given(COUNTS, st.sampled_from([(5, 7), (130, 33)]), TYPES, st.booleans())
def test_grouped_products_are_those_of_each_group(counts, sizes, dtype, has_bias) -> None:
    groups, (inputs, outputs) = RowGroups(torch.tensor(counts)), sizes
    x = normal(sum(counts), inputs, dtype=dtype, seed=1).requires_grad_()
    weights = parameters(len(counts), outputs, inputs, dtype=dtype)
    biases = parameters(len(counts), outputs, dtype=dtype) if has_bias else None
    sums = [torch.randn(outputs, inputs) for _ in counts]
    before = [total.clone() for total in sums]
    for weight, total in zip(weights, sums, strict=True):
        set_sink(weight, GradientSink(total))
    y = grouped_linear(x, groups, weights, biases, kernels="triton")
    wave = normal(*y.shape, dtype=dtype, seed=2)
    y.backward(wave)
    assert x.grad is not None
    found, expected = [y.detach(), x.grad], [torch.zeros_like(y).double(), torch.zeros_like(x).double()]
    for number, rows in enumerate(torch.arange(len(x)).split(counts)):
        own, grad, weight = x.detach()[rows].double(), wave[rows].double(), weights[number].detach().double()
        bias = biases[number].detach().double() if biases else 0.0
        expected[0][rows], expected[1][rows] = own @ weight.t() + bias, grad @ weight
        found.append(sums[number])
        expected.append(before[number].double() + grad.t() @ own)
        if biases and len(rows):
            gradient = biases[number].grad
            assert gradient is not None
            found.append(gradient)
            expected.append(grad.sum(0))
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("blank", [[True, True, True], [False, True, True]])
def test_the_first_product_of_a_step_overwrites_and_may_wait(blank: list[bool]) -> None:
    """A group without rows then has a gradient of zeros, not what was there before."""
    groups, weights = RowGroups(torch.tensor([2, 0, 3])), parameters(3, 4, 6, dtype=torch.float32)
    sums, later = torch.full((3, 4, 6), torch.nan), []
    for weight, total, is_blank in zip(weights, sums, blank, strict=True):
        sink = GradientSink(total)
        set_sink(weight, sink)
        if is_blank:
            sink.begin()
        else:
            total.fill_(1.0)
    x = torch.randn(5, 6, requires_grad=True)
    grouped_linear(x, groups, weights, later=later, kernels="triton").sum().backward()
    assert len(later) == 1 and sums[1].isnan().all()
    apply_deferred(later)
    for number, rows in enumerate(x.detach().split([2, 0, 3])):
        expected = rows.sum(0).expand(4, 6) + (0.0 if blank[number] else 1.0)
        torch.testing.assert_close(sums[number], expected)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 7), st.sampled_from([3, 40]), TYPES, st.booleans())
def test_sums_of_results_and_their_gradients(tokens, width, dtype, some_absent) -> None:
    chosen = torch.arange(tokens * 3).view(tokens, 3) * 5 % 4 - int(some_absent)
    make = Places.of_some if some_absent else Places.of
    x, gates = normal(tokens, width, dtype=dtype), normal(tokens, 3, dtype=torch.float32, seed=1)
    results = []
    for kernels, kind in (("triton", dtype), ("plain", torch.double)):
        places, of_gates = make(chosen, 4, kernels), torch.float32 if kernels == "triton" else kind
        leaves = [x.to(kind, copy=True).requires_grad_(), gates.to(of_gates, copy=True).requires_grad_()]
        y = Combine.apply(Dispatch.apply(leaves[0], places) * 2, leaves[1], places)
        wave = normal(*y.shape, dtype=dtype, seed=2).to(kind)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, wave)])
    found, expected = results
    assert found[2].dtype == torch.float32
    assert_close(found, expected, dtype)


def test_a_layer_of_experts_is_that_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(layers=1, hidden=16, heads=2, experts=5, expert_hidden=8, activation="swiglu")
    results = []
    for kernels in ("plain", "triton"):
        boundary = Boundary()
        boundary.kernels = kernels
        layer = Experts(config, boundary)
        for seed, parameter in enumerate(layer.parameters()):
            parameter.data.copy_(normal(*parameter.shape, dtype=torch.float32, seed=seed))
            set_sink(parameter, GradientSink(torch.zeros(parameter.shape)))
        x = normal(2, 6, 16, dtype=torch.float32, seed=99).requires_grad_()
        y = layer(x, layer.router(x, 0.1))
        y.backward(normal(*y.shape, dtype=torch.float32, seed=98))
        totals = [parameter.sink.total for parameter in layer.parameters()]
        results.append([y.detach(), x.grad, *totals])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
