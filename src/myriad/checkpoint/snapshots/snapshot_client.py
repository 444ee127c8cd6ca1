"""Client of the node's snapshot server, used by a rank. The first rank of a node starts a missing server."""

import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from myriad.checkpoint.format.stored_shard import StoredShard, decode_shards, encode_shards
from myriad.checkpoint.snapshots.checkpoint_writer import StoreOutcome
from myriad.checkpoint.snapshots.rank_entry import OpenedSnapshot
from myriad.checkpoint.snapshots.server_monitor import (
    ServerKilledError,
    ServerProcess,
    StallDetector,
    await_answer,
)
from myriad.checkpoint.snapshots.server_socket import ForeignServerError, connect_to_own
from myriad.checkpoint.snapshots.server_start import (
    StartedServer,
    StartServer,
    server_name,
    server_names,
    start_snapshot_server,
)
from myriad.checkpoint.snapshots.snapshot_memory import SnapshotMemory
from myriad.checkpoint.storage.folder_owner import AcquiredFolder
from myriad.errors import RunFailedError
from myriad.wire.socket_channel import Closed, Message, SocketChannel

__all__ = ["SnapshotClient", "ask_server", "held_steps", "list_in_memory", "server_name"]

_START_SECONDS = 60.0
_POLL_SECONDS = 0.01
_LIST_SECONDS = 5.0
_ANSWER_SECONDS, _SEND_SECONDS = 60.0, 10.0
"""A server that neither accepts nor answers a request within this time is killed. Time that the request
itself may take is added."""


class _Connection:
    """A connection to a server that has answered once, and a handle of the server's process."""

    def __init__(self, wire: SocketChannel) -> None:
        self.wire = wire
        self.process = ServerProcess(wire.process_socket())
        self.stalled = StallDetector(self.process)

    def close(self) -> None:
        self.wire.close()
        self.process.close()


