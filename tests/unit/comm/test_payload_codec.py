"""A codec that loses more than it says, or hides a broken gradient, spoils a run that looks healthy."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myriad.comm.payload_codec import EncodedGradients, EncodedUpdates, make_codec

NAMES = ("bfloat16", "int8")
numbers = st.builds(
    lambda count, seed, size: torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10.0**size,
    st.integers(1, 1200),
    st.integers(0, 1000),
    st.integers(-30, 30),
)


@pytest.mark.parametrize("name", NAMES)
@given(values=numbers)
def test_rounding_is_to_the_nearest(name, values):
    codec = make_codec(name)
    data = codec.encode(values)
    assert data.dtype == torch.uint8 and len(data) == codec.num_bytes(len(values))
    back = codec.decode(data, len(values))
    assert back.dtype == torch.float32 and back.shape == values.shape
    for block, found in zip(values.split(256), back.split(256), strict=True):
        step = block.abs().max() / 127 if name == "int8" else block.abs() * 2.0**-7
        assert ((found - block).abs() <= step * 0.501).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_tenth_of_the_bytes_are_not_lost_to_scales(name):
    assert make_codec(name).num_bytes(2**20) <= {"bfloat16": 2, "int8": 1.02}[name] * 2**20


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_so(name, bad):
    values = torch.ones(600)
    values[300] = bad
    codec = make_codec(name)
    back = codec.decode(codec.encode(values), 600)
    assert not back.isfinite().all()
    assert back[:256].isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_the_smallest_numbers_are_sent(name):
    codec = make_codec(name)
    for values in (torch.zeros(300), torch.full((300,), 1e-44)):
        assert (codec.decode(codec.encode(values), 300).abs() <= 1e-43).all()


@pytest.mark.parametrize("name", NAMES)
def test_what_a_gradient_loses_arrives_later(name):
    """The sum of everything sent stays within one rounding of the sum of everything meant."""
    lost, codec = torch.zeros(2, 300), make_codec(name)
    meant, arrived, cut = torch.zeros(300), torch.zeros(300), slice(0, 300)
    for step in range(20):
        sums = torch.randn(600, generator=torch.Generator().manual_seed(step))
        meant += sums[300:]
        payload = EncodedGradients(sums, codec, lost)
        arrived += payload.decode_part(payload.part(1, cut), cut)
    torch.testing.assert_close(arrived + lost[1], meant, rtol=0, atol=1e-4)
    assert lost.abs().max() < {"bfloat16": 0.02, "int8": 0.03}[name]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_follow_and_all_have_the_same(name, dtype):
    """Over twenty small changes, then at rest."""
    values, theirs, cut = torch.zeros(600, dtype=dtype), torch.zeros(600, dtype=dtype), slice(0, 300)
    own, codec = torch.zeros(300), make_codec(name)
    for step in range(30):
        if step < 20:
            own += 0.01 * torch.randn(300, generator=torch.Generator().manual_seed(step))
        data = EncodedUpdates(values, 2, codec, own).whole(0, cut)
        EncodedUpdates(theirs, 2, codec, torch.zeros(300)).store_whole(0, cut, data)
        assert torch.equal(values, theirs)
    torch.testing.assert_close(
        theirs[:300], own.to(dtype), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )
