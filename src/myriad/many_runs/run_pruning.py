"""Which runs to delete, and why a run stays although it was selected.

A run is selected if it meets every given condition: its state, its age, the filters, and not being among the
best. A selected run stays if it is running, if its last step is only in memory, if its Slurm job was
requeued, if its folder is a link or holds another run, or if a run that stays and has not finished takes
weights, checkpoints or routing from it.
"""

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myriad.errors import BadInputError, MyriadError
from myriad.many_runs.run_row import RunRow, read_row
from myriad.many_runs.run_table import filtered
from myriad.run import Run
from myriad.run.run_removal import remove_run
from myriad.run.run_status import RUNNING, STATES, is_at_work

__all__ = ["PrunePlan", "PruneRules", "plan_deletion", "plan_pruning", "prune"]

_DAY_SECONDS = 86400.0
_SOURCES = ("train.init_from", "train.replay_routing", "checkpoint.url")
"""Keys of a job that may name another run's folder."""


@dataclass(frozen=True, kw_only=True)
class PruneRules:
    """The conditions that a run must meet to be deleted. At least one must be given."""

    keep_best: int | None = None
    """How many to keep of the runs that meet the filters, by best validation loss. Runs without a validation
    are not among them."""
    older_than_days: float | None = None
    """Least time since the last event or step."""
    states: Sequence[str] = ()
    filters: Sequence[str] = ()
    """Conditions as of `myriad.many_runs.run_table.filtered`."""

    def check(self) -> None:
        """Raise `BadInputError` for a state that is not one, a wrong filter, or if nothing is given."""
        filtered([], self.filters)
        allowed = [state for state in STATES if state not in RUNNING]
        for state in self.states:
            if state not in allowed:
                raise BadInputError("--state", state, f"must be one of {', '.join(allowed)}")
        no_limit = self.keep_best is None and self.older_than_days is None
        if no_limit and not self.states and not self.filters:
            allowed_text = "give at least one of --keep-best, --older-than, --state and --filter"
            raise BadInputError("prune", "no condition", allowed_text)


@dataclass(frozen=True)
class PrunePlan:
    """The runs to delete, with their sizes, and the selected runs that stay, with the reason."""

    delete: Sequence[RunRow]
    num_bytes: Mapping[Path, int]
    stay: Mapping[Path, str]

    @property
    def total_bytes(self) -> int:
        """Size of all files that would be deleted."""
        return sum(self.num_bytes.values())

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        delete = [row.as_json() | {"bytes": self.num_bytes[row.path]} for row in self.delete]
        return {"selected": delete, "stay": {str(path): why for path, why in self.stay.items()}}


def plan_pruning(rows: Sequence[RunRow], rules: PruneRules, now: float | None = None) -> PrunePlan:
    """Return which runs to delete. Changes nothing. ``now``: the current time, for tests.

    Raises `BadInputError` for wrong rules."""
    rules.check()
    return plan_deletion(_selected(rows, rules, time.time() if now is None else now), rows)


def plan_deletion(selected: Sequence[RunRow], rows: Sequence[RunRow]) -> PrunePlan:
    """Return which of the selected runs to delete. ``rows``: all runs that may need one of them."""
    stay = {row.path: why for row in selected if (why := _why_stays(row))}
    delete = [row for row in selected if row.path not in stay]
    while used := _used(delete, rows):  # a run that stays may need another in turn
        stay |= used
        delete = [row for row in delete if row.path not in stay]
    return PrunePlan(delete, {row.path: _size(row.path) for row in delete}, stay)


def prune(
    plan: PrunePlan, *, show: Callable[[RunRow], object] = lambda row: None
) -> tuple[list[Path], dict[Path, str]]:
    """Delete the runs of a plan; return the deleted ones, and those that could not be, with the reason.

    ``show`` is called after each deletion. A run that has changed since the plan was made stays."""
    deleted, problems = list[Path](), dict[Path, str]()
    for row in plan.delete:
        try:
            now = read_row(Run(row.path))
            if (now.state, now.changed, now.steps) != (row.state, row.changed, row.steps):
                problems[row.path] = "has changed since it was listed"
                continue
            remove_run(row.path)
        except MyriadError as error:
            problems[row.path] = str(error)
        except OSError as error:
            problems[row.path] = f"{error.filename or row.path}: {error.strerror}"
        else:
            deleted.append(row.path)
            show(row)
    return deleted, problems


def _selected(rows: Sequence[RunRow], rules: PruneRules, now: float) -> list[RunRow]:
    known = filtered(rows, rules.filters)
    validated = [row for row in known if row.best_validation is not None]
    validated.sort(key=lambda row: row.best_validation or 0.0)
    best = {row.path for row in validated[: rules.keep_best or 0]}
    age = None if rules.older_than_days is None else rules.older_than_days * _DAY_SECONDS
    return [
        row
        for row in known
        if row.path not in best
        and (not rules.states or row.state in rules.states)
        and (age is None or (row.changed is not None and now - row.changed > age))
    ]


def _why_stays(row: RunRow) -> str:
    """Return why a run must not be deleted; "": it may."""
    if row.state in RUNNING or is_at_work(Run(row.path)):
        return "is running"
    if row.holds_unsaved_step:
        return "its last step is only in memory: myriad checkpoint save or release"
    if row.is_requeued:
        return "its Slurm job was requeued and may start again"
    if row.path.is_symlink():
        return "is a symbolic link"
    if any(row.path.glob("*/job.toml")):
        return "holds another run"
    return ""


def _used(delete: Sequence[RunRow], rows: Sequence[RunRow]) -> dict[Path, str]:
    """Return the runs that another run still needs, which stays and has not finished."""
    going = {row.path for row in delete}
    others = [row for row in rows if row.path not in going and row.state != "finished"]
    found = {}
    for row in delete:
        folder = row.path.resolve()
        for other in others:
            if key := _key_that_names(folder, other.job):
                found[row.path] = f"{other.name} takes {key} from it"
    return found


def _key_that_names(folder: Path, job: Mapping[str, Any]) -> str:
    for key in _SOURCES:
        value = job.get(key)
        if not isinstance(value, str) or not value:
            continue
        named: Collection[Path] = (Path(value.removeprefix("file://")), Path("runs") / value)
        if any(each.resolve().is_relative_to(folder) for each in named):
            return key
    return ""


def _size(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(Path(place) / name).st_size
            except OSError:  # removed in the meantime
                continue
    return total
