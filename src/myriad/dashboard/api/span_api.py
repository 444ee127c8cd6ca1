"""Endpoints about spans: the heat map, the slowest ranks, and the timeline, with the predicted step beside
the measured one.

The timeline has the spans of some ranks in a time window, no more than a screen can show. A span shorter
than a pixel is drawn only if it is the longest that begins in its pixel. If the page would still get too
many spans, pixels become wider. If there are more ranks than lines on the screen, each group of ranks is
represented by its worst rank (`choose_lanes`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api.query_parameters import QueryParameterError, as_int, as_range, as_ranks, as_seconds
from myriad.dashboard.insight.predicted_step import Plan
from myriad.dashboard.store.heat_map import Heat
from myriad.dashboard.store.span_store import SpanStore
from myriad.dashboard.store.step_block import Columns
from myriad.dashboard.tile import pack_tile
from myriad.dashboard.watched_run import WatchedRun
from myriad.telemetry.span_io.span_records import class_of

__all__ = ["TimeWindow", "choose_lanes", "heat", "spans_in", "steps", "timeline", "window_of_steps", "worst"]

_MOST_STEP = 2**31 - 1
_MOST_STEPS_OF_TIMELINE = 200
_MOST_LANES_WITH_ARROWS = 1024
"""With more lanes, arrows would hide the spans."""
_MOST_ARROWS = 4000
"""Maximum number of arrows per step; the longest waits are kept."""
_ARROW_COLUMNS = (
    ("from_rank", np.int32),
    ("to_rank", np.int32),
    ("from_at", np.float64),
    ("to_at", np.float64),
    ("kind", np.uint8),
)


def heat(watched: WatchedRun, query: Mapping[str, str]) -> bytes:
    """Return the seconds of a phase on all ranks, over some steps."""
    phase, found = _heat(watched, query)
    arrays = {"seconds": found.seconds, "z": found.z, "deviation": found.deviation}
    return pack_tile(arrays, phase=phase, first=found.first, last=found.last, missing=found.missing)


def steps(watched: WatchedRun, query: Mapping[str, str]) -> bytes:
    """Return, for each step, the distance of the worst rank from its peers."""
    phase = _phase(watched, query)
    found = watched.heat.by_step(phase)
    worst = {"worst_z": found.worst_z, "worst_deviation": found.worst_deviation}
    return pack_tile({"step": found.step, **worst, "median": found.median}, phase=phase)


def worst(watched: WatchedRun, analyst: Analyst, query: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the ranks that are slowest among their peers, the worst first."""
    phase, found = _heat(watched, query)
    limit = as_int(query, "limit", 50, 1, 1000)
    known = np.flatnonzero(np.isfinite(found.z))
    order = known[np.argsort(-found.z[known], kind="stable")][:limit]
    said = {rank: one.sentence for one in analyst.suspects if one.phase == phase for rank in one.ranks}
    return [_row(watched, phase, found, int(number)) | _said(said, int(number)) for number in order]


def _said(said: Mapping[int, str], number: int) -> dict[str, str]:
    """Return the sentence of a finding over many steps, if the rank has one."""
    return {"sentence": said[number]} if number in said else {}


def _row(watched: WatchedRun, phase: str, found: Heat, number: int) -> dict[str, Any]:
    seconds, peers = float(found.seconds[number]), float(found.peers_seconds[number])
    node = int(watched.ranks.node[number])
    slower = f"{seconds / peers - 1:+.1%} against its peers" if peers > 0 else "its peers take no time"
    return {
        "rank": number,
        "node": node,
        "coordinates": watched.ranks.coordinates(number),
        "z": float(found.z[number]),
        "deviation": seconds / peers - 1 if peers > 0 else None,
        "seconds": seconds,
        "peers_seconds": peers,
        "sentence": f"rank {number} on node {node}: {phase} {slower}",
    }


def _phase(watched: WatchedRun, query: Mapping[str, str]) -> str:
    phases = watched.store.names.phases_in_order()
    phase = query.get("phase") or next((name for name in ("forward", *phases) if name in phases), "")
    if phases and phase not in phases:
        raise QueryParameterError("phase", phase, f"one of {', '.join(phases)}")
    return phase


