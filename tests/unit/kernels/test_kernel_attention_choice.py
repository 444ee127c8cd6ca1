"""Attention goes by a path that can compute the shape, whatever is asked for; what was measured on a device
counts there alone; and what cannot be is refused, or done otherwise with a line saying so."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend

from myriad.errors import BadInputError
from myriad.kernels import attention_choice
from myriad.kernels.attention import attention_by, attention_reference
from myriad.kernels.attention_choice import (
    AttentionShape,
    FastestAttention,
    Scores,
    check_attention,
    choose_attention,
    choose_inside_documents,
    choose_pieces,
    fallback_attention,
    fallback_pieces,
    hindrance,
    read_times,
)
from myriad.kernels.attention_library import cudnn_attention, flex_attention_in, sdpa_attention

HOPPER = AttentionShape("cuda", "bfloat16", 8192, 128)


@pytest.fixture(params=[True, False], ids=["triton", "no triton"])
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(attention_choice, "has_triton", lambda: request.param)
    return request.param


@given(
    device=st.sampled_from(["cpu", "cuda"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    sequence=st.integers(1, 300),
    width=st.sampled_from([2, 20, 64, 80, 96, 128, 256, 512]),
    window=st.integers(1, 400) | st.none(),
    kernels=st.sampled_from(["auto", "plain", "triton"]),
    deterministic=st.booleans(),
)
def test_every_shape_has_a_path_that_takes_it(
    device, dtype, sequence, width, window, kernels, deterministic
) -> None:
    shape = AttentionShape(device, dtype, sequence, width, window, deterministic=deterministic)
    path = choose_attention(shape, kernels).path
    assert hindrance(path, shape) == ""
    assert not (kernels == "plain" and path == "triton")


def test_a_window_on_a_gpu_goes_by_a_kernel_that_skips_what_it_leaves_out(installed: bool) -> None:
    shape = HOPPER._replace(window=512)
    assert choose_attention(shape).path == ("triton" if installed else "varlen")
    assert bool(fallback_attention("auto", shape)) is not installed
    assert choose_attention(HOPPER._replace(window=8192)).path == "cudnn"
    assert choose_attention(HOPPER._replace(deterministic=True)).path == "sdpa"


def test_ranks_on_gpus_that_share_sequences_launch_many_or_cut_pieces_as_one(installed: bool) -> None:
    """Whole and causal pieces of whole sequences, of which a step has few, are the library's."""
    wide, bounded = HOPPER._replace(dtype="float32"), HOPPER._replace(capped=True)
    assert choose_pieces(HOPPER, num_pieces=4).path == "library"
    assert choose_pieces(HOPPER, num_pieces=100).path == ("triton" if installed else "library")
    assert choose_pieces(HOPPER, "plain", num_pieces=100).path == "library"
    for shape, cut in ((wide, False), (bounded, False), (HOPPER, True), (HOPPER._replace(width=20), False)):
        able = installed and shape.width == 128
        assert choose_pieces(shape, cut=cut).path == ("triton" if able else "scores")
        assert choose_pieces(shape, "plain", cut=cut).path == "scores"
        assert bool(fallback_pieces("auto", shape._replace(window=512 if cut else None))) is not able
    host = AttentionShape("cpu", "float32", 256, 64, interpreted=True)
    assert choose_pieces(host).path == "library" and choose_pieces(host, cut=True).path == "scores"
    assert choose_pieces(host, "triton").path == ("triton" if installed else "library")


def test_documents_and_bounded_scores_on_a_gpu_need_no_other_call(installed: bool) -> None:
    """What the library has no call for is Triton's."""
    bounded = HOPPER._replace(capped=True)
    assert choose_attention(bounded).path == ("triton" if installed else "scores")
    assert choose_attention(bounded._replace(device="cpu", interpreted=True)).path == "scores"
    assert choose_inside_documents(HOPPER, "auto") == "varlen"
    for shape in (bounded, HOPPER._replace(dtype="float32"), HOPPER._replace(deterministic=True)):
        assert choose_inside_documents(shape, "auto") == ("triton" if installed else "")
        assert choose_inside_documents(shape._replace(device="cpu"), "auto") == ""


def test_what_triton_cannot_do_is_refused_when_asked_to_insist(installed: bool) -> None:
    odd = HOPPER._replace(width=72, window=512)
    for shape in (odd, AttentionShape("cpu", "float32", 256, 64)):
        with pytest.raises(BadInputError, match=r"attention by Triton"):
            check_attention("triton", shape)
        check_attention("auto", shape)
    assert choose_attention(odd, "triton").path == "varlen"
    assert "\n" not in fallback_attention("auto", odd)


def test_what_was_measured_counts_on_that_device_and_shape_alone(tmp_path: Path) -> None:
    row = ("NVIDIA H200", "bfloat16", 8192, 128, 512, "varlen")
    file = tmp_path / "times.json"
    file.write_text(json.dumps({"attention": [dict(zip(FastestAttention._fields, row, strict=True))]}))
    timed, shape = read_times(file), HOPPER._replace(window=512)
    usual = choose_attention(shape).path
    assert choose_attention(shape, timed=timed, name="NVIDIA H200").path == "varlen"
    assert choose_attention(shape, timed=timed, name="NVIDIA H100").path == usual
    assert choose_attention(shape._replace(sequence=4096), timed=timed, name="NVIDIA H200").path == usual
    assert read_times(tmp_path / "none.json") == ()
    bad = tmp_path / "bad.json"
    bad.write_text('{"attention": [{"path": "quick"}]}')
    with pytest.raises(BadInputError, match="--choose"):
        read_times(bad)


@pytest.mark.parametrize("window", [1, 7, 40, 90])
def test_paths_of_a_cpu_agree_with_the_formula(window: int) -> None:
    q, k, v = torch.randn(2, 80, 4, 16), torch.randn(2, 80, 2, 16), torch.randn(2, 80, 2, 16)
    expected = attention_reference(q, k, v, window)
    shape = AttentionShape("cpu", "float32", 80, 16, window)
    for path in ("sdpa", "windows", "masked"):
        if not hindrance(path, shape):
            torch.testing.assert_close(attention_by(path, q, k, v, window), expected)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_the_mask_given_to_flex_attention_is_the_window() -> None:
    q, k, v = torch.randn(1, 128, 2, 16), torch.randn(1, 128, 1, 16), torch.randn(1, 128, 1, 16)
    torch.testing.assert_close(flex_attention_in(q, k, v, 9), attention_reference(q, k, v, 9))
    adjusted = (Scores(0.7, 1.5), torch.randn(2))
    torch.testing.assert_close(
        flex_attention_in(q, k, v, 9, *adjusted), attention_reference(q, k, v, 9, *adjusted)
    )


def test_the_order_of_the_library_s_kernels_is_set_once_for_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At each call it is ten microseconds of the host's, which small models wait for."""
    orders, original = [], torch._C._set_sdp_priority_order
    usual, values = torch._C._get_sdp_priority_order(), [torch.randn(1, 8, 2, 4) for _ in range(3)]

    def noted(order: list[int]) -> None:
        orders.append(order)
        original(order)

    monkeypatch.setattr(torch._C, "_set_sdp_priority_order", noted)
    found = [cudnn_attention(*values) for _ in range(3)]
    assert len(orders) == 1 and orders[0][0] == int(SDPBackend.CUDNN_ATTENTION)
    assert sorted(orders[0]) == sorted(usual)
    assert torch.equal(sdpa_attention(*values), found[0]) and orders[1:] == [usual], "measured beside it"
