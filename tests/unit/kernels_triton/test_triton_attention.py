"""A Triton kernel that a GPU would run gives, in the interpreter, what the formula gives: outputs and
gradients, whatever the window, the length, the heads that share keys, and how the memory lies."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl

from myriad.kernels.attention import attention, attention_reference
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.attention_choice import Scores
from myriad.kernels.attention_flash import flash_attention
from myriad.kernels.documents import Documents
from myriad.kernels.rotary import Rotary, rotary_turns
from myriad.kernels.triton import attention_tiles


@triton.jit
def move_kernel(source, target, stride):
    rows, columns = tl.arange(0, 4), tl.arange(0, 16)
    values = attention_tiles.load(source, rows, stride, columns, 4, 16, 16, False, False)
    attention_tiles.store(target, values, rows, stride, columns, 4, 16, False)


def test_rows_that_lie_billions_of_values_apart_are_found() -> None:
    """A product of 32 bits turns negative there: 131,072 positions of a row of 16,384 values are enough."""
    stride = 2**30
    memory = torch.empty(2 * stride + 4 * stride, dtype=torch.uint8)  # untouched pages take none
    source = memory[2 * stride :].as_strided((4, 32), (stride, 1))
    for row in range(-2, 0):
        memory[(2 + row) * stride :][:32] = 0  # where 32 bits would lead to
    source[:, :16] = torch.arange(64, dtype=torch.uint8).view(4, 16)
    source[:, 16:] = 0
    move_kernel[(1,)](memory[2 * stride :], memory[2 * stride + 16 :], stride)
    assert torch.equal(source[:, 16:], source[:, :16]) and source[:, 16:].any(1).all()


def values(batch: int, sequence: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(sequence * 7 + heads)
    shapes = [(batch, sequence, count, width) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def both(q, k, v, grad, window, how=Scores(), sinks=None):
    """Output and gradients of the kernel, and of the formula in float32."""
    found = []
    for function, dtype in ((flash_attention, q.dtype), (attention_reference, torch.float32)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, sinks) if x is not None]
        out = function(*inputs[:3], window, how, *inputs[3:])
        out.backward(grad.to(dtype))
        found.append([out.detach().float(), *(x.grad.float() for x in inputs)])
    return zip(*found, strict=True)


@settings(max_examples=8, deadline=None)
@given(
    sequence=st.integers(1, 100),
    window=st.integers(1, 120) | st.none(),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2)]),
    batch=st.integers(1, 2),
    how=st.sampled_from([Scores(), Scores(0.2, softcap=2.0)]),
    has_sinks=st.booleans(),
)
def test_any_length_window_and_sharing_of_keys(sequence, window, heads, batch, how, has_sinks) -> None:
    q, k, v, grad = values(batch, sequence, *heads, 64, torch.float32)
    sinks = torch.linspace(-1, 2, heads[0]) if has_sinks else None
    for found, expected in both(q, k, v, grad, window, how, sinks):
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize(
    ("width", "dtype"), [(64, "bfloat16"), (80, "float16"), (96, "bfloat16"), (128, "bfloat16")]
)
def test_half_precision_at_every_head_size(width: int, dtype: str) -> None:
    q, k, v, grad = values(1, 150, 2, 1, width, getattr(torch, dtype))
    for found, expected in both(q, k, v, grad, 70):
        torch.testing.assert_close(found, expected, atol=3e-2, rtol=2e-2)


def test_memory_that_lies_otherwise() -> None:
    fused = torch.randn(2, 40, 4, 64)  # two query heads, a key, a value: views of one tensor
    q, k, v = fused.split([2, 1, 1], 2)
    crosswise = torch.randn(2, 2, 64, 40).permute(0, 3, 1, 2)  # a head's values far apart
    for queries in (q, crosswise):
        for found, expected in both(queries, k, v, torch.randn(2, 2, 40, 64).transpose(1, 2), 9):
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-4)


def test_packed_documents_attend_as_they_do_regrouped() -> None:
    fused, heads, lengths = torch.randn(2, 40, 4 * 16), Heads(2, 1, 16), [[30, 1, 9], [40]]
    positions = torch.tensor([[at for length in row for at in range(length)] for row in lengths])
    turns, found = rotary_turns(Rotary(1e4, 16), 40, fused.device), []
    for kernels in ("triton", "plain"):
        x, sinks = fused.clone().requires_grad_(), torch.tensor([0.5, -1.0], requires_grad=True)
        how, documents = Scores(softcap=3.0), Documents(positions, lengths)
        out = attention(x, heads, 12, turns, kernels, how, sinks, documents)
        found.append([out, *torch.autograd.grad(out.sin().sum(), (x, sinks))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-4)


def test_nothing_gives_nothing() -> None:
    for batch, sequence in ((0, 5), (2, 0)):
        inputs = [torch.randn(batch, sequence, 2, 64, requires_grad=True) for _ in range(3)]
        out = flash_attention(*inputs, 3)
        out.sum().backward()
        assert out.shape == inputs[0].shape and all(x.grad is not None for x in inputs)


def test_only_the_rank_with_a_non_finite_value_reports_it() -> None:
    q, k, v, _ = values(1, 100, 1, 1, 64, torch.float32)
    k[0, 40] = torch.nan
    out = flash_attention(q, k, v, 16)
    spoilt = out.isnan().any(-1).flatten()
    assert spoilt.nonzero().flatten().tolist() == list(range(40, 56))


def test_the_same_gradients_every_time() -> None:
    q, k, v, grad = values(1, 70, 4, 1, 64, torch.bfloat16)
    first, again = ([found for found, _ in both(q, k, v, grad, 33)] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
