"""Endpoints about the whole run: what it is, its state, its events and faults, and where a step's time
goes."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api.query_parameters import as_int
from myriad.dashboard.api.rank_api import silent_rank_sentence
from myriad.dashboard.insight.losses import Losses
from myriad.dashboard.node_table import evidence_rows, health_of, node_rows
from myriad.dashboard.run_files import Curves, number
from myriad.dashboard.watched_run import WatchedRun
from myriad.run.event_text import event_text
from myriad.run.run_status import state_sentence
from myriad.run.score_history import ScoreHistory, score_histories
from myriad.system.jsonl import Record
from myriad.units import format_seconds

__all__ = ["faults", "norms", "overview", "run"]

_MOST_EVENTS, _MOST_NUMBER = 500, 2**53
_MOST_STEP = 2**31 - 1
_MOST_SCORES, _MOST_EVALUATIONS = 200, 200
_MOST_NORMS, _MOST_LAYERS = 60, 400
_MOST_VALIDATIONS, _MOST_NAME = 12, 60
_MOST_MARKS = 400
_MARKED = (
    *("fault", "diagnosis", "health", "eviction", "restart", "resume", "start", "finish", "interrupted"),
    *("spike", "skip", "bad_block", "job_changed", "phase", "start_over", "held", "checkpoint"),
)
"""Events that are marked on the charts, because they often explain a change."""
_BEHIND_SECONDS = 10.0
_MOST_FEW = 5
"""Stages of fewer ranks have no spread to speak of: deviations are shown in percent instead of scores."""
_AT_STEPS = ("spike", "skip", "overflow")
_REPEATED = ("diagnosis", "log_match", "health", "retry", "telemetry", *_AT_STEPS)
_TOGETHER_SECONDS = 900.0
_ABOUT_LAST_STEP = ("held", "checkpoint", "finish", "start")
_DECISIONS = (
    *("fault", "diagnosis", "health", "refusal", "quarantine", "eviction", "restart", "move", "takeover"),
    *("spares", "replace", "drain", "requeue", "spike", "skip", "bad_block", "start_over", "retry", "held"),
)


def run(watched: WatchedRun, analyst: Analyst, query: Mapping[str, str]) -> dict[str, Any]:
    """Return what the run is: name, state, layout, phases and counts."""
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
        "few_peers": ranks.world // ranks.layout.pp < _MOST_FEW,
        "nodes": [f"node {node}" for node in range(-(-ranks.world // ranks.node_size))],
        "phases": store.names.phases_in_order(),
        "first_step": steps[0] if steps else None,
        "last_step": watched.last_step,
        "first_seconds": None if store.first_ns is None else store.first_ns * 1e-9,
        "predicted": watched.plan is not None,
        "peak_flops": files.peaks.flops_per_second,
        "peak_source": files.peaks.source or None,
        "dropped": dropped(watched),
        "problems": [*store.counts.problems, *files.problems],
        "clock_error_seconds": store.clock_error_seconds,
        "attempts": sum(event.get("event") == "start" for event in files.events),
    }


def dropped(watched: WatchedRun) -> dict[str, int]:
    """Return the number of spans and files that are not shown, by reason."""
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


def sentence(watched: WatchedRun, analyst: Analyst) -> str:
    """Return the state of the run in a sentence, with the first problem."""
    step, planned = watched.steps_done, watched.files.job.train.steps
    state = state_sentence(watched.state, step, planned, watched.step_seconds, watched.quiet_seconds)
    parts = [state]
    if (still := analyst.hang()) is not None:
        parts.append(silent_rank_sentence(watched, still))
    elif watched.state != "finished":  # then the maps show which rank was slow, and nothing is to be done
        parts += [one.sentence for one in analyst.suspects[:1]]
    return "; ".join([*parts, *_doubts(watched)])


def _doubts(watched: WatchedRun) -> list[str]:
    """Return why the shown data may be stale, and which state may be lost."""
    files, found = watched.files, []
    if files.is_gone:
        found.append(f"the run's folder {files.run.path} is gone: this is what was read before")
    elif (behind := watched.behind_seconds) > _BEHIND_SECONDS:
        found.append(f"its files have been read for {format_seconds(behind)}: the disk is slow, or hangs")
    newest = next((one for one in reversed(files.events) if one.get("event") in _ABOUT_LAST_STEP), {})
    if newest.get("event") == "held":
        step = _whole(newest.get("step"))
        found.append(f"step {step} is in memory only: `myriad checkpoint save` stores it elsewhere")
    return found


def overview(watched: WatchedRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the curves, the loads of experts, the scores on tasks, the account of time and the newest
    events."""
    points = as_int(query, "points", 2000, 2, 20_000)
    first, last = (as_int(query, key, -1, 0, _MOST_STEP) for key in ("first", "last"))
    account, events = watched.account, watched.files.events
    scores, speed = score_histories(events), watched.files.speed_meter.speed
    begin = max(0, len(events) - _MOST_EVENTS)
    shown = [_event(event, place) for place, event in enumerate(events[begin:], begin)]
    return {
        **watched.files.curves.thinned(points, watched.files.peaks, first, None if last < 0 else last),
        "validation": validation_curves(events),
        "marks": _marks(events, watched.files.curves),
        "last_step": watched.steps_done,
        "newest_loss": _newest_loss(watched.files.metrics),
        "began": _began(watched),
        "speed": None if speed is None else asdict(speed),
        "ledger": account.get("classes", {}),
        "ettr": account.get("effective_ratio"),
        "goodput": account.get("goodput_tokens_per_second"),
        "expert_loads": watched.files.expert_loads,
        "norms_step": watched.files.norms_step,
        "scores": [_score(one) for one in scores[:_MOST_SCORES]],
        "num_scores": len(scores),
        "num_events": len(events),
        "events": grouped(shown),
    }


