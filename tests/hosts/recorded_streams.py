"""What crosses the network between hosts, as someone who taps the switch sees it: the bytes of each TCP
connection, in order."""

import socket
import struct
import threading
from collections import defaultdict

from hosts import Hosts

__all__ = ["Recorder", "Stream", "is_tls"]

_EVERY_PROTOCOL, _FORCE_RECEIVE_BUFFER = 3, 33
"""ETH_P_ALL and SO_RCVBUFFORCE, which Python does not name."""
_BUFFER_BYTES, _FRAME_BYTES = 2**28, 2**17
_IPV4, _TCP, _SYN = 0x0800, 6, 2

_RECORD = struct.Struct("!BHH")
_RECORDS, _VERSIONS, _MOST_RECORD_BYTES = (20, 21, 22, 23), (0x0301, 0x0303), 2**14 + 256

Stream = tuple[tuple[str, int], tuple[str, int]]
"""Address and port of the sender, then of the receiver."""


class Recorder:
    """Records all frames at the switch of some hosts until the block ends."""

    def __init__(self, made: Hosts) -> None:
        with made.network_of(-1):
            self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
        self._socket.setsockopt(socket.SOL_SOCKET, _FORCE_RECEIVE_BUFFER, _BUFFER_BYTES)
        self._socket.settimeout(0.2)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)
        self._first: dict[Stream, int] = {}
        self._parts: dict[Stream, dict[int, bytes]] = defaultdict(dict)

    def __enter__(self) -> "Recorder":
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._end.set()
        self._thread.join()
        self._socket.close()

    def _record(self) -> None:
        while True:
            try:
                frame = self._socket.recv(_FRAME_BYTES)
            except TimeoutError:
                if self._end.is_set():
                    return
                continue
            if len(frame) > 34 and struct.unpack_from("!H", frame, 12)[0] == _IPV4 and frame[23] == _TCP:
                self._keep(frame[14:])

    def _keep(self, packet: bytes) -> None:
        (size,), head = struct.unpack_from("!H", packet, 2), 4 * (packet[0] & 15)
        source, target = (socket.inet_ntoa(packet[at : at + 4]) for at in (12, 16))
        from_port, to_port, number = struct.unpack_from("!HHI", packet, head)
        stream = (source, from_port), (target, to_port)
        if packet[head + 13] & _SYN:
            self._first[stream] = number + 1
        content = packet[head + 4 * (packet[head + 12] >> 4) : size]
        if content and stream in self._first:
            at = (number - self._first[stream]) % 2**32
            if len(content) > len(self._parts[stream].get(at, b"")):
                self._parts[stream][at] = content

    def streams(self) -> dict[Stream, bytes]:
        """Return the bytes that each end of each connection has sent. Raises ``AssertionError`` if a part was
        missed."""
        return {stream: _joined(parts) for stream, parts in self._parts.items()}


def _joined(parts: dict[int, bytes]) -> bytes:
    joined = bytearray()
    for at, content in sorted(parts.items()):
        assert at <= len(joined), f"missed {at - len(joined)} bytes"
        joined += content[len(joined) - at :]
    return bytes(joined)


def is_tls(data: bytes) -> bool:
    """Whether these bytes are records of TLS; the last one may be cut."""
    while len(data) >= _RECORD.size:
        kind, version, size = _RECORD.unpack_from(data)
        if kind not in _RECORDS or version not in _VERSIONS or size > _MOST_RECORD_BYTES:
            return False
        data = data[_RECORD.size + size :]
    return True
