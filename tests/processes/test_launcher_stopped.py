"""If these fail, a launcher that a person has stopped with Ctrl-Z, or that hangs, takes the repair of ranks
with it, or does so without a word."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_corpora import make_corpus

from myriad.faults.run_processes import descendants
from myriad.run import Run
from myriad.system.processes import process_state

SECONDS = 180.0
SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "layout.dp=2"]


def until(what: str, seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not seen():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def launch(tmp_path: Path) -> "tuple[Run, subprocess.Popen[bytes]]":
    run = Run(tmp_path / "run")
    corpus = make_corpus(tmp_path, count=300)
    given = [*SMALL, f"data.corpus={corpus}", "train.steps=600", "checkpoint.memory_seconds=0"]
    options = [word for one in given for word in (f"--{one.partition('=')[0]}", one.partition("=")[2])]
    command = [sys.executable, "-m", "myriad.cli.main", "train", "tiny", "--run", str(run.path), *options]
    return run, subprocess.Popen([*command, "--oversubscribe"], stdout=subprocess.DEVNULL)


def hold(pid: int) -> "subprocess.Popen[bytes]":
    """Nothing of it runs until what is returned ends."""
    freeze = [sys.executable, "-m", "myriad.faults.freeze", str(pid), str(os.getpid())]
    freezer = subprocess.Popen(freeze)
    until("this machine does not let a process be traced", lambda: process_state(pid) == "t")
    return freezer


@pytest.mark.parametrize("how", ["stopped", "hung"])
def test_ranks_are_repaired_without_the_launcher_and_the_run_ends_when_it_continues(
    tmp_path: Path, how: str
) -> None:
    run, launcher = launch(tmp_path)
    with launcher:
        try:
            stop_and_kill(run, launcher, how)
        finally:
            launcher.kill()


def test_a_run_without_a_driver_reports_it(tmp_path: Path) -> None:
    """The launcher is stopped, so none takes the place of the driver that dies."""
    run, launcher = launch(tmp_path)
    with launcher:
        try:
            until("no step", lambda: run.path.exists() and len(run.read_metrics()) > 5)
            launcher.send_signal(signal.SIGSTOP)
            os.kill(json.loads((run.path / "driver.json").read_text())["pid"], signal.SIGKILL)
            until("nothing says that there is no driver", lambda: told(run, "health"))
            assert told(run, "health")[0]["problem"].startswith("no driver can be reached for 10 s")
            launcher.send_signal(signal.SIGCONT)
            assert launcher.wait(SECONDS) == 0
            assert told(run, "health")[-1]["problem"] == "a driver is there again"
        finally:
            launcher.kill()


def told(run: Run, event: str) -> list[dict]:
    return [one for one in run.read_events() if one["event"] == event]


def stop_and_kill(run: Run, launcher: "subprocess.Popen[bytes]", how: str) -> None:
    until("no step", lambda: run.path.exists() and len(run.read_metrics()) > 5)
    (rank,) = (pid for pid in descendants(launcher.pid) if name_of(pid) == "myriad-rank-1")
    if how == "stopped":
        launcher.send_signal(signal.SIGSTOP)
    else:
        freezer = hold(launcher.pid)
    os.kill(rank, signal.SIGKILL)
    until("the rank is not replaced", lambda: told(run, "restart"))
    until("nothing says that the launcher is stopped", lambda: told(run, "health"))
    (health,) = told(run, "health")
    assert health["what"] == "launcher"
    assert health["problem"].startswith("is stopped" if how == "stopped" else "hangs: it reads nothing")
    until("the run does not finish", lambda: told(run, "finish"))
    if how == "stopped":
        launcher.send_signal(signal.SIGCONT)
    else:
        freezer.terminate()
        freezer.wait()
    assert launcher.wait(SECONDS) == 0


def name_of(pid: int) -> str:
    path = Path(f"/proc/{pid}/comm")
    return path.read_text().strip() if path.exists() else ""
