"""A rank's spans as one more thread of the profile that torch writes of it: over its operators lie the names
of what they were for.

    thread "spans"     |forward 0            |send|forward 1 ...
    thread 4711        |aten::mm|aten::add|...

torch's own marks (`record_function`) cannot: see `myriad.train.profiler`. Both clocks count from the epoch;
they agree to some microseconds.
"""

import json
import os

from myriad.telemetry.records import class_of
from myriad.telemetry.ring import Drained, SpanRing

__all__ = ["SpanLane"]

_THREAD = 2**30
"""No number of a thread that there is."""
_PLACES = ("step", "stage", "micro_batch", "chunk")


class SpanLane:
    """What ends from when it is made on; `look` more often than the ring is full."""

    def __init__(self, ring: SpanRing) -> None:
        self._ring, self._read = ring, ring.num_written
        self._parts: list[Drained] = []

    def look(self) -> None:
        """Takes what is new."""
        drained, self._read = self._ring.since(self._read)
        self._parts.append(drained)

    def events(self, base_ns: int) -> bytes:
        """Of a Chrome trace whose times count from there: JSON objects, with commas between them."""
        process = os.getpid()
        place = f'"pid":{process},"tid":{_THREAD}'
        lines = [
            f'{{"ph":"M","name":"thread_name",{place},"args":{{"name":"spans"}}}}',
            f'{{"ph":"M","name":"thread_sort_index",{place},"args":{{"sort_index":-1}}}}',
        ]
        for part in self._parts:
            lines += _slices(part, place, base_ns)
        return ",\n".join(lines).encode()


def _slices(part: Drained, place: str, base_ns: int) -> list[str]:
    heads = [f'{{"ph":"X","name":{json.dumps(name)},"cat":"{class_of(name)}",{place}' for name in part.names]
    rows = zip(
        *(part.records[field].tolist() for field in ("name", "start_ns", "duration_ns", *_PLACES)),
        strict=True,
    )
    lines = []
    for name, start_ns, duration_ns, *values in rows:
        told = ",".join(f'"{key}":{value}' for key, value in zip(_PLACES, values, strict=True) if value >= 0)
        at, took = (start_ns - base_ns) / 1e3, duration_ns / 1e3
        lines.append(f'{heads[name]},"ts":{at:.3f},"dur":{took:.3f},"args":{{{told}}}}}')
    return lines
