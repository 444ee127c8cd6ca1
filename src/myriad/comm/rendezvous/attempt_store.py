"""A rank's side of the rendezvous store of its attempt: a store for `torch.distributed`.

A rank has one connection for each request that it has in flight, so that a thread that waits for a key delays
no other. A request is never sent twice: if its connection is lost, the caller gets an error. A request that
times out ends its connection, so that a late reply is never taken for the reply to a later request.

torch calls a Python store by the names of `torch._C._distributed_c10d`'s C++ trampoline: some of them are in
camel case there (`deleteKey`, `getNumKeys`).
"""

import contextlib
import random
import socket
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from myriad.comm.rendezvous.store_frames import MOST_BYTES, PROTOCOL, StoreOp, StoreStatus, pack, unpack
from myriad.comm.rendezvous.store_server import StoreServer
from myriad.errors import RunFailedError
from myriad.wire.frame_reader import FrameReader, packed_frame
from myriad.wire.framing import FrameKind, Refused
from myriad.wire.handshake import NONCE_BYTES, PROOF_BYTES, ConnectorHandshake
from myriad.wire.pending_connections import AUTHENTICATION_SECONDS

__all__ = ["AttemptStore"]

_FOREIGN_SECONDS = 10.0
"""How long a rank retries while the port belongs to a process without the attempt's secret."""
_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 0.005, 0.5
_READ_BYTES = 2**16

Address = tuple[str, int]


