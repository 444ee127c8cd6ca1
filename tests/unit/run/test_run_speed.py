"""If these break: the progress line, the summary and the page show different speeds of one run, or an MFU
above 100 %."""

from collections.abc import Sequence
from typing import Any

import pytest

from myriad.run.run_speed import Peaks, SpeedMeter, run_speed


def lines_of(seconds: Sequence[float], first_step: int = 1, begin: float = 100.0) -> list[dict[str, Any]]:
    """Steps of 1,000 FLOPs and 10 tokens, one after the other."""
    lines, now = [], begin
    for step, each in enumerate(seconds, first_step):
        now += each
        lines.append(
            {"step": step, "time": now, "step_seconds": each, "flops": 1000.0, "tokens_per_second": 10 / each}
        )
    return lines


def start(time: float, peak: float, world: int = 2) -> dict[str, Any]:
    return {"event": "start", "time": time, "world": world, "peak_flops": peak, "peak_source": "a product"}


def test_the_speed_of_a_run_is_its_work_over_its_time_without_warm_up() -> None:
    peaks = Peaks([start(100.0, 1000.0)])
    found = run_speed(lines_of([9.0, 9.0, 9.0, 2.0, 4.0, 2.0, 4.0, 2.0, 4.0]), peaks)
    assert found is not None and (found.first_step, found.last_step) == (4, 9)
    assert found.step_seconds == pytest.approx(3.0)
    assert found.tokens_per_second == pytest.approx(10 / 3) and found.mfu == pytest.approx(1 / 3)
    few = run_speed(lines_of([9.0, 2.0]), peaks)
    assert few is not None and few.first_step == 2, "half of the steps, while there are few"
    assert run_speed([], peaks) is None


def test_the_speed_is_of_the_newest_attempt_that_has_steps() -> None:
    lines = lines_of([2.0] * 8)
    peaks = Peaks([start(100.0, 1000.0), start(200.0, 500.0, world=1)])
    found = run_speed(lines, peaks)
    assert found is not None and found.last_step == 8, "the second has none yet"
    lines += lines_of([4.0] * 8, 9, 200.0)
    found = run_speed(lines, peaks)
    assert found is not None and (found.first_step, found.last_step) == (12, 16)
    assert found.mfu == pytest.approx(0.5)


def test_a_peak_that_rises_later_counts_for_all_steps_and_no_mfu_exceeds_it() -> None:
    peaks = Peaks([start(100.0, 1000.0)])
    meter = SpeedMeter(peaks)
    lines = lines_of([2.0] * 10)
    for line in lines[:8]:
        meter.add(line)
    peaks.add({"event": "peak", "time": 118.0, "peak_flops": 2000.0, "peak_source": "a step"})
    for line in lines[8:]:
        meter.add(line)
    assert meter.speed is not None and meter.speed.mfu == pytest.approx(0.25)
    assert meter.speed == run_speed(lines, peaks), "line by line as at once"
    assert peaks.mfu(lines[0] | {"step_seconds": 1e-3}) == 1.0