def _heat(watched: WatchedRun, query: Mapping[str, str]) -> tuple[str, Heat]:
    last = as_int(query, "last", -1, 0, _MOST_STEP)
    if last < 0:
        last = watched.last_step or 0
    first = as_int(query, "first", last, 0, _MOST_STEP)
    if first > last:
        raise QueryParameterError("first", str(first), f"at most last, which is {last}")
    phase = _phase(watched, query)
    return phase, watched.heat.heat(phase, first, last)


def timeline(watched: WatchedRun, analyst: Analyst, query: Mapping[str, str]) -> bytes:
    """Return the spans of a window. ``arrows_to_come``: the arrows of some steps are not computed yet."""
    store = watched.store
    ranks = as_ranks(query, "ranks", store.world)
    width = as_int(query, "width", 1600, 16, 8192)
    window = _window(watched, query)
    lanes = choose_lanes(ranks, _badness(watched, window), as_int(query, "lanes", 400, 1, 4096))
    spans = spans_in(store, window, lanes, width)
    names, predicted_lanes = list(store.names.names), list[dict[str, Any]]()
    if watched.plan is not None:
        spans, names, predicted_lanes = with_predicted(watched, watched.plan, spans, lanes, window)
    arrows, are_all = _arrows(watched, analyst, window, np.array([lane.rank for lane in lanes]))
    arrays: dict[str, npt.NDArray[Any]] = {
        "lane": spans["lane"].astype(np.int32),
        "name": spans["name"].astype(np.uint16),
        "stage": spans["stage"].astype(np.int16),
        "micro_batch": spans["micro_batch"].astype(np.int16),
        "chunk": spans["chunk"].astype(np.int16),
        "start": (spans["start_ns"] - (store.first_ns or 0)) * 1e-9,
        "duration": spans["duration"].astype(np.float32),
        "rank": spans["rank"].astype(np.int32),
        **arrows,
    }
    return pack_tile(
        arrays,
        arrows_to_come=not are_all,
        names=names,
        lanes=[*(lane.as_json() for lane in lanes), *predicted_lanes],
        start=watched.since_first(window.start_ns),
        end=watched.since_first(window.stop_ns),
    )


@dataclass(frozen=True)
class TimeWindow:
    """A time window in nanoseconds since the epoch."""

    start_ns: int
    stop_ns: int


def _arrows(
    watched: WatchedRun, analyst: Analyst, window: TimeWindow, ranks: npt.NDArray[Any]
) -> tuple[dict[str, npt.NDArray[Any]], bool]:
    """Return the arrows between shown ranks, and whether they are complete."""
    inside = (
        watched.steps_in(window.start_ns, window.stop_ns) if len(ranks) <= _MOST_LANES_WITH_ARROWS else []
    )
    found, are_all = analyst.arrows(inside[0], inside[-1], ranks, _MOST_ARROWS) if inside else ([], True)
    drawn = np.zeros(watched.store.world, bool)
    drawn[ranks] = True
    columns: dict[str, list[npt.NDArray[Any]]] = {key: [] for key, _ in _ARROW_COLUMNS}
    for each in found:
        shown = drawn[each.from_rank] & (each.from_ns < window.stop_ns) & (each.to_ns > window.start_ns)
        for key, _ in _ARROW_COLUMNS:
            columns[key].append(getattr(each, key.replace("_at", "_ns"))[shown])
    whole = {key: np.concatenate([*parts, np.zeros(0, np.int64)]) for key, parts in columns.items()}
    whole |= {key: (whole[key] - (watched.store.first_ns or 0)) * 1e-9 for key in ("from_at", "to_at")}
    return {key: whole[key].astype(kind) for key, kind in _ARROW_COLUMNS}, are_all


def _window(watched: WatchedRun, query: Mapping[str, str]) -> TimeWindow:
    """Return the window of ``steps``, or of ``start`` and ``end`` in seconds since the first span. The
    default is the newest step."""
    store = watched.store
    start, end, chosen = as_seconds(query, "start"), as_seconds(query, "end"), as_range(query, "steps")
    first_ns = store.first_ns or 0
    if start is not None and end is not None:
        if end <= start:
            raise QueryParameterError("end", str(end), "later than start")
        return TimeWindow(first_ns + int(start * 1e9), first_ns + int(end * 1e9))
    first, last = chosen or (watched.last_step or 0,) * 2
    if last - first >= _MOST_STEPS_OF_TIMELINE or last < first:
        raise QueryParameterError("steps", f"{first}-{last}", f"from 1 to {_MOST_STEPS_OF_TIMELINE} steps")
    return window_of_steps(store, first, last) or TimeWindow(first_ns, first_ns + 10**9)


