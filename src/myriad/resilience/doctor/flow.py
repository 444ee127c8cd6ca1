"""Bytes through a socket for a given time: how many a second arrive, and whether they are the ones sent.

By time and not by amount, so that a link at a hundredth of its speed takes no longer to find than a good
one. The first quarter is not counted: connections start slowly, and shapers and buffers give their first
bytes away.
"""

import random
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Received", "exchange", "receive", "send_for"]

_BLOCK_BYTES = 2**18
_BLOCK = random.Random(20402).randbytes(_BLOCK_BYTES)
_TWICE = memoryview(_BLOCK + _BLOCK)
_UNCOUNTED_RATIO = 0.25


@dataclass(frozen=True)
class Received:
    """At one end."""

    bytes_per_second: float
    wrong_bytes: int
    """Of blocks that came back different, all bytes."""


def send_for(connection: socket.socket, seconds: float) -> None:
    """Sends for that long, then says that it is over; a receiver that has gone ends it earlier."""
    end, sent = time.perf_counter() + seconds, 0
    connection.settimeout(seconds)
    with suppress(OSError):
        while time.perf_counter() < end:
            sent += connection.send(_TWICE[sent % _BLOCK_BYTES : sent % _BLOCK_BYTES + _BLOCK_BYTES])
        connection.shutdown(socket.SHUT_WR)


def receive(connection: socket.socket, seconds: float) -> Received:
    """Until the sender is done, but no longer than twice ``seconds``; a sender that breaks off gives 0."""
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
    """Both ways at once, as an all-reduce of two does; the other end does the same."""
    sender = threading.Thread(target=send_for, args=(connection, seconds), daemon=True)
    sender.start()
    found = receive(connection, seconds)
    sender.join(2 * seconds)
    return found
