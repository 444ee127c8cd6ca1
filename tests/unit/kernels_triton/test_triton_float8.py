"""What a GPU computes for float8 in blocks is what a CPU emulates: the curve trained here is the one that
would be trained there."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from myriad.kernels.float8 import Scaled, _scaled_in_blocks
from myriad.kernels.triton.float8 import product_of_blocks, scaled_in_blocks

TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 150),
    columns=st.integers(1, 300),
    square=st.booleans(),
    name=st.sampled_from(["e4m3", "e5m2"]),
)
def test_scaling_is_the_cpus_to_the_bit(rows: int, columns: int, square: bool, name: str) -> None:
    x = torch.randn(columns, rows).t() * 10.0 ** torch.randint(-6, 3, (rows, 1))
    values, scales = scaled_in_blocks(x, TYPES[name], square)
    expected = _scaled_in_blocks(x, TYPES[name], square)
    assert torch.equal(scales, expected.scales)
    # the interpreter's own cast loses the carry into the exponent (127.9 becomes 64) and cuts off what is
    # below the normal numbers; a GPU's rounds
    least = torch.finfo(TYPES[name]).smallest_normal
    wanted = expected.values.float()
    same = (wanted.abs() >= least) & (wanted.abs().log2() % 1 != 0)
    assert torch.equal(values.float()[same], wanted[same])


@settings(max_examples=4, deadline=None)
@given(rows=st.integers(1, 140), columns=st.integers(1, 140), inner=st.integers(1, 260), square=st.booleans())
def test_products_of_blocks_are_those_of_the_numbers(
    rows: int, columns: int, inner: int, square: bool
) -> None:
    a = _scaled_in_blocks(torch.randn(rows, inner), torch.float8_e5m2, False)
    b = _scaled_in_blocks(torch.randn(columns, inner), torch.float8_e4m3fn, square)
    found = product_of_blocks(*a, *b, torch.float32)
    expected = a.restored(torch.float32) @ Scaled(*b).restored(torch.float32).t()
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
