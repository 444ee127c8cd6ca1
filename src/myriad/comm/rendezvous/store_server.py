"""Server of an attempt's rendezvous store: a thread of rank 0 that holds keys and values in memory.

    accepted ──► challenged ──answer that proves the secret──► served
                    └── no proof within 5 s, more than 64 bytes, or too many such: closed

One thread serves all connections without blocking: a peer that is silent, or that does not read its replies,
delays no other. A peer that breaks the protocol loses its connection. The thread shares rank 0's interpreter
lock; ranks use the store while groups are made, when rank 0 waits as well.
"""

import contextlib
import itertools
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from myriad.comm.rendezvous.store_frames import MOST_BYTES, PROTOCOL, StoreOp, StoreStatus, pack, unpack
from myriad.wire.frame_codes import DirectionCodes
from myriad.wire.frame_reader import FrameReader, packed_frame
from myriad.wire.framing import FrameKind, Refused
from myriad.wire.handshake import ANSWER_BYTES, ListenerHandshake
from myriad.wire.listener import raise_file_limit
from myriad.wire.pending_connections import AUTHENTICATION_SECONDS, PendingConnections

__all__ = ["StoreServer"]

_ACCEPTED_AT_ONCE = 64
"""Connections that are accepted before others are served."""
_READ_BYTES = 2**16
_MOST_UNREAD_BYTES = 2**27
"""A peer that leaves more of its replies unread is disconnected."""
_NO_DESCRIPTOR_SECONDS = 0.05


@dataclass(eq=False)
class _Peer:
    """A client's connection to the store."""

    connection: socket.socket
    handshake: ListenerHandshake
    deadline: float
    """Time by which it must have proved the secret."""
    received: FrameReader = field(default_factory=FrameReader)
    unsent: bytearray = field(default_factory=bytearray)
    sent: DirectionCodes | None = None
    """Codes of the frames to it; ``None``: it has not proved the secret yet."""
    waiting: "_Waiting | None" = None
    """Its request for keys that do not exist yet."""


@dataclass(eq=False)
class _Waiting:
    peer: _Peer
    keys: list[bytes]
    missing: set[bytes]
    wants_values: bool


