"""If this fails, a launcher that a person has stopped with Ctrl-Z takes the repair of ranks with it, or
does so without a word."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tiny_corpora import make_corpus

from myriad.resilience.faults.processes import descendants
from myriad.run import Run

SECONDS = 60.0
SMALL = ["model.layers=2", "model.hidden=32", "model.sequence=32", "train.threads=1", "layout.dp=2"]


def until(what: str, seen: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not seen():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def test_ranks_are_repaired_while_the_launcher_is_stopped_and_the_run_ends_when_it_goes_on(
    tmp_path: Path,
) -> None:
    run = Run(tmp_path / "run")
    corpus = make_corpus(tmp_path, count=300)
    given = [*SMALL, f"data.corpus={corpus}", "train.steps=600", "checkpoint.memory_seconds=0"]
    options = [word for one in given for word in (f"--{one.partition('=')[0]}", one.partition("=")[2])]
    command = [sys.executable, "-m", "myriad.cli.main", "train", "tiny", "--run", str(run.path), *options]
    with subprocess.Popen([*command, "--oversubscribe"], stdout=subprocess.DEVNULL) as launcher:
        try:
            stop_and_kill(run, launcher)
        finally:
            launcher.kill()


def stop_and_kill(run: Run, launcher: "subprocess.Popen[bytes]") -> None:
    def told(event: str) -> list[dict]:
        return [one for one in run.read_events() if one["event"] == event]

    until("no step", lambda: run.path.exists() and len(run.read_metrics()) > 5)
    (rank,) = (pid for pid in descendants(launcher.pid) if name_of(pid) == "myriad-rank-1")
    launcher.send_signal(signal.SIGSTOP)
    os.kill(rank, signal.SIGKILL)
    until("the rank is not replaced", lambda: told("restart"))
    until("nothing says that the launcher is stopped", lambda: told("health"))
    assert told("health")[0]["what"] == "launcher"
    until("the run does not finish", lambda: told("finish"))
    launcher.send_signal(signal.SIGCONT)
    assert launcher.wait(SECONDS) == 0


def name_of(pid: int) -> str:
    path = Path(f"/proc/{pid}/comm")
    return path.read_text().strip() if path.exists() else ""
