"""If these fail, precision = "auto" picks a type that the machine emulates at a hundredth of the speed."""

import pytest
import torch

from myriad.optim.precision import resolve_precision


def test_named_precisions_are_taken_as_they_are() -> None:
    assert resolve_precision("float32", "cpu") == torch.float32
    assert resolve_precision("bfloat16", "cpu") == torch.bfloat16


@pytest.mark.parametrize(
    ("avx512_bf16", "amx", "expected"),
    [
        (False, False, torch.float32),
        (True, False, torch.bfloat16),
        (False, True, torch.bfloat16),
    ],
)
def test_auto_on_a_cpu_follows_its_instructions(
    monkeypatch: pytest.MonkeyPatch, avx512_bf16: bool, amx: bool, expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
    assert resolve_precision("auto", "cpu") == expected


@pytest.mark.parametrize(
    ("capability", "expected"),
    [((6, 1), torch.float32), ((7, 0), torch.float16), ((9, 0), torch.bfloat16)],
)
def test_auto_on_a_gpu_follows_its_generation(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: torch.dtype
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_precision("auto", "cuda:0") == expected
    unskipped = torch.float32 if expected == torch.float16 else expected
    assert resolve_precision("auto", "cuda:0", skips_steps=False) == unskipped, "updates are not taken back"
