"""The process of `hdfs_server`: the two nodes.

    python hdfs_nodes.py NAME_PORT DATA_PORT

At the name node, PUT /stand-in takes a fault, DELETE clears them, POST flips a bit, GET returns
the requests that came.
"""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

_PREFIX = "/webhdfs/v1"
_EXCEPTIONS = {
    "standby": (403, "StandbyException", "Operation category READ is not supported in state standby"),
    "error": (500, "IOException", "the disk of the data node failed\n\tat java.lang.Thread.run"),
    "denied": (403, "AccessControlException", "Permission denied: user=nobody, access=WRITE"),
    "missing": (404, "FileNotFoundException", "File does not exist"),
    "full": (403, "IOException", "is non empty"),
}


class _State:
    """Files and folders, the faults to come, and the requests that came."""

    def __init__(self, data_port: int) -> None:
        self.data_port = data_port
        self.files: dict[str, bytes] = {}
        self.folders = {"/"}
        self.faults: list[dict[str, Any]] = []
        self.log: list[list[Any]] = []
        self.lock = threading.Lock()

    def fault(self, node: str, op: str) -> str:
        """What goes wrong with this request; "": nothing."""
        with self.lock:
            for fault in self.faults:
                if (fault["node"], fault["op"]) == (node, op) and fault["times"] > 0:
                    fault["times"] -= 1
                    return str(fault["how"])
        return ""

    def add_folders(self, path: str) -> None:
        while path and path not in self.folders:
            self.folders.add(path)
            path = path.rpartition("/")[0]

    def exists(self, path: str) -> bool:
        return path in self.files or path in self.folders

    def status(self, path: str, name: str) -> dict[str, Any]:
        kind = "FILE" if path in self.files else "DIRECTORY"
        return {"pathSuffix": name, "type": kind, "length": len(self.files.get(path, b"")),
                "modificationTime": 1, "permission": "755", "owner": "somebody"}  # fmt: skip

    def children(self, path: str) -> list[str]:
        inside = path.rstrip("/") + "/"
        found = [*self.files, *self.folders]
        return sorted(
            {one for one in found if one.startswith(inside) and "/" not in one[len(inside) :]} - {"/"}
        )

    def below(self, path: str) -> list[str]:
        return [one for one in [*self.files, *self.folders] if one.startswith(path.rstrip("/") + "/")]


class _Node(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    node, state = "", _State(0)

    def do_GET(self) -> None:
        self._serve()

    do_PUT = do_POST = do_DELETE = do_GET

    def log_message(self, *arguments: Any) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.keys = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        self.path_asked = unquote(parts.path.removeprefix(_PREFIX)).rstrip("/") or "/"
        self.op = self.keys.get("op", "").upper()
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if parts.path == "/stand-in":
            return self._control()
        how = self.state.fault(self.node, self.op)
        if how == "away":
            self.close_connection = True
            return None
        if how in _EXCEPTIONS:
            return self._refuse(how)
        return self._data(how) if self.node == "data" else self._name()

    def _control(self) -> None:
        with self.state.lock:
            if self.command == "PUT":
                self.state.faults.append(json.loads(self.body))
            if self.command == "DELETE":
                self.state.faults.clear()
            if self.command == "POST":
                path, at = json.loads(self.body)
                content = bytearray(self.state.files[path])
                content[at] ^= 4
                self.state.files[path] = bytes(content)
            log, self.state.log[:] = list(self.state.log), []
        self._send(200, json.dumps(log).encode(), counts=False)

    def _data(self, how: str) -> None:
        """The second step: bytes."""
        path, state = self.path_asked, self.state
        if self.op == "OPEN":
            start = int(self.keys.get("offset", 0))
            content = state.files[path][start:]
            content = content[: int(self.keys["length"])] if "length" in self.keys else content
            if how == "flip":
                content = bytes([content[0] ^ 4]) + content[1:]
            return self._send(200, content, short=how == "short")
        with state.lock:
            state.files[path] = (state.files[path] if self.op == "APPEND" else b"") + self.body
            state.add_folders(path.rpartition("/")[0])
        return self._send(200 if self.op == "APPEND" else 201, b"")

    def _name(self) -> None:
        path, state = self.path_asked, self.state
        if self.op in ("OPEN", "CREATE", "APPEND"):
            if self.op != "CREATE" and path not in state.files:
                return self._refuse("missing")
            query = self.path.partition("?")[2]
            target = f"http://127.0.0.1:{state.data_port}{_PREFIX}{quote(path)}?{query}&namenoderpcaddress=stand-in"
            return self._send(307, b"", location=target)
        with state.lock:
            answer = getattr(self, f"_{self.op.lower()}")(path)
        if isinstance(answer, str):
            return self._refuse(answer)
        return self._send(200, json.dumps(answer).encode())

    def _getfilestatus(self, path: str) -> Any:
        return {"FileStatus": self.state.status(path, "")} if self.state.exists(path) else "missing"

    def _liststatus(self, path: str) -> Any:
        if not self.state.exists(path):
            return "missing"
        if path in self.state.files:
            return {"FileStatuses": {"FileStatus": [self.state.status(path, "")]}}
        found = [self.state.status(one, one.rpartition("/")[2]) for one in self.state.children(path)]
        return {"FileStatuses": {"FileStatus": found}}

    def _mkdirs(self, path: str) -> Any:
        self.state.add_folders(path)
        return {"boolean": True}

    def _rename(self, path: str) -> Any:
        target = self.keys["destination"]
        if not self.state.exists(path) or self.state.exists(target):
            return {"boolean": False}
        for one in [path, *self.state.below(path)]:
            moved = target + one[len(path) :]
            if one in self.state.files:
                self.state.files[moved] = self.state.files.pop(one)
            else:
                self.state.folders.discard(one)
                self.state.folders.add(moved)
        return {"boolean": True}

    def _delete(self, path: str) -> Any:
        inside = self.state.below(path)
        if inside and self.keys.get("recursive") != "true":
            return "full"
        existed = self.state.exists(path)
        for one in [path, *inside]:
            self.state.files.pop(one, None)
            self.state.folders.discard(one)
        return {"boolean": existed}

    def _refuse(self, how: str) -> None:
        status, exception, message = _EXCEPTIONS[how]
        told = {
            "exception": exception,
            "javaClassName": f"java.{exception}",
            "message": f"{message} {self.path_asked}",
        }
        self._send(status, json.dumps({"RemoteException": told}).encode())

    def _send(
        self, status: int, body: bytes, *, location: str = "", short: bool = False, counts: bool = True
    ) -> None:
        if counts:
            user = self.keys.get("delegation") or self.keys.get("user.name")
            with self.state.lock:
                self.state.log.append([self.node, self.command, self.op, self.path_asked, status, user])
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if location:
            self.send_header("Location", location)
        self.end_headers()
        self.wfile.write(body[: len(body) // 2] if short else body)
        self.close_connection |= short


def main(name_port: str, data_port: str) -> None:
    """Serves until it is killed."""
    state = _State(int(data_port))
    for node, port in (("name", name_port), ("data", data_port)):
        handler = type(node, (_Node,), {"node": node, "state": state})
        server = ThreadingHTTPServer(("127.0.0.1", int(port)), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
