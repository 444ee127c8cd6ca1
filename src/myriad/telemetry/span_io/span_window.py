"""Read the spans of selected steps and ranks from a folder of span files, for an export.

Nesting: spans of one thread are nested or disjoint. Files round times to a quarter of a microsecond, so a
child may seem to end after its parent; such small overlaps are trimmed. Spans that really overlap (from
another thread of the rank) go to a separate lane."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from myriad.errors import BadInputError
from myriad.telemetry.span_io.span_batch import BatchError, SpanBatch
from myriad.telemetry.span_io.span_files import read_facts, read_span_file, span_files
from myriad.telemetry.span_io.span_records import Records

__all__ = ["MAX_EVENTS", "Arrow", "Event", "RankSpans", "Window", "read_window"]

MAX_EVENTS = 1_000_000
"""Maximum number of events in an export that browsers can open."""
_HAIR_NS = 1000
_HAIR_SHARE = 2e-7
"""Rounding error of a float32, as a fraction of a duration."""


class Event(NamedTuple):
    """A span in an export."""

    start_ns: int
    end_ns: int
    name: int
    step: int
    stage: int
    micro_batch: int
    chunk: int


class Arrow(NamedTuple):
    """An arrow from a span of one rank to a span of another. Each time lies within its span."""

    from_rank: int
    from_ns: int
    to_rank: int
    to_ns: int


@dataclass(frozen=True)
class RankSpans:
    """Spans of one rank in one attempt on one node."""

    node: int
    attempt: int
    rank: int
    records: Records

    def lanes(self) -> list[list[Event]]:
        """Divide the spans into lanes of nested or disjoint spans, each parent before its children."""
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
        """Ends of the open spans that may enclose the next span."""
        self._free_ns = 0

    def take(self, event: Event) -> bool:
        """Add the event if it is nested in or disjoint from the lane's spans; return whether it was added."""
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
    """The spans in an export."""

    names: tuple[str, ...]
    ranks: tuple[RankSpans, ...]
    clock_error_seconds: float
    num_dropped: int

    @property
    def num_spans(self) -> int:
        """Number of spans of all ranks."""
        return sum(len(one.records) for one in self.ranks)

    @property
    def start_ns(self) -> int:
        """Start of the first span; 0 if there is none."""
        return min((int(one.records["start_ns"].min()) for one in self.ranks), default=0)


def read_window(
    folder: Path, steps: tuple[int, int] | None, ranks: Collection[int] | None, limit: int | None = None
) -> Window:
    """Read the spans of ``steps`` (first and last) and ``ranks``; ``None`` selects all.

    Files that are not valid span files are skipped. Raises `BadInputError` if no span or more than ``limit``
    spans match; the error then suggests steps that fit.
    """
    found, per_step, limit = [], Counter[int](), limit or MAX_EVENTS
    for batch in _batches(folder, steps):
        records = batch.records[_wanted(batch.records, steps, ranks)]
        per_step.update(dict(zip(*(each.tolist() for each in _counts(records["step"])), strict=True)))
        if per_step.total() <= limit and len(records):
            found.append(replace(batch, records=records))
    if per_step.total() > limit:
        raise _too_many(per_step, limit)
    if not found:
        raise BadInputError("--steps, --ranks", _selection(steps, ranks), f"no spans of these in {folder}")
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
    allowed = f"{sum(per_step.values())} spans, and at most {limit} are exported: "
    allowed += f"--steps {first}-{fits[-1]} fits" if fits else "fewer --ranks"
    return BadInputError("--steps", f"{first}-{last}", allowed)


def _selection(steps: tuple[int, int] | None, ranks: Collection[int] | None) -> str:
    shown = "all" if ranks is None else ",".join(map(str, sorted(ranks)[:8]))
    return f"{'all' if steps is None else f'{steps[0]}-{steps[1]}'}, {shown}"


def _window(batches: Sequence[SpanBatch]) -> Window:
    numbers: dict[str, int] = {}
    parts: defaultdict[tuple[int, int, int], list[Records]] = defaultdict(list)
    for batch in batches:
        to = np.array([numbers.setdefault(name, len(numbers)) for name in batch.names], np.int16)
        names: npt.NDArray[np.int16] = batch.records["name"]
        batch.records["name"] = to[names]
        ranks: npt.NDArray[np.int32] = batch.records["rank"]
        for rank in np.unique(ranks).tolist():
            parts[rank, batch.attempt, batch.node].append(batch.records[ranks == rank])
    return Window(
        tuple(numbers),
        tuple(
            RankSpans(node, attempt, rank, np.concatenate(records))
            for (rank, attempt, node), records in sorted(parts.items())
        ),
        max(batch.clock_error_seconds for batch in batches),
        sum(batch.num_dropped for batch in batches),
    )
