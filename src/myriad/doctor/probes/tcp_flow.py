"""Send bytes through a socket for a given time: how many arrive per second, and whether they are unchanged.

The limit is a time, not an amount, so that a link at a hundredth of its speed takes no longer to find than a
good one. The first quarter does not count: connections start slowly, and shapers and buffers let the first
bytes pass.
"""

import random
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Received", "exchange", "receive", "send_for", "trickle"]

_BLOCK_BYTES = 2**18
_BLOCK = random.Random(20402).randbytes(_BLOCK_BYTES)
_TWICE = memoryview(_BLOCK + _BLOCK)
_UNCOUNTED_RATIO = 0.25


_TRICKLE, _TRICKLE_BYTES, _TRICKLE_SECONDS = 250, 200, 1e-3
_TCP_INFO_BYTES, _TOTAL_RETRANSMITS, _SPURIOUS = 232, 100, 216
"""Linux's struct tcp_info: size, offsets of tcpi_total_retrans and tcpi_dsack_dups (uapi/linux/tcp.h)."""
_COUNT = struct.Struct("=I")


@dataclass(frozen=True)
class Received:
    """Result of a test at one end."""

    bytes_per_second: float
    wrong_bytes: int
    """Bytes of blocks that arrived changed."""
    lost: int = 0
    """Packets of `trickle` that this end had to resend."""
    trickled: int = 0
    """Packets of `trickle` that this end sent."""


def send_for(connection: socket.socket, seconds: float) -> None:
    """Send for ``seconds``, then close this direction; stop earlier if the receiver is gone."""
    end, sent = time.perf_counter() + seconds, 0
    connection.settimeout(seconds)
    with suppress(OSError):
        while time.perf_counter() < end:
            sent += connection.send(_TWICE[sent % _BLOCK_BYTES : sent % _BLOCK_BYTES + _BLOCK_BYTES])
        connection.shutdown(socket.SHUT_WR)


def receive(connection: socket.socket, seconds: float) -> Received:
    """Receive until the sender is done, for at most twice ``seconds``; the rate is 0 if the sender breaks
    off."""
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    start = time.perf_counter()
    counted_from, counted, total, wrong, last = start, 0, 0, 0, start
    connection.settimeout(seconds)
    with suppress(OSError):
        while (now := time.perf_counter()) - start < 2 * seconds:
            got = connection.recv_into(buffer)
            if not got:
                break
            place = total % _BLOCK_BYTES
            if bytes(buffer[:got]) != bytes(_TWICE[place : place + got]):  # views compare 50 times slower
                wrong += got
            total, last = total + got, time.perf_counter()
            if now - start < _UNCOUNTED_RATIO * seconds:
                counted_from, counted = last, 0
            else:
                counted += got
    return Received(counted / (last - counted_from) if counted and last > counted_from else 0.0, wrong)


def exchange(connection: socket.socket, seconds: float) -> Received:
    """Send and receive at the same time, as in an all-reduce of two; the other end does the same."""
    sender = threading.Thread(target=send_for, args=(connection, seconds), daemon=True)
    sender.start()
    found = receive(connection, seconds)
    sender.join(2 * seconds)
    return found


def trickle(connection: socket.socket) -> tuple[int, int]:
    """Send small packets in both directions at a rate that fills no queue. Return how many this end had to
    resend, and how many it sent. The link loses these packets, not congestion: at full speed, queues
    overflow on healthy links too. Raises `OSError` if the connection breaks."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(20 * _TRICKLE * _TRICKLE_SECONDS)
    before = _retransmits(connection)
    sender = threading.Thread(target=_trickle_out, args=(connection,), daemon=True)
    sender.start()
    missing = _TRICKLE * _TRICKLE_BYTES
    while missing:
        if not (part := connection.recv(min(missing, _BLOCK_BYTES))):
            raise ConnectionResetError("the other end has closed")
        missing -= len(part)
    sender.join()
    return max(0, _retransmits(connection) - before), _TRICKLE


def _trickle_out(connection: socket.socket) -> None:
    packet, due = bytes(_TRICKLE_BYTES), time.perf_counter()
    with suppress(OSError):
        for _ in range(_TRICKLE):
            connection.sendall(packet)
            due += _TRICKLE_SECONDS
            time.sleep(max(0.0, due - time.perf_counter()))


def _retransmits(connection: socket.socket) -> int:
    """Return the resent packets, without those that the other end reported as unnecessary."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
    found = [
        _COUNT.unpack_from(info, at)[0] if len(info) >= at + 4 else 0
        for at in (_TOTAL_RETRANSMITS, _SPURIOUS)
    ]
    return int(found[0] - found[1])
