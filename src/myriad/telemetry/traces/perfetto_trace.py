"""Write a window of spans as a native Perfetto trace, which has half the size of the Chrome trace.

The module encodes the protocol buffers itself:

    Trace        { packet: 1 }
    TracePacket  { timestamp: 8, sequence: 10, interned_data: 12, sequence_flags: 13, track_event: 11,
                   track_descriptor: 60 }

Nodes are tracks and their ranks are child tracks. A slice has a begin and an end event, in nanoseconds from
the window's first span. Texts are interned: written once and referenced by number. Field numbers are from
perfetto/protos/perfetto/trace/perfetto_trace.proto."""

from collections.abc import Sequence
from pathlib import Path
from typing import IO

from myriad.telemetry.span_io.span_records import CLASSES, class_of
from myriad.telemetry.span_io.span_window import Event, Window
from myriad.telemetry.traces.trace_files import opened_trace

__all__ = ["write_perfetto_trace"]

_SEQUENCE = b"\x50\x01"
"""Packet sequence id; all packets belong to sequence 1."""
_CLEARED, _NEEDS = b"\x68\x01", b"\x68\x02"
"""Sequence flags: reset the interned texts; use interned texts."""
_BEGIN, _END = b"\x48\x01", b"\x48\x02"
_EXPLICIT = 3
"""Order of child tracks: by explicit rank."""
_PLACES = ("step", "stage", "micro_batch", "chunk", "attempt")


def write_perfetto_trace(path: Path, window: Window) -> None:
    """Write the trace, gzipped if the file's name ends in .gz. The file appears when it is complete. Raises
    ``OSError``."""
    several, bodies = len({one.attempt for one in window.ranks}) > 1, _Bodies(window)
    with opened_trace(path) as file:
        _write(file, _texts(window))
        track, start_ns = 0, window.start_ns
        for node in sorted({one.node for one in window.ranks}):
            track += 1
            parent = track
            _write(file, _track(track, f"node {node}", 0, node))
            for one in (one for one in window.ranks if one.node == node):
                for lane, events in enumerate(one.lanes()):
                    track += 1
                    name = f"rank {one.rank}" + (f" ({lane + 1})" if lane else "")
                    _write(file, _track(track, name, parent, one.rank))
                    attempt = one.attempt if several else -1
                    file.write(_slices(bodies, events, track, start_ns, attempt))


def _write(file: IO[bytes], packet: bytes) -> None:
    file.write(_bytes(1, packet))


def _texts(window: Window) -> bytes:
    def named(field: int, texts: Sequence[str]) -> bytes:
        entries = (_int(1, 1 + number) + _text(2, text) for number, text in enumerate(texts))
        return b"".join(_bytes(field, entry) for entry in entries)

    texts = named(1, CLASSES) + named(2, window.names) + named(3, _PLACES)
    return _SEQUENCE + _CLEARED + _bytes(12, texts)


def _track(track: int, name: str, parent: int, place: int) -> bytes:
    above = _int(5, parent) if parent else b""
    return _SEQUENCE + _bytes(
        60, _int(1, track) + _text(2, name) + above + _int(11, _EXPLICIT) + _int(12, place)
    )


class _Bodies:
    """A cache of begin events without their track, as all ranks use the same few."""

    def __init__(self, window: Window) -> None:
        self._heads = [
            _int(3, 1 + CLASSES.index(class_of(name))) + _int(10, 1 + number)
            for number, name in enumerate(window.names)
        ]
        self._made: dict[tuple[int, ...], bytes] = {}

    def of(self, event: Event, attempt: int) -> bytes:
        """Return the body of an event; ``attempt`` is -1 if the window has one attempt only."""
        name, *places = (*event[2:], attempt)
        key = name, *places
        body = self._made.get(key)
        if body is None:
            notes = (_note(place, value) for place, value in enumerate(places) if value >= 0)
            body = self._made[key] = self._heads[name] + b"".join(notes)
        return body


def _slices(bodies: _Bodies, events: Sequence[Event], track: int, start_ns: int, attempt: int) -> bytes:
    """Return the begin and end packets of nested events in the order of time."""
    begin, end, ends = _BEGIN + _int(11, track), _bytes(11, _END + _int(11, track)), list[int]()
    packets = []
    for event in events:
        while ends and ends[-1] <= event.start_ns:
            packets.append(_packet(ends.pop() - start_ns, end))
        body = _bytes(11, begin + bodies.of(event, attempt))
        packets.append(_packet(event.start_ns - start_ns, body))
        ends.append(event.end_ns)
    packets += [_packet(at - start_ns, end) for at in reversed(ends)]
    return b"".join(_bytes(1, packet) for packet in packets)


def _note(place: int, value: int) -> bytes:
    return _bytes(4, _int(1, 1 + place) + _int(4, value))


def _packet(at_ns: int, event: bytes) -> bytes:
    return _int(8, at_ns) + _SEQUENCE + _NEEDS + event


def _int(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _text(field: int, text: str) -> bytes:
    return _bytes(field, text.encode(errors="replace"))


def _bytes(field: int, data: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    """Encode a number with seven bits per byte, lowest first."""
    assert value >= 0
    if value < 128:
        return bytes((value,))
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    found.append(value)
    return bytes(found)
