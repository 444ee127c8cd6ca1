"""Process of a node's snapshot server: its sockets and its lifetime.

    python -m myriad.checkpoint.snapshots.snapshot_server_process NAME

abstract unix socket NAME    ranks of this node, of the same user
TCP, any port                snapshot servers of other nodes: on the address that this node's ranks use; both
                             ends prove the attempt's token, and each frame has a code (`myriad.wire`)
"""

import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from myriad.checkpoint.snapshots.peer_servers import PROTOCOL
from myriad.checkpoint.snapshots.rank_entry import RankEntry
from myriad.checkpoint.snapshots.server_socket import user_of
from myriad.checkpoint.snapshots.snapshot_server import RANKS_CONNECTED, SnapshotServer
from myriad.checkpoint.storage.folder_owner import acquire_folder
from myriad.wire.pending_connections import PendingConnections
from myriad.wire.socket_channel import Message, SocketChannel
from myriad.wire.tls import tls_identity

__all__ = ["ServerThread", "main"]

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED)
_MAX_UNAUTHENTICATED = 256
"""Largest number of unauthenticated connections, each of which uses a thread."""
_ALONE_SECONDS = 30.0
"""How long a server waits for its first rank."""
_LOST_SECONDS = 1.0
"""Delay before the flush after the last rank is gone: other ranks may still be leaving or joining."""
_POLL_SECONDS, _BUSY_SECONDS = 0.05, 1.0
"""How often the server checks whether it is still needed. A rank that leaves wakes it."""


_UNIX_BYTES = 2**32
"""The largest payload that a rank may send: the envelopes of its shards."""


