"""If these fail, a hang of a GPU is blamed on another rank, or times of a step are paid for by the device."""

import time
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.supervise.observations import RankStatus
from myriad.supervise.policy.step_work import StepWork
from myriad.supervise.policy.straggler_detector import StragglerDetector
from myriad.telemetry.progress.device_clock import DeviceClock
from myriad.telemetry.progress.device_progress import DeviceProgress
from myriad.telemetry.progress.operation_counters import COUNTERS, messages
from myriad.telemetry.progress.progress_page import ROW_BYTES, ProgressPage, ProgressRow
from myriad.telemetry.span_io.span_ring import SpanRing
from myriad.telemetry.spans import Recorder

SENT, RECEIVED = COUNTERS.index("activation up sent"), COUNTERS.index("gradient down received")


class Device:
    """Passes its events one by one, each some time after the one before; counts what is asked of them."""

    def __init__(self, cost_ms: float = 1.0) -> None:
        self.cost_ms, self.recorded, self.passed = cost_ms, 0, 10**9
        self.asked = Counter[str]()

    def event(self) -> "Event":
        self.asked["made"] += 1
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._at = device, 0

    def record(self) -> None:
        self._device.asked["record"] += 1
        self._device.recorded += 1
        self._at = self._device.recorded

    def query(self) -> bool:
        self._device.asked["query"] += 1
        return self._at <= self._device.passed

    def synchronize(self) -> None:
        self._device.asked["synchronize"] += 1

    def elapsed_time(self, end_event: "Event") -> float:
        self._device.asked["elapsed_time"] += 1
        return (end_event._at - self._at) * self._device.cost_ms


def recorder_of(device: Device, row: ProgressRow | None = None) -> Recorder:
    return Recorder(row, SpanRing.of_its_own(2**14), device=DeviceClock(device.event))


def step_of(recorder: Recorder, micro_batches: int, tensor: int) -> int:
    """A first pipeline stage's step, as the runtime records it; returns the number of spans."""
    count = 0
    plan = [("load", None)]
    for _ in range(micro_batches):
        plan += [("forward", None), ("send", messages([SENT], waits=False))]
    for _ in range(micro_batches):
        plan += [("wait", messages([RECEIVED], waits=True)), ("backward", None)]
    for index, (name, operation) in enumerate(plan):
        with recorder.span(name, 0, index, operation=operation, follows=index > 0):
            count += 1
            if name in ("forward", "backward"):
                for _ in range(tensor):
                    with recorder.span("tensor_comm"):
                        count += 1
    return count


@pytest.mark.parametrize(("tensor", "most_marks"), [(0, 1.05), (40, 2.0)])
def test_reading_a_step_asks_once_for_each_mark_and_a_span_shares_its_mark_with_the_next(
    tensor: int, most_marks: float
) -> None:
    """Before: 2 marks recorded, 1 query and 2 times for each span."""
    device = Device()
    recorder = recorder_of(device)
    recorder.step(1)
    spans = step_of(recorder, 16, tensor)
    device.asked.clear()
    recorder.step(2)
    marks = device.asked["elapsed_time"]
    assert marks <= most_marks * spans + 2 and device.asked["query"] <= 2 + marks.bit_length()
    assert device.asked["synchronize"] == device.asked["record"] == 0
    assert recorder.written == spans
    made = device.asked["made"]
    step_of(recorder, 16, tensor)
    assert device.asked["record"] == marks and device.asked["made"] == made, "from the pool"


def test_what_was_read_in_the_middle_of_a_step_counts_with_the_rest_of_it() -> None:
    """Else a rank whose device is far behind looks quicker than one whose device is not."""
    device = Device()
    recorder = recorder_of(device)
    for step in range(1, 5):
        recorder.step(step)
        before = device.recorded
        for _ in range(4):
            with recorder.span("forward"):
                pass
        device.passed = before + 2 * step - 1
        recorder.collect()
        device.passed = 10**9
        assert recorder.take_busy() == pytest.approx(0 if step == 1 else 0.004)