class StoreServer:
    """Serves the keys of one attempt on a listening socket until it is closed."""

    def __init__(self, listener: socket.socket, secret: bytes) -> None:
        """``secret``: what each peer must prove to have. The listener is closed with the server."""
        self._listener, self._secret = listener, secret
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self._values: dict[bytes, bytes] = {}
        self._waiting: dict[bytes, set[_Waiting]] = {}
        """Requests that wait for a key."""
        self._peers: set[_Peer] = set()
        self._unproved: dict[_Peer, None] = {}
        """Peers that have not proved the secret, oldest first."""
        raise_file_limit()
        self._pending = PendingConnections()
        self._joined: set[bytes] = set()
        self._has_joined = threading.Condition()
        self._is_closed = False
        self._wake, self._woken = socket.socketpair()
        self._events = selectors.DefaultSelector()
        listener.setblocking(False)
        self._events.register(listener, selectors.EVENT_READ, self._accept)
        self._events.register(self._woken, selectors.EVENT_READ, lambda: None)
        self._thread = threading.Thread(target=self._serve, name="rendezvous store", daemon=True)
        self._thread.start()

    def wait_for_ranks(self, world: int, seconds: float) -> list[int]:
        """Wait until all ranks of the world have connected; return those that have not after ``seconds``."""
        with self._has_joined:
            self._has_joined.wait_for(lambda: len(self._joined) >= world, seconds)
            return [rank for rank in range(world) if b"%d" % rank not in self._joined]

    def close(self) -> None:
        """End all connections and the thread."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")
        if self._thread is not threading.current_thread():
            self._thread.join(1.0)

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                for key, mask in self._events.select(self._seconds_left()):
                    if isinstance(key.data, _Peer):
                        self._handle(key.data, mask)
                    else:
                        key.data()
                self._close_unproved()
        finally:
            for peer in list(self._peers):
                self._drop(peer)
            self._events.close()
            for each in (self._listener, self._wake, self._woken):
                each.close()

    def _seconds_left(self) -> float | None:
        oldest = next(iter(self._unproved), None)
        return None if oldest is None else max(0.0, oldest.deadline - time.monotonic())

    def _close_unproved(self) -> None:
        now = time.monotonic()
        for peer in list(itertools.takewhile(lambda peer: peer.deadline <= now, self._unproved)):
            self._drop(peer)

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError:  # the peer has gone, or there is no descriptor left
                time.sleep(_NO_DESCRIPTOR_SECONDS)
                return
            connection.setblocking(False)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = ListenerHandshake(PROTOCOL, [self._secret])
            peer = _Peer(connection, handshake, time.monotonic() + AUTHENTICATION_SECONDS)
            self._peers.add(peer)
            self._unproved[peer] = None
            self._events.register(connection, selectors.EVENT_READ, peer)
            self._pending.admit(peer, address[0], partial(self._drop, peer))
            if peer in self._peers:
                self._send(peer, packed_frame(FrameKind.CHALLENGE, handshake.challenge))

    def _drop(self, peer: _Peer) -> None:
        """Close a connection and forget it."""
        if peer not in self._peers:
            return
        self._peers.discard(peer)
        self._has_proved(peer)
        if peer.waiting is not None:
            self._stop_waiting(peer.waiting)
        with contextlib.suppress(KeyError, ValueError):
            self._events.unregister(peer.connection)
        peer.connection.close()

    def _has_proved(self, peer: _Peer) -> None:
        self._unproved.pop(peer, None)
        self._pending.leave(peer)

    def _handle(self, peer: _Peer, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE and peer in self._peers:
                self._flush(peer)
            if mask & selectors.EVENT_READ and peer in self._peers:
                data = peer.connection.recv(_READ_BYTES)
                if not data:
                    self._drop(peer)
                    return
                peer.received.add(data)
                self._take_frames(peer)
        except BlockingIOError:
            return
        except (OSError, Refused):
            self._drop(peer)

    def _take_frames(self, peer: _Peer) -> None:
        while peer in self._peers:
            if peer.sent is None:
                answer = peer.received.next_body(FrameKind.ANSWER, ANSWER_BYTES)
                if answer is None:
                    return
                try:
                    proof, codes = peer.handshake.accept(answer)
                except Refused:
                    self._send(peer, packed_frame(FrameKind.PROOF, peer.handshake.refusal))
                    raise
                peer.sent, peer.received.codes = codes.sent, codes.received
                self._has_proved(peer)
                self._send(peer, packed_frame(FrameKind.PROOF, proof))
                continue
            body = peer.received.next_body(FrameKind.MESSAGE, MOST_BYTES)
            if body is None:
                return
            if peer.waiting is not None:
                raise Refused("a request before the last one was answered")
            self._answer(peer, *unpack(body))

    def _answer(self, peer: _Peer, op: int, items: list[bytes]) -> None:
        if op in (StoreOp.GET, StoreOp.WAIT):
            self._read(_Waiting(peer, items, set(), op == StoreOp.GET))
            return
        try:
            reply = _OPERATIONS[StoreOp(op)](self, *items)
        except (ValueError, TypeError) as error:  # no such operation, another number of items, not a number
            self._reply(peer, [str(error).encode()], StoreStatus.REFUSED)
            return
        self._reply(peer, reply)

    def _reply(self, peer: _Peer, items: Sequence[bytes], status: StoreStatus = StoreStatus.DONE) -> None:
        assert peer.sent is not None, "it has proved the secret"
        body = pack(status, items)
        if len(body) > MOST_BYTES:
            body = pack(StoreStatus.REFUSED, [b"the values are too large for one reply"])
        self._send(peer, packed_frame(FrameKind.MESSAGE, body, peer.sent))

    def _send(self, peer: _Peer, data: bytes) -> None:
        """Send what the connection takes; the rest follows when it can be written. Never raises ``OSError``:
        the peer may not be the one whose request is being handled."""
        try:
            if not peer.unsent:
                data = data[peer.connection.send(data) :]
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)
            return
        if data:
            peer.unsent += data
            self._events.modify(peer.connection, selectors.EVENT_READ | selectors.EVENT_WRITE, peer)
            if len(peer.unsent) > _MOST_UNREAD_BYTES:
                self._drop(peer)

    def _flush(self, peer: _Peer) -> None:
        del peer.unsent[: peer.connection.send(peer.unsent)]
        if not peer.unsent:
            self._events.modify(peer.connection, selectors.EVENT_READ, peer)

    def _read(self, request: _Waiting) -> None:
        """Answer if all keys exist, else wait for those that do not."""
        request.missing = {key for key in request.keys if key not in self._values}
        if not request.missing:
            request.peer.waiting = None
            self._reply(
                request.peer, [self._values[key] for key in request.keys] if request.wants_values else []
            )
            return
        request.peer.waiting = request
        for key in request.missing:
            self._waiting.setdefault(key, set()).add(request)

    def _stop_waiting(self, request: _Waiting) -> None:
        for key in request.missing:
            requests = self._waiting.get(key, set())
            requests.discard(request)
            if not requests:
                self._waiting.pop(key, None)

    def _write(self, key: bytes, value: bytes) -> None:
        self._values[key] = value
        for request in self._waiting.pop(key, ()):
            request.missing.discard(key)
            if not request.missing:
                self._read(request)

    # Operations: they take the byte strings of a request, and return those of the reply.

    def _join(self, rank: bytes) -> list[bytes]:
        with self._has_joined:
            self._joined.add(rank)
            self._has_joined.notify_all()
        return []

    def _set(self, *pairs: bytes) -> list[bytes]:
        for key, value in zip(pairs[::2], pairs[1::2], strict=True):
            self._write(key, value)
        return []

    def _add(self, key: bytes, number: bytes) -> list[bytes]:
        total = b"%d" % (int(self._values.get(key, b"0")) + int(number))
        self._write(key, total)
        return [total]

    def _append(self, key: bytes, more: bytes) -> list[bytes]:
        self._write(key, self._values.get(key, b"") + more)
        return []

    def _compare_set(self, key: bytes, expected: bytes, desired: bytes) -> list[bytes]:
        now = self._values.get(key)
        if now is None and expected:
            return [expected]
        if now is not None and now != expected:
            return [now]
        self._write(key, desired)
        return [desired]

    def _check(self, *keys: bytes) -> list[bytes]:
        return [b"%d" % all(key in self._values for key in keys)]

    def _delete(self, key: bytes) -> list[bytes]:
        return [b"%d" % (self._values.pop(key, None) is not None)]

    def _list(self) -> list[bytes]:
        return sorted(self._values)

    def _count(self) -> list[bytes]:
        return [b"%d" % len(self._values)]


_OPERATIONS: dict[StoreOp, Callable[..., list[bytes]]] = {
    StoreOp.JOIN: StoreServer._join,
    StoreOp.SET: StoreServer._set,
    StoreOp.ADD: StoreServer._add,
    StoreOp.APPEND: StoreServer._append,
    StoreOp.COMPARE_SET: StoreServer._compare_set,
    StoreOp.CHECK: StoreServer._check,
    StoreOp.DELETE: StoreServer._delete,
    StoreOp.LIST: StoreServer._list,
    StoreOp.COUNT: StoreServer._count,
}
