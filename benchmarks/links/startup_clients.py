"""Simulated ranks that start: each is a connection that sends exactly what a real rank's start sends.

For each of its world, dp, pp and tp group (`myriad.comm.gloo_setup`) a rank writes its own address and reads
its partners' in one request; a test holds this against real ranks. Two processes hold all connections and
send a rank's next message when its last was answered, so ranks wait for each other as real ones do.
At most `_OPENING` connections of each process have had no answer yet: a server's queue of new connections is
4,096 long on most machines, and what does not fit comes again a second later.

``mesh`` ranks do instead what torch's gloo does for a full mesh: three round trips for each other rank.
"""

import errno
import itertools
import multiprocessing
import os
import resource
import selectors
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from myriad.comm.gloo_setup import MESH_RANKS, partners
from myriad.comm.grid import RankGrid
from myriad.comm.layout import Layout
from myriad.comm.rendezvous.store_frames import MOST_BYTES, PROTOCOL
from myriad.wire.frame_reader import FrameReader, packed_frame
from myriad.wire.framing import FrameKind
from myriad.wire.handshake import NONCE_BYTES, PROOF_BYTES, ConnectorHandshake
from startup_wire import ADDRESS_BYTES, OwnStore, Step, Wire

_OPENING = 1000
_PROCESSES = 2
_LIMIT_SECONDS = 240.0

Exchange = tuple[str, int, Sequence[int], int]
"""A group's name, this rank's place in it, the places of those whose addresses it reads, and an address's
bytes."""


