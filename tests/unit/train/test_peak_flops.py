"""MFU's peak: the best that a machine has shown, never lowered by a busy moment, never beaten by a step."""

import json
from pathlib import Path

import pytest
import torch

from myriad.train import metrics
from myriad.train.metrics import PeakFlopsTracker

_CPU, _FLOAT32 = torch.device("cpu"), torch.float32


@pytest.fixture
def shares() -> list[float]:
    """Which share of the cores' time the next measurements get; then all of it."""
    return []


@pytest.fixture
def rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: list[float]) -> list[float]:
    """What the next measurements find."""
    found: list[float] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(metrics, "num_cores", lambda: 1024)
    monkeypatch.setattr(
        metrics,
        "_measure",
        lambda device, dtype, seconds: metrics._Product(found.pop(0), shares.pop(0) if shares else 1.0),
    )
    return found


def test_a_start_on_a_busy_machine_is_put_right_by_later_tries_and_stays_so(rates: list[float]) -> None:
    rates += [5.5e9, 4e9, 60e9]
    tries = PeakFlopsTracker(_CPU, _FLOAT32)
    assert tries.peak.flops_per_second == 5.5e9
    assert [tries.after_step(step, 1e9) for step in (1, 2, 3, 4, 5)] == [False, False, False, False, True]
    assert tries.peak.flops_per_second == 60e9
    assert PeakFlopsTracker(_CPU, _FLOAT32).peak == tries.peak, (
        "the next run begins with it, and measures nothing"
    )


def test_a_peak_measured_beside_other_programs_says_so_until_a_quiet_one(
    rates: list[float], shares: list[float]
) -> None:
    rates += [5e9, 4.5e9, 3e9, 4.5e9]
    shares += [0.4, 0.5]
    tries = PeakFlopsTracker(_CPU, _FLOAT32)
    assert tries.peak.source.endswith("; other programs had 60% of the cores then, so it may be too low")
    assert not any(tries.after_step(step, 1e9) for step in (2, 3, 5)), (
        "busy again, then too slow to confirm it"
    )
    again = PeakFlopsTracker(_CPU, _FLOAT32)
    assert again.peak.flops_per_second == 5e9 and "other" not in again.peak.source
    assert PeakFlopsTracker(_CPU, _FLOAT32).peak == again.peak, "and the next run measures nothing"


def test_a_step_above_the_peak_raises_it_and_is_named_as_its_source(rates: list[float]) -> None:
    rates += [5e9, 6.5e9]  # measured again after the step
    tries = PeakFlopsTracker(_CPU, _FLOAT32)
    assert tries.after_step(1, 7e9) and not tries.after_step(3, 6e9)
    assert tries.peak.flops_per_second == 7e9
    assert tries.peak.source.startswith("measured float32 training step, 20")


def test_others_ranks_and_types_have_a_peak_of_their_own(rates: list[float]) -> None:
    rates += [5e9, 3e9, 2e9]
    found = [
        PeakFlopsTracker(_CPU, _FLOAT32),
        PeakFlopsTracker(_CPU, _FLOAT32, 4),
        PeakFlopsTracker(_CPU, torch.bfloat16),
    ]
    assert [one.peak.flops_per_second for one in found] == [5e9, 3e9, 2e9]


@pytest.mark.parametrize("text", ["", "[]", "{", json.dumps({"x": 3})])
def test_a_damaged_or_foreign_file_is_replaced(text: str, rates: list[float], tmp_path: Path) -> None:
    rates += [5e9]
    (tmp_path / "myriad").mkdir()
    (tmp_path / "myriad" / "peak.json").write_text(text)
    assert PeakFlopsTracker(_CPU, _FLOAT32).peak.flops_per_second == 5e9
    assert PeakFlopsTracker(_CPU, _FLOAT32).peak.flops_per_second == 5e9


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA A800-SXM4-80GB", 312e12),
        ("NVIDIA A30", 165e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA A10", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_mfu_is_of_the_peak_of_the_very_device(
    name: str, flops: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A PCIe card has three quarters of the SXM module's: its MFU would be reported a quarter too low."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    found = metrics._data_sheet(torch.device("cuda", 0), torch.bfloat16)
    assert (found and found.flops_per_second) == flops


def test_measuring_draws_no_random_numbers_of_the_run() -> None:
    before = torch.get_rng_state()
    metrics.find_peak(_CPU, _FLOAT32, 0.0)
    assert torch.equal(torch.get_rng_state(), before)
