"""Select the spans of some ranks in a time window, no more than a screen can show.

A span shorter than a pixel is drawn only if it is the longest that begins in its pixel. If the page would
still get too many spans, pixels become wider. If there are more ranks than lines on the screen, each group of
ranks is represented by its worst rank (`choose_lanes`)."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.dashboard.store.span_store import SpanStore
from myriad.dashboard.store.step_block import Columns

__all__ = ["Lane", "TimeWindow", "choose_lanes", "spans_in", "window_of_steps"]

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Lane:
    """One line of the timeline."""

    rank: int
    worst_of: int
    """Number of ranks that the lane represents, including its own."""

    def as_json(self) -> dict[str, int]:
        """Return the lane as JSON values."""
        return {"rank": self.rank, "worst_of": self.worst_of}


def choose_lanes(ranks: Array, badness: Array, most: int) -> list[Lane]:
    """Return at most ``most`` lanes for ``ranks``, in their order. ``badness`` is by rank of the run; a rank
    with NaN is chosen last."""
    if not len(ranks):
        return []
    size = -(-len(ranks) // max(most, 1))
    groups = -(-len(ranks) // size)
    known = np.full(groups * size, -np.inf)
    known[: len(ranks)] = np.where(np.isnan(badness[ranks]), -np.inf, badness[ranks])
    worst = known.reshape(groups, size).argmax(axis=1) + np.arange(groups) * size
    sizes = np.full(groups, size)
    sizes[-1] = len(ranks) - (groups - 1) * size
    return [Lane(rank, count) for rank, count in zip(ranks[worst].tolist(), sizes.tolist(), strict=True)]


_MOST_SPANS = 150_000
_LOOKED_AT = ("start_ns", "duration", "lane")
_KEYS = ("start_ns", "duration", "rank", "name", "stage", "micro_batch", "chunk")


@dataclass(frozen=True)
class TimeWindow:
    """A time window in nanoseconds since the epoch."""

    start_ns: int
    stop_ns: int


def window_of_steps(store: SpanStore, first: int, last: int) -> TimeWindow | None:
    """Return the window from the first start to the last end of some steps; ``None`` if they have no
    spans."""
    blocks = [block for _, block in store.blocks(first, last) if block.count]
    if not blocks:
        return None
    return TimeWindow(min(block.first_ns for block in blocks), max(block.last_ns for block in blocks))


def spans_in(store: SpanStore, window: TimeWindow, lanes: list[Lane], width: int) -> Columns:
    """Return the spans to draw, ordered by start. ``lane`` is an index into ``lanes``; ``width`` is in
    pixels."""
    lane_of = np.full(store.world, -1, np.int32)
    lane_of[[lane.rank for lane in lanes]] = np.arange(len(lanes), dtype=np.int32)
    blocks = [
        store.columns(block)
        for _, block in store.blocks()
        if block.count and block.first_ns < window.stop_ns and block.last_ns > window.start_ns
    ]
    found = [_chosen(columns, lane_of, window) for columns in blocks]
    shown = _visible(_joined(found, _LOOKED_AT), window, width, len(lanes))
    # Most spans are not drawn, so the other columns are fetched for drawn spans only.
    cuts = np.cumsum([0, *(len(part["place"]) for part in found)])
    parts = []
    for columns, part, first, end in zip(blocks, found, cuts[:-1], cuts[1:], strict=True):
        some = shown[(shown >= first) & (shown < end)] - first
        places = part["place"][some]
        parts.append({key: columns[key][places] for key in _KEYS} | {"lane": part["lane"][some]})
    spans = _joined(parts, (*_KEYS, "lane"))
    return _taken(spans, np.argsort(spans["start_ns"], kind="stable"))


def _chosen(columns: Columns, lane_of: Array, window: TimeWindow) -> Columns:
    """Return the indices of the lanes' spans in the window, with the columns that decide whether they are
    drawn."""
    lane = lane_of[columns["rank"]]
    places = np.flatnonzero(lane >= 0)
    starts, durations = columns["start_ns"][places], columns["duration"][places]
    inside = (starts < window.stop_ns) & (starts + (durations * 1e9).astype(np.int64) > window.start_ns)
    if not inside.all():
        places, starts, durations = places[inside], starts[inside], durations[inside]
    return {"place": places, "start_ns": starts, "duration": durations, "lane": lane[places]}


def _joined(parts: list[Columns], keys: tuple[str, ...]) -> Columns:
    return {
        key: np.concatenate([part[key] for part in parts]) if parts else np.zeros(0, np.int64) for key in keys
    }


def _taken(spans: Columns, places: Array) -> Columns:
    return {key: column[places] for key, column in spans.items()}


def _visible(spans: Columns, window: TimeWindow, width: int, num_lanes: int) -> Array:
    """Return the indices of the spans to draw."""
    seconds, durations = max(window.stop_ns - window.start_ns, 1) * 1e-9, spans["duration"]
    pixel = seconds / width
    if len(durations) > _MOST_SPANS:
        half = _MOST_SPANS // 2
        many = float(np.partition(durations, len(durations) - half)[len(durations) - half])
        pixel = max(pixel, many, num_lanes * seconds / half)
    is_long = durations >= pixel
    short = np.flatnonzero(~is_long)
    column = (spans["start_ns"][short] - window.start_ns) * (1e-9 / pixel)
    columns = int(seconds / pixel) + 1
    cell = spans["lane"][short] * np.int64(columns) + np.clip(column, 0, columns - 1).astype(np.int64)
    return np.sort(np.concatenate([np.flatnonzero(is_long), short[_longest(cell, durations[short])]]))


def _longest(cell: Array, duration: Array) -> Array:
    """Return the index of the longest span in each cell. The bits of positive floats have the order of the
    floats, so one maximum finds both length and index."""
    if not len(cell):
        return np.empty(0, np.int64)
    packed = (duration.astype(np.float32).view(np.int32).astype(np.int64) << 32) | np.arange(len(cell))
    best = np.full(int(cell.max()) + 1, -1, np.int64)
    np.maximum.at(best, cell, packed)
    return np.sort(best[best >= 0] & 0xFFFFFFFF)
