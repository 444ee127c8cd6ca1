"""The messages of a rank that starts, to Myriad's store, torch's TCPStore and Redis; and these servers.

Myriad's are in `myriad.comm.rendezvous.attempt_store`, those for Redis in `redis_store` beside it;
torch's were read from its connections (TCPStoreBackend.hpp names them).
"""

import os
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist

from myriad.comm.rendezvous.store_frames import StoreOp, pack
from myriad.comm.rendezvous.store_server import StoreServer

ADDRESS_BYTES = 152 + len(socket.gethostname())
"""What gloo writes for one rank of a group: host name and socket address, and 8 bytes for each member when it
connects to all at once."""


@dataclass(frozen=True)
class Step:
    """One message and what has to come back: ``replies`` counted by the protocol; 0: nothing."""

    message: bytes
    kind: str = "none"
    replies: int = 0
    names: tuple[bytes, ...] = ()


class Wire(Protocol):
    """A store's server and the messages of one client."""

    name: str

    def serve(self, ready: Any, stop: Any) -> None:
        """Run the server, print its port, and end on request."""

    def hello(self, rank: int) -> list[Step]:
        """What a client sends when it has connected."""

    def exchange(self, group: str, index: int, members: Sequence[int], size: int) -> list[Step]:
        """Writes one's own address, ``size`` bytes, and reads those of ``members``."""


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


class OwnStore:
    """What `myriad.comm.rendezvous.attempt_store` sends. The client adds a code to each message."""

    name, secret = "Myriad", b"the secret of a benchmark of the store"

    def serve(self, ready: Any, stop: Any) -> None:
        """Run the server until a stop is requested."""
        server = StoreServer(socket.create_server(("127.0.0.1", 0), backlog=4096), self.secret)
        ready.send(server.address[1])
        stop.wait()
        os._exit(0)

    def hello(self, rank: int) -> list[Step]:
        """Answer the challenge; be counted."""
        return [Step(b"", "challenge", 1), Step(pack(StoreOp.JOIN, [b"%d" % rank]), "reply", 1)]

    def exchange(self, group: str, index: int, members: Sequence[int], size: int) -> list[Step]:
        """Write this rank's address, then read those of the members."""
        keys = [f"/{group}/{member}".encode() for member in members]
        own = pack(StoreOp.SET, [f"/{group}/{index}".encode(), b"a" * size])
        return [Step(own, "reply", 1), Step(pack(StoreOp.GET, keys), "reply", 1)]

    def mesh(self, group: str, index: int, size: int) -> Iterator[Step]:
        """SET; then for each member WAIT twice, and GET."""
        yield Step(
            pack(StoreOp.SET, [f"/{group}/{index}".encode(), b"a" * (ADDRESS_BYTES + 8 * size)]), "reply", 1
        )
        for member in range(size):
            key = [f"/{group}/{member}".encode()]
            for op in (StoreOp.WAIT, StoreOp.WAIT, StoreOp.GET):
                yield Step(pack(op, key), "reply", 1)


class TcpStore:
    """What torch's TCPStore client sends (TCPStoreBackend.hpp), byte for byte."""

    def __init__(self, *, libuv: bool) -> None:
        self.libuv, self.name = libuv, "TCPStore" if libuv else "TCPStore without libuv"

    def serve(self, ready: Any, stop: Any) -> None:
        """Run the server until a stop is requested."""
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=self.libuv)
        ready.send(server.port)
        stop.wait()
        os._exit(0)

    def hello(self, rank: int) -> list[Step]:
        """Validate, ping, be counted."""
        ping = b"\x00" + struct.pack("<I", 0x3C85F7CE) + b"\x0d" + struct.pack("<I", rank)
        return [Step(ping, "bytes", 4), Step(b"\x04" + _text(b"init/") + struct.pack("<q", 1), "bytes", 8)]

    def exchange(self, group: str, index: int, members: Sequence[int], size: int) -> list[Step]:
        """SET; then WAIT and MULTI_GET."""
        keys = [f"/{group}/{member}".encode() for member in members]
        asked = struct.pack("<Q", len(keys)) + b"".join(map(_text, keys))
        own = b"\x01" + _text(f"/{group}/{index}".encode()) + _text(b"a" * size)
        return [Step(own), Step(b"\x06" + asked, "bytes", 1), Step(b"\x0a" + asked, "values", len(keys))]

    def mesh(self, group: str, index: int, size: int) -> Iterator[Step]:
        """SET; then for each member WAIT, and a get, which is WAIT and GET."""
        yield Step(b"\x01" + _text(f"/{group}/{index}".encode()) + _text(b"a" * (ADDRESS_BYTES + 8 * size)))
        for member in range(size):
            key = _text(f"/{group}/{member}".encode())
            for _ in range(2):
                yield Step(b"\x06" + struct.pack("<Q", 1) + key, "bytes", 1)
            yield Step(b"\x03" + key, "values", 1)


class Redis:
    """The requests of `myriad.comm.rendezvous.redis_store`, and a Redis server that answers them."""

    name = "Redis"

    def serve(self, ready: Any, stop: Any) -> None:
        """Run the server until a stop is requested."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        limits = ["--maxclients", "60000", "--tcp-backlog", "4096"]
        command = ["redis-server", "--port", str(port), "--save", "", "--appendonly", "no", *limits]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.02)
        ready.send(port)
        stop.wait()
        server.kill()
        server.wait()
        os._exit(0)

    @staticmethod
    def _command(*words: bytes) -> bytes:
        return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)

    def hello(self, rank: int) -> list[Step]:
        """redis-py names itself twice; then the mark of this rank."""
        info = [self._command(b"CLIENT", b"SETINFO", what, b"redis-py") for what in (b"LIB-NAME", b"LIB-VER")]
        mark = self._command(b"SET", b"myriad/a\0mark/%d" % rank, b"1", b"EX", b"86400")
        return [Step(b"".join(info), "lines", 2), Step(mark, "lines", 1)]

    def exchange(self, group: str, index: int, members: Sequence[int], size: int) -> list[Step]:
        """XADD and EXPIRE in one message; XREAD BLOCK until all are there."""
        own = f"myriad/a/{group}/{index}".encode()
        add = self._command(b"XADD", own, b"MAXLEN", b"1", b"*", b"v", b"a" * size)
        names = tuple(f"myriad/a/{group}/{member}".encode() for member in members)
        write = Step(add + self._command(b"EXPIRE", own, b"86400"), "lines", 3)  # a length, an id, a number
        return [write, Step(self.read(names), "streams", len(names), names)]

    def read(self, names: Sequence[bytes]) -> bytes:
        """Those values that are there; when none is, the first to come."""
        zeros = [b"0"] * len(names)
        return self._command(b"XREAD", b"BLOCK", b"5000", b"STREAMS", *names, *zeros)
