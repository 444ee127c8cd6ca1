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
        time.sleep(0.1)


def launch(tmp_path: Path) -> "tuple[Run, subprocess.Popen[bytes]]":
    run = Run(tmp_path / "run")
    corpus = make_corpus(tmp_path, count=300)
    given = [*SMALL, f"data.corpus={corpus}", "train.steps=100000", "checkpoint.memory_seconds=0"]
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
def training(tmp_path: Path) -> "Iterator[tuple[Run, subprocess.Popen[bytes]]]":
    """A run that trains, and its launcher."""
    run, launcher = launch(tmp_path)
    with launcher:
        try:
            until("no step", lambda: run.path.exists() and len(run.read_metrics()) > 5)
            yield run, launcher
        finally:
            launcher.kill()


def test_ranks_are_repaired_while_the_launcher_is_stopped_or_hangs_and_the_run_ends_when_it_continues(
    tmp_path: Path,
) -> None:
    """None takes the place of a driver that dies while the launcher is stopped, until it continues."""
    with training(tmp_path) as (run, launcher):
        launcher.send_signal(signal.SIGSTOP)
        see_repair(run, launcher, "is stopped")
        os.kill(driver_pid(run), signal.SIGKILL)
        until("nothing says that there is no driver", lambda: len(told(run, "health")) == 2)
        assert told(run, "health")[1]["problem"].startswith("no driver can be reached for 10 s")
        launcher.send_signal(signal.SIGCONT)
        again = "a driver is there again"
        until(again, lambda: again in [one["problem"] for one in told(run, "health")[2:]])

        freezer = hold(launcher.pid)
        see_repair(run, launcher, "hangs: it reads nothing")
        os.kill(driver_pid(run), signal.SIGINT)
        until("the run does not end", lambda: told(run, "interrupted"))
        freezer.terminate()
        freezer.wait()
        assert launcher.wait(SECONDS) == 130


def told(run: Run, event: str) -> list[dict]:
    return [one for one in run.read_events() if one["event"] == event]


def see_repair(run: Run, launcher: "subprocess.Popen[bytes]", problem: str) -> None:
    """A rank is killed and replaced, and the run says what is wrong with its launcher."""
    restarts = len(told(run, "restart"))
    os.kill(pid_of("myriad-rank-1", launcher), signal.SIGKILL)
    until("the rank is not replaced", lambda: len(told(run, "restart")) == restarts + 1)
    until(
        "nothing says what is wrong with the launcher",
        lambda: any(
            one["what"] == "launcher" and one["problem"].startswith(problem) for one in told(run, "health")
        ),
    )


def driver_pid(run: Run) -> int:
    return int(json.loads((run.path / "driver.json").read_text())["pid"])


def pid_of(rank: str, launcher: "subprocess.Popen[bytes]") -> int:
    """The process of a rank, once it has been started."""
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [pid for pid in descendants(launcher.pid) if name_of(pid) == rank]
        return len(found) == 1

    until(f"no {rank}", is_there)
    return found[0]


def name_of(pid: int) -> str:
    path = Path(f"/proc/{pid}/comm")
    return path.read_text().strip() if path.exists() else ""
