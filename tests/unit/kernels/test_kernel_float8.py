"""Training in float8 differs from bfloat16 by the rounding of operands and by nothing else, and numbers that
are none are not rounded away."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myriad.kernels.float8 import Float8, Scaling, scaled
from myriad.kernels.gradient import GradientSink, apply_deferred, set_sink
from myriad.kernels.linear import linear

SCALINGS: list[Scaling] = ["tensor", "blocks"]


@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 260),
    scaling=st.sampled_from(SCALINGS),
    square=st.booleans(),
    size=st.floats(1e-20, 1e20),
)
def test_a_value_is_off_by_its_rounding_at_most(rows, columns, scaling, square, size) -> None:
    x = torch.randn(rows, columns) * size
    found = scaled(x, torch.float8_e4m3fn, scaling, square=square)
    # 3 bits of mantissa: 1/16 of the value; below the least normal number of a block, of that
    least = x.abs().max() / 448 * 2 * 2.0**-6
    assert ((found.restored(torch.float32) - x).abs() <= x.abs() / 16 + least / 8).all()
    assert torch.equal(found.scales.log2(), found.scales.log2().round())


def test_a_large_value_spoils_its_own_block_alone() -> None:
    x = torch.rand(4, 512) + 0.5
    x[0, 0] = 1e6
    errors = {
        scaling: (scaled(x, torch.float8_e4m3fn, scaling).restored(torch.float32) - x).abs()[1:].max()
        for scaling in SCALINGS
    }
    assert errors["blocks"] < 0.1 < errors["tensor"]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(scaling: Scaling, bad: float) -> None:
    x, weight = torch.randn(32, 64), torch.randn(48, 64)
    x[3, 5] = bad
    assert not Float8(scaling).output(x, weight)[3].isfinite().any()
    assert scaled(torch.zeros(32, 32), torch.float8_e5m2, scaling).restored(torch.float32).abs().sum() == 0


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("later", [False, True])
def test_a_linear_with_a_float8_sink_computes_all_three_products_so(scaling: Scaling, later: bool) -> None:
    x = torch.randn(2, 32, 64, requires_grad=True)
    weight, grad = torch.nn.Parameter(torch.randn(48, 64)), torch.randn(2, 32, 48)
    sink = GradientSink(torch.zeros(48, 64), float8=Float8(scaling))
    set_sink(weight, sink)
    products = []
    sink.deferred = products if later else None
    y = linear(x, weight)
    y.backward(grad)
    apply_deferred(products)
    exact = (x @ weight.t(), grad @ weight, grad.flatten(0, 1).t() @ x.flatten(0, 1))
    for found, expected in zip((y, x.grad, sink.total), exact, strict=True):
        error = (found - expected).norm() / expected.norm()
        assert 1e-3 < error < 0.1
