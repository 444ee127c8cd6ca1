"""Machines as processes of this one: whatever is started on one can be lost with all that it has started."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

__all__ = ["Machine", "wait_for"]

_NAME = "MYRIAD_TEST_MACHINE"


class Machine:
    """One of them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = f"{name}-{os.getpid()}", folder
        self.started: list[subprocess.Popen[bytes]] = []

    def myriad(self, *arguments: object) -> "subprocess.Popen[bytes]":
        """A command there; what it says goes to a file."""
        command = [sys.executable, "-m", "myriad.cli.main", *map(str, arguments)]
        with self.log.open("ab") as log:
            started = subprocess.Popen(
                command,
                cwd=self.folder,
                env=os.environ | {_NAME: self.name},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.started.append(started)
        return started

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def pids(self) -> list[int]:
        """Of all that runs there."""
        mark, found = f"{_NAME}={self.name}".encode(), []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes().split(b"\0"):
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def lose(self) -> None:
        """All of it at once."""
        while pids := self.pids():
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            time.sleep(0.01)
            for process in self.started:
                process.poll()


def wait_for(what: str, condition: Callable[[], object], *machines: Machine, seconds: float = 120.0) -> None:
    """Raises `AssertionError` with what the machines have said."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            told = "\n".join(f"{one.name}: {one.log.read_text()}" for one in machines if one.log.exists())
            raise AssertionError(f"never came: {what}\n{told}")
        time.sleep(0.05)
