"""If these fail, a flipped bit in a rank's memory is not seen, or equal replicas seem to differ."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myriad.train.replica_digests import digest_of, reduce_bits

Digest = Callable[[list[torch.Tensor]], int]


def on_host(tensors: list[torch.Tensor]) -> int:
    return int(digest_of(tensors))


def on_device(tensors: list[torch.Tensor]) -> int:
    """The reduction that a device does, here."""
    return int(reduce_bits(tensors))


BOTH = pytest.mark.parametrize("digest", [on_host, on_device])


def tensors(seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(10_001, generator=generator)
    return [values, values[:4099].bfloat16(), torch.zeros(0), values[5000:5007]]


@BOTH
@given(st.data())
def test_every_single_flipped_bit_changes_it(digest: Digest, data: st.DataObject) -> None:
    held = tensors()
    before = digest(held)
    one = data.draw(st.sampled_from([held[0], held[1], held[3]]))
    size = one.element_size()
    bit = data.draw(st.integers(0, 8 * size - 1))
    words = one.view(torch.int32 if size == 4 else torch.int16)
    at = data.draw(st.integers(0, len(words) - 1))
    words[at] ^= (1 << bit) if bit < 8 * size - 1 else -(1 << bit)
    assert digest(held) != before


@BOTH
def test_equal_bits_give_the_same_number_wherever_they_lie(digest: Digest) -> None:
    here, there = tensors(), [torch.cat([torch.ones(1), one.float()])[1:].to(one.dtype) for one in tensors()]
    assert digest(here) == digest(there)
    assert -(2**63) <= digest(here) < 2**63


@BOTH
def test_not_a_number_and_minus_zero_are_bits_like_others(digest: Digest) -> None:
    plus, minus, strange = torch.zeros(3), -torch.zeros(3), torch.full((3,), torch.nan)
    assert len({digest([one]) for one in (plus, minus, strange)}) == 3
    assert digest([strange]) == digest([strange.clone()])


@BOTH
def test_tensors_that_change_places_change_it(digest: Digest) -> None:
    a, b, *_ = tensors()
    assert digest([a, b]) != digest([b, a])
