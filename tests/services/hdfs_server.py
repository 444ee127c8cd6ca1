"""A stand-in for HDFS that speaks WebHDFS, in a process of its own (`hdfs_nodes`): a name node that redirects
and a data node that has the bytes, with the errors of real ones on demand.

Shapes of requests and answers: hadoop.apache.org/docs/stable/hadoop-project-dist/hadoop-hdfs/WebHDFS.html
"""

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ranks import free_port

__all__ = ["HdfsServer"]

_PREFIX = "/webhdfs/v1"


class HdfsServer:
    """The server as a test holds it."""

    def __init__(self) -> None:
        self._ports = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._ports[0]}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        nodes = Path(__file__).with_name("hdfs_nodes.py")
        command = [sys.executable, str(nodes), *map(str, self._ports)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def fail(self, node: str, op: str, how: str, times: int = 1) -> None:
        """The next ``times`` requests of ``op`` to a node (name, data) go wrong: ``standby``, ``error`` or
        ``denied`` (an exception of Hadoop's), ``short`` (half of the bytes come), ``flip`` (a bit of what is
        read is another), ``away`` (the connection is closed)."""
        body = json.dumps({"node": node, "op": op, "how": how, "times": times}).encode()
        self._own("PUT", body)

    def clear(self) -> None:
        """Remove all injected faults."""
        self._own("DELETE")

    def requests(self) -> list[list[Any]]:
        """Those since the last call: node, method, op, path, status, user or token."""
        return json.loads(self._own("GET"))

    def flip(self, path: str, at: int) -> None:
        """One bit of a stored file."""
        self._own("POST", json.dumps([path, at]).encode())

    def upload(self, folder: Path, target: str) -> None:
        """All files of a folder."""
        for path in folder.iterdir():
            url = f"http://127.0.0.1:{self._ports[1]}{_PREFIX}{quote(f'{target}/{path.name}')}?op=CREATE"
            request = urllib.request.Request(url, path.read_bytes(), method="PUT")
            urllib.request.urlopen(request).close()
        self.requests()

    def _own(self, method: str, body: bytes | None = None) -> bytes:
        request = urllib.request.Request(f"{self.url}/stand-in", body, method=method)
        with urllib.request.urlopen(request) as answer:
            return answer.read()
