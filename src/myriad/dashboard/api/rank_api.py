"""Endpoints about single ranks: their place in the grid, the ranks they wait for, and the silent ranks."""

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api.query_parameters import as_int
from myriad.dashboard.insight.hang_analysis import HangAnalysis
from myriad.dashboard.watched_run import WatchedRun
from myriad.units import format_ranks

__all__ = ["rank", "silent", "silent_rank_sentence"]

_MOST_SILENT = 200


def rank(watched: WatchedRun, analyst: Analyst, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a rank and its groups. The ranks it waits for are known only while the run hangs."""
    number = as_int(query, "rank", 0, 0, watched.store.world - 1)
    ranks, still = watched.ranks, analyst.hang()
    return {
        "rank": number,
        "coordinates": ranks.coordinates(number),
        "node": int(ranks.node[number]),
        "groups": {axis: ranks.group(number, axis).tolist() for axis in ("tp", "pp", "dp")},
        "waits_for": [] if still is None else still.waits_for(number),
        "silent": still is not None and number in still.silent,
        "is_in": _is_in(still, number),
        "last_entered": _last_entered(watched, number),
    }


def silent(watched: WatchedRun, analyst: Analyst, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the ranks that wait for no other rank while others wait for them, most waited for first."""
    still = analyst.hang()
    if still is None:
        return {"sentence": "", "silent": []}
    rows = [
        {
            "rank": number,
            "node": int(watched.ranks.node[number]),
            "waited_for_by": still.waited_for_by[number],
            "is_in": _is_in(still, number),
            "last_entered": _last_entered(watched, number),
        }
        for number in _furthest_behind(watched, still)[:_MOST_SILENT]
    ]
    return {"sentence": silent_rank_sentence(watched, still), "silent": rows}


def silent_rank_sentence(watched: WatchedRun, still: HangAnalysis) -> str:
    """Describe the rank that most ranks wait for."""
    if not (numbers := _furthest_behind(watched, still)):
        return still.sentence
    first, action = numbers[0], still.action(numbers[0])
    doing = "between two steps" if action is None else f"in {str(action.kind).replace('_', ' ')}"
    also = f" (and for {format_ranks(numbers[1:])})" if len(numbers) > 1 else ""
    where = f"rank {first} on node {watched.ranks.node[first]}, {doing} of step {still.steps[first]}{also}"
    return f"{still.waited_for_by[first]} ranks wait for {where}"


def _furthest_behind(watched: WatchedRun, still: HangAnalysis) -> list[int]:
    """Return, of silent tensor-parallel peers, those that have done least: the others wait inside a compute
    action."""
    done = still.steps * (int(still.done.max()) + 1) + still.done
    sharers = watched.ranks.sharers
    least = np.repeat(done.reshape(-1, sharers).min(axis=1), sharers)
    return [number for number in still.silent if done[number] == least[number]]


def _is_in(still: HangAnalysis | None, number: int) -> str | None:
    """Return the unfinished action of a rank, by its program; ``None`` unless the run hangs."""
    if still is None:
        return None
    return "between two steps" if (action := still.action(number)) is None else str(action).replace("_", " ")


def _last_entered(watched: WatchedRun, number: int) -> dict[str, Any] | None:
    """Return the newest span of a rank; ``None`` if it has none."""
    store = watched.store
    name = int(store.last_name[number])
    if name < 0:
        return None
    ago = time.time() - float(store.last_end_ns[number]) * 1e-9
    return {"name": store.names.names[name], "step": int(store.last_step_of[number]), "seconds_ago": ago}
