"""A real S3 API server (moto) in a process of its own, which can go down, come back with what it holds, and
writes down every request that reaches it.

    python object_store.py PORT LOG      SIGUSR1: down, nobody listens; SIGUSR2: up again
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["ObjectStore", "Request"]

WSGI = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@dataclass(frozen=True)
class Request:
    """One that the server answered."""

    method: str
    path: str
    bytes_range: str | None
    status: int

    @property
    def span(self) -> tuple[int, int] | None:
        """First byte, and one past the last, of what was asked for; ``None``: all."""
        if self.bytes_range is None:
            return None
        first, last = self.bytes_range.removeprefix("bytes=").split("-")
        return int(first), int(last) + 1


class ObjectStore:
    """The server as a test holds it."""

    def __init__(self, port: int, folder: Path) -> None:
        self.url, self._port, self._log = f"http://127.0.0.1:{port}", port, folder / "requests.jsonl"
        self._log.touch()
        self._output = folder / "output.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        command = [sys.executable, __file__, str(self._port), str(self._log)]
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output)
        self._wait(listening=True)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def go_down(self) -> None:
        """Connections are refused when this returns."""
        self._signal(signal.SIGUSR1)
        self._wait(listening=False)

    def come_back(self) -> None:
        """With all objects; nothing happens when it is there."""
        if not self._listens():
            self._signal(signal.SIGUSR2)
            self._wait(listening=True)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def _wait(self, *, listening: bool) -> None:
        deadline = time.monotonic() + 60
        while self._listens() != listening:
            assert time.monotonic() < deadline, self._output.read_text()
            time.sleep(0.02)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def mark(self) -> int:
        """Now, for `requests`."""
        return len(self._log.read_bytes())

    def requests(self, since: int = 0) -> list[Request]:
        """Those since a mark, as the server counted them."""
        lines = self._log.read_bytes()[since:].splitlines()
        return [Request(*json.loads(line)) for line in lines]


def _counted(app: WSGI, log: Path) -> WSGI:
    lock = threading.Lock()

    def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def start(status: str, *arguments: Any) -> Any:
            asked = [environ["REQUEST_METHOD"], environ["PATH_INFO"], environ.get("HTTP_RANGE")]
            with lock, log.open("ab") as file:
                file.write(json.dumps([*asked, int(status.split()[0])]).encode() + b"\n")
            return start_response(status, *arguments)

        return app(environ, start)

    return call


def _serve(port: int, log: Path) -> None:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    app = _counted(DomainDispatcherApplication(create_backend_app), log)
    for wanted in (signal.SIGUSR1, signal.SIGUSR2):
        signal.pthread_sigmask(signal.SIG_BLOCK, [wanted])
    while True:
        server = make_server("127.0.0.1", port, app, threaded=True)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        signal.sigwait([signal.SIGUSR1])
        server.shutdown()
        server.server_close()
        signal.sigwait([signal.SIGUSR2])


if __name__ == "__main__":
    _serve(int(sys.argv[1]), Path(sys.argv[2]))
