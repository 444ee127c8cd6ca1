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


_TRICKLE, _TRICKLE_BYTES, _TRICKLE_SECONDS, _MOST_TRICKLE_SECONDS = 250, 200, 1e-3, 3.0
_TCP_INFO_BYTES, _TOTAL_RETRANSMITS, _DATA_SEGMENTS, _SPURIOUS = 232, 100, 156, 216
"""Linux's struct tcp_info: size, offsets of tcpi_total_retrans, tcpi_data_segs_out and tcpi_dsack_dups
(uapi/linux/tcp.h)."""
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
    """Send small packets in both directions at a rate that fills no queue, then close this direction. Return
    how many this end had to resend, and how many it sent. The link loses these packets, not congestion: at
    full speed, queues overflow on healthy links too. Raises `OSError` if the connection breaks."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.settimeout(2 * _MOST_TRICKLE_SECONDS)
    before = _Sent.read(connection)
    sender = threading.Thread(target=_trickle_out, args=(connection, before.packets), daemon=True)
    sender.start()
    while connection.recv(_BLOCK_BYTES):
        pass
    sender.join()
    after = _Sent.read(connection)
    return max(0, after.resent - before.resent), after.packets - before.packets


def _trickle_out(connection: socket.socket, packets_before: int) -> None:
    """Send until `_TRICKLE` packets have left. Writes do not count: the kernel joins those that wait for the
    processor or for a lost packet, and few large packets would meet few losses."""
    packet, end = bytes(_TRICKLE_BYTES), time.perf_counter() + _MOST_TRICKLE_SECONDS
    with suppress(OSError):
        while _Sent.read(connection).packets - packets_before < _TRICKLE and time.perf_counter() < end:
            connection.sendall(packet)
            time.sleep(_TRICKLE_SECONDS)
        connection.shutdown(socket.SHUT_WR)


@dataclass(frozen=True)
class _Sent:
    """What a connection has sent so far, as Linux counts it."""

    packets: int
    """Packets with data, resent ones included."""
    resent: int
    """Resent packets, without those that the other end reported as unnecessary."""

    @classmethod
    def read(cls, connection: socket.socket) -> "_Sent":
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        packets, resent, spurious = (
            _COUNT.unpack_from(info, at)[0] if len(info) >= at + _COUNT.size else 0
            for at in (_DATA_SEGMENTS, _TOTAL_RETRANSMITS, _SPURIOUS)
        )
        return cls(packets, resent - spurious)