class AttemptStore(Store):
    """Keys of one attempt, which a `StoreServer` holds."""

    timeout: timedelta
    """The attribute of torch's store, which its type hints lack."""

    def __init__(
        self,
        address: Address,
        secret: bytes,
        rank: int,
        timeout: timedelta,
        server: StoreServer | None = None,
    ) -> None:
        """Connect to ``address``, and retry until ``timeout``. ``server``: it is closed with this store.
        Raises `RunFailedError`."""
        super().__init__()
        self.set_timeout(timeout)
        self._address, self._secret, self._rank = address, secret, rank
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        self._close = weakref.finalize(self, _close_all, self._idle, server)
        self._ask(StoreOp.JOIN, [b"%d" % rank], "an answer")

    def __str__(self) -> str:
        """Return the name of the store for errors."""
        host, port = self._address
        return f"the store of rank 0 at {host}:{port}"

    @contextlib.contextmanager
    def _connection(self) -> Iterator["_Connection"]:
        """Yield a connection that no other thread uses. It is closed after an error."""
        with self._lock:
            connection = self._idle.pop() if self._idle else None
        if connection is None:
            connection = self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            self._idle.append(connection)

    def _connect(self) -> "_Connection":
        seconds, delay = self.timeout.total_seconds(), _FIRST_DELAY_SECONDS
        started = time.monotonic()
        while True:
            try:
                return _Connection(self._address, self._secret, max(1.0, seconds))
            except (OSError, Refused) as error:
                passed = time.monotonic() - started + delay
                if isinstance(error, Refused) and passed > min(seconds, _FOREIGN_SECONDS):
                    reason = "another process serves this port, or this rank has another secret"
                    raise RunFailedError(f"rank {self._rank}: {self}: {reason} ({error})") from None
                if passed > seconds:
                    waited = f"rank {self._rank} waited for {self} for {seconds:g} s"
                    raise RunFailedError(f"{waited}: {error}") from None
            time.sleep(delay * (0.5 + random.random()))
            delay = min(1.5 * delay, _LONGEST_DELAY_SECONDS)

    def _ask(
        self, op: StoreOp, items: Sequence[bytes], what: str, timeout: timedelta | None = None
    ) -> list[bytes]:
        """Send a request, and return the byte strings of the reply. Raises torch's errors of a store."""
        seconds = (timeout or self.timeout).total_seconds()
        try:
            with self._connection() as connection:
                status, found = connection.request(op, items, seconds)
        except TimeoutError:
            raise dist.DistStoreError(f"{self}: timed out after waiting {seconds:g} s for {what}") from None
        except OSError as error:
            reason = f"the connection was closed ({error}) while rank {self._rank} waited for {what}"
            raise dist.DistNetworkError(f"{self}: {reason}") from None
        except Refused as error:
            raise dist.DistNetworkError(f"{self}: the connection was closed: {error}") from None
        if status != StoreStatus.DONE:
            raise dist.DistStoreError(
                f"{self} refuses {op.name} of {what}: {found[0].decode(errors='replace')}"
            )
        return found

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value, and wake the ranks that wait for it."""
        self.multi_set([key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several values in one request."""
        pairs = [_encoded(each) for pair in zip(keys, values, strict=True) for each in pair]
        self._ask(StoreOp.SET, pairs, f"writing {keys[0]}")

    def get(self, key: str) -> bytes:
        """Wait for a value, and return it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for all values, and return them."""
        return self._ask(StoreOp.GET, [key.encode() for key in keys], _names(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Block until all keys exist. Raises `torch.distributed.DistStoreError` after the timeout."""
        self._ask(StoreOp.WAIT, [key.encode() for key in keys], _names(keys), timeout)

    def add(self, key: str, value: int) -> int:
        """Add to a number (0 if the key is missing), and return the sum."""
        return int(self._ask(StoreOp.ADD, [key.encode(), b"%d" % value], key)[0])

    def append(self, key: str, value: str | bytes) -> None:
        """Append bytes to a value."""
        self._ask(StoreOp.APPEND, [key.encode(), _encoded(value)], key)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write ``desired`` if the value is ``expected``, or if ``expected`` is empty and the key is missing.

        Returns the value afterwards, or ``expected`` if the key is missing.
        """
        return self._ask(StoreOp.COMPARE_SET, [key.encode(), _encoded(expected), _encoded(desired)], key)[0]

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys exist."""
        return self._ask(StoreOp.CHECK, [key.encode() for key in keys], _names(keys)) == [b"1"]

    def delete_key(self, key: str) -> bool:
        """Delete a key, and return whether it existed."""
        return self._ask(StoreOp.DELETE, [key.encode()], key) == [b"1"]

    def list_keys(self) -> list[str]:
        """Return the names of all keys that exist."""
        return [key.decode(errors="replace") for key in self._ask(StoreOp.LIST, [], "all keys")]

    def num_keys(self) -> int:
        """Return the number of keys."""
        return int(self._ask(StoreOp.COUNT, [], "the number of keys")[0])

    deleteKey, getNumKeys = delete_key, num_keys  # the C++ trampoline's names

    def has_extended_api(self) -> bool:
        """Return True: append, multi_get and multi_set are available."""
        return True

    def clone(self) -> "AttemptStore":
        """Return this store itself, which is thread-safe; torch would keep only the C++ half of a new one."""
        return self

    def close(self) -> None:
        """Close idle connections, and the server if this store has one."""
        self._close()


class _Connection:
    """An authenticated connection to the server, for one request at a time."""

    def __init__(self, address: Address, secret: bytes, seconds: float) -> None:
        """Connect and authenticate. Raises ``OSError``, and `Refused` if the server has another secret."""
        self._received = FrameReader()
        self._socket = socket.create_connection(address, seconds)
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._deadline = time.monotonic() + min(seconds, AUTHENTICATION_SECONDS)
            handshake = ConnectorHandshake(PROTOCOL, secret)
            answer = handshake.answer(self._next(FrameKind.CHALLENGE, NONCE_BYTES))
            self._socket.sendall(packed_frame(FrameKind.ANSWER, answer))
            codes = handshake.finish(self._next(FrameKind.PROOF, PROOF_BYTES))
            self._sent, self._received.codes = codes.sent, codes.received
        except BaseException:
            self._socket.close()
            raise

    def request(self, op: StoreOp, items: Sequence[bytes], seconds: float) -> tuple[int, list[bytes]]:
        """Send a request, and return status and byte strings of the reply. Raises ``OSError``, `Refused`."""
        body = pack(op, items)
        if len(body) > MOST_BYTES:
            raise Refused(f"a request of {len(body)} bytes; at most {MOST_BYTES}")
        self._deadline = time.monotonic() + seconds
        self._socket.settimeout(max(1.0, seconds))
        self._socket.sendall(packed_frame(FrameKind.MESSAGE, body, self._sent))
        return unpack(self._next(FrameKind.MESSAGE, MOST_BYTES))

    def _next(self, kind: FrameKind, most_bytes: int) -> bytes:
        while (body := self._received.next_body(kind, most_bytes)) is None:
            self._receive()
        return body

    def _receive(self) -> None:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer")
        self._socket.settimeout(left)
        data = self._socket.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("by the other end")
        self._received.add(data)

    def close(self) -> None:
        """Close the socket, which ends a request that another thread waits for."""
        self._socket.close()


def _close_all(idle: list[_Connection], server: StoreServer | None) -> None:
    while idle:
        idle.pop().close()
    if server is not None:
        server.close()


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _names(keys: Sequence[str]) -> str:
    most = 8
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more
