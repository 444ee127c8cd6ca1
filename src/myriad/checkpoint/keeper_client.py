"""A rank's line to the keeper of its node; the first rank of the node starts one where there is none."""

import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from myriad.checkpoint.claiming import Claimed
from myriad.checkpoint.keeper_start import keeper_name, keeper_names, start_keeper
from myriad.checkpoint.keeper_watch import ServerKilledError, ServerProcess, Stalled, await_answer
from myriad.checkpoint.member import Opened
from myriad.checkpoint.memory import SnapshotMemory
from myriad.checkpoint.piece import Piece, join_pieces, split_pieces
from myriad.checkpoint.storing import Outcome
from myriad.checkpoint.wire import Closed, Message, Wire
from myriad.errors import RunFailedError

__all__ = ["KeeperClient", "ask_server", "held_steps", "keeper_name", "list_in_memory"]

_START_SECONDS = 60.0
_POLL_SECONDS = 0.01
_LIST_SECONDS = 5.0
_ANSWER_SECONDS, _SEND_SECONDS = 60.0, 10.0
"""A server that does not answer a request, or take one, within this time is killed. The time that a request
itself may take comes on top."""


class _Connection:
    """To a server that has answered, with the process at its other end."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.process = ServerProcess(wire.process_socket())
        self.stalled = Stalled(self.process)

    def close(self) -> None:
        self.wire.close()
        self.process.close()


class KeeperClient:
    """Requests and their answers; one at a time. Each has a deadline, after which the server is killed: to
    the rank that is as if it had died, and `reconnect` leads to another."""

    def __init__(self, name: str, *, starts: bool, log: Path) -> None:
        """``name``: of the run on this node; ``starts``: this rank starts a keeper if there is none. Raises
        `RunFailedError` when none comes up."""
        self._lock = threading.Lock()
        self._name, self._log = name, log
        self.why_killed = ""
        """Why this client has killed the last server; empty: it has not."""
        self._connection = self._connect() or self._await(name, starts, log)

    @property
    def _wire(self) -> Wire:
        return self._connection.wire

    def reconnect(self) -> None:
        """To a new keeper, when the one that was there is gone; whoever misses it first starts one. Raises
        `RunFailedError` when none comes up."""
        with self._lock:
            self._connection.close()
            self._connection = self._connect() or self._await(self._name, True, self._log)

    def is_alive(self) -> bool:
        """Whether the keeper is still there; asks nobody."""
        return self._wire.is_open()

    def _connect(self) -> _Connection | None:
        """To the server that there is; one that is stopped or hung is continued or killed."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(_SEND_SECONDS)
        found: _Connection | None = None
        try:
            connection.connect(f"\0{self._name}")
            found = _Connection(Wire(connection))
            self._request(found, {"op": "hello"}, b"", _ANSWER_SECONDS)
        except OSError:
            connection.close() if found is None else found.close()
            return None
        return found

    def _await(self, name: str, starts: bool, log: Path) -> _Connection:
        process = start_keeper(name, log) if starts else None
        deadline = time.monotonic() + _START_SECONDS
        while (connection := self._connect()) is None:
            code = None if process is None else process.poll()
            if (code or 0) > 0 or time.monotonic() > deadline:
                raise RunFailedError(f"the checkpoint process did not start (log: {log})")
            if code is not None:  # 0: an older one still had the name; below 0: killed while it started
                process = start_keeper(name, log)
            time.sleep(_POLL_SECONDS)
        return connection

    def _ask(
        self, message: Message, payload: bytes = b"", seconds: float = 0.0
    ) -> tuple[Message, memoryview, list[int]]:
        """``seconds``: how long the server may take by itself. Raises `Closed` when it is gone, or was killed
        because it did not answer."""
        with self._lock:
            return self._request(self._connection, message, payload, seconds + _ANSWER_SECONDS)

    def _ask_again(self, message: Message, seconds: float = 0.0) -> tuple[Message, memoryview, list[int]]:
        """A request before `join`, which any server can answer: one that ends meanwhile is replaced, and the
        next one asked. Its memory is empty."""
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
        """Raises `Closed` when the server is gone, or was killed because it did not answer."""
        self._ask({"op": "hello"})

    def join(
        self,
        pieces: Sequence[Piece],
        *,
        attempt: int,
        rank: int,
        world: int,
        num_local: int,
        num_slots: int,
        resumed: int | None = None,
    ) -> SnapshotMemory:
        """Memory for this rank's snapshots; ``resumed``: the step that this attempt goes on from. Raises
        `RunFailedError` when there is none."""
        values, envelopes = join_pieces(pieces)
        who = {"attempt": attempt, "rank": rank, "world": world, "num_local": num_local}
        message = {"op": "join", "num_slots": num_slots, "pieces": values, **who}
        answer, _, descriptors = self._ask(message | {"resumed": resumed}, envelopes)
        if "problem" in answer:
            raise RunFailedError(f"no memory for snapshots: {answer['problem']}")
        (descriptor,) = descriptors
        memory = SnapshotMemory(descriptor)
        os.close(descriptor)
        return memory

    def configure(self, message: dict[str, Any], files: dict[str, bytes]) -> None:
        """How the keepers store; see `myriad.checkpoint.keeper.Keeper.configure`."""
        sizes = [[name, len(content)] for name, content in files.items()]
        self._ask({"op": "configure", "files": sizes, **message}, b"".join(files.values()))

    def port(self, wanted: int = 0) -> int:
        """Where keepers of other nodes reach this one; ``wanted``: if it is free."""
        return int(self._ask({"op": "port", "wanted": wanted})[0]["port"])

    def say_whole(self, slot: int, step: int, *, durable: bool, copies: bool) -> None:
        """A snapshot is complete; nothing is waited for."""
        with self._lock:
            wants = {"durable": durable, "copies": copies}
            self._wire.send({"op": "whole", "slot": slot, "step": step, **wants})

    def say_skipped(self, step: int) -> None:
        """A snapshot that was to be stored could not be taken: all memory is held by earlier ones."""
        with self._lock:
            self._wire.send({"op": "skipped", "step": step})

    def wait_stored(self, step: int, seconds: float) -> Outcome | None:
        """What became of a step; ``None``: it is still being stored. For the ranks of rank 0's node."""
        outcome = self._ask({"op": "wait", "step": step, "seconds": seconds}, seconds=seconds)[0]["outcome"]
        return None if outcome is None else Outcome(**outcome)

    def store_again(self, step: int) -> None:
        """Have a step that could not be stored tried once more; for the ranks of rank 0's node."""
        self._ask({"op": "store again", "step": step})

    def hold(self, step: int) -> int:
        """Have the snapshot server keep its memory after the ranks have ended, until the step is stored or
        given up; gives its process id."""
        pid: int = self._ask({"op": "hold", "step": step})[0]["pid"]
        return pid

    def claim(self, url: str, attempts_before: int, seconds: float, run: str | None = None) -> Claimed:
        """Takes the folder of durable checkpoints over for a new start of the ranks; ``run``: the path of
        the run, where the folder is not its own."""
        how = {"url": url, "attempts_before": attempts_before, "seconds": seconds, "run": run}
        answer = self._ask_again({"op": "claim", **how}, seconds)[0]
        steps, damaged = tuple(answer["steps"]), tuple(answer["damaged"])
        return Claimed(answer["attempt"], steps, damaged, answer["problem"], answer.get("taken_from"))

    def snapshots(self) -> list[dict[str, Any]]:
        """What this node has in memory: attempt, world, rank, copied, steps of each."""
        found: list[dict[str, Any]] = self._ask_again({"op": "snapshots"})[0]["snapshots"]
        return found

    def open(self, attempt: int, rank: int, step: int, *, copied: bool) -> Opened | None:
        """One of them, to read from; ``None`` when it is gone."""
        which = {"attempt": attempt, "rank": rank, "step": step, "copied": copied}
        answer, envelopes, descriptors = self._ask_again({"op": "open", **which})
        if "problem" in answer:
            return None
        memory = SnapshotMemory(descriptors[0])
        os.close(descriptors[0])
        pieces = split_pieces(answer["pieces"], bytes(envelopes))
        return Opened(rank, pieces, answer["hashes"], memory, answer["slot"])

    def bye(self) -> None:
        """This rank has ended well."""
        with suppress(OSError):
            self._ask({"op": "bye"})
        self._connection.close()


