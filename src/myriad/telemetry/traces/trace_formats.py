"""Write a window of spans as a Chrome trace (chrome://tracing, https://ui.perfetto.dev) or as a Perfetto
trace.

Each node is a process and each rank a thread. Spans are complete events ("ph": "X") in microseconds from
the window's first span. Overlapping spans get a separate thread, so the events of each thread nest. An
arrow leads from the span of the rank that was waited for to the span of the rank that waited.

`SpanLane` adds a rank's spans as an extra thread to the profile that torch writes, so that each operator
can be assigned to a span. torch's own marks (`record_function`) cannot do this: see
`myriad.train.rank_profiler`. Both clocks count from the epoch and agree to some microseconds.

    thread "spans"     |forward 0            |send|forward 1 ...
    thread 4711        |aten::mm|aten::add|...

A native Perfetto trace has half the size. The module encodes the protocol buffers itself:

    Trace        { packet: 1 }
    TracePacket  { timestamp: 8, sequence: 10, interned_data: 12, sequence_flags: 13, track_event: 11,
                   track_descriptor: 60 }

Nodes are tracks and their ranks are child tracks. A slice has a begin and an end event, in nanoseconds
from the window's first span. Texts are interned: written once and referenced by number. Field numbers are
from perfetto/protos/perfetto/trace/perfetto_trace.proto.
"""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import IO, Any

from myriad.telemetry.span_io.span_records import CLASSES, RING_SPANS, chunk_word, class_of
from myriad.telemetry.span_io.span_ring import Drained, SpanRing
from myriad.telemetry.span_io.span_window import Arrow, Event, RankSpans, Window
from myriad.telemetry.traces.trace_files import opened_trace

__all__ = ["SpanLane", "write_chrome_trace", "write_perfetto_trace"]


def write_chrome_trace(path: Path, window: Window, arrows: Sequence[Arrow] = ()) -> None:
    """Write the trace as JSON, gzipped if the file's name ends in .gz. The file appears when it is complete.
    Raises ``OSError``."""
    with opened_trace(path) as file:
        file.write(f'{{"displayTimeUnit":"ms","otherData":{json.dumps(_facts(window))},'.encode())
        file.write(b'"traceEvents":[\n')
        for number, line in enumerate(_lines(window, arrows)):
            file.write(f",\n{line}".encode() if number else line.encode())
        file.write(b"\n]}\n")


def _facts(window: Window) -> dict[str, Any]:
    return {
        "start_seconds": window.start_ns / 1e9,
        "clock_error_seconds": window.clock_error_seconds,
        "num_dropped": window.num_dropped,
    }


def _lines(window: Window, arrows: Sequence[Arrow]) -> Iterator[str]:
    start = window.start_ns
    for node in sorted({one.node for one in window.ranks}):
        yield _meta("process_name", node, 0, name=f"node {node}")
        yield _meta("process_sort_index", node, 0, sort_index=node)
    several, threads = len({one.attempt for one in window.ranks}) > 1, count(1)
    places: dict[int, str] = {}
    for one in window.ranks:
        for lane, events in enumerate(one.lanes()):
            thread = next(threads)
            if lane == 0:  # arrows belong to the newest attempt, which comes last
                places[one.rank] = f'"pid":{one.node},"tid":{thread}'
            yield from _name_thread(one, thread, lane)
            heads = _heads(window, one, thread, several)
            for event in events:
                yield heads[event.name] + _tail(event, start, chunk_word(window.names[event.name]))
    for number, arrow in enumerate(arrows):
        yield _arrow_end("s", number, places[arrow.from_rank], arrow.from_ns - start)
        yield _arrow_end("f", number, places[arrow.to_rank], arrow.to_ns - 1 - start)


def _name_thread(one: RankSpans, thread: int, lane: int) -> Iterator[str]:
    name = f"rank {one.rank}" + (f" ({lane + 1})" if lane else "")
    yield _meta("thread_name", one.node, thread, name=name)
    yield _meta("thread_sort_index", one.node, thread, sort_index=thread)


def _heads(window: Window, one: RankSpans, thread: int, several: bool) -> list[str]:
    """Return, for each span name, the beginning of its JSON events, which they share."""
    attempt = f'"attempt":{one.attempt},' if several else ""
    return [
        f'{{"ph":"X","name":{json.dumps(name)},"cat":"{class_of(name)}","pid":{one.node},"tid":{thread},'
        f'"args":{{{attempt}'
        for name in window.names
    ]