def grouped(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join events that repeat: the newest stands for all of the same kind, rank and node in which none comes
    long after the one before. ``times``: their number; ``seconds``: from the first to the newest."""
    found: list[dict[str, Any]] = []
    newest: dict[tuple[Any, ...], int] = {}
    for event in events:
        key = (event["event"], event["rank"], event["node"])
        before = found[newest[key]] if key in newest else None
        if event["event"] in _REPEATED and before and None not in (event["time"], before["time"]):
            passed = event["time"] - before["time"]
            if 0 <= passed <= _TOGETHER_SECONDS:
                event |= {"times": before.get("times", 1) + 1, "seconds": before.get("seconds", 0.0) + passed}
                found[newest[key]] = {}
        newest[key] = len(found)
        found.append(event)
    return [event for event in found if event]


def _marks(events: Sequence[Record], curves: Curves) -> list[dict[str, Any]]:
    """Return the newest events that charts mark, with ``at``, the step at which they do. Those about single
    steps are not joined."""
    marked = [_event(event, place) for place, event in enumerate(events) if event.get("event") in _MARKED]
    joined = grouped([event for event in marked if event["event"] not in _AT_STEPS])
    single = [event for event in marked if event["event"] in _AT_STEPS]
    newest = sorted([*joined, *single], key=lambda event: event["place"])[-_MOST_MARKS:]
    steps = curves.steps_at([event["time"] or 0.0 for event in newest])
    return [event | {"at": event["step"] or step} for event, step in zip(newest, steps, strict=True)]


def _newest_loss(lines: Sequence[Record]) -> dict[str, Any] | None:
    """Return the newest finite loss, its step, and the step since which losses are not finite."""
    if not lines:
        return None
    for place in range(len(lines) - 1, -1, -1):
        if (loss := number(lines[place].get("loss"))) is not None:
            since = lines[place + 1]["step"] if place + 1 < len(lines) else None
            return {"loss": loss, "step": lines[place]["step"], "since": since}
    return {"loss": None, "step": None, "since": lines[0]["step"]}


def _began(watched: WatchedRun) -> float:
    """Return the time at which the run began, from which charts count."""
    times = (number(one.get("time")) for one in (*watched.files.events[:1], *watched.files.metrics[:1]))
    return min((time for time in times if time is not None), default=0.0)


_VALIDATIONS = {"loss": "validation", "ema_loss": "moving average"}


def validation_curves(events: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the losses of validations: ``name``, ``step`` and ``value`` of each validation set, and of the
    moving average. A validation of a step that was repeated replaces the earlier ones from there on."""
    found: dict[str, ScoreHistory] = {}
    for event in events:
        step, kind = _whole(event.get("step")), event.get("event")
        if step is None or kind not in ("validation", "validation_set"):
            continue
        own = {key: number(event.get(key)) for key in _VALIDATIONS}
        for key, value in own.items():
            name = _VALIDATIONS[key]
            if kind == "validation_set":
                name = str(event.get("name"))[:_MOST_NAME] + (
                    " (moving average)" if key == "ema_loss" else ""
                )
            if value is not None and (name in found or len(found) < _MOST_VALIDATIONS):
                found.setdefault(name, ScoreHistory(name)).add(step, value, None)
    return [{"name": one.name, "step": one.steps, "value": one.values} for one in found.values()]


def norms(watched: WatchedRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the norms of layers: for each kind a row for each layer of the newest step that has norms, with
    a value for each such step. Some steps are left out evenly."""
    lines = [line for line in watched.files.metrics if line.get("layer_norms")]
    apart = -(-len(lines) // _MOST_NORMS)
    lines = lines[::-1][::apart][::-1] if lines else []
    layers = [*lines[-1]["layer_norms"].get("gradient", {})][:_MOST_LAYERS] if lines else []
    return {"step": [line["step"] for line in lines], "layers": layers} | {
        kind: [[line["layer_norms"].get(kind, {}).get(layer) for line in lines] for layer in layers]
        for kind in ("gradient", "parameter", "update")
    }


def _score(found: ScoreHistory) -> dict[str, Any]:
    """Return a score as JSON, with the first evaluation and the newest ones."""
    places = list(range(len(found.steps)))
    shown = [*places[:1], *places[1:][1 - _MOST_EVALUATIONS :]]
    return {
        "name": found.name,
        "documents": found.num_documents,
        "step": [found.steps[place] for place in shown],
        "value": [found.values[place] for place in shown],
        "standard_error": [found.standard_errors[place] for place in shown],
    }


def _event(event: Record, place: int) -> dict[str, Any]:
    """Return an event as JSON; ``place`` is its index among all events."""
    return {
        "place": place,
        "time": number(event.get("time")),
        "event": str(event.get("event", "")),
        "text": event_text(event),
        **{key: _whole(event.get(key)) for key in ("step", "rank", "node")},
    }


def _whole(value: Any) -> int | None:
    """Return a step, rank or node number; ``None`` if the value is not one."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < _MOST_NUMBER else None


def faults(watched: WatchedRun, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the nodes, the decisions about them, and the checkpoints."""
    events = enumerate(watched.files.events)
    decided = [(place, event) for place, event in events if event.get("event") in _DECISIONS]
    of_kind: dict[str, list[dict[str, Any]]] = {
        kind: [_decision(event, place) for place, event in decided if event["event"] == kind][-_MOST_EVENTS:]
        for kind in ("eviction", "diagnosis")
    }
    return {
        "nodes": _nodes(watched, [event for _, event in decided]),
        "evidence": evidence_rows(watched.files.run.counters_path / "around"),
        "decisions": [_decision(event, place) for place, event in decided[-_MOST_EVENTS:]],
        "num_decisions": len(decided),
        "evictions": of_kind["eviction"],
        "diagnoses": of_kind["diagnosis"],
        "checkpoints": watched.checkpoints.newest(),
    }


def _decision(event: Record, place: int) -> dict[str, Any]:
    return _event(event, place) | {key: event.get(key) for key in ("cause", "verdict", "rule", "evidence")}


def _nodes(watched: WatchedRun, decided: list[Record]) -> list[dict[str, Any]]:
    """Return a row for each node. Its heartbeat is the end of the newest span of its ranks, or the newest
    line of link counters, which the node agent writes each second whatever the ranks do."""
    ranks, ends = watched.ranks, watched.store.last_end_ns
    samples, now, health = watched.node_samples(), time.time(), health_of(decided)
    facts = watched.node_facts()
    known = {row["node"]: row for row in node_rows(facts, samples, health, now)}
    nodes = []
    for node in range(-(-ranks.world // ranks.node_size)):
        members = ranks.ranks_of_node(node)
        heard = [int(ends[members].max()) * 1e-9, samples[node].time if node in samples else -1.0]
        ago = None if max(heard) < 0 else max(0.0, now - max(heard))
        span = [int(members[0]), int(members[-1])]
        nodes.append(
            known.get(node, {})
            | {
                "node": node,
                "heartbeat_seconds_ago": ago,
                "health": health.get(node, "no complaint"),
                "ranks": span,
            }
        )
    return nodes


def waterfall(watched: WatchedRun, analyst: Analyst, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the time losses from the peak down to the MFU, measured over the newest steps and predicted."""
    (found, steps), plan = analyst.losses_and_steps(None, None), watched.plan
    return {
        "measured": None if found is None else _as_json(found),
        "steps": [steps[0], steps[-1]] if steps else None,
        "predicted": None if plan is None else _as_json(plan.losses),
    }


def shares(watched: WatchedRun, analyst: Analyst, query: Mapping[str, str]) -> dict[str, Any]:
    """Return the time losses over selected steps, as shares of the step time."""
    last = as_int(query, "last", -1, 0, _MOST_STEP)
    first = as_int(query, "first", -1, 0, _MOST_STEP)
    found = analyst.losses(None if first < 0 else first, None if last < 0 else last)
    return {} if found is None else {"seconds": found.step_seconds, "shares": dict(found.shares)}


def _as_json(found: Losses) -> dict[str, Any]:
    rows = [{"name": name, "lost": lost, "left": left} for name, lost, left in found.waterfall()]
    return {
        "step_seconds": found.step_seconds,
        "ideal_seconds": found.ideal_seconds,
        "mfu": found.mfu,
        "bubble_and_slower_told_apart": found.split,
        "losses": rows,
    }