def list_in_memory(run: Path, node: int | None = None, ranks: int = 1) -> list[tuple[int, int]]:
    """Steps that all ranks of this machine have in memory, or copies of them, with their bytes; none without
    a keeper. ``node``: of this one alone, as `keeper_name` has it; ``ranks``: how many there are at least."""
    names = keeper_names(run) if node is None else [keeper_name(run, node)]
    found: dict[tuple[int, int], int] = defaultdict(int)
    having: dict[tuple[int, int], set[int]] = defaultdict(set)
    for one in (one for name in names for one in _snapshots_of(name)):
        for step in one["steps"]:
            found[one["attempt"], step] += one["bytes"]
            having[one["attempt"], step].add(one["rank"])
    most = max([ranks, *map(len, having.values())])
    return sorted((key[1], size) for key, size in found.items() if len(having[key]) == most)


def held_steps(run: Path) -> set[int]:
    """Last steps that the snapshot servers of this machine hold because they could not be stored."""
    answers = (ask_server(name, {"op": "snapshots"}, _LIST_SECONDS) for name in keeper_names(run))
    return {step for answer in answers if (step := answer.get("held")) is not None}


def ask_server(name: str, message: Message, seconds: float | None = None) -> Message:
    """One request to a snapshot server, of a process that is no rank; empty when it does not answer within
    ``seconds``."""
    wire = _connect(name)
    if wire is None:
        return {}
    try:
        wire.patience(seconds)
        wire.send(message)
        return wire.receive()[0]
    except OSError:
        return {}
    finally:
        wire.close()


def _snapshots_of(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask_server(name, {"op": "snapshots"}, _LIST_SECONDS).get("snapshots", [])
    return found


def _connect(name: str) -> Wire | None:
    """To a server that answers soon; for whoever only looks, and ends none."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    wire = Wire(connection)
    try:
        wire.patience(_LIST_SECONDS)
        connection.connect(f"\0{name}")
        wire.send({"op": "hello"})
        wire.receive()
    except OSError:
        wire.close()
        return None
    return wire