class SnapshotClient:
    """Sends requests to the snapshot server, one at a time.

    Each request has a deadline, after which the client kills the server. The rank then handles it like a
    server that died: `reconnect` connects to a new one."""

    def __init__(
        self, name: str, *, starts: bool, log: Path, start: StartServer = start_snapshot_server
    ) -> None:
        """Connect to the server ``name`` of the run on this node; with ``starts``, use ``start`` to start one
        if there is none. Raises `RunFailedError` if no server answers."""
        self._lock = threading.Lock()
        self._name, self._log, self._start = name, log, start
        self._started: StartedServer | None = None
        self.why_killed = ""
        """Why this client killed the last server; empty: it did not."""
        self._connection = self._connect() or self._await(name, starts, log)

    @property
    def _wire(self) -> SocketChannel:
        return self._connection.wire

    def reconnect(self) -> None:
        """Connect to a new server after the old one has ended; start one if there is none.

        Raises `RunFailedError` if no server starts."""
        with self._lock:
            self._connection.close()
            self._connection = self._connect() or self._await(self._name, True, self._log)

    def is_alive(self) -> bool:
        """Whether the connection to the server is open. Sends no request."""
        return self._wire.is_open()

    def _connect(self) -> _Connection | None:
        """Connect to the running server. A server that is stopped or hung is continued or killed."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_SEND_SECONDS)
        found: _Connection | None = None
        try:
            connect_to_own(connection, self._name)
            found = _Connection(SocketChannel(connection))
            self._request(found, {"op": "hello"}, b"", _ANSWER_SECONDS)
        except ForeignServerError:
            connection.close()
            raise
        except OSError:
            connection.close() if found is None else found.close()
            return None
        return found

    def _await(self, name: str, starts: bool, log: Path) -> _Connection:
        process = self._started = self._start(name, log) if starts else None
        deadline = time.monotonic() + _START_SECONDS
        while (connection := self._connect()) is None:
            code = None if process is None else process.poll()
            if (code or 0) > 0 or time.monotonic() > deadline:
                raise RunFailedError(f"the snapshot server did not start (log: {log})")
            if code is not None:  # 0: an older server still had the name; below 0: killed during its start
                process = self._started = self._start(name, log)
            time.sleep(_POLL_SECONDS)
        return connection

    def _ask(
        self, message: Message, payload: bytes = b"", seconds: float = 0.0
    ) -> tuple[Message, memoryview, list[int]]:
        """Send a request and return the answer. ``seconds``: how long the request itself may take.

        Raises `Closed` if the server has ended or was killed for not answering."""
        with self._lock:
            return self._request(self._connection, message, payload, seconds + _ANSWER_SECONDS)

    def _ask_with_reconnect(
        self, message: Message, seconds: float = 0.0
    ) -> tuple[Message, memoryview, list[int]]:
        """Send a request that any server can answer before `join`.

        If the server ends meanwhile, a new one, whose memory is empty, gets the request."""
        try:
            return self._ask(message, seconds=seconds)
        except Closed:
            self.reconnect()
            return self._ask(message, seconds=seconds)

    def _request(
        self, connection: _Connection, message: Message, payload: bytes, seconds: float
    ) -> tuple[Message, memoryview, list[int]]:
        try:
            connection.wire.send(message, payload)
            await_answer(connection.wire, connection.stalled, seconds)
        except ServerKilledError as killed:
            self.why_killed = killed.event.why
            raise
        return connection.wire.receive()

    def check(self) -> None:
        """Check that the server answers. Raises `Closed` if it has ended or was killed for not answering."""
        self._ask({"op": "hello"})

    def join(
        self,
        stored_shards: Sequence[StoredShard],
        *,
        attempt: int,
        rank: int,
        holds: Sequence[int],
        world: int,
        num_local: int,
        num_slots: int,
        resumed: int | None = None,
    ) -> SnapshotMemory:
        """Return memory for this rank's snapshots. ``holds``: the ranks whose shards they all have.
        ``resumed``: the step that this attempt resumes from.

        Raises `RunFailedError` if the server has no memory for them."""
        values, envelopes = encode_shards(stored_shards)
        who = {"attempt": attempt, "rank": rank, "holds": holds, "world": world, "num_local": num_local}
        message = {"op": "join", "num_slots": num_slots, "pieces": values, **who}
        answer, _, descriptors = self._ask(message | {"resumed": resumed}, envelopes)
        if "problem" in answer:
            raise RunFailedError(f"no memory for snapshots: {answer['problem']}")
        (descriptor,) = descriptors
        memory = SnapshotMemory(descriptor)
        os.close(descriptor)
        return memory

    def configure(self, message: dict[str, Any], files: dict[str, bytes]) -> None:
        """Set how the snapshot servers store; see
        `myriad.checkpoint.snapshots.snapshot_server.SnapshotServer.configure`."""
        sizes = [[name, len(content)] for name, content in files.items()]
        self._ask({"op": "configure", "files": sizes, **message}, b"".join(files.values()))

    def port(self, host: str, wanted: int = 0, *, encrypts: bool = False) -> int:
        """Return the port for other nodes' servers, on this node's address ``host``; ``wanted`` is the port
        to use if it is free; ``encrypts``: whether connections have TLS."""
        return int(self._ask({"op": "port", "host": host, "wanted": wanted, "encrypt": encrypts})[0]["port"])

    def report_complete(self, slot: int, step: int, *, durable: bool, copies: bool) -> None:
        """Report a complete snapshot, without waiting for an answer."""
        with self._lock:
            purpose = {"durable": durable, "copies": copies}
            self._wire.send({"op": "whole", "slot": slot, "step": step, **purpose})

    def report_skipped(self, step: int) -> None:
        """Report that a snapshot to be stored was not taken, because earlier ones hold all slots."""
        with self._lock:
            self._wire.send({"op": "skipped", "step": step})

    def wait_stored(self, step: int, seconds: float) -> StoreOutcome | None:
        """Return the storage outcome of a step; ``None``: in progress. Valid on ranks of rank 0's node."""
        outcome = self._ask({"op": "wait", "step": step, "seconds": seconds}, seconds=seconds)[0]["outcome"]
        return None if outcome is None else StoreOutcome(**outcome)

    def retry_store(self, step: int) -> None:
        """Retry a step that could not be stored. Valid on ranks of rank 0's node."""
        self._ask({"op": "store again", "step": step})

    def hold(self, step: int) -> int:
        """Make the server keep its memory after the ranks exit, until the step is stored or given up.

        Return the process id of the server."""
        pid: int = self._ask({"op": "hold", "step": step})[0]["pid"]
        return pid

    def acquire(
        self, url: str, attempts_before: int, seconds: float, run: str | None = None
    ) -> AcquiredFolder:
        """Take over the folder of durable checkpoints for a new attempt.

        ``run``: path of the run, if the folder is outside it."""
        how = {"url": url, "attempts_before": attempts_before, "seconds": seconds, "run": run}
        answer = self._ask_with_reconnect({"op": "claim", **how}, seconds)[0]
        steps, damaged = tuple(answer["steps"]), tuple(answer["damaged"])
        return AcquiredFolder(answer["attempt"], steps, damaged, answer["problem"], answer.get("taken_from"))

    def snapshots(self) -> list[dict[str, Any]]:
        """List the snapshots in this node's memory: attempt, world, rank, copied and steps of each."""
        found: list[dict[str, Any]] = self._ask_with_reconnect({"op": "snapshots"})[0]["snapshots"]
        return found

    def open(self, attempt: int, rank: int, step: int, *, copied: bool) -> OpenedSnapshot | None:
        """Open one snapshot for reading; ``None`` if it no longer exists."""
        which = {"attempt": attempt, "rank": rank, "step": step, "copied": copied}
        answer, envelopes, descriptors = self._ask_with_reconnect({"op": "open", **which})
        if "problem" in answer:
            return None
        memory = SnapshotMemory(descriptors[0])
        os.close(descriptors[0])
        stored_shards = decode_shards(answer["pieces"], bytes(envelopes))
        return OpenedSnapshot(rank, stored_shards, answer["hashes"], memory, answer["slot"])

    def leave(self, seconds: float) -> None:
        """End this rank's session after an error, as its process ended. A server in this process has up to
        ``seconds`` to store the newest snapshot."""
        self._connection.close()
        if self._started is not None:
            self._started.finish(seconds)

    def bye(self) -> None:
        """End this rank's session after a clean exit."""
        with suppress(OSError):
            self._ask({"op": "bye"})
        self._connection.close()


