"""The live line: it fits its terminal, follows the run's files, and shows what happened above it."""

import io
import re

import pytest
from rich.console import Console

from myriad.cli.train.train_screen import open_screen
from myriad.job import load_job
from myriad.reports.run_report.run_summary import summarize
from myriad.run import Run


@pytest.fixture
def run(tmp_path) -> Run:
    run = Run(tmp_path / "run")
    run.create_or_resume(load_job("tiny"))
    return run


def step(run: Run, number: int, **more: float) -> None:
    speeds = {"tokens_per_second": 123456.0, "mfu": 0.41, "step_seconds": 60.0}
    run.append_metrics({"step": number, "loss": 2.5, **speeds, **more})


def terminal(width: int) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width, legacy_windows=False)


def drawn(console: Console) -> list[str]:
    """Every line that was drawn, without colours and cursor movements."""
    assert isinstance(console.file, io.StringIO)
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", console.file.getvalue()))


@pytest.mark.parametrize("width", [20, 60, 80, 120, 200])
def test_the_live_line_never_wraps(run, width):
    console = terminal(width)
    screen = open_screen(console, run, 10000)
    step(run, 9990)
    run.append_event("validation", step=9990, loss=2.5, bits_per_byte=1.234)
    screen.tick()
    step(run, 9991)
    screen.tick()
    screen.close()
    lines = [line for line in drawn(console) if "/10000" in line]
    assert lines and all(len(line.rstrip()) <= width for line in lines)


def test_at_80_columns_the_line_has_everything(run):
    console = terminal(80)
    screen = open_screen(console, run, 2000)
    run.append_event("validation", step=1, loss=2.5, bits_per_byte=1.234)
    step(run, 1935)
    screen.tick()
    screen.close()
    assert (
        "1935/2000  loss 2.500  1.234 bits/byte  123k tokens/s  MFU 41.0%  1:05:00 left" in drawn(console)[-2]
    )
    assert any("step 1: validation loss 2.5000, 1.234 bits per byte" in line for line in drawn(console))


def test_a_pipe_gets_plain_lines_and_the_last_step(run):
    console = Console(file=io.StringIO(), width=80)
    screen = open_screen(console, run, 3)
    for number in (1, 2, 3):
        step(run, number)
        screen.tick()
    screen.close()
    steps = [line.split(" · ")[0] for line in drawn(console) if line]
    assert steps == ["step 1/3", "step 3/3"]
    assert "\x1b" not in console.file.getvalue()


def test_a_log_gets_lines_while_nothing_ends(run, monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("myriad.cli.train.train_screen.time.monotonic", lambda: clock[0])
    console = Console(file=io.StringIO(), width=80)
    screen = open_screen(console, run, 3)
    for _ in range(26):
        clock[0] += 1.0
        screen.tick()
    run.append_event("start", ranks=1, device="cpu", precision="float32", parameters=1000)
    step(run, 1)
    screen.tick()
    for _ in range(8):
        clock[0] += 1.0
        screen.tick()
    lines = [line for line in drawn(console) if line.startswith("waiting")]
    starts = [f"waiting for the ranks to start, {seconds} s" for seconds in (6, 12, 18, 25)]
    assert lines == [*starts, "waiting for step 2 to end, 6 s"]


def test_spans_that_are_lost_are_reported_while_the_run_continues(run):
    console = Console(file=io.StringIO(), width=120)
    screen = open_screen(console, run, 3)
    full = {"place": "files", "problem": "No space left on device"}
    run.append_event("telemetry", node=3, num_dropped=512, **full)
    run.append_event("telemetry", node=3, num_dropped=0, place="files", problem="")
    screen.tick()
    screen.close()
    full_line = "spans of node 3 to files: No space left on device; 512 spans are lost"
    assert drawn(console)[:2] == [full_line, "spans of node 3 to files: it works again"]


def test_a_fault_is_a_sentence_with_its_step(run):
    console = terminal(120)
    screen = open_screen(console, run, 100)
    run.append_event(
        "fault", cause="disk", rank=1, rule="ends", evidence={}, step=7, problem="rank 1 is full"
    )
    run.append_event("fault", step=8, problem="checkpoint not stored", failures=3, alarm=True)
    screen.tick()
    lines = drawn(console)
    assert "fault at step 7: rank 1 is full" in lines
    assert "ALARM at step 8: checkpoint not stored (3 in a row)" in lines


def test_earlier_attempts_do_not_count_for_this_ones_speed(run):
    step(run, 1, step_seconds=9999.0)
    screen = open_screen(console := terminal(120), run, 100)
    step(run, 2, step_seconds=1.0)
    screen.tick()
    screen.close()
    assert "1:38 left" in drawn(console)[-2]


def test_a_loss_that_is_not_a_number_is_shown_as_such(run):
    screen = open_screen(console := terminal(80), run, 100)
    step(run, 2, loss=float("nan"))
    screen.tick()
    screen.close()
    assert any("loss nan" in line for line in drawn(console))


def test_float16_shows_its_scale_and_each_step_that_it_skipped(run):
    screen = open_screen(console := terminal(150), run, 100)
    step(run, 1, loss_scale=65536.0, skipped=1, overflow=1)
    run.append_event("overflow", step=1, loss_scale=65536.0, next_loss_scale=32768.0)
    step(run, 2, loss_scale=32768.0)
    screen.tick()
    screen.close()
    assert any(
        "step 1: gradients overflow float16 at the loss scale 65,536" in line for line in drawn(console)
    )
    assert drawn(console)[-2].rstrip().endswith("loss scale 32,768, 1 step skipped for overflow")
    assert summarize(run).loss_scale == "loss scale 32,768, 1 step skipped for overflow"
