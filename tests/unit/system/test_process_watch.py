"""If these fail, a process that is slow is killed as stopped or hung, or one that is stopped is not noticed,
or a machine that was paused comes back to a run whose processes kill each other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from myriad.supervise.driver.launcher_monitor import LauncherMonitor, unread_bytes
from myriad.system.processes import PausableClock, StopTimer, process_run_ns, process_state

SECONDS = 60.0


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    """That computes."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as started:
        yield started
        started.kill()


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGSTOP)
    while process_state(process.pid) != "T":
        time.sleep(0.001)


def run_a_little(process: "subprocess.Popen[bytes]") -> None:
    before, deadline = process_run_ns(process.pid), time.monotonic() + SECONDS
    process.send_signal(signal.SIGCONT)
    while process_run_ns(process.pid) == before:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    stop(process)


def test_a_process_that_runs_between_two_looks_is_not_stopped(process: "subprocess.Popen[bytes]") -> None:
    timer = StopTimer()
    assert timer.poll(process.pid, 0.0) is None
    for now in range(1, 10):
        stop(process) if now == 1 else run_a_little(process)
        assert timer.poll(process.pid, float(now)) == 0.0
    assert timer.poll(process.pid, 12.0) == 3.0, "it has not run since"
    process.send_signal(signal.SIGCONT)
    while process_state(process.pid) == "T":
        time.sleep(0.001)
    assert timer.poll(process.pid, 13.0) is None


def test_another_process_with_the_same_state_is_measured_again(process: "subprocess.Popen[bytes]") -> None:
    timer = StopTimer()
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        stop(process)
        stop(other)
        assert timer.poll(process.pid, 0.0) == 0.0
        assert timer.poll(other.pid, 5.0) == 0.0
        other.kill()


def test_a_pause_of_the_watcher_counts_for_one_look() -> None:
    times = iter([0.0, 0.5, 1.0, 601.0, 601.5])
    clock = PausableClock(2.0, lambda: next(times))
    assert [clock.read() for _ in range(4)] == [0.5, 1.0, 3.0, 3.5]


def test_a_launcher_that_reads_nothing_is_reported_once_and_so_is_its_return() -> None:
    reading, writing = os.pipe()
    clock = iter(float(second) for second in range(100))
    watch = LauncherMonitor(os.getpid(), writing, clock=lambda: next(clock))
    said = []
    for second in range(20):
        said.append(watch.poll())
        os.write(writing, b"{}\n")
        if not 5 <= second < 15:
            os.read(reading, 1000)
    told = [(second, one) for second, one in enumerate(said) if one is not None]
    assert [second for second, _ in told] == [10, 16]
    assert told[0][1].startswith("hangs: it reads nothing") and told[1][1] == "goes on"
    os.close(reading)
    os.close(writing)


def test_output_that_is_no_pipe_gives_no_sign_of_the_launcher() -> None:
    with open(os.devnull, "wb") as file:
        assert unread_bytes(file.fileno()) == 0
