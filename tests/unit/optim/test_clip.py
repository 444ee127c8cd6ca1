"""If these fail, the reported gradient norm is wrong, or layouts part because they clip differently."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.optim.parameter_norms import clip_scale, non_finite_rows, squared_norms, sums_of_squares
from myriad.optim.region import ParameterSlice, Region


def region_of(gradients: torch.Tensor, pieces: tuple[ParameterSlice, ...]) -> Region:
    return Region(torch.zeros_like(gradients), gradients, True, pieces)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_squared_norms_are_those_of_each_parameter(data: st.DataObject) -> None:
    num_parameters, regions = 5, []
    expected = torch.zeros(num_parameters, dtype=torch.float64)
    for _ in range(data.draw(st.integers(1, 2))):
        sizes = data.draw(st.lists(st.integers(1, 4000), min_size=1, max_size=6))
        owners = data.draw(st.lists(st.integers(0, 4), min_size=len(sizes), max_size=len(sizes)))
        gap = data.draw(st.integers(0, 1100))  # memory without an owner, for example padding
        gradients = torch.randn(gap + sum(sizes))
        pieces, start = [], gap
        for owner, size in zip(owners, sizes, strict=True):
            pieces.append(ParameterSlice(owner, start, start + size))
            expected[owner] += gradients[start : start + size].double().square().sum()
            start += size
        regions.append(region_of(gradients, tuple(pieces)))
    table = squared_norms(regions, num_parameters)
    assert table.dtype == torch.float64
    torch.testing.assert_close(table, expected, rtol=1e-6, atol=0)


def test_large_parameters_keep_their_precision() -> None:
    """torch's own norm of this vector is 0.8 % off on a CPU, more than a thousand times the parity
    tolerance."""
    flat = torch.full((10_000_001,), 1e-3)
    table = sums_of_squares([flat], [(ParameterSlice(0, 0, flat.numel()),)], 1)
    assert table.item() == pytest.approx(flat.numel() * float(flat[0].double()) ** 2, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("position", [0, 1500, 2999])
def test_a_non_finite_gradient_names_its_parameter_only(bad: float, position: int) -> None:
    gradients = torch.ones(3000)
    gradients[position] = bad
    pieces = (ParameterSlice(4, 0, 1100), ParameterSlice(2, 1100, 1600), ParameterSlice(0, 1600, 3000))
    expected = next(piece.parameter for piece in pieces if piece.start <= position < piece.stop)
    assert non_finite_rows(squared_norms([region_of(gradients, pieces)], 5)) == [expected]


def test_finite_values_name_no_rank() -> None:
    assert non_finite_rows(torch.ones(3)) == []


@given(st.floats(0, 1e6), st.none() | st.floats(1e-3, 1e3))
def test_clipped_norm_is_at_most_the_limit(norm: float, limit: float | None) -> None:
    scale = clip_scale(norm, limit)
    assert 0 < scale <= 1
    if limit is None or norm <= limit:
        assert scale == 1
    else:
        assert norm * scale == pytest.approx(limit)
