"""If these fail, what a rank did is lost, misplaced in time or attributed to another rank."""

import os
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.telemetry import spans
from myriad.telemetry.progress import device_clock
from myriad.telemetry.progress.device_clock import DeviceClock
from myriad.telemetry.span_io.span_records import RECORD, RECORD_BYTES
from myriad.telemetry.span_io.span_ring import MAX_NAMES, SPANS, SpanRing, SpanRings, own_ring
from myriad.telemetry.spans import Recorder, span

CAPACITY = 128


@pytest.fixture
def rings(monkeypatch: pytest.MonkeyPatch) -> SpanRings:
    """Of two ranks; this process is the second."""
    rings = SpanRings(2, CAPACITY)
    monkeypatch.setenv(SPANS, rings.address(1))
    monkeypatch.setenv("MYRIAD_EPOCH", "3")
    return rings


def test_a_reader_gets_what_a_rank_did_with_everything_that_names_it(rings: SpanRings) -> None:
    assert len(rings.drain(1).records) == 0
    recorder = Recorder(ring=own_ring(), rank=12_287)
    before = time.time_ns()
    recorder.step(70_000)
    with recorder.span("forward", 3, 17):
        with recorder.span("tensor_comm"):
            time.sleep(0.01)
    with recorder.span("await_gather", 31, -1, 5):
        pass
    found = rings.drain(1)
    assert (found.pid, found.attempt, found.num_dropped) == (os.getpid(), 3, 0)
    records = found.records
    assert [found.names[name] for name in records["name"]] == ["tensor_comm", "forward", "await_gather"]
    assert records["step"].tolist() == [70_000] * 3 and records["rank"].tolist() == [12_287] * 3
    places = [records[field].tolist() for field in ("stage", "micro_batch", "chunk")]
    assert places == [[-1, 3, 31], [-1, 17, -1], [-1, -1, 5]]
    inner, outer, _ = records
    assert before - 10**6 <= outer["start_ns"] <= inner["start_ns"] <= time.time_ns()
    assert 10**7 <= inner["duration_ns"] <= outer["duration_ns"]
    assert len(rings.drain(1).records) == 0 and len(rings.drain(0).records) == 0


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(0, 3 * CAPACITY), max_size=6))
def test_every_span_is_read_once_or_counted_as_dropped(bursts: list[int]) -> None:
    rings = SpanRings(1, CAPACITY)
    ring = SpanRing(rings._rings[0], CAPACITY)
    ring.begin(1)
    recorder, made, read, dropped = Recorder(ring=ring), 0, [], 0
    for burst in bursts:
        for _ in range(burst):
            recorder.write(made, 1, 0, 0)
            made += 1
        found = rings.drain(0)
        offset = time.time_ns() - time.monotonic_ns()
        read += [round((start - offset) / 1e6) for start in found.records["start_ns"].tolist()]
        dropped += found.num_dropped
        assert len(found.records) + found.num_dropped == burst
    assert len(read) + dropped == made


def test_the_newest_are_kept_and_the_next_attempt_starts_again(rings: SpanRings) -> None:
    recorder = Recorder(ring=own_ring())
    for step in range(3 * CAPACITY):
        recorder.step(step)
        with recorder.span("load"):
            pass
    found = rings.drain(1)
    assert found.num_dropped == 3 * CAPACITY - len(found.records) and found.records["step"][-1] == step
    assert found.records["step"].tolist() == list(range(step + 1 - len(found.records), step + 1))
    rings.clear(1)
    assert len(rings.drain(1).records) == 0
    own_ring()
    assert len(rings.drain(1).records) == 0 and rings.drain(1).attempt == 3


def test_a_block_that_raises_and_one_inside_itself_are_recorded(rings: SpanRings) -> None:
    recorder = Recorder(ring=own_ring())
    with pytest.raises(KeyError), recorder.span("forward", 0, 0):
        raise KeyError
    with recorder.span("forward", 0, 0), recorder.span("forward", 0, 0):
        time.sleep(0.001)
    with recorder.span("forward", 0, 0):
        pass
    durations = rings.drain(1).records["duration_ns"]
    assert len(durations) == 4 and durations[2] >= durations[1] >= 10**6 > durations[3]


def test_code_of_a_job_adds_spans_and_runs_without_a_rank_too(
    rings: SpanRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "_of_this_process", [])
    with span("mix experts", 2):
        pass
    recorder = Recorder(ring=own_ring())
    recorder.serve()
    with span("mix experts", 2):
        pass
    found = rings.drain(1)
    assert [found.names[name] for name in found.records["name"]] == ["mix experts"]
    assert found.records["stage"].tolist() == [2]


def test_names_beyond_the_table_are_recorded_as_other(rings: SpanRings) -> None:
    recorder = Recorder(ring=own_ring())
    for number in range(MAX_NAMES + 5):
        with recorder.span(f"part {number} " + "é" * 40):
            pass
    found = rings.drain(1)
    assert len(found.names) == MAX_NAMES and found.names[1].startswith("part 0 é")
    assert (found.records["name"][-6:] == 0).all() and found.names[0] == "other"