def test_a_gpu_that_computes_slowly_is_found_by_its_own_seconds() -> None:
    """Hosts of all ranks take the same: they wait for the slowest in the sum over all ranks."""
    page = ProgressPage(3)
    rows = [ProgressRow(memoryview(page._memory)[ROW_BYTES * n : ROW_BYTES * (n + 1)]) for n in range(3)]
    recorders = [recorder_of(Device(1.0 if rank != 1 else 1.6), row) for rank, row in enumerate(rows)]
    work = StepWork(3, 1, 1, (), (2, 2, 2), 4, 100, "report")
    stragglers = StragglerDetector(work, {rank: (rank,) for rank in range(3)}, work.shares)
    for step in range(1, 20):
        for row, recorder in zip(rows, recorders, strict=True):
            row.begin(1) if step == 1 else None
            row.step(step)
            recorder.step(step)
            for name in ("forward", "backward"):
                with recorder.span(name), recorder.span("tensor_comm"):
                    pass
            with recorder.span("clip"), recorder.span("all_reduce", recorded=False):
                recorder.collect()
            row.step_done(recorder.take_busy())
        looks = [page.read(rank) for rank in range(3)]
        seen = [
            RankStatus(rank, 1, "S", "step", "", step, 1, 1, 0.0, 1.0, look.busy_ns / 1e9)
            for rank, look in enumerate(looks)
        ]
        stragglers.observe(seen, float(step))
    found = stragglers.found()
    assert found is not None and found.ranks == (1,) and found.ratio == pytest.approx(1.6)


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_position_is_that_of_the_device_however_much_was_read_before(read: int, passed: int) -> None:
    device = Device()
    recorder = recorder_of(device)
    clock = recorder.device
    assert clock is not None
    device.passed = read
    step_of(recorder, 8, 2)
    recorder.collect()
    device.passed = max(read, passed)
    position = clock.position()
    assert position is not None
    other = recorder_of(device)
    clock = other.device
    assert clock is not None
    device.recorded, device.passed = 1, max(read, passed)
    step_of(other, 8, 2)
    expected = clock.position()
    assert expected is not None
    assert (position.counters, position.waits, position.activity) == (
        expected.counters,
        expected.waits,
        expected.activity,
    )
    assert (position.entered, position.left) == (expected.entered, expected.left)
    assert 0 <= position.entered - position.left <= 1 and bool(position.waits) == (
        position.entered > position.left
    )


def page_of(device: Device) -> tuple[ProgressPage, ProgressRow, Recorder]:
    page = ProgressPage(1)
    row = ProgressRow(memoryview(page._memory)[:ROW_BYTES])
    row.begin(1)
    row.step(7)
    return page, row, recorder_of(device, row)


def eventually(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_row_shows_where_the_device_is_while_the_host_waits_for_it() -> None:
    device, entered = Device(), []
    page, row, recorder = page_of(device)
    clock = recorder.device
    assert clock is not None
    device.passed = 8  # the first is the clock's own; "load" and a forward with two operations inside
    step_of(recorder, 2, 4)
    asked = device.asked["query"]
    progress = DeviceProgress(clock, row, lambda: entered.append(1), poll_seconds=0.01)
    with recorder.span("all_reduce", recorded=False):
        host = page.read(0)
        assert (host.on_device, host.activity, host.waits) == (False, "all_reduce", 1)
        eventually(lambda: page.read(0).on_device)
        seen = page.read(0)
        assert (seen.activity, seen.entered, seen.left) == ("tensor_comm", 3, 2)
        assert seen.counters[COUNTERS.index("tp")] == 3 and seen.waits == 1 << COUNTERS.index("tp")
        changed = seen.changed_ns
        time.sleep(0.05)
        assert page.read(0).changed_ns == changed, "neither moves"
        device.passed += 1
        eventually(lambda: page.read(0).activity == "forward")
        seen = page.read(0)
        assert seen.changed_ns > changed and (seen.entered, seen.left, seen.waits) == (3, 3, 0)
        device.passed = 10**9
        eventually(lambda: page.read(0).counters[0] == 1)
        assert page.read(0).activity == "all_reduce", "it has come to where the host waits"
    seen = page.read(0)
    assert not seen.on_device and seen.entered == seen.left, "the host moves: its own row counts"
    progress.close()
    assert entered and device.asked["synchronize"] == 1, "the clock's own at its start"
    assert device.asked["query"] - asked < 2000


def test_of_a_host_that_stalls_its_own_activity_is_shown() -> None:
    """The device has done what it was asked for, also what it was asked for in the span that stalls."""
    device = Device()
    page, row, recorder = page_of(device)
    assert recorder.device is not None
    progress = DeviceProgress(recorder.device, row, lambda: None, poll_seconds=0.01)
    step_of(recorder, 2, 0)
    row.enter("load", None, time.monotonic_ns())
    eventually(lambda: page.read(0).on_device)
    seen = page.read(0)
    assert (seen.activity, seen.waits) == ("load", 0) and seen.entered == seen.left == 2
    device.passed = 0
    eventually(lambda: page.read(0).activity == "")
    progress.close()


def test_a_host_that_moves_is_not_looked_at() -> None:
    device = Device()
    _, row, recorder = page_of(device)
    assert recorder.device is not None
    progress = DeviceProgress(recorder.device, row, lambda: None, poll_seconds=0.02)
    asked = device.asked["query"]
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        row.phase("step")
        time.sleep(0.001)
    progress.close()
    assert device.asked["query"] == asked


def test_a_device_that_fails_ends_the_looks_and_not_the_rank(caplog: pytest.LogCaptureFixture) -> None:
    device = Device()
    page, row, recorder = page_of(device)
    step_of(recorder, 1, 0)

    def fail() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert recorder.device is not None
    progress = DeviceProgress(recorder.device, row, fail, poll_seconds=0.01)
    eventually(lambda: "illegal memory access" in caplog.text)
    progress.close()
    assert not page.read(0).on_device and page.read(0).entered == 1
