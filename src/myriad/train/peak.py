"""The peak that MFU is measured against, with its source.

Known accelerators by their data sheet (dense, no sparsity); anything else by multiplying matrices for a
moment, on every rank at once, as training will.
"""

import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from myriad.train.measured_files import keep_measured, read_measured

__all__ = ["Peak", "find_peak"]

_DATA_SHEETS = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}
"""bf16 FLOP/s without sparsity, NVIDIA's data sheets (SXM)."""


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one rank, and where the number is from."""

    flops_per_second: float
    source: str


def find_peak(
    device: torch.device, dtype: torch.dtype, measure_seconds: float = 0.4, kept: Path | None = None
) -> Peak:
    """Peak of one rank for matrix products of ``dtype``. What was measured is kept in ``kept``: a run that
    begins again loses no time with it, and its MFU stays comparable."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, peak in _DATA_SHEETS.items():
            if known in name and dtype == torch.bfloat16:
                return Peak(peak, f"{known} data sheet, bf16")
    name = str(dtype).removeprefix("torch.")
    where = f"{socket.gethostname()}, {device.type}, {name}, {torch.get_num_threads()} threads"
    peaks = read_measured(kept, _are_peaks) or {}
    if where not in peaks:
        peaks[where] = _measure(device, dtype, measure_seconds)
        keep_measured(kept, peaks)
    return Peak(peaks[where], f"measured {name} matrix product")


def _are_peaks(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(one, float | int) and 0 < one < 1e300 for one in value.values()
    )


def _measure(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    size = 1024 if device.type == "cpu" else 8192
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    best, end = 0.0, time.perf_counter() + seconds
    while best == 0.0 or time.perf_counter() < end:
        _synchronize(device)
        start = time.perf_counter()
        a @ b
        _synchronize(device)
        best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
