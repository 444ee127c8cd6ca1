"""Write a window of spans as a Chrome trace, for chrome://tracing and Perfetto (https://ui.perfetto.dev).

Each node is a process and each rank a thread. Spans are complete events ("ph": "X") in microseconds from the
window's first span. Overlapping spans get a separate thread, so the events of each thread nest. An arrow
leads from the span of the rank that was waited for to the span of the rank that waited.

`SpanLane` adds a rank's spans as an extra thread to the profile that torch writes, so that each operator can
be assigned to a span. torch's own marks (`record_function`) cannot do this: see `myriad.train.rank_profiler`.
Both clocks count from the epoch and agree to some microseconds.

    thread "spans"     |forward 0            |send|forward 1 ...
    thread 4711        |aten::mm|aten::add|...
"""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from myriad.telemetry.span_io.span_records import class_of
from myriad.telemetry.span_io.span_ring import Drained, SpanRing
from myriad.telemetry.span_io.span_window import Arrow, Event, RankSpans, Window
from myriad.telemetry.traces.trace_files import opened_trace

__all__ = ["SpanLane", "write_chrome_trace"]


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
                yield heads[event.name] + _tail(event, start)
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


def _tail(event: Event, start_ns: int) -> str:
    places = (("stage", event.stage), ("micro_batch", event.micro_batch), ("chunk", event.chunk))
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
        known = ((key, value) for key, value in zip(_LANE_FIELDS, values, strict=True) if value >= 0)
        arguments = ",".join(f'"{key}":{value}' for key, value in known)
        at, took = (start_ns - base_ns) / 1e3, duration_ns / 1e3
        lines.append(f'{heads[name]},"ts":{at:.3f},"dur":{took:.3f},"args":{{{arguments}}}}}')
    return lines
