"""Read the kernel's counters of network interfaces by netlink, which answers for the network namespace of
this process (/sys may show another namespace)."""

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
"""Interface flags: administratively up; lower layer up (carrier present)."""
_MOST_BYTES = 2**16
_SIOCETHTOOL, _ETHTOOL_GSET, _COMMAND_BYTES = 0x8946, 1, 44
_HALF, _SPEED_AT, _UNKNOWN = struct.Struct("=H"), (12, 28), 0xFFFF
"""Fields speed and speed_hi of struct ethtool_cmd, in Mbit/s, and the value for an unknown speed."""


@dataclass(frozen=True)
class LinkCounters:
    """Counters of one interface since it was created."""

    name: str
    up: bool
    """Whether the interface is administratively up and has a carrier."""
    received_bytes: int
    sent_bytes: int
    received_packets: int
    sent_packets: int
    errors: int
    """Packets with receive or transmit errors."""
    drops: int
    """Packets dropped in either direction."""
    carrier_changes: int
    downs: int
    """Number of times that the interface went down."""


class Kernel:
    """An open netlink connection to the kernel."""

    def __init__(self) -> None:
        """Open the socket. Raises ``OSError``."""
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE)

    def ask(self, names: Iterable[str]) -> Iterator[LinkCounters]:
        """Yield the counters of each existing interface. The kernel replies at once. Raises ``OSError``."""
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
        """Close the socket."""
        self._socket.close()


def parse_link(message: bytes) -> LinkCounters | None:
    """Parse the kernel's answer about an interface; ``None`` if it is empty or an error."""
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
    """Return the link speed that the driver reports, in bytes per second one way; 0 if it reports none."""
    command = ctypes.create_string_buffer(_NUMBER.pack(_ETHTOOL_GSET), _COMMAND_BYTES)
    request = struct.pack("=16sQ16x", name.encode()[:15], ctypes.addressof(command))
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked.fileno(), _SIOCETHTOOL, request)
        (low,), (high,) = (_HALF.unpack_from(command, at) for at in _SPEED_AT)
        if low != _UNKNOWN:
            return (high << 16 | low) * 1e6 / 8
    return 0.0
