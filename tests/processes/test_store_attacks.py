"""Another user of the machine, or of the network, at the port of a run's rendezvous store.

The store is served by a process of its own. If these fail, whoever finds the port can take a rank's place.
"""

import contextlib
import multiprocessing
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from ranks import environments

from myriad.comm.config import CommConfig
from myriad.comm.rendezvous import attempt_store
from myriad.comm.rendezvous.attempt_store import AttemptStore
from myriad.comm.rendezvous.rendezvous_store import open_store
from myriad.comm.rendezvous.store_frames import MOST_BYTES, StoreOp, pack
from myriad.errors import RunFailedError
from myriad.wire.frame_codes import MESSAGE_CODE_BYTES
from myriad.wire.frame_reader import packed_frame
from myriad.wire.framing import HEADER_BYTES, FrameKind, pack_header
from myriad.wire.handshake import ANSWER_BYTES, NONCE_BYTES

SECONDS = timedelta(seconds=20)


@dataclass
class Served:
    """A process that serves the store of an attempt, and what its ranks have."""

    pid: int
    address: tuple[str, int]
    secret: bytes

    def rank(self, number: int = 1) -> AttemptStore:
        """A rank that has the secret."""
        return AttemptStore(self.address, self.secret, number, SECONDS)

    def memory_bytes(self) -> int:
        """What the process holds in memory."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve(environment: dict[str, str], ready: "multiprocessing.synchronize.Event") -> None:
    os.environ |= environment
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
    store = open_store(CommConfig(), 0, 1)
    store.set("address of rank 0", "10.0.0.1")
    ready.set()
    time.sleep(120)


@pytest.fixture
def served() -> Iterator[Served]:
    context = multiprocessing.get_context("fork")
    [environment] = environments(1)
    ready = context.Event()
    process = context.Process(target=serve, args=(environment, ready), daemon=True)
    process.start()
    assert ready.wait(60) and process.pid is not None
    address = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    yield Served(process.pid, address, environment["MYRIAD_STORE_SECRET"].encode())
    process.kill()
    process.join()


def connected(served: Served) -> socket.socket:
    return socket.create_connection(served.address, timeout=20)


def take(connection: socket.socket, count: int) -> bytes:
    """``count`` bytes; fewer if the other end closes."""
    data = b""
    while len(data) < count:
        try:
            part = connection.recv(count - len(data))
        except OSError:
            break
        if not part:
            break
        data += part
    return data


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes, whatever it sends before."""
    return len(take(connection, 2**20)) < 2**20


def keys(served: Served) -> list[str]:
    return served.rank().list_keys()


def test_torchs_client_gets_nothing(served: Served) -> None:
    """As anyone could read and write the keys when torch served them."""
    with pytest.raises((dist.DistError, RuntimeError, ValueError)):
        outsider = dist.TCPStore(*served.address, is_master=False, timeout=timedelta(seconds=1))
        outsider.set("address of rank 0", "6.6.6.6")
    assert served.rank().get("address of rank 0") == b"10.0.0.1"


def test_without_the_secret_no_key_is_read_written_or_listed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_store, "_FOREIGN_SECONDS", 0.0)
    for secret in (b"", b"x" * 64, served.secret[:-1] + b"!"):
        with pytest.raises(RunFailedError, match="another secret"):
            AttemptStore(served.address, secret, 1, SECONDS)
    requests = {
        StoreOp.GET: [b"address of rank 0"],
        StoreOp.SET: [b"address of rank 0", b"6.6.6.6"],
        StoreOp.LIST: [],
        StoreOp.DELETE: [b"address of rank 0"],
    }
    for op, items in requests.items():
        body = pack(op, items)
        for kind in FrameKind:
            with connected(served) as connection:
                take(connection, HEADER_BYTES + NONCE_BYTES)
                connection.sendall(pack_header(kind, len(body)) + body + bytes(MESSAGE_CODE_BYTES))
                assert b"10.0.0.1" not in take(connection, 2**16)
    assert served.rank().get("address of rank 0") == b"10.0.0.1" and keys(served) == ["address of rank 0"]


