"""The table of runs: what can be sorted and filtered by, and the keys in which the runs' jobs differ.

A name is a column (`COLUMNS`) or a key of the job (``optimizer.learning_rate``). Values compare as numbers if
both are numbers, else as text; with ``=`` and ``!=`` a text may be a pattern (``name=abl-*``), and one of the
run's tags is enough (``tags=paper``). A run without the value fails every condition except ``!=``, and comes
last in every order.
"""

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from myriad.errors import BadInputError, plain_value
from myriad.job import job_keys, suggest_key
from myriad.many_runs.run_row import RunRow
from myriad.run.run_status import RUNNING

__all__ = [
    "COLUMNS",
    "differing_keys",
    "filtered",
    "is_in_layout_column",
    "sorted_rows",
    "value_of",
    "values_that_differ",
]

COLUMNS: Mapping[str, Callable[[RunRow], Any]] = {
    "name": lambda row: row.name,
    "state": lambda row: row.state,
    "job": lambda row: row.job_name,
    "layout": lambda row: row.layout,
    "steps": lambda row: row.steps,
    "tokens": lambda row: row.tokens,
    "loss": lambda row: row.loss,
    "validation": lambda row: row.best_validation,
    "tokens_per_second": lambda row: row.tokens_per_second,
    "mfu": lambda row: row.mfu,
    "started": lambda row: row.started,
    "seconds": lambda row: row.seconds,
    "tags": lambda row: row.notes.tags or None,
}
"""Columns by name."""
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_RUNNING = "running"
"""Stands for every state of `RUNNING` in a condition."""
_IN_COLUMNS = ("name", "layout.dp", "layout.pp", "layout.cp", "layout.tp", "layout.ep")


@dataclass(frozen=True)
class _Condition:
    key: str
    operator: str
    wanted: str

    def accepts(self, row: RunRow) -> bool:
        value = value_of(row, self.key)
        if value is None:
            return self.operator == "!="
        if isinstance(value, tuple) and self.operator in ("=", "!="):
            return any(fnmatchcase(one, self.wanted) for one in value) == (self.operator == "=")
        if self.key == "state" and self.wanted == _RUNNING and self.operator in ("=", "!="):
            return (value in RUNNING) == (self.operator == "=")
        found, wanted = _number(value), _number(self.wanted)
        if found is not None and wanted is not None:
            return _OPERATORS[self.operator](found, wanted)
        text = plain_value(value)
        if self.operator in ("=", "!="):
            return fnmatchcase(text, self.wanted) == (self.operator == "=")
        return _OPERATORS[self.operator](text, self.wanted)


def filtered(rows: Sequence[RunRow], conditions: Sequence[str]) -> list[RunRow]:
    """Return the rows that meet all conditions, such as ``state=failed``, ``loss<3`` and
    ``optimizer.name!=muon``. Raises `BadInputError`."""
    parsed = [_parse(text) for text in conditions]
    return [row for row in rows if all(one.accepts(row) for one in parsed)]


def sorted_rows(rows: Sequence[RunRow], order: str = "-started") -> list[RunRow]:
    """Return the rows by a column or a key of the job; ``-`` before it: largest first. Raises
    `BadInputError`."""
    key = order.removeprefix("-")
    _check_key("--sort", order, key)
    known = [row for row in rows if value_of(row, key) is not None]
    known.sort(key=lambda row: _sort_key(value_of(row, key)), reverse=order.startswith("-"))
    return known + [row for row in rows if value_of(row, key) is None]


def differing_keys(rows: Sequence[RunRow]) -> list[str]:
    """Return the keys of the job, in its order, that are not equal in all rows whose job can be read."""
    jobs = [row.job for row in rows if row.job]
    keys = dict.fromkeys(key for job in jobs for key in job)
    return [key for key in keys if any(job.get(key) != jobs[0].get(key) for job in jobs[1:])]


def values_that_differ(row: RunRow, keys: Sequence[str]) -> dict[str, Any]:
    """Return the row's values of the given keys."""
    return {key: row.job[key] for key in keys if key in row.job}


def is_in_layout_column(key: str) -> bool:
    """Whether the columns of the job and the layout show the key."""
    return key in _IN_COLUMNS


def _parse(text: str) -> _Condition:
    match = re.fullmatch(r"\s*([\w.]+)\s*(!=|<=|>=|=|<|>)\s*(.*?)\s*", text)
    if match is None:
        raise BadInputError("--filter", text, "KEY=VALUE, or with !=, <, <=, > or >= instead of =")
    _check_key("--filter", text, match[1])
    return _Condition(match[1], match[2], match[3])


def _check_key(option: str, text: str, key: str) -> None:
    if key in COLUMNS or key in {name for name, _ in job_keys()}:
        return
    near = suggest_key(key)
    hint = f"; did you mean {near}?" if near else ""
    raise BadInputError(option, text, f"a column ({', '.join(COLUMNS)}) or a key of the job{hint}")


def value_of(row: RunRow, key: str) -> Any:
    """Return the value of a column or a key of the job; ``None``: the run has none."""
    if key in COLUMNS:
        return COLUMNS[key](row)
    # With runs at hand, "off" is a value of its own: only a job that cannot be read has none.
    return plain_value(row.job[key]) if row.job.get(key, "") is None else row.job.get(key)


def _number(value: Any) -> float | None:
    try:
        return None if isinstance(value, bool | list | tuple | dict) else float(value)
    except (TypeError, ValueError):
        return None


def _sort_key(value: Any) -> tuple[bool, float, str]:
    number = _number(value)
    return (number is None, number or 0.0, "" if number is not None else plain_value(value))
