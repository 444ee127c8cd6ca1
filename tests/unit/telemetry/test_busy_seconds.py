"""If these fail, a rank that waits for a slow one is taken for slow itself, or cannot be asked to end."""

import time

import pytest

from myriad.telemetry.progress.progress_page import ROW_BYTES, ProgressPage, ProgressRow
from myriad.telemetry.spans import Recorder


def test_only_computing_counts() -> None:
    """Of a forward the communication inside it does not, nor does what a rank waits in, or does between."""
    recorder = Recorder()
    with recorder.span("load"), recorder.span("exchange"):
        time.sleep(0.02)
    with recorder.span("forward"):
        time.sleep(0.03)
        with recorder.span("tensor_comm"):
            time.sleep(0.05)
    with recorder.span("await_reduce"):
        time.sleep(0.02)
    totals = recorder.take_totals()
    assert recorder.take_busy() == pytest.approx(totals["forward"] - totals["tensor_comm"], abs=1e-9)
    assert recorder.take_busy() == 0.0


def test_an_evaluation_is_no_computing_of_a_step() -> None:
    """Else a rank looks slow after each step with an evaluation, and waits of it count as a step's."""
    memory = memoryview(bytearray(ROW_BYTES))
    recorder = Recorder(row=ProgressRow(memory))
    forward = recorder.span("forward", 0, 1)
    with recorder.span("evaluate"), recorder.evaluating():
        with recorder.span("forward", 0, 1), recorder.span("tensor_comm"), recorder.span("augment"):
            assert bytes(memory[64:71]) == b"augment"
        with recorder.span("await_gather", 0):
            assert bytes(memory[64:76]) == b"await_gather", "who watches a hang sees what it is in"
    assert recorder.take_busy() == 0.0 and set(recorder.take_totals()) == {"evaluate"}
    with forward:
        pass
    assert recorder.take_busy() > 0.0 and recorder.span("forward", 0, 1) is forward
    names = [span.name for span in recorder.newest()]
    inside = ["augment", "evaluate_tensor_comm", "evaluate_forward", "evaluate_await_gather"]
    assert names == [*inside, "evaluate", "forward"]


def test_a_progress_page_holds_a_ranks_busy_time_and_can_request_a_restart() -> None:
    page = ProgressPage(2)
    rows = [ProgressRow(memoryview(page._memory)[ROW_BYTES * n : ROW_BYTES * (n + 1)]) for n in range(2)]
    for row in rows:
        row.begin(1)
        row.step(1)
        row.step_done(0.25)
    assert page.read(1).busy_ns == 250_000_000 and not rows[1].restart_requested
    page.request_restart(1)
    assert [row.restart_requested for row in rows] == [False, True]
    rows[1].step(2)
    assert rows[1].restart_requested and page.read(1).busy_ns == 250_000_000
    page.clear(1)
    assert not rows[1].restart_requested
