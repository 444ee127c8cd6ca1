"""What the page of many runs may change: only with ``myriad watch --write``, and only by POST with JSON.

    POST /api/runs/notes      {"run": ID, "note": "...", "tags": [...]}
    POST /api/runs/archive    {"runs": [ID, ...], "archived": true}
    POST /api/runs/plan       {"runs": [ID, ...]} -> {"plan": PLAN, "delete": [...], "stay": [...]}
    POST /api/runs/delete     {"plan": PLAN} -> {"deleted": [...], "problems": [...]}

`myriad.dashboard.request_guard` refuses pages of other sites by Origin, and browsers send them no cookie. The
content type must be application/json, which a form of another site cannot send. Runs are deleted in two
steps: a plan is what the page shows, and holds for some minutes and one use. What stays, and why, is decided
by `myriad.many_runs.run_pruning` as for `myriad runs prune`; a run that has changed since the plan stays too.
"""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from myriad.dashboard.api.query_parameters import QueryParameterError, json_body
from myriad.dashboard.many.live_table import LiveTable, id_of
from myriad.dashboard.tile import to_json
from myriad.errors import BadInputError, MyriadError
from myriad.many_runs.run_pruning import PrunePlan, plan_deletion, prune
from myriad.many_runs.run_row import RunRow, read_row
from myriad.run import Run
from myriad.run.run_notes import write_notes

__all__ = ["RunsWrites", "write_routes"]

_MOST_BYTES, _MOST_RUNS = 2**17, 100
_PLAN_SECONDS, _MOST_PLANS = 600.0, 8
_READ_ONLY = "the page is read-only: start it with myriad watch --write"


class RunsWrites:
    """The changes, to runs of one table only."""

    def __init__(self, table: LiveTable) -> None:
        self._table = table
        self._plans: dict[str, tuple[float, PrunePlan]] = {}
        self._lock = threading.Lock()

    def notes(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Write a note and the tags of a run."""
        note, tags = asked.get("note"), asked.get("tags")
        if (
            not isinstance(note, str)
            or not isinstance(tags, list)
            or not all(type(one) is str for one in tags)
        ):
            raise QueryParameterError("note", "", "a text, with a list of tags")
        row = self._row(asked.get("run"))
        found = write_notes(Run(row.path), note=note, tags=tags)
        self._table.refresh(row.path)
        return {"note": found.note, "tags": list(found.tags)}

    def archive(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Archive runs, or take them back. A run that cannot be written is a problem of its own."""
        archived = asked.get("archived")
        if not isinstance(archived, bool):
            raise QueryParameterError("archived", str(archived), "true or false")
        problems = []
        for row in self._rows(asked):
            try:
                write_notes(Run(row.path), archived=archived)
            except OSError as error:
                problems.append(f"{row.path}: {error.strerror}")
            self._table.refresh(row.path)
        return {"problems": problems}

    def plan(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a deletion would remove, and which runs stay. Changes nothing."""
        chosen = [read_row(Run(row.path)) for row in self._rows(asked)]
        paths = {row.path for row in chosen}
        plan = plan_deletion(chosen, [*chosen, *(row for row in self._table.rows if row.path not in paths)])
        name = secrets.token_urlsafe(16)
        with self._lock:
            now = time.monotonic()
            kept = [(key, one) for key, one in self._plans.items() if now < one[0]]
            self._plans = dict(kept[1 - _MOST_PLANS :]) | {name: (now + _PLAN_SECONDS, plan)}
        return {
            "plan": name,
            "delete": [_named(row) | {"bytes": plan.num_bytes[row.path]} for row in plan.delete],
            "stay": [_named(row) | {"why": plan.stay[row.path]} for row in chosen if row.path in plan.stay],
            "bytes": plan.total_bytes,
        }

    def delete(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Delete the runs of a plan, which is used up by it."""
        name = asked.get("plan")
        with self._lock:
            until, plan = self._plans.pop(name if isinstance(name, str) else "", (0.0, None))
        if plan is None or time.monotonic() >= until:
            raise QueryParameterError("plan", str(name), "a plan of the last minutes that was not used")
        deleted, problems = prune(plan, show=lambda row: self._table.refresh(row.path))
        return {
            "deleted": [id_of(path) for path in deleted],
            "problems": [f"{path}: {why}" for path, why in problems.items()],
        }

    def _rows(self, asked: Mapping[str, Any]) -> list[RunRow]:
        names = asked.get("runs")
        if not isinstance(names, list) or not 0 < len(names) <= _MOST_RUNS:
            raise QueryParameterError("runs", "", f"1 to {_MOST_RUNS} ids of runs")
        return list({(row := self._row(name)).path: row for name in names}.values())

    def _row(self, name: Any) -> RunRow:
        row = self._table.row(name) if isinstance(name, str) else None
        if row is None:
            raise QueryParameterError("run", str(name), "the id of a run in the table")
        return row


def write_routes(table: LiveTable, *, may_write: bool) -> list[Route]:
    """Return the routes. If the page may not write, each of them refuses."""
    writes = RunsWrites(table)
    answers = {"notes": writes.notes, "archive": writes.archive, "plan": writes.plan, "delete": writes.delete}
    return [
        Route(f"/api/runs/{name}", _endpoint(answer if may_write else _refuse), methods=["POST"])
        for name, answer in answers.items()
    ]


def _refuse(asked: Mapping[str, Any]) -> dict[str, Any]:
    raise BadInputError("--write", "off", _READ_ONLY)


def _endpoint(answer: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Callable[[Request], Any]:
    async def ask(request: Request) -> Response:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise QueryParameterError("content-type", kind, "application/json")
        asked = await json_body(request, _MOST_BYTES, "a JSON object")
        try:
            return _json(await run_in_threadpool(answer, asked), 200)
        except MyriadError as error:
            return _json({"error": str(error)}, 400 if error.exit_code == 2 else 502)
        except OSError as error:
            return _json({"error": f"{error.filename or 'a file'}: {error.strerror}"}, 502)

    return ask


def _json(found: dict[str, Any], status: int) -> Response:
    return Response(to_json(found), status, media_type="application/json")


def _named(row: RunRow) -> dict[str, Any]:
    return {"id": id_of(row.path), "name": row.name, "path": str(row.path)}
