"""What the files of a run say happened, and when: one list in the order of time. Pure.

    events.jsonl  ─┐
    metrics.jsonl ─┼──► Moment(time, what, fields) ...
    journal.jsonl ─┘

Lines are what a killed writer, a full disk or a clock that was set back has left of them: a line without a
time says nothing, and a time before that of the line above it is that one's. So time never goes backward.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

__all__ = ["Moment", "in_order", "number"]

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Moment:
    """One thing that happened."""

    time: float
    """Seconds since the epoch."""
    what: str
    """An event's name; "launch", "attempt" and "end" of the journal; "step" of the metrics."""
    fields: Line

    def seconds(self, name: str) -> float:
        """A duration that it tells; 0: none."""
        return max(0.0, number(self.fields.get(name)) or 0.0)

    def count(self, name: str, default: int) -> int:
        """A whole number that it tells."""
        found = number(self.fields.get(name))
        return default if found is None else int(found)


def in_order(events: Iterable[Line], metrics: Iterable[Line], journal: Iterable[Line]) -> list[Moment]:
    """All of them; of the same instant the decision first, then the step."""
    tracks = (
        _timed((what, line) for record in journal for what, line in _decisions(record)),
        _timed(("step", line) for line in metrics if number(line.get("step")) is not None),
        _timed((str(line.get("event")), line) for line in events),
    )
    return list(heapq.merge(*tracks, key=lambda moment: moment.time))


def _timed(lines: Iterable[tuple[str, Line]]) -> Iterator[Moment]:
    latest = 0.0
    for what, line in lines:
        at = number(line.get("time"))
        if at is not None:
            latest = max(latest, at)
            yield Moment(latest, what, line)


def _decisions(record: Line) -> Iterator[tuple[str, Line]]:
    """Of the driver: what begins and ends attempts and runs."""
    at = record.get("time")
    if "plan" in record:
        yield "launch", {**_mapping(record["plan"]), "time": at}
    actions = record.get("actions")
    for action in map(_mapping, actions if isinstance(actions, list) else []):
        if action.get("kind") == "StartAttempt":
            yield "attempt", {**action, "time": at}
        elif action.get("kind") == "EndRun":
            yield "end", {**action, "time": at}


def _mapping(value: object) -> Line:
    return value if isinstance(value, Mapping) else {}


def number(value: object) -> float | None:
    """A finite one, or nothing."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and isfinite(value) else None