def _badness(watched: WatchedRun, window: TimeWindow) -> npt.NDArray[Any]:
    """Return each rank's distance from its peers in phases of compute, over the steps of a window."""
    store, worst_of = watched.store, np.full(watched.store.world, np.nan, np.float32)
    inside = watched.steps_in(window.start_ns, window.stop_ns)
    if not inside:
        return worst_of
    seen = set(store.names.phases_in_order())
    computing = {store.names.phase_of(name) for name in store.names.names if class_of(name) == "compute"}
    for phase in computing & seen:
        worst_of = np.fmax(worst_of, watched.heat.heat(phase, inside[0], inside[-1]).z)
    return worst_of


_MOST_LANES, _MOST_STEPS = 64, 4


@dataclass(frozen=True)
class _Lane:
    """One line of the timeline."""

    rank: int
    worst_of: int
    """Number of ranks that the lane represents, including its own."""

    def as_json(self) -> dict[str, int]:
        """Return the lane as JSON values."""
        return {"rank": self.rank, "worst_of": self.worst_of}


def with_predicted(
    watched: WatchedRun, plan: Plan, spans: Columns, lanes: list[_Lane], window: TimeWindow
) -> tuple[Columns, list[str], list[dict[str, Any]]]:
    """Return spans, names and lanes with the predicted ones after the measured ones. Each predicted step
    begins where the measured one began. With many lanes or steps, nothing is added."""
    store = watched.store
    names, steps = list(store.names.names), watched.steps_in(window.start_ns, window.stop_ns)
    if len(lanes) > _MOST_LANES or len(steps) > _MOST_STEPS:
        return spans, names, []
    codes = {name: code for code, name in enumerate(names)}
    for name in plan.names:
        codes.setdefault(name, len(codes))
    numbers = np.array([codes[name] for name in plan.names], np.int16)
    begins = [block.first_ns for step in steps for _, block in store.blocks(step, step)]
    parts = [spans]
    for place, lane in enumerate(lanes):
        for begin in begins:
            found = plan.spans_of(lane.rank, begin)
            part = {key: found[key] for key in ("start_ns", "rank", "stage", "micro_batch", "chunk")}
            part |= {"duration": found["duration_ns"] * 1e-9, "name": numbers[found["name"]]}
            parts.append(part | {"lane": np.full(len(found), len(lanes) + place)})
    whole = {key: np.concatenate([part[key] for part in parts]) for key in spans}
    predicted = [{"rank": lane.rank, "worst_of": 1, "predicted": True} for lane in lanes]
    return whole, list(codes), predicted


_Array = npt.NDArray[Any]


def choose_lanes(ranks: _Array, badness: _Array, most: int) -> list[_Lane]:
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
    return [_Lane(rank, count) for rank, count in zip(ranks[worst].tolist(), sizes.tolist(), strict=True)]


_MOST_SPANS = 150_000
_LOOKED_AT = ("start_ns", "duration", "lane")
_KEYS = ("start_ns", "duration", "rank", "name", "stage", "micro_batch", "chunk")


def window_of_steps(store: SpanStore, first: int, last: int) -> TimeWindow | None:
    """Return the window from the first start to the last end of some steps; ``None`` if they have no
    spans."""
    blocks = [block for _, block in store.blocks(first, last) if block.count]
    if not blocks:
        return None
    return TimeWindow(min(block.first_ns for block in blocks), max(block.last_ns for block in blocks))


def spans_in(store: SpanStore, window: TimeWindow, lanes: list[_Lane], width: int) -> Columns:
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


def _chosen(columns: Columns, lane_of: _Array, window: TimeWindow) -> Columns:
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


def _taken(spans: Columns, places: _Array) -> Columns:
    return {key: column[places] for key, column in spans.items()}


def _visible(spans: Columns, window: TimeWindow, width: int, num_lanes: int) -> _Array:
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


def _longest(cell: _Array, duration: _Array) -> _Array:
    """Return the index of the longest span in each cell. The bits of positive floats have the order of the
    floats, so one maximum finds both length and index."""
    if not len(cell):
        return np.empty(0, np.int64)
    packed = (duration.astype(np.float32).view(np.int32).astype(np.int64) << 32) | np.arange(len(cell))
    best = np.full(int(cell.max()) + 1, -1, np.int64)
    np.maximum.at(best, cell, packed)
    return np.sort(best[best >= 0] & 0xFFFFFFFF)
