"""Decoders of what a table of runs shows of run folders, and of what its page receives."""

import json
from functools import cache
from typing import Any

from decoder_target import Target, as_json, scratch, write_scratch
from mutations import JSON, JSON_LINES, dump_json

__all__ = ["RUN_TABLE_TARGETS"]

_STARTED = {
    "time": 1.7e9,
    "event": "start",
    "world": 2,
    "device": "cuda",
    "precision": "bfloat16",
    "threads": 1,
}
_EVENTS: tuple[dict[str, Any], ...] = (
    _STARTED | {"peak_flops": 1e15, "peak_source": "data sheet", "software": {"myriad": "1"}, "host": "a"},
    {"time": 1.7e9, "event": "validation", "step": 2, "loss": 2.5},
    {
        "time": 1.7e9,
        "event": "job_changed",
        "step": 2,
        "key": "train.steps",
        "before": 1,
        "after": [2],
        "user": "a@b",
    },
    {"time": 1.7e9, "event": "requeue", "problem": "not requeued: no"},
    {"time": 1.7e9, "event": "held", "step": 3},
    {"time": 1.7e9, "event": "finish", "step": 4},
)


@cache
def _run() -> Any:
    """Return a run with two steps, whose other files the targets write."""
    from myriad.job import dump_toml, load_job
    from myriad.run import Run

    write_scratch("table/run/job.toml", dump_toml(load_job("tiny")).encode())
    line = {"step": 1, "time": 1.7e9, "loss": 2.5, "step_seconds": 1.0, "flops": 1e12, "tokens": 512}
    write_scratch("table/run/metrics.jsonl", dump_json(line) + b"\n" + dump_json(line | {"step": 2}) + b"\n")
    return Run(scratch() / "table" / "run")


def _row(data: bytes) -> None:
    """The events of a run, as a row of the table, its curves and its differences."""
    from myriad.dashboard.many.live_table import LiveTable
    from myriad.dashboard.many.run_curves import RunCurves
    from myriad.dashboard.many.runs_api import RunsApi
    from myriad.dashboard.tile import to_json
    from myriad.many_runs.run_row import read_row

    run = _run()
    write_scratch("table/run/events.jsonl", data)
    table = LiveTable([])
    table.rows = (read_row(run),)
    api = RunsApi(table)
    found = api.runs({"group": "state"})["runs"]
    to_json([found, api.diff({"runs": found[0]["id"]}), RunCurves.read(run).thinned(100, "tokens", 1, 600)])


def _notes(data: bytes) -> None:
    from myriad.run.run_notes import read_notes

    write_scratch("table/run/notes.json", data)
    read_notes(_run()).check()


def _notes_request(data: bytes) -> None:
    from myriad.dashboard.api.query_parameters import QueryParameterError
    from myriad.dashboard.many.live_table import LiveTable
    from myriad.dashboard.many.runs_writes import RunsWrites
    from myriad.errors import BadInputError

    try:
        asked = json.loads(data)
    except (ValueError, RecursionError):
        return
    writes = RunsWrites(LiveTable([]))
    for answer in (writes.notes, writes.archive, writes.plan, writes.delete):
        if isinstance(asked, dict):
            try:
                answer(asked)
            except (QueryParameterError, BadInputError) as error:
                assert "\n" not in str(error), str(error)


RUN_TABLE_TARGETS: tuple[Target, ...] = (
    Target(
        "runs: events of a row",
        _row,
        lambda: [b"".join(dump_json(event) + b"\n" for event in _EVENTS)],
        JSON_LINES,
        slow=True,
    ),
    Target("runs: notes.json", _notes, as_json({"note": "a", "tags": ["b:1"], "archived": False}), JSON),
    Target(
        "runs: changes of the page",
        _notes_request,
        as_json({"run": "0f", "runs": ["0f"], "note": "a", "tags": ["b"], "archived": True, "plan": "x"}),
        JSON,
    ),
)