class _ServerSockets:
    def __init__(self, name: str) -> None:
        self.server = SnapshotServer()
        self._lock = threading.Lock()
        self._ranks, self._grace_seconds = 0, _ALONE_SECONDS
        self._has_left = self._joined = self._flushed = self._is_ending = False
        self._last_change = time.monotonic()
        self._left = threading.Event()
        """Set when a rank disconnects; `stay` clears it."""
        self._tokens: set[str] = set()
        self._pending = PendingConnections(_MAX_UNAUTHENTICATED, _MAX_UNAUTHENTICATED)
        self._tcp: socket.socket | None = None
        self._encrypts = False
        self._unix = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._unix.bind(f"\0{name}")
        self._unix.listen(512)
        threading.Thread(target=self._accept, args=(self._unix, self._serve_rank), daemon=True).start()

    def _accept(self, listener: socket.socket, serve: Callable[[SocketChannel], None]) -> None:
        while True:
            try:
                connection, peer = listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:  # accept again once another connection has ended
                    time.sleep(_POLL_SECONDS)
                    continue
                return  # the listener was closed
            if listener.family == socket.AF_UNIX and user_of(connection) != os.getuid():
                connection.close()
                continue
            channel = SocketChannel(connection)
            if listener.family != socket.AF_UNIX:
                self._pending.admit(channel, peer[0], channel.shut_down)
            threading.Thread(target=self._guarded, args=(serve, channel), daemon=True).start()

    def _guarded(self, serve: Callable[[SocketChannel], None], wire: SocketChannel) -> None:
        """Serve one connection; an invalid message ends only this connection."""
        try:
            with suppress(OSError):
                serve(wire)
        except Exception as error:
            sys.stderr.write(f"connection closed: {type(error).__name__}: {error}\n")
        finally:
            wire.close()

    def close(self) -> None:
        """Free the socket name, even if a thread that hangs in a dead file system delays the exit."""
        self._unix.shutdown(socket.SHUT_RDWR)
        self._unix.close()

    # Requests of ranks

    def _serve_rank(self, wire: SocketChannel) -> None:
        message, payload, _ = wire.receive()
        if message["op"] == "ping":
            return self._answer_pings(wire)
        with self._lock:
            if self._is_ending:
                return
            self._ranks, self._grace_seconds = self._ranks + 1, 0.0
        entry: RankEntry | None = None
        wire.max_bytes = _UNIX_BYTES
        try:
            while message["op"] != "bye":
                entry = self._answer_rank(wire, message, payload, entry)
                message, payload, _ = wire.receive()
            with self._lock:
                self._has_left |= entry is not None and self.server.is_present(entry)
            wire.send({})
        finally:
            if entry is not None:
                with suppress(OSError):  # the attempt is no longer kept
                    self.server.attempt(entry.attempt).leave(entry)
            with self._lock:
                self._ranks -= 1
                self._last_change = time.monotonic()
                self._left.set()

    def _answer_pings(self, wire: SocketChannel) -> None:
        """Answer liveness checks of a node agent. It is not a rank, so it does not keep the server alive."""
        while True:
            wire.send({})
            wire.receive()

    def _answer_rank(
        self, wire: SocketChannel, message: Message, payload: memoryview, entry: RankEntry | None
    ) -> RankEntry | None:
        server, op = self.server, message["op"]
        if op == "whole":
            assert entry is not None, "a rank joins first"
            server.on_complete(entry, message)
        elif op == "skipped":
            assert entry is not None, "a rank joins first"
            server.attempt(entry.attempt).skipped(message["step"])
        elif op == "join":
            try:
                entry = server.join(message, payload)
            except OSError as error:
                wire.send({"problem": str(error)})
                return None
            with self._lock:
                self._joined, self._has_left, self._flushed = True, False, False
            server.held_step = None
            wire.send({"num_bytes": entry.memory.num_bytes}, descriptors=[entry.descriptor])
        elif op == "configure":
            assert entry is not None, "a rank joins first"
            self._tokens.add(message["token"])
            server.configure(entry.attempt, message, payload)
            wire.send({})
        elif op == "hello":
            wire.send({})
        elif op == "port":
            wire.send({"port": self._port(message["host"], message["wanted"], message["encrypt"])})
        elif op == "claim":
            asked = message["url"], message["attempts_before"], message["seconds"], message.get("run")
            acquired = acquire_folder(*asked)
            wire.send(asdict(acquired))
        elif op == "snapshots":
            summaries = [known.summary() for known in server.snapshots() if known.steps()]
            wire.send({"snapshots": summaries, "held": server.held_step})
        elif op == "open":
            self._open(wire, message)
        elif op == "store again":
            assert entry is not None, "a rank joins first"
            server.attempt(entry.attempt).retry_store(message["step"])
            wire.send({})
        elif op == "hold":
            assert entry is not None, "a rank joins first"
            server.attempt(entry.attempt)  # raises if the attempt is older
            server.held_step = message["step"]
            wire.send({"pid": os.getpid()})
        elif op == "save":
            self._save(wire, message["url"])
        elif op == "release held":
            wire.send(self._release_held())
        elif op == "wait":
            assert entry is not None, "a rank joins first"
            outcome = server.attempt(entry.attempt).wait_stored(message["step"], message["seconds"])
            wire.send({"outcome": None if outcome is None else asdict(outcome)})
        return entry

    def _save(self, wire: SocketChannel, url: str) -> None:
        try:
            saved = self.server.save(url)
        except Exception as error:  # storage back ends may raise anything
            wire.send({"problem": str(error) or type(error).__name__})
            return
        wire.send(asdict(saved))

    def _release_held(self) -> Message:
        """Give up the held step on all nodes, so that the servers exit."""
        if self.server.has_ranks:
            return {"problem": RANKS_CONNECTED}
        self.server.release_held()
        self._end_when_alone()
        return {}

    def _end_when_alone(self) -> None:
        with self._lock:
            self._has_left |= not self.server.has_ranks

    def _open(self, wire: SocketChannel, message: Message) -> None:
        entry = self.server.find(message["attempt"], message["rank"], message["step"], message["copied"])
        opened = None if entry is None else entry.opened(message["step"])
        if entry is None or opened is None:
            wire.send({"problem": "no such snapshot"})
            return
        wire.send(opened[0], opened[1], descriptors=[entry.descriptor])

    # Requests of other snapshot servers

    def _port(self, host: str, wanted: int, encrypts: bool) -> int:
        """Return the TCP port, and listen on it first if needed.

        ``host``: this node's address, as other nodes reach it. ``wanted``: the port of the server before this
        one, which other nodes still use; 0: none. If several servers are replaced at the same time, none can
        report a new port to the others. ``encrypts``: whether peers connect with TLS."""
        with self._lock:
            if self._tcp is not None and (host, encrypts) != (self._tcp.getsockname()[0], self._encrypts):
                self._tcp.shutdown(socket.SHUT_RDWR)  # ends its thread
                self._tcp.close()
                self._tcp = None
            if self._tcp is None:
                self._tcp, self._encrypts = _listen(host, wanted), encrypts
                arguments = (self._tcp, self._serve_peer)
                threading.Thread(target=self._accept, args=arguments, daemon=True).start()
        port: int = self._tcp.getsockname()[1]
        return port

    def _serve_peer(self, wire: SocketChannel) -> None:
        """Serve another node's snapshot server, once it has proved an attempt's token in time."""
        try:
            tls = tls_identity() if self._encrypts else None
            wire.accept(PROTOCOL, [token.encode() for token in list(self._tokens)], tls=tls)
        finally:
            self._pending.leave(wire)
        while True:
            message, payload, _ = wire.receive()
            try:
                answer = self._answer_peer(message, payload)
            except (OSError, AssertionError, KeyError) as error:
                answer = {"problem": str(error) or type(error).__name__}
            wire.send(answer)

    def _answer_peer(self, message: Message, payload: memoryview) -> dict[str, Any]:
        op, attempt = message["op"], self.server.attempt(message["attempt"])
        if op == "store":
            files = attempt.store_local(message["step"], message.get("url"))
            return {"files": {name: file.as_json() for name, file in files.items()}}
        if op == "copy":
            return {"has": attempt.copy_local(message["step"])}
        if op == "begin copies":
            self.server.copied.begin(message, payload)
        elif op == "copy of":
            self.server.copied.take(message, payload)
        elif op == "moved":
            attempt.move(message["node"], message["host"], message["port"])
        elif op == "copied":
            self.server.on_copied(attempt.number, message["step"])
        elif op == "release":
            attempt.release_step(message["step"])
        elif op == "unhold":
            self.server.held_step = None
            self._end_when_alone()
        elif op == "steps":
            return {"steps": attempt.common_steps()}
        return {}

    # Lifetime

    def stay(self) -> None:
        """Return when the server is no longer needed."""
        begun = time.monotonic()
        while not self._is_ending:
            self._left.wait(_BUSY_SECONDS if self._ranks else _POLL_SECONDS)
            self._left.clear()
            unused = not self._joined and time.monotonic() - begun > self._grace_seconds
            if unused or (self._joined and self._is_over()):
                with self._lock:
                    self._is_ending = self._ranks == 0

    @property
    def has_finished(self) -> bool:
        """Whether no rank is connected and what the last one left is stored, or held in memory."""
        settled = self._flushed or self.server.held_step is not None
        return not self._ranks and settled and self.server.is_idle

    def _is_over(self) -> bool:
        with self._lock:
            away = 0.0 if self._ranks else time.monotonic() - self._last_change
            has_left = self._has_left
        if not away or not self.server.is_idle:
            return False
        if has_left:
            return True
        if self.server.held_step is not None:
            return False
        if away > _LOST_SECONDS and not self._flushed:
            self._flushed = True
            self.server.flush()
            return False
        with self._lock:
            return not self._ranks and time.monotonic() - self._last_change > self.server.linger_seconds


