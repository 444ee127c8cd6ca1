"""A real Redis server of the test's own, gone when the test is."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import free_port

from myriad.resilience.engines import child

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "data"))  # tiny_corpora

redis = pytest.importorskip("redis", reason="needs the package redis (pip install 'myriad[redis]')")


class Server:
    """redis-server without a disk, on a port of its own."""

    def __init__(self) -> None:
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/1"

    @property
    def client(self) -> "redis.Redis":
        return redis.Redis("127.0.0.1", self.port, 1)

    def start(self) -> "Server":
        """Returns when it answers."""
        options = ["--port", self.port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        command = [sys.executable, "-S", child.__file__, os.getpid(), "redis-server", *options]
        self.process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                self.client.ping()
                return self
            except redis.RedisError:
                assert time.monotonic() < deadline and self.process.poll() is None, (
                    "redis-server does not start"
                )
                time.sleep(0.02)

    def kill(self) -> None:
        """As a lost machine: no goodbye."""
        if self.process is not None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture
def server() -> Iterator[Server]:
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server (apt-get install redis-server)")
    running = Server().start()
    try:
        yield running
    finally:
        running.kill()
