"""Services beside the run of a scenario: a Redis server, a standby driver, a page server.

They start with the run and end with it. A killed Redis server starts again after some time, as under a
service manager.
"""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from myriad.errors import RunFailedError
from myriad.system import child_process

__all__ = ["REDIS_SERVER", "Services", "missing_for_redis"]

REDIS_SERVER = "redis-server"
_START_SECONDS = 20.0


def missing_for_redis() -> str:
    """Return what a scenario with Redis needs and this machine lacks; empty if nothing."""
    if shutil.which(REDIS_SERVER) is None:
        return f"needs {REDIS_SERVER} on this machine (Debian: apt-get install redis-server)"
    return (
        ""
        if find_spec("redis") is not None
        else "needs the package redis (pip install 'myriad-train[redis]')"
    )


class Services:
    """The services beside one run."""

    def __init__(self, folder: Path) -> None:
        """``folder``: where the services write their output, once it exists."""
        self._folder, self._port = folder, 0
        self._started: list[subprocess.Popen[bytes]] = []

    @property
    def redis_url(self) -> str:
        """URL of the Redis server."""
        return f"redis://127.0.0.1:{self._port}/0"

    def start_redis(self) -> None:
        """Start or restart Redis, and wait until it answers. Raises `RunFailedError`."""
        if not self._port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._port = probe.getsockname()[1]
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._start(["-S", child_process.__file__, str(os.getpid()), REDIS_SERVER, *options], "redis.log")
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), timeout=1).close()
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise RunFailedError(f"{REDIS_SERVER} does not start: {error}") from None
                time.sleep(0.02)

    def start_standby(self, run: Path) -> None:
        """Start a standby driver, with its launcher."""
        self._myriad(["train", str(run), "--standby"], "standby.log")

    def start_watch(self, run: Path) -> None:
        """Start a page server."""
        self._myriad(["watch", str(run), "--port", "0", "--no-open"], "watch.log")

    def end(self) -> None:
        """End the processes of all services and wait for them."""
        for one in self._started:
            one.kill()
            one.wait()

    def _myriad(self, command: Sequence[str], log: str) -> None:
        own = [str(os.getpid()), sys.executable, "-Pm", "myriad.cli.main"]
        self._start(["-S", child_process.__file__, *own, *command], log)

    def _start(self, command: Sequence[str], log: str) -> None:
        place = self._folder / log if self._folder.is_dir() else Path(os.devnull)
        with place.open("ab") as output:
            self._started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
