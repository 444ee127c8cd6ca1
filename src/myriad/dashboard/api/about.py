"""The run as a whole: what it is, how it goes, what happened."""

import re
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api.questions import as_int
from myriad.dashboard.api.ranks import told_silent
from myriad.dashboard.insight.state import state_sentence
from myriad.dashboard.run_files import number
from myriad.dashboard.watched import Watched
from myriad.jsonl import Record

__all__ = ["faults", "overview", "run"]

_COLUMNS = ("step", "time", "loss", "tokens_per_second", "step_seconds")
_MOST_EVENTS = 500
_NOT_TOLD = ("time", "event", "evidence", "rule", "log")
_DECISIONS = (
    *("fault", "diagnosis", "health", "refusal", "quarantine", "eviction", "restart", "move", "takeover"),
    *("spares", "replace", "drain", "requeue"),
)


def run(watched: Watched, analyst: Analyst, query: Mapping[str, str]) -> dict[str, Any]:
    """What it is."""
    files, store, ranks = watched.files, watched.store, watched.ranks
    steps = store.steps()
    layout = {axis: getattr(ranks.layout, axis) for axis in ("dp", "pp", "cp", "tp", "ep", "virtual_stages")}
    return {
        "name": files.run.path.resolve().name,
        "state": watched.state,
        "sentence": sentence(watched, analyst),
        "world": ranks.world,
        "layout": layout,
        "node_size": ranks.node_size,
        "nodes": [f"node {node}" for node in range(-(-ranks.world // ranks.node_size))],
        "phases": store.names.phases_in_order(),
        "first_step": steps[0] if steps else None,
        "last_step": watched.last_step,
        "first_seconds": None if store.first_ns is None else store.first_ns * 1e-9,
        "predicted": watched.plan is not None,
        "peak_flops": files.peaks.flops_per_second,
        "peak_source": files.peaks.source or None,
        "dropped": dropped(watched),
        "problems": store.counts.problems,
        "clock_error_seconds": store.clock_error_seconds,
        "attempts": sum(event.get("event") == "start" for event in files.events),
    }


def dropped(watched: Watched) -> dict[str, int]:
    """What is not shown, counted, by why."""
    counts = watched.store.counts
    return {
        "spans_lost_by_ranks": counts.lost_before,
        "spans_too_old": counts.too_old,
        "steps_forgotten": counts.dropped_steps,
        "batches_refused": counts.refused_batches,
        "batches_sent_again": counts.repeated_batches,
        "batches_flooded": counts.flooded_batches,
        "files_refused": counts.refused_files,
        "lines_wrong": watched.files.num_wrong_lines,
        "steps_without_line": watched.files.steps.without_line,
        "spans_kept": counts.kept,
    }


def sentence(watched: Watched, analyst: Analyst) -> str:
    """How it goes, and the first thing that is wrong."""
    step, planned = watched.steps_done, watched.files.job.train.steps
    told = state_sentence(watched.state, step, planned, watched.step_seconds, watched.quiet_seconds)
    if (still := analyst.standstill()) is not None:
        return f"{told}; {told_silent(watched, still)}"
    return "; ".join([told, *(one.sentence for one in analyst.culprits[:1])])


def overview(watched: Watched, query: Mapping[str, str]) -> dict[str, Any]:
    """Curves, ledger and events."""
    points = as_int(query, "points", 2000, 2, 20_000)
    metrics = watched.files.metrics
    places: Iterable[int] = (
        np.unique(np.linspace(0, len(metrics) - 1, min(points, len(metrics))).astype(int)) if metrics else []
    )
    lines = [metrics[place] for place in places]
    account = watched.account
    return {
        **{key: [number(line.get(key)) for line in lines] for key in _COLUMNS},
        "mfu": list(map(watched.files.peaks.mfu, lines)),
        "ledger": account.get("classes", {}),
        "ettr": account.get("effective_ratio"),
        "goodput": account.get("goodput_tokens_per_second"),
        "events": [_event(event) for event in watched.files.events[-_MOST_EVENTS:]],
    }


def _event(event: Record) -> dict[str, Any]:
    return {
        "time": number(event.get("time")),
        "step": number(event.get("step")),
        "event": str(event.get("event", "")),
        "text": _text(event),
    }


def _text(event: Record) -> str:
    """What people want to know of it first."""
    if problem := event.get("problem"):
        return re.sub(r" \(log:.*", "", str(problem).partition("\n")[0])[:300]
    return ", ".join(f"{key} {value}" for key, value in event.items() if key not in _NOT_TOLD)[:300]


def faults(watched: Watched, query: Mapping[str, str]) -> dict[str, Any]:
    """Nodes, and what was decided about them."""
    decided = [event for event in watched.files.events if event.get("event") in _DECISIONS]
    of_kind: dict[str, list[dict[str, Any]]] = {
        kind: [_decision(event) for event in decided if event["event"] == kind][-_MOST_EVENTS:]
        for kind in ("eviction", "diagnosis")
    }
    return {
        "nodes": _nodes(watched, decided),
        "decisions": [_decision(event) for event in decided[-_MOST_EVENTS:]],
        "evictions": of_kind["eviction"],
        "diagnoses": of_kind["diagnosis"],
        "checkpoints": watched.checkpoints.newest(),
    }


def _decision(event: Record) -> dict[str, Any]:
    told = {key: event.get(key) for key in ("rank", "node", "cause", "verdict", "rule", "evidence")}
    return _event(event) | told


def _nodes(watched: Watched, decided: list[Record]) -> list[dict[str, Any]]:
    """A node was last heard of when the newest span of its ranks ended, or when its executor last counted
    what its links carry, as it does each second whatever ranks do."""
    ranks, ends = watched.ranks, watched.store.last_end_ns
    looks, now, health = watched.node_looks(), time.time(), _health(decided)
    nodes = []
    for node in range(-(-ranks.world // ranks.node_size)):
        members = ranks.ranks_of_node(node)
        heard = [int(ends[members].max()) * 1e-9, looks[node].time if node in looks else -1.0]
        ago = None if max(heard) < 0 else max(0.0, now - max(heard))
        span = [int(members[0]), int(members[-1])]
        nodes.append(
            {
                "node": node,
                "heartbeat_seconds_ago": ago,
                "health": health.get(node, "no complaint"),
                "ranks": span,
            }
        )
    return nodes


def _health(decided: list[Record]) -> dict[int, str]:
    """The last that was said of each node."""
    return {
        event["node"]: f"{event['event']}: {_text(event)}"
        for event in decided
        if isinstance(event.get("node"), int) and event["event"] != "restart"
    }
