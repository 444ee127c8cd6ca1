"""If these fail, a launcher that a person has stopped with Ctrl-Z, or that hangs, takes the repair of ranks
with it, or does so without a word."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from same_run import slow_steps
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


def launch(tmp_path: Path, steps: int) -> "tuple[Run, subprocess.Popen[bytes]]":
    run = Run(tmp_path / "run")
    corpus = make_corpus(tmp_path, count=300)
    given = [*SMALL, f"data.corpus={corpus}", f"train.steps={steps}", "checkpoint.memory_seconds=0"]
    options = [word for one in given for word in (f"--{one.partition('=')[0]}", one.partition("=")[2])]
    command = [sys.executable, "-m", "myriad.cli.main", "train", "tiny", "--run", str(run.path), *options]
    around = os.environ | slow_steps(tmp_path / "faults", 15.0)  # the run lasts until all was reported
    return run, subprocess.Popen([*command, "--oversubscribe"], stdout=subprocess.DEVNULL, env=around)


def hold(pid: int) -> "subprocess.Popen[bytes]":
    """Nothing of it runs until what is returned ends."""
    freeze = [sys.executable, "-m", "myriad.faults.freeze", str(pid), str(os.getpid())]
    freezer = subprocess.Popen(freeze)
    until("this machine does not let a process be traced", lambda: process_state(pid) == "t")
    return freezer


@contextmanager
def training(tmp_path: Path, steps: int) -> "Iterator[tuple[Run, subprocess.Popen[bytes]]]":
    """A run that trains, and its launcher."""
    run, launcher = launch(tmp_path, steps)
    with launcher:
        try:
            until("no step", lambda: run.path.exists() and len(run.read_metrics()) > 5)
            yield run, launcher
        finally:
            launcher.kill()


def test_ranks_are_repaired_while_the_launcher_is_stopped_and_a_run_without_a_driver_reports_it(
    tmp_path: Path,
) -> None:
    """None takes the place of a driver that dies meanwhile, until the launcher continues."""
    with training(tmp_path, 100_000) as (run, launcher):
        launcher.send_signal(signal.SIGSTOP)
        see_repair(run, launcher, "is stopped")
        os.kill(json.loads((run.path / "driver.json").read_text())["pid"], signal.SIGKILL)
        until("nothing says that there is no driver", lambda: len(told(run, "health")) == 2)
        assert told(run, "health")[1]["problem"].startswith("no driver can be reached for 10 s")
        launcher.send_signal(signal.SIGCONT)
        again = "a driver is there again"
        until(again, lambda: again in [one["problem"] for one in told(run, "health")[2:]])
        launcher.terminate()
        assert launcher.wait(SECONDS) == 130


def test_ranks_are_repaired_while_the_launcher_hangs_and_the_run_ends_when_it_continues(
    tmp_path: Path,
) -> None:
    with training(tmp_path, 80) as (run, launcher):
        freezer = hold(launcher.pid)
        see_repair(run, launcher, "hangs: it reads nothing")
        until("the run does not finish", lambda: told(run, "finish"))
        freezer.terminate()
        freezer.wait()
        assert launcher.wait(SECONDS) == 0


def told(run: Run, event: str) -> list[dict]:
    return [one for one in run.read_events() if one["event"] == event]


def see_repair(run: Run, launcher: "subprocess.Popen[bytes]", problem: str) -> None:
    """A rank is killed and replaced, and the run says what is wrong with its launcher."""
    (rank,) = (pid for pid in descendants(launcher.pid) if name_of(pid) == "myriad-rank-1")
    os.kill(rank, signal.SIGKILL)
    until("the rank is not replaced", lambda: told(run, "restart"))
    until("nothing says what is wrong with the launcher", lambda: told(run, "health"))
    (health,) = told(run, "health")
    assert health["what"] == "launcher" and health["problem"].startswith(problem)


def name_of(pid: int) -> str:
    path = Path(f"/proc/{pid}/comm")
    return path.read_text().strip() if path.exists() else ""
