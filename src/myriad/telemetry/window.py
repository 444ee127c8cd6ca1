"""Some steps of some ranks, read from a folder of span files for an export.

nesting: one thread's spans lie inside each other or apart. Files keep times to a quarter of a microsecond,
so a child may seem to end after its parent: such hairs are cut. What truly overlaps (another thread of the
rank) goes to a lane of its own.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from myriad.errors import BadInputError
from myriad.telemetry.batch import BatchError, SpanBatch
from myriad.telemetry.records import Records
from myriad.telemetry.span_files import read_facts, read_span_file, span_files

__all__ = ["MAX_EVENTS", "Arrow", "Event", "RankSpans", "Window", "read_window"]

MAX_EVENTS = 1_000_000
"""Of an export: what browsers still open."""
_HAIR_NS = 1000
_HAIR_SHARE = 2e-7
"""Of a duration: a float32's rounding."""


class Event(NamedTuple):
    """A span, as an export has it."""

    start_ns: int
    end_ns: int
    name: int
    step: int
    stage: int
    micro_batch: int
    chunk: int


class Arrow(NamedTuple):
    """From a span of one rank to one of another; times are in these spans."""

    from_rank: int
    from_ns: int
    to_rank: int
    to_ns: int


@dataclass(frozen=True)
class RankSpans:
    """Of one rank in one attempt on one node."""

    node: int
    attempt: int
    rank: int
    records: Records

    def lanes(self) -> list[list[Event]]:
        """Each with spans that lie inside each other or apart, what holds others before them."""
        order = np.lexsort((-self.records["duration_ns"], self.records["start_ns"]))
        lanes: list[_Lane] = []
        for start, took, step, _, name, *rest in self.records[order].tolist():
            event = Event(start, start + took, name, step, *rest)
            if not any(lane.take(event) for lane in lanes):
                lanes.append(_Lane())
                lanes[-1].take(event)
        return [lane.events for lane in lanes]


class _Lane:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self._ends: list[int] = []
        """Of spans that the next one may lie in."""
        self._free_ns = 0

    def take(self, event: Event) -> bool:
        """Whether it fits here."""
        ends, hair = self._ends, _HAIR_NS + int(_HAIR_SHARE * (event.end_ns - event.start_ns))
        while ends and ends[-1] - event.start_ns <= hair:
            self._free_ns = max(self._free_ns, ends.pop())
        start = max(event.start_ns, self._free_ns)
        end = max(event.end_ns, start)
        if ends and end > ends[-1]:
            if end - ends[-1] > hair:
                return False
            end = ends[-1]
        ends.append(end)
        self.events.append(event._replace(start_ns=start, end_ns=end))
        return True


@dataclass(frozen=True)
class Window:
    """What an export shows."""

    names: tuple[str, ...]
    ranks: tuple[RankSpans, ...]
    clock_error_seconds: float
    num_dropped: int

    @property
    def num_spans(self) -> int:
        """Of all ranks."""
        return sum(len(one.records) for one in self.ranks)

    @property
    def start_ns(self) -> int:
        """Of its first span."""
        return min((int(one.records["start_ns"].min()) for one in self.ranks), default=0)


def read_window(
    folder: Path, steps: tuple[int, int] | None, ranks: Collection[int] | None, limit: int | None = None
) -> Window:
    """Those of ``steps`` (first and last) and ``ranks``; ``None``: all. Files that hold no spans are left
    out. Raises `BadInputError`, with what would fit, where there are none or too many."""
    found, per_step, limit = [], Counter[int](), limit or MAX_EVENTS
    for batch in _batches(folder, steps):
        records = batch.records[_wanted(batch.records, steps, ranks)]
        per_step.update(dict(zip(*(each.tolist() for each in _counts(records["step"])), strict=True)))
        if per_step.total() <= limit and len(records):
            found.append(replace(batch, records=records))
    if per_step.total() > limit:
        raise _too_many(per_step, limit)
    if not found:
        raise BadInputError("--steps, --ranks", _told(steps, ranks), f"no spans of these in {folder}")
    return _window(found)


def _batches(folder: Path, steps: tuple[int, int] | None) -> Iterator[SpanBatch]:
    for path in span_files(folder):
        with suppress(BatchError, OSError):
            facts = read_facts(path)
            if steps is None or (facts.first_step <= steps[1] and facts.last_step >= steps[0]):
                yield read_span_file(path)


def _wanted(records: Records, steps: tuple[int, int] | None, ranks: Collection[int] | None) -> Any:
    wanted = np.ones(len(records), bool)
    if steps is not None:
        wanted &= (records["step"] >= steps[0]) & (records["step"] <= steps[1])
    if ranks is not None:
        wanted &= np.isin(records["rank"], list(ranks))
    return wanted


def _counts(steps: Any) -> Any:
    return np.unique(steps, return_counts=True)


def _too_many(per_step: Mapping[int, int], limit: int) -> BadInputError:
    total, fits = 0, []
    for step in sorted(per_step):
        total += per_step[step]
        if total <= limit:
            fits.append(step)
    first, last = min(per_step), max(per_step)
    told = f"{sum(per_step.values())} spans, and at most {limit} are exported: "
    told += f"--steps {first}-{fits[-1]} fits" if fits else "fewer --ranks"
    return BadInputError("--steps", f"{first}-{last}", told)


def _told(steps: tuple[int, int] | None, ranks: Collection[int] | None) -> str:
    shown = "all" if ranks is None else ",".join(map(str, sorted(ranks)[:8]))
    return f"{'all' if steps is None else f'{steps[0]}-{steps[1]}'}, {shown}"


def _window(batches: Sequence[SpanBatch]) -> Window:
    numbers: dict[str, int] = {}
    parts: defaultdict[tuple[int, int, int], list[Records]] = defaultdict(list)
    for batch in batches:
        to = np.array([numbers.setdefault(name, len(numbers)) for name in batch.names], np.int16)
        batch.records["name"] = to[batch.records["name"]]
        for rank in np.unique(batch.records["rank"]).tolist():
            parts[rank, batch.attempt, batch.node].append(batch.records[batch.records["rank"] == rank])
    return Window(
        tuple(numbers),
        tuple(
            RankSpans(node, attempt, rank, np.concatenate(records))
            for (rank, attempt, node), records in sorted(parts.items())
        ),
        max(batch.clock_error_seconds for batch in batches),
        sum(batch.num_dropped for batch in batches),
    )