def list_in_memory(run: Path, node: int | None = None, ranks: int = 1) -> list[tuple[int, int]]:
    """Return (step, bytes) of each step that this machine's snapshot servers have of all ranks.

    ``node``: search the server of this node only, as in `server_name`. ``ranks``: lower bound of the number
    of ranks. The list is empty without a server."""
    names = server_names(run) if node is None else [server_name(run, node)]
    found: dict[tuple[int, int], int] = defaultdict(int)
    having: dict[tuple[int, int], set[int]] = defaultdict(set)
    for one in (one for name in names for one in _snapshots_of(name)):
        for step in one["steps"]:
            found[one["attempt"], step] += one["bytes"]
            having[one["attempt"], step].add(one["rank"])
    most = max([ranks, *map(len, having.values())])
    return sorted((key[1], size) for key, size in found.items() if len(having[key]) == most)


def held_steps(run: Path) -> set[int]:
    """Return the steps that snapshot servers of this machine hold because they could not be stored."""
    answers = (ask_server(name, {"op": "snapshots"}, _LIST_SECONDS) for name in server_names(run))
    return {step for answer in answers if (step := answer.get("held")) is not None}


def ask_server(name: str, message: Message, seconds: float | None = None) -> Message:
    """Send one request to a snapshot server from a process that is not a rank.

    Return an empty message if the server does not answer within ``seconds``."""
    wire = _connect(name)
    if wire is None:
        return {}
    try:
        wire.set_timeout(seconds)
        wire.send(message)
        return wire.receive()[0]
    except OSError:
        return {}
    finally:
        wire.close()


def _snapshots_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask_server(name, {"op": "snapshots"}, _LIST_SECONDS).get("snapshots", [])
    return found


def _connect(name: str) -> SocketChannel | None:
    """Connect to a server that answers within `_LIST_SECONDS`; ``None``: there is none. Kills no server."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    wire = SocketChannel(connection)
    try:
        wire.set_timeout(_LIST_SECONDS)
        connect_to_own(connection, name)
        wire.send({"op": "hello"})
        wire.receive()
    except (OSError, ForeignServerError):
        wire.close()
        return None
    return wire
