"""What the kernel counts of network interfaces, asked by netlink: it knows the network namespace of this
process (/sys may show another's)."""

import ctypes
import fcntl
import socket
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

__all__ = ["Kernel", "LinkCounters", "link_bytes_per_second", "parse_link"]

_HEADER, _LINK = struct.Struct("=LHHLL"), struct.Struct("=BxHiII")
_ATTRIBUTE, _STATISTICS, _NUMBER = struct.Struct("=HH"), struct.Struct("=8Q"), struct.Struct("=I")
_NEW_LINK, _GET_LINK, _REQUEST = 16, 18, 1
_NAME, _STATISTICS_64, _CARRIER_CHANGES, _TIMES_DOWN = 3, 23, 35, 48
_UP, _LOWER_UP = 1, 1 << 16
"""Wanted up; with a carrier."""
_MOST_BYTES = 2**16
_SIOCETHTOOL, _ETHTOOL_GSET, _COMMAND_BYTES = 0x8946, 1, 44
_HALF, _SPEED_AT, _UNKNOWN = struct.Struct("=H"), (12, 28), 0xFFFF
"""Of struct ethtool_cmd, in Mbit/s: speed and speed_hi."""


@dataclass(frozen=True)
class LinkCounters:
    """Of one interface, since it is there."""

    name: str
    up: bool
    """Wanted up, and with a carrier."""
    received_bytes: int
    sent_bytes: int
    received_packets: int
    sent_packets: int
    errors: int
    """Packets that arrived or left damaged."""
    drops: int
    """Packets that were thrown away, either way."""
    carrier_changes: int
    downs: int
    """How often it has gone down."""


class Kernel:
    """A connection to it, kept open."""

    def __init__(self) -> None:
        """Raises ``OSError``."""
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def ask(self, names: Iterable[str]) -> Iterator[LinkCounters]:
        """It answers at once; of what is not there it says nothing. Raises ``OSError``."""
        for name in names:
            text = name.encode() + b"\0"
            padded = text.ljust(-(-len(text) // 4) * 4, b"\0")
            attribute = _ATTRIBUTE.pack(_ATTRIBUTE.size + len(text), _NAME) + padded
            size = _HEADER.size + _LINK.size + len(attribute)
            head = _HEADER.pack(size, _GET_LINK, _REQUEST, 0, 0) + _LINK.pack(0, 0, 0, 0, 0)
            self._socket.send(head + attribute)
            if (link := parse_link(self._socket.recv(_MOST_BYTES, socket.MSG_DONTWAIT))) is not None:
                yield link

    def close(self) -> None:
        """For good."""
        self._socket.close()


def parse_link(message: bytes) -> LinkCounters | None:
    """What the kernel says of an interface; ``None``: nothing, or an error."""
    if len(message) < _HEADER.size + _LINK.size or _HEADER.unpack_from(message)[1] != _NEW_LINK:
        return None
    flags = _LINK.unpack_from(message, _HEADER.size)[3]
    known = dict(_attributes(message[_HEADER.size + _LINK.size :]))
    counted = known.get(_STATISTICS_64, b"")
    counts = _STATISTICS.unpack_from(counted) if len(counted) >= _STATISTICS.size else (0,) * 8
    return LinkCounters(
        name=known.get(_NAME, b"").rstrip(b"\0").decode(errors="replace"),
        up=bool(flags & _UP and flags & _LOWER_UP),
        received_bytes=counts[2],
        sent_bytes=counts[3],
        received_packets=counts[0],
        sent_packets=counts[1],
        errors=counts[4] + counts[5],
        drops=counts[6] + counts[7],
        carrier_changes=_number(known.get(_CARRIER_CHANGES, b"")),
        downs=_number(known.get(_TIMES_DOWN, b"")),
    )


def _number(data: bytes) -> int:
    return int(_NUMBER.unpack(data)[0]) if len(data) == _NUMBER.size else 0


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, at)
        if size < _ATTRIBUTE.size:
            return
        yield kind, data[at + _ATTRIBUTE.size : at + size]
        at += -(-size // 4) * 4


def link_bytes_per_second(name: str) -> float:
    """What the driver of an interface says that it can, one way; 0: it does not say."""
    command = ctypes.create_string_buffer(_NUMBER.pack(_ETHTOOL_GSET), _COMMAND_BYTES)
    request = struct.pack("=16sQ16x", name.encode()[:15], ctypes.addressof(command))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked.fileno(), _SIOCETHTOOL, request)
        (low,), (high,) = (_HALF.unpack_from(command, at) for at in _SPEED_AT)
        if low != _UNKNOWN:
            return (high << 16 | low) * 1e6 / 8
    return 0.0