def test_the_record_is_what_batches_hold() -> None:
    assert RECORD_BYTES == 32 == np.zeros(1, RECORD).nbytes


class _Event:
    """An event of a device; it completes when the test requests it."""

    now_ms, passed_ms = 0.0, 1e9

    def record(self) -> None:
        self.at = _Event.now_ms

    def query(self) -> bool:
        return self.at <= _Event.passed_ms

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: "_Event") -> float:
        return end_event.at - self.at


def test_spans_of_a_device_come_when_it_has_passed_them(rings: SpanRings) -> None:
    """What the host took to ask for the work is not what the work took."""
    _Event.now_ms, _Event.passed_ms = 100.0, 1e9
    recorder = Recorder(ring=own_ring(), device=DeviceClock(_Event))
    _Event.passed_ms = 100.0
    recorder.step(1)
    for duration in (5.0, 7.0):
        with recorder.span("forward"):
            _Event.now_ms += duration
    recorder.step(2)
    assert len(rings.drain(1).records) == 0
    _Event.passed_ms = 106.0
    recorder.step(3)
    assert rings.drain(1).records["duration_ns"].tolist() == [5_000_000]
    _Event.passed_ms = 200.0
    recorder.step(4)
    late = rings.drain(1).records
    assert late["duration_ns"].tolist() == [7_000_000] and late["step"].tolist() == [1]


def test_a_gpu_reports_how_long_it_computed_once_it_has(rings: SpanRings) -> None:
    """Stragglers are found by it: not by when the host asked, and not by what the rank waited for others."""
    _Event.now_ms, _Event.passed_ms = 100.0, 1e9
    recorder = Recorder(ring=own_ring(), device=DeviceClock(_Event))
    recorder.step(1)
    assert recorder.take_busy() == 0
    with recorder.span("forward"):
        _Event.now_ms += 5
        with recorder.span("tensor_comm"):
            _Event.now_ms += 40
    with recorder.span("await_gather"):
        _Event.now_ms += 70
    _Event.passed_ms = 100.0
    recorder.step(2)
    assert recorder.take_busy() == 0, "the device has not come to them"
    _Event.passed_ms = 1e9
    recorder.step(3)
    assert recorder.take_busy() == pytest.approx(0.005) and recorder.take_busy() == 0
    with recorder.evaluating(), recorder.span("forward"):
        _Event.now_ms += 90
    recorder.step(4)
    assert recorder.take_busy() == 0


def test_a_gpu_s_exposed_communication_is_what_the_device_waited(rings: SpanRings) -> None:
    """The host runs ahead and waits for the whole step in one place: by its clock all of it is exposed."""
    _Event.now_ms, _Event.passed_ms = 100.0, 1e9
    recorder = Recorder(ring=own_ring(), device=DeviceClock(_Event))
    with recorder.span("forward"):
        _Event.now_ms += 50
        with recorder.span("tensor_comm"):
            _Event.now_ms += 3
    with recorder.span("clip"):
        time.sleep(0.02)  # the host, for the 53 ms of the device
        _Event.now_ms += 2
    with recorder.evaluating(), recorder.span("await_gather"):
        _Event.now_ms += 90
    recorder.step(2)
    assert recorder.take_exposed() == pytest.approx(0.005) and recorder.take_exposed() == 0


def test_a_device_s_clock_is_renewed_though_it_is_busy_when_steps_begin(
    rings: SpanRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its clock runs 1 % fast here: times drift from the host's until they count from a new moment."""
    now_ns = [10**12]
    monkeypatch.setattr(device_clock.time, "monotonic_ns", lambda: now_ns[0])

    def passes(seconds: float) -> None:
        now_ns[0] += round(seconds * 1e9)
        _Event.now_ms += seconds * 1e3 * 1.01

    _Event.now_ms, _Event.passed_ms = 100.0, 1e9
    recorder = Recorder(ring=own_ring(), device=DeviceClock(_Event))
    for step in range(100):
        recorder.step(step)
        with recorder.span("clip"):
            passes(1.0)
            recorder.align_clocks()
        _Event.passed_ms = _Event.now_ms - 1  # the update is under way when the next step begins
        recorder.step(step + 1)
        _Event.passed_ms = 1e9
    recorder.step(101)
    starts = rings.drain(1).records["start_ns"] / 1e9
    assert np.abs(starts - starts[0] - np.arange(100)).max() < 0.1, "1 s without renewal"


def test_of_a_device_that_is_far_behind_the_hosts_times_are_kept(
    rings: SpanRings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not nothing: who looks at a stuck device wants to see what it was last asked for."""
    monkeypatch.setattr(device_clock, "_MOST_WAITING", 1)
    _Event.now_ms, _Event.passed_ms = 100.0, 1e9
    recorder = Recorder(ring=own_ring(), device=DeviceClock(_Event))
    _Event.now_ms, _Event.passed_ms = 101.0, 100.0
    for step in (1, 2):
        recorder.step(step)
        with recorder.span("forward"):
            time.sleep(0.001)
    found = rings.drain(1).records
    assert found["step"].tolist() == [2] and found["duration_ns"][0] >= 10**6