class Between:
    """A man in the middle who hands on frames as ``change`` says."""

    def __init__(self, served: Served, change: Callable[[str, int, bytes], list[bytes]]) -> None:
        """``change``: the frames to send on, given who sent one, its number from that end, and the frame."""
        self._served, self._change = served, change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()
        self.frames: list[tuple[str, bytes]] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            rank, _ = self._listener.accept()
            server = connected(self._served)
            for who, source, target in (("rank", rank, server), ("server", server, rank)):
                threading.Thread(target=self._relay, args=(who, source, target), daemon=True).start()

    def _relay(self, who: str, source: socket.socket, target: socket.socket) -> None:
        number = 0
        while header := take(source, HEADER_BYTES):
            _, _, kind, size = struct.unpack("!2sBBI", header)
            coded = kind == FrameKind.MESSAGE
            frame = header + take(source, size + (MESSAGE_CODE_BYTES if coded else 0))
            self.frames.append((who, frame))
            try:
                for each in self._change(who, number, frame):
                    target.sendall(each)
            except OSError:
                break
            number += 1
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def flipped(frame: bytes, bit: int) -> bytes:
    at = (bit // 8) % len(frame)
    return frame[:at] + bytes([frame[at] ^ (1 << bit % 8)]) + frame[at + 1 :]


ADD = 2
"""The number of a rank's first request after its answer and its joining."""


@pytest.mark.parametrize("where", ["header", "body", "code"])
def test_a_changed_request_is_not_carried_out(served: Served, where: str) -> None:
    def change(who: str, number: int, frame: bytes) -> list[bytes]:
        if who != "rank" or number != ADD:
            return [frame]
        places = {"header": 8 * 3, "body": 8 * (HEADER_BYTES + 10), "code": 8 * (len(frame) - 1)}
        return [flipped(frame, places[where])]

    between = Between(served, change)
    store = AttemptStore(between.address, served.secret, 1, SECONDS)
    with pytest.raises(dist.DistNetworkError, match="connection was closed"):
        store.add("sum", 1)
    assert keys(served) == ["address of rank 0"]
    assert store.add("sum", 1) == 1  # on a new connection


def test_a_changed_reply_is_not_taken(served: Served) -> None:
    def change(who: str, number: int, frame: bytes) -> list[bytes]:
        if who != "server" or b"10.0.0.1" not in frame:
            return [frame]
        return [frame.replace(b"10.0.0.1", b"6.6.6.66")]

    store = AttemptStore(Between(served, change).address, served.secret, 1, SECONDS)
    with pytest.raises(dist.DistNetworkError, match="connection was closed"):
        store.get("address of rank 0")


def test_a_repeated_request_ends_the_connection(served: Served) -> None:
    def change(who: str, number: int, frame: bytes) -> list[bytes]:
        return [frame, frame] if who == "rank" and number == ADD else [frame]

    store = AttemptStore(Between(served, change).address, served.secret, 1, SECONDS)
    assert store.add("sum", 1) == 1
    with pytest.raises(dist.DistNetworkError, match="connection was closed"):
        store.add("other", 1)
    assert served.rank().get("sum") == b"1"


def test_what_was_recorded_is_worth_nothing_on_another_connection(served: Served) -> None:
    between = Between(served, lambda who, number, frame: [frame])
    AttemptStore(between.address, served.secret, 1, SECONDS).add("sum", 1)
    with connected(served) as connection:
        take(connection, HEADER_BYTES + NONCE_BYTES)
        with contextlib.suppress(OSError):
            for who, frame in between.frames:
                if who == "rank":
                    connection.sendall(frame)
        assert is_closed(connection)
    assert served.rank().get("sum") == b"1"


@pytest.mark.parametrize("kind", [FrameKind.ANSWER, FrameKind.MESSAGE])
def test_a_huge_frame_takes_no_memory(served: Served, kind: FrameKind) -> None:
    before = served.memory_bytes()
    for size in (ANSWER_BYTES + 1, MOST_BYTES, 2**32 - 1):
        with connected(served) as connection:
            connection.sendall(pack_header(kind, size))
            assert is_closed(connection)
    assert served.memory_bytes() < before + 2**23


def test_a_huge_announcement_of_a_rank_takes_no_memory_before_it_comes(served: Served) -> None:
    """Also a process with the secret has only what it has sent."""
    store = served.rank()
    before = served.memory_bytes()
    with store._connection() as connection:
        connection._socket.sendall(pack_header(FrameKind.MESSAGE, MOST_BYTES))
        time.sleep(0.2)
        assert served.memory_bytes() < before + 2**23
    with store._connection() as connection:
        connection._socket.sendall(bytes(2**10))
    assert keys(served) == ["address of rank 0"]


def test_silent_and_slow_peers_do_not_delay_ranks(served: Served) -> None:
    silent = [connected(served) for _ in range(200)]
    for one in silent[::2]:
        one.sendall(pack_header(FrameKind.ANSWER, ANSWER_BYTES)[:5])
    began = time.monotonic()
    store = served.rank()
    for number in range(100):
        store.set(str(number), "value")
    assert store.get("99") == b"value" and time.monotonic() - began < 3
    assert all(is_closed(one) for one in silent)
    assert time.monotonic() - began < 15
    assert store.get("99") == b"value"


def test_a_peer_that_reads_no_reply_does_not_delay_others(served: Served) -> None:
    deaf, store = served.rank(), served.rank(2)
    store.set("large", b"x" * 2**25)
    with deaf._connection() as connection:
        connection._socket.sendall(
            packed_frame(FrameKind.MESSAGE, pack(StoreOp.GET, [b"large"]), connection._sent)
        )
        began = time.monotonic()
        for _ in range(20):
            assert store.add("sum", 1)
        assert time.monotonic() - began < 3
