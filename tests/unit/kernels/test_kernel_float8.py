"""Training in float8 differs from bfloat16 by the rounding of operands and by nothing else, and numbers that
are none are not rounded away."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myriad.kernels.float8 import Float8, Kind, Scaled, Scaling, _power_of_two, scaled, seen
from myriad.kernels.gradient import GradientSink, apply_deferred, set_sink
from myriad.kernels.grouped import RowGroups, grouped_linear
from myriad.kernels.linear import linear

SCALINGS: list[Scaling] = ["tensor", "blocks"]
KINDS: list[Kind] = ["tensor", "lines", "squares"]


def in_float8(x: torch.Tensor, kind: Kind, dtype: torch.dtype = torch.float8_e4m3fn) -> Scaled:
    return scaled(seen(x, kind), dtype, kind, ["rows"])[0]


@given(
    rows=st.integers(1, 140),
    columns=st.integers(1, 260),
    kind=st.sampled_from(KINDS),
    size=st.floats(1e-20, 1e20),
)
def test_a_value_is_off_by_its_rounding_at_most(rows, columns, kind, size) -> None:
    x = torch.randn(rows, columns) * size
    found = in_float8(x, kind)
    # 3 bits of mantissa: 1/16 of the value; below the least normal number of a block, of that
    least = x.abs().max() / 448 * 2 * 2.0**-6
    assert ((found.restored(torch.float32) - x).abs() <= x.abs() / 16 + least / 8).all()
    assert torch.equal(found.scales.log2(), found.scales.log2().round())


def test_a_large_value_spoils_its_own_block_alone() -> None:
    x = torch.rand(4, 512) + 0.5
    x[0, 0] = 1e6
    errors = {
        kind: (in_float8(x, kind).restored(torch.float32) - x).abs()[1:].max() for kind in ("tensor", "lines")
    }
    assert errors["lines"] < 0.1 < errors["tensor"]


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(scaling: Scaling, bad: float) -> None:
    x, weight = torch.randn(32, 64), torch.randn(48, 64)
    x[3, 5] = bad
    float8 = Float8(scaling)
    assert not float8.output(*float8.seen(x, weight))[3].isfinite().any()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_but_zeros_has_a_scale(kind: Kind) -> None:
    found = in_float8(torch.zeros(32, 32), kind, torch.float8_e5m2)
    assert found.restored(torch.float32).abs().sum() == 0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_scale_is_the_least_power_of_two_that_suffices(dtype: torch.dtype) -> None:
    every = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()  # all that are finite
    found, most = _power_of_two(every, dtype), torch.finfo(dtype).max
    assert (every <= most * found.double()).all()
    assert ((every > most * found.double() / 2) | (found == 2.0**-100)).all()
    assert (found.frexp().mantissa == 0.5).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_transposed_form_is_that_of_the_transposed_matrix(kind: Kind, dtype: torch.dtype) -> None:
    x = (torch.randn(150, 260) * 10.0 ** torch.randint(-6, 3, (150, 1))).to(dtype)
    found = seen(x, kind)
    rows, columns = scaled(found, torch.float8_e5m2, kind, ["rows", "columns"])
    (alone,) = scaled(found, torch.float8_e5m2, kind, ["columns"])
    for one, expected in ((rows, x), (columns, x.t()), (alone, x.t())):
        wanted = in_float8(expected, kind, torch.float8_e5m2)
        assert torch.equal(one.values.float(), wanted.values.float()) and one.values.is_contiguous()
        assert torch.equal(one.scales, wanted.scales)


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


def test_groups_are_multiplied_as_each_alone() -> None:
    """Experts: one has no token, and products wait until tokens travel."""
    counts, results = [3, 0, 130], []
    x, wave = torch.randn(133, 32), torch.randn(133, 48)
    start, biases = torch.randn(3, 48, 32), torch.randn(3, 48)
    for together in (True, False):
        weights, later = [torch.nn.Parameter(weight.clone()) for weight in start], []
        for weight in weights:
            set_sink(weight, GradientSink(torch.zeros(48, 32), float8=Float8("blocks")))
        leaf = x.clone().requires_grad_()
        if together:
            y = grouped_linear(leaf, RowGroups(torch.tensor(counts)), weights, [*biases], later)
        else:
            parts = zip(leaf.split(counts), weights, biases, strict=True)
            y = torch.cat([linear(part, weight, bias, later) for part, weight, bias in parts])
        y.backward(wave)
        assert len(later) == 2 + (not together)
        apply_deferred(later)
        results.append([y.detach(), leaf.grad, *(weight.sink.total for weight in weights)])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))
