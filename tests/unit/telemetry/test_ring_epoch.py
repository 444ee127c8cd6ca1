"""If this breaks: a busy machine moves the spans of one drain by milliseconds against others, and messages
seem to come before they were sent."""

import time

import pytest

from myriad.telemetry.span_io.span_ring import SpanRing
from myriad.telemetry.spans import Recorder


def test_a_reader_that_is_stopped_between_two_clocks_moves_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = SpanRing.of_its_own(128)
    recorder, real, calls = Recorder(ring=ring), time.time_ns, []
    began = real()
    with recorder.span("forward"):
        pass
    ended = real()

    def stopped() -> int:
        calls.append(1)
        now = real()
        if len(calls) == 1:
            time.sleep(0.05)
        return now

    monkeypatch.setattr(time, "time_ns", stopped)
    start = int(ring.newest().records["start_ns"][0])
    assert calls
    assert began - 20_000_000 < start < ended + 20_000_000
