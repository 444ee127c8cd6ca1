"""How long something takes on a device, and what two things, a copy and a matrix product, reach there."""

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["measured_seconds", "wait"]

_ROUND_SECONDS = 0.2
_MOST_ROUNDS = 200


def wait(device: torch.device) -> None:
    """Until the device has done what it was asked for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measured_seconds(
    function: Callable[[], object], device: torch.device, seconds: float = _ROUND_SECONDS
) -> float:
    """Median of rounds for about so long, after three that warm up (and compile)."""
    for _ in range(3):
        function()
    wait(device)
    began = time.perf_counter()
    function()
    wait(device)
    rounds = int(min(_MOST_ROUNDS, max(3, seconds / max(time.perf_counter() - began, 1e-6))))
    return _by_events(function, rounds) if device.type == "cuda" else _by_clock(function, rounds)


def _by_events(function: Callable[[], object], rounds: int) -> float:
    """The device's own times: launches overlap with what runs."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for first, last in marks:
        first.record()
        function()
        last.record()
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in marks) / 1e3


def _by_clock(function: Callable[[], object], rounds: int) -> float:
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        function()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)
