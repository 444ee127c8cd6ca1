"""A window of spans as a Chrome trace: a process for each node, a thread for each rank, for chrome://tracing
and Perfetto (https://ui.perfetto.dev).

Complete events ("ph": "X") in microseconds from the window's first span; what overlaps has a thread of its
own, so each thread's events nest. Arrows lead from whom a rank waited for to where it waited.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from myriad.telemetry.records import class_of
from myriad.telemetry.trace_file import opened_trace
from myriad.telemetry.window import Arrow, Event, RankSpans, Window

__all__ = ["write_chrome_trace"]


def write_chrome_trace(path: Path, window: Window, arrows: Sequence[Arrow] = ()) -> None:
    """JSON, gzipped when the file's name ends in .gz; the file is there when it is complete. Raises
    ``OSError``."""
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
            if lane == 0:  # of several attempts the newest has arrows, and comes last
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
    """Of each name's events: what they share."""
    attempt = f'"attempt":{one.attempt},' if several else ""
    return [
        f'{{"ph":"X","name":{json.dumps(name)},"cat":"{class_of(name)}","pid":{one.node},"tid":{thread},'
        f'"args":{{{attempt}'
        for name in window.names
    ]


def _tail(event: Event, start_ns: int) -> str:
    places = (("stage", event.stage), ("micro_batch", event.micro_batch), ("chunk", event.chunk))
    told = "".join(f',"{key}":{value}' for key, value in places if value >= 0)
    at, took = (event.start_ns - start_ns) / 1e3, (event.end_ns - event.start_ns) / 1e3
    return f'"step":{event.step}{told}}},"ts":{at:.3f},"dur":{took:.3f}}}'


def _meta(kind: str, process: int, thread: int, **args: object) -> str:
    return json.dumps({"ph": "M", "name": kind, "pid": process, "tid": thread, "args": args})


def _arrow_end(phase: str, number: int, place: str, at_ns: int) -> str:
    """It is bound to the slice that its time lies in."""
    bound = ',"bp":"e"' if phase == "f" else ""
    return (
        f'{{"ph":"{phase}","name":"arrives","cat":"arrow","id":{number},{place},'
        f'"ts":{at_ns / 1e3:.3f}{bound}}}'
    )
