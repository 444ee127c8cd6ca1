"""A redis-server of a test's own."""

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

from ranks import free_port

from myriad.comm.rendezvous.redis_address import redis_address
from myriad.system import child_process

if TYPE_CHECKING:
    import redis


class Server:
    """redis-server without a disk, on a port of its own."""

    def __init__(self, at: str = "redis://127.0.0.1", *options: str) -> None:
        """``options``: further ones of its command line, with ``{port}`` for its port."""
        self.port = free_port()
        self.at, self.options = at, options
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.at}:{self.port}/1"

    @property
    def client(self) -> "redis.Redis":
        import redis

        address = redis_address(self.url)
        assert address is not None
        return redis.Redis(**address.options())

    def start(self) -> "Server":
        """Returns when it answers."""
        import redis

        options = ["--port", self.port, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        options += [option.format(port=self.port) for option in self.options]
        command = [sys.executable, "-S", child_process.__file__, os.getpid(), "redis-server", *options]
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
