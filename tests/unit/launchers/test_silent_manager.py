"""If these fail, a run does not end on SIGTERM because its cluster manager, or each of many processes that it
has started, never answers."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from myriad.launchers import background_launcher, supervised_process
from myriad.launchers.background_launcher import BackgroundLauncher
from myriad.launchers.supervised_process import SupervisedProcess, end_all, wait_all
from myriad.run import Run

SECONDS = 60.0
"""Of patience with this machine."""


class Manager:
    """A launcher whose ``poll`` returns once it is let go, and which notes what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers, self.polls = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def start(self) -> None:
        self.asked.append("start")

    def poll(self) -> None:
        self.asked.append("poll")
        self.polls.set()
        if self.error is not None:
            raise self.error
        assert self.answers.wait(SECONDS)

    def replace(self, node: int) -> None:
        self.asked.append(f"replace {node}")

    def ask_to_stop(self) -> None:
        self.asked.append("ask to stop")

    def wait(self, seconds: float) -> None:
        self.asked.append("wait")

    def close(self) -> None:
        self.asked.append("close")


def test_requests_are_executed_in_order() -> None:
    manager = Manager()
    manager.answers.set()
    launcher = BackgroundLauncher(manager)
    launcher.start()
    launcher.poll()
    launcher.replace(3)
    launcher.ask_to_stop()
    launcher.wait(SECONDS)
    launcher.close()
    assert manager.asked == ["start", "poll", "replace 3", "ask to stop", "wait", "close"]


def test_a_manager_that_never_answers_keeps_no_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_launcher, "_CLOSE_SECONDS", 0.1)
    manager = Manager()
    launcher = BackgroundLauncher(manager)
    launcher.start()
    for _ in range(100):
        launcher.poll()
    launcher.replace(1)
    launcher.wait(0.1)
    launcher.close()
    assert manager.asked in (["start"], ["start", "poll"]), "polls do not pile up"
    manager.answers.set()


def test_its_error_is_raised_by_a_later_poll() -> None:
    manager = Manager()
    manager.error = OSError("gone")
    launcher = BackgroundLauncher(manager)
    launcher.start()
    launcher.poll()
    assert manager.polls.wait(SECONDS)
    launcher.wait(SECONDS)
    with pytest.raises(OSError, match="gone"):
        launcher.poll()
    launcher.close()


IGNORES_SIGTERM = """
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
sys.stdout.write("1\\n")
sys.stdout.flush()
time.sleep(600)
"""


def test_many_processes_that_hang_take_the_time_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits for its controller; a rank's host may have hundreds."""
    command = [sys.executable, "-c", IGNORES_SIGTERM]
    run = Run(tmp_path)
    hung = [SupervisedProcess(run, f"hung-{number}", command) for number in range(4)]
    waits: list[float] = []
    wait = SupervisedProcess.wait

    def note(process: SupervisedProcess, seconds: float) -> None:
        waits.append(seconds)
        wait(process, seconds)

    for each in hung:
        each.start()
    for each in hung:
        assert each.read(SECONDS) == [1]
    monkeypatch.setattr(supervised_process, "_END_SECONDS", 0.2)
    monkeypatch.setattr(SupervisedProcess, "wait", note)
    end_all(hung, signal.SIGTERM)
    assert sum(waits[:4]) < 0.3, "one time for all of them"
    wait_all(hung, SECONDS)
    assert [process_of(each).returncode for each in hung] == [-signal.SIGKILL] * 4


def process_of(supervised: SupervisedProcess) -> "subprocess.Popen[bytes]":
    assert supervised._process is not None
    return supervised._process