def _listen(host: str, wanted: int) -> socket.socket:
    try:
        return socket.create_server((host, wanted))
    except OSError:  # another process has taken the port
        return socket.create_server((host, 0))


class ServerThread:
    """A snapshot server in a thread of the training process (`myriad.train.in_process`).

    Its snapshots end with the process. Durable checkpoints are written as by a separate server."""

    def __init__(self, name: str, log: Path) -> None:
        """``log`` is unused: messages go to this process's standard error."""
        self._thread: threading.Thread | None = None
        with suppress(OSError):  # another server has the name
            self._server = _ServerSockets(name)
            self._thread = threading.Thread(target=self._serve, daemon=True)
            self._thread.start()

    def _serve(self) -> None:
        self._server.stay()
        self._server.close()

    def finish(self, seconds: float) -> None:
        """Wait up to ``seconds`` until the newest snapshot is stored, or held as it could not be."""
        deadline = time.monotonic() + seconds
        while self.poll() is None and not self._server.has_finished and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def poll(self) -> int | None:
        """Return ``None`` while the thread runs, else 0."""
        return None if self._thread is not None and self._thread.is_alive() else 0


def main(arguments: list[str]) -> int:
    """Serve until the server is no longer needed. Return at once if another server has the name."""
    try:
        server = _ServerSockets(arguments[0])
    except OSError:
        return 0
    server.stay()
    server.close()
    sys.stdout.flush()
    os._exit(0)  # a thread that hangs in a dead file system must not delay the exit


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