def _tail(event: Event, start_ns: int, chunk: str) -> str:
    places = (("stage", event.stage), ("micro_batch", event.micro_batch), (chunk, event.chunk))
    known = "".join(f',"{key}":{value}' for key, value in places if value >= 0)
    at, took = (event.start_ns - start_ns) / 1e3, (event.end_ns - event.start_ns) / 1e3
    return f'"step":{event.step}{known}}},"ts":{at:.3f},"dur":{took:.3f}}}'


def _meta(kind: str, process: int, thread: int, **args: object) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args})


def _arrow_end(phase: str, number: int, place: str, at_ns: int) -> str:
    """Return one end of an arrow. The viewer binds it to the slice that contains its time."""
    bound = ',"bp":"e"' if phase == "f" else ""
    return (
        f'{{"ph":"{phase}","name":"arrives","cat":"arrow","id":{number},{place},'
        f'"ts":{at_ns / 1e3:.3f}{bound}}}'
    )


_LANE_THREAD = 2**30
"""Thread number of the lane, larger than any real thread id."""
_LANE_FIELDS = ("step", "stage", "micro_batch", "chunk")
"""Fields of a record that become arguments."""


class SpanLane:
    """Collects the spans that end after its creation. Call `collect` before the ring wraps."""

    def __init__(self, ring: SpanRing) -> None:
        self._ring, self._read = ring, ring.num_written
        self._parts: list[Drained] = []

    def collect(self) -> None:
        """Read the new spans from the ring."""
        drained, self._read = self._ring.since(self._read)
        self._parts.append(drained)

    def events(self, base_ns: int) -> bytes:
        """Return Chrome trace events as comma-separated JSON objects. Their times count from ``base_ns``."""
        process = os.getpid()
        place = f'"pid":{process},"tid":{_LANE_THREAD}'
        lines = [
            f'{{"ph":"M","name":"thread_name",{place},"args":{{"name":"spans"}}}}',
            f'{{"ph":"M","name":"thread_sort_index",{place},"args":{{"sort_index":-1}}}}',
        ]
        for part in self._parts:
            lines += _lane_events(part, place, base_ns)
        return ",\n".join(lines).encode()


def _lane_events(part: Drained, place: str, base_ns: int) -> list[str]:
    heads = [f'{{"ph":"X","name":{json.dumps(name)},"cat":"{class_of(name)}",{place}' for name in part.names]
    rows = zip(
        *(part.records[field].tolist() for field in ("name", "start_ns", "duration_ns", *_LANE_FIELDS)),
        strict=True,
    )
    lines = []
    for name, start_ns, duration_ns, *values in rows:
        keys = (*_LANE_FIELDS[:-1], chunk_word(part.names[name]))
        known = ((key, value) for key, value in zip(keys, values, strict=True) if value >= 0)
        arguments = ",".join(f'"{key}":{value}' for key, value in known)
        at, took = (start_ns - base_ns) / 1e3, duration_ns / 1e3
        lines.append(f'{heads[name]},"ts":{at:.3f},"dur":{took:.3f},"args":{{{arguments}}}}}')
    return lines


_SEQUENCE = b"\x50\x01"
"""Packet sequence id; all packets belong to sequence 1."""
_CLEARED, _NEEDS = b"\x68\x01", b"\x68\x02"
"""Sequence flags: reset the interned texts; use interned texts."""
_BEGIN, _END = b"\x48\x01", b"\x48\x02"
_EXPLICIT = 3
"""Order of child tracks: by explicit rank."""
_PLACES = ("step", "stage", "micro_batch", "chunk", "attempt", "ring_step")
_RING = {_PLACES.index("chunk"): _PLACES.index("ring_step")}
"""Places whose number has another name in the spans of a ring."""


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
        self._renamed = [_RING if name in RING_SPANS else {} for name in window.names]
        self._made: dict[tuple[int, ...], bytes] = {}

    def of(self, event: Event, attempt: int) -> bytes:
        """Return the body of an event; ``attempt`` is -1 if the window has one attempt only."""
        name, *places = (*event[2:], attempt)
        key = name, *places
        body = self._made.get(key)
        if body is None:
            renamed = self._renamed[name]
            notes = (
                _note(renamed.get(place, place), value) for place, value in enumerate(places) if value >= 0
            )
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
