"""Answers about many runs: the table, the curves of chosen runs, and what differs between them.

A run is named by its id from the table, so a request can name no other folder. Conditions of ``filter`` are
separated by commas: those with an operator are conditions of `myriad runs list --filter`; other words must
occur in the name, the path, the job's name, the note or the tags."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from myriad.dashboard.api.query_parameters import QueryParameterError, as_int
from myriad.dashboard.many.live_table import LiveTable, id_of
from myriad.dashboard.many.run_curves import AXES, NO_CURVES, CurveCache
from myriad.errors import BadInputError, plain_value
from myriad.many_runs.run_diff import environment_of, shown_value
from myriad.many_runs.run_row import RunRow
from myriad.many_runs.run_table import (
    COLUMNS,
    differing_keys,
    filtered,
    is_in_layout_column,
    sorted_rows,
    value_of,
    values_that_differ,
)
from myriad.run import Run
from myriad.run.run_lines import figure_of
from myriad.run.run_status import STATES
from myriad.supervise.driver.node_inventory import read_nodes

__all__ = ["MOST_CHOSEN", "RunsApi"]

MOST_CHOSEN = 10
"""Runs in one chart: five colours, solid and dashed."""
_MOST_ROWS, _MOST_TEXT, _MOST_DIFFERENCES, _MOST_CHANGES = 1000, 400, 12, 5
_MOST_KEYS = 500
_MOST_FILTER = 1000
_HAS_OPERATOR = re.compile(r"[=<>]")


class RunsApi:
    """The answers, from the rows of one table."""

    def __init__(self, table: LiveTable, *, may_write: bool = False) -> None:
        """``may_write``: whether the page offers to write notes, archive and delete."""
        self._table, self._curves, self._may_write = table, CurveCache(), may_write

    def runs(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the rows that meet ``filter``, in the order of ``sort``, with the value of ``group``.

        Archived runs are left out without ``archived`` = 1."""
        with_archived = query.get("archived", "") == "1"
        every = [row for row in self._table.rows if with_archived or not row.notes.archived]
        rows = _in_order(_matching(every, query.get("filter", "")), query.get("sort", "") or "-started")
        keys = [key for key in differing_keys(rows) if not is_in_layout_column(key)]
        group = query.get("group", "")
        if group:
            _in_order((), group)  # refuses a wrong key
        return {
            "runs": [_row(row, keys, group) for row in rows[:_MOST_ROWS]],
            "matching": len(rows),
            "total": len(every),
            "num_archived": sum(row.notes.archived for row in self._table.rows),
            "may_write": self._may_write,
            "columns": [*COLUMNS],
            "keys": keys[:_MOST_KEYS],
            "problems": list(self._table.problems),
            "unread": self._table.num_unread,
            "most_chosen": MOST_CHOSEN,
        }

    def run(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the states of all runs in a sentence, as the page of one run says its state."""
        states = Counter(row.state for row in self._table.rows)
        parts = [f"{states[state]} {state}" for state in STATES if states[state]]
        number = len(self._table.rows)
        waits = f", {self._table.num_unread} not read yet" if self._table.num_unread else ""
        sentence = f"{number} {'run' if number == 1 else 'runs'}{': ' if parts else ''}{', '.join(parts)}"
        return {"name": "runs", "sentence": sentence + waits}

    def curves(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the curves of the runs of ``runs`` by an axis, ``by``, between ``first`` and ``last``."""
        points, axis = as_int(query, "points", 1000, 2, 20_000), query.get("by", "") or "steps"
        if axis not in AXES:
            raise QueryParameterError("by", axis, f"one of {', '.join(AXES)}")
        first, last = (_place(query, key) for key in ("first", "last"))
        found = []
        for row in self._chosen(query):
            curves = self._curves.of(id_of(row.path), Run(row.path))
            columns = (curves or NO_CURVES).thinned(points, axis, first, last)
            found.append(_name(row) | columns | {"reading": curves is None})
        return {"by": axis, "runs": found}

    def diff(self, query: Mapping[str, str]) -> dict[str, Any]:
        """Return the keys of the jobs and the facts of the environments that differ between the runs of
        ``runs``, with a text for each run, and what resumes changed in each."""
        rows = self._chosen(query)
        keys = differing_keys(rows)
        environments = [
            environment_of(Run(row.path).read_events(), read_nodes(Run(row.path).nodes_path)) for row in rows
        ]
        facts = dict.fromkeys(key for one in environments for key in one)
        return {
            "runs": [_name(row) for row in rows],
            "job": [[key, [_text(row.job, key) for row in rows]] for key in keys],
            "environment": [
                [key, texts]
                for key in facts
                if len(set(texts := [_fact(one, key) for one in environments])) > 1
            ],
            "changes": [[_change(one) for one in row.changes] for row in rows],
        }

    def _chosen(self, query: Mapping[str, str]) -> list[RunRow]:
        """Return the rows of the runs that are asked for. Runs that have been deleted are left out."""
        names = [name for name in query.get("runs", "").split(",") if name]
        if not 0 < len(names) <= MOST_CHOSEN:
            raise QueryParameterError("runs", query.get("runs", ""), f"1 to {MOST_CHOSEN} ids of runs")
        return [row for name in dict.fromkeys(names) if (row := self._table.row(name)) is not None]


def _matching(rows: Sequence[RunRow], text: str) -> list[RunRow]:
    if len(text) > _MOST_FILTER:
        raise QueryParameterError("filter", text, f"at most {_MOST_FILTER} characters")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    words = [part.lower() for part in parts if not _HAS_OPERATOR.search(part)]
    try:
        found = filtered(rows, [part for part in parts if _HAS_OPERATOR.search(part)])
    except BadInputError as error:
        raise QueryParameterError("filter", str(error.value), error.allowed) from None
    return [row for row in found if all(word in _searched(row) for word in words)]


def _searched(row: RunRow) -> str:
    return "\n".join((row.name, str(row.path), row.job_name or "", row.notes.note, *row.notes.tags)).lower()


def _in_order(rows: Sequence[RunRow], key: str) -> list[RunRow]:
    try:
        return sorted_rows(rows, key)
    except BadInputError as error:
        raise QueryParameterError("sort", key, error.allowed) from None


def _name(row: RunRow) -> dict[str, Any]:
    return {"id": id_of(row.path), "name": row.name, "path": str(row.path)}


def _row(row: RunRow, keys: Sequence[str], group: str) -> dict[str, Any]:
    different = values_that_differ(row, keys)
    shown = [[key, plain_value(different[key])[:_MOST_TEXT]] for key in [*different][:_MOST_DIFFERENCES]]
    return (
        row.as_json()
        | _name(row)
        | {
            "layout": row.layout,
            "differs": shown,
            "num_differs": len(different),
            "changes": [_change(one) for one in row.changes[-_MOST_CHANGES:]],
            "num_changes": len(row.changes),
            "group": _group(row, group) if group else "",
        }
    )


def _group(row: RunRow, key: str) -> str:
    value = value_of(row, key)
    text = " ".join(value) if isinstance(value, tuple) else plain_value(value)
    return "–" if value is None else text[:_MOST_TEXT]


def _change(event: Mapping[str, Any]) -> dict[str, Any]:
    """Return a change of the job as texts."""
    shown = {key: plain_value(event.get(key))[:_MOST_TEXT] for key in ("key", "before", "after")}
    user = event.get("user")
    step = figure_of(event.get("step"))
    return shown | {"step": step, "user": plain_value(user)[:_MOST_TEXT] if user else ""}


def _text(values: Mapping[str, Any], key: str) -> str | None:
    return plain_value(values[key])[:_MOST_TEXT] if key in values else None


def _fact(facts: Mapping[str, Any], key: str) -> str | None:
    return plain_value(shown_value(key, facts[key]))[:_MOST_TEXT] if key in facts else None


def _place(query: Mapping[str, str], key: str) -> float | None:
    try:
        place = float(query[key]) if query.get(key) else None
    except ValueError:
        place = math.nan
    if place is not None and not math.isfinite(place):
        raise QueryParameterError(key, query[key], "a number")
    return place