def layout_of(world: int) -> Layout:
    """8-way tensor, 8-way pipeline, the rest data parallelism: as MegaScale's 175B job."""
    return Layout(dp=world // 64, pp=8, tp=8)


def exchanges_of(rank: int, layout: Layout) -> list[Exchange]:
    """World, dp, pp and tp."""
    grid = RankGrid(layout, rank)
    found: list[Exchange] = [("world", rank, partners(rank, layout.world), ADDRESS_BYTES)]
    for axis in ("dp", "pp", "tp"):
        members = grid.peers(axis)
        if len(members) > 1:
            index, count = members.index(rank), len(members)
            size = ADDRESS_BYTES + (8 * count if count <= MESH_RANKS else 0)
            found.append((f"{axis}:{members[0]}", index, partners(index, count), size))
    return found


class _Short(Exception):
    """The reply is not complete."""


class Client:
    """One simulated rank: a connection and the steps left."""

    def __init__(self, wire: Wire, steps: Iterator[Step]) -> None:
        self.wire, self.steps, self.data = wire, steps, b""
        self.messages = self.replies = self.retries = 0
        self.is_opening = True
        self.step = Step(b"")
        self.socket = self._new_socket()

    def _new_socket(self) -> socket.socket:
        made = socket.socket()
        made.setblocking(False)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        return made

    def connect(self, port: int) -> None:
        """Start the connection; `go_on` finds out when it is established."""
        code = self.socket.connect_ex(("127.0.0.1", port))
        assert code in (0, errno.EINPROGRESS), os.strerror(code)

    def begin_again(self) -> None:
        """Take another socket after the server has closed this one."""
        raise ConnectionError("the server has closed a connection that it had accepted")

    def go_on(self) -> bool:
        """Sends up to the next message that is answered; False when there is none."""
        for step in self.steps:
            self.send(step.message)
            if step.replies:
                self.step = step
                return True
        return False

    def send(self, message: bytes) -> None:
        """Requests are small: the socket takes them whole."""
        assert self.socket.send(message) == len(message)
        self.messages += 1

    def receive(self) -> bool:
        """Takes what has come; True when the step is answered."""
        data = self.socket.recv(1 << 18)
        if not data:
            raise ConnectionResetError
        self.data += data
        try:
            done = getattr(self, f"_{self.step.kind}")()
        except _Short:
            return False
        self.replies += done
        return done

    def _bytes(self) -> bool:
        if len(self.data) < self.step.replies:
            raise _Short
        self.data = self.data[self.step.replies :]
        return True

    def _values(self) -> bool:
        at = 0
        for _ in range(self.step.replies):
            if len(self.data) < at + 8:
                raise _Short
            at += 8 + struct.unpack_from("<Q", self.data, at)[0]
        if len(self.data) < at:
            raise _Short
        self.data = self.data[at:]
        return True

    def _lines(self) -> bool:
        if self.data.count(b"\r\n") < self.step.replies:
            raise _Short
        self.data = b""
        return True

    def _streams(self) -> bool:
        """Each stream ends with its value; none at all after five seconds without news."""
        head, _, rest = self.data.partition(b"\r\n")
        if (not rest and head != b"*-1") or rest.count(b"aa\r\n") < int(head[1:]):
            raise _Short
        self.data = b""
        missing = tuple(name for name in self.step.names if b"\r\n%s\r\n" % name not in rest)
        if not missing:
            return True
        self.step = Step(b"", "streams", len(missing), missing)
        self.replies += 1
        self.send(self.wire.read(missing))
        return False


class OwnClient(Client):
    """A rank that proves the secret of Myriad's store, and adds a code to each message."""

    def __init__(self, wire: Wire, steps: Iterator[Step]) -> None:
        super().__init__(wire, steps)
        self._reset()

    def _reset(self) -> None:
        self.frames, self.sent, self.data = FrameReader(), None, b""
        self.handshake = ConnectorHandshake(PROTOCOL, OwnStore.secret)

    def begin_again(self) -> None:
        """Retry, as a rank does whose proof has come too late: a busy server closes after five seconds."""
        if self.sent is not None:
            super().begin_again()
        self.socket.close()
        self.socket = self._new_socket()
        self._reset()
        self.steps = itertools.chain([Step(b"", "challenge", 1)], self.steps)
        self.retries += 1

    def send(self, message: bytes) -> None:
        """Nothing is sent before the challenge has come."""
        if message:
            super().send(packed_frame(FrameKind.MESSAGE, message, self.sent))

    def _frame(self, kind: FrameKind, most_bytes: int) -> bytes:
        self.frames.add(self.data)
        self.data = b""
        body = self.frames.next_body(kind, most_bytes)
        if body is None:
            raise _Short
        return body

    def _challenge(self) -> bool:
        answer = self.handshake.answer(self._frame(FrameKind.CHALLENGE, NONCE_BYTES))
        super().send(packed_frame(FrameKind.ANSWER, answer))
        self.step = Step(b"", "proof", 1)
        return False

    def _proof(self) -> bool:
        codes = self.handshake.finish(self._frame(FrameKind.PROOF, PROOF_BYTES))
        self.sent, self.frames.codes = codes.sent, codes.received
        return True

    def _reply(self) -> bool:
        self._frame(FrameKind.MESSAGE, MOST_BYTES)
        return True


def run_clients(wire: Wire, port: int, scripts: list[Iterator[Step]]) -> tuple[int, int, int]:
    """All clients of one process to their end; messages, round trips and retries."""
    waiting, clients = list(reversed(scripts)), []
    opening, left = 0, len(scripts)
    kind = OwnClient if isinstance(wire, OwnStore) else Client
    with selectors.DefaultSelector() as events:
        while left:
            while waiting and opening < _OPENING:
                client = kind(wire, waiting.pop())
                clients.append(client)
                client.connect(port)
                events.register(client.socket, selectors.EVENT_WRITE, client)
                opening += 1
            for key, mask in events.select():
                client = key.data
                try:
                    if mask & selectors.EVENT_WRITE:
                        events.modify(client.socket, selectors.EVENT_READ, client)
                    elif not client.receive():
                        continue
                    else:
                        opening -= client.is_opening
                        client.is_opening = False
                    if not client.go_on():
                        events.unregister(client.socket)
                        left -= 1
                except ConnectionError:
                    events.unregister(client.socket)
                    client.begin_again()
                    client.connect(port)
                    events.register(client.socket, selectors.EVENT_WRITE, client)
    for client in clients:
        client.socket.close()
    counts = [(client.messages, client.replies, client.retries) for client in clients]
    messages, replies, retries = map(sum, zip(*counts, strict=True))
    return messages, replies, retries


def _process(wire: Wire, port: int, world: int, part: int, way: str, gate: Any, results: Any) -> None:
    layout = layout_of(world) if way == "myriad" else None
    scripts = []
    for rank in range(part, world, _PROCESSES):
        if layout is None:
            steps = [*wire.hello(rank), *wire.mesh("world", rank, world)]
        else:
            steps = wire.hello(rank)
            for exchange in exchanges_of(rank, layout):
                steps += wire.exchange(*exchange)
        scripts.append(iter(steps))
    gate.wait(_LIMIT_SECONDS)
    started = time.monotonic()
    counts = run_clients(wire, port, scripts)
    results.put((started, time.monotonic(), *counts))


def measure(wire: Wire, world: int, way: str = "myriad") -> dict[str, float]:
    """Seconds from the release of all simulated ranks to the end of the last one, and what each asked."""
    context = multiprocessing.get_context("fork")
    ready, told = context.Pipe(duplex=False)
    stop, gate, results = context.Event(), context.Barrier(_PROCESSES), context.SimpleQueue()
    server = context.Process(target=wire.serve, args=(told, stop))
    server.start()
    parts = []
    try:
        port = ready.recv()
        common = (way, gate, results)
        for part in range(_PROCESSES):
            parts.append(
                context.Process(target=_process, args=(wire, port, world, part, *common), daemon=True)
            )
            parts[-1].start()
        for each in parts:
            each.join(_LIMIT_SECONDS)
        if any(each.exitcode != 0 for each in parts):
            raise RuntimeError(f"{wire.name}, {world} ranks: not done after {_LIMIT_SECONDS:g} s")
        found = [results.get() for _ in parts]
    finally:
        for each in parts:
            each.kill()
        stop.set()
        server.join(10)
        server.kill()
    seconds = max(end for _, end, *_ in found) - min(start for start, *_ in found)
    messages, replies = (sum(each[index] for each in found) / world for index in (2, 3))
    counts = {"messages_per_rank": messages, "replies_per_rank": replies}
    return {"ranks": world, "seconds": seconds, "retries": sum(each[4] for each in found)} | counts


def most_ranks() -> int:
    """How many connections one server process here can hold, and this machine has ports for."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as ports:
        low, high = map(int, ports.read().split())
    return min(hard - 200, high - low - 1000)
