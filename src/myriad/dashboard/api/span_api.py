"""Endpoints about spans: the heat map, the slowest ranks, and the timeline, with the predicted step beside
the measured one."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api.query_parameters import QueryParameterError, as_int, as_range, as_ranks, as_seconds
from myriad.dashboard.insight.predicted_step import Plan
from myriad.dashboard.store.heat_map import Heat
from myriad.dashboard.store.step_block import Columns
from myriad.dashboard.store.timeline_spans import Lane, TimeWindow, choose_lanes, spans_in, window_of_steps
from myriad.dashboard.tile import pack_tile
from myriad.dashboard.watched_run import WatchedRun
from myriad.telemetry.span_io.span_records import class_of

__all__ = ["heat", "steps", "timeline", "worst"]

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
    arrays = {"seconds": found.seconds, "z": found.z}
    return pack_tile(arrays, phase=phase, first=found.first, last=found.last, missing=found.missing)


def steps(watched: WatchedRun, query: Mapping[str, str]) -> bytes:
    """Return, for each step, the distance of the worst rank from its peers."""
    phase = _phase(watched, query)
    found = watched.heat.by_step(phase)
    return pack_tile({"step": found.step, "worst_z": found.worst_z, "median": found.median}, phase=phase)


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


def with_predicted(
    watched: WatchedRun, plan: Plan, spans: Columns, lanes: list[Lane], window: TimeWindow
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
