"""Decide whether a run without a loadable state may start at step 1. Without torch.

A run that has ever stored a checkpoint does not start at step 1 by itself: every checkpoint may be damaged,
in another place (checkpoint.url), or temporarily unreachable. Each of these proves that one was stored:

    a committed step-N, good or not; a step-N.damaged          in the folder of checkpoints
    a ``checkpoint`` event since the run last began at step 1  in events.jsonl
    steps in metrics.jsonl without any event                   events.jsonl was lost

Without such a proof nothing can be lost, and the run starts at step 1. Otherwise the operator decides for one
start with checkpoint.restart_from_scratch. A checkpoint that cannot be read *now* never counts as damaged.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from myriad.errors import NO_STATE, NoStateError, RunFailedError

__all__ = ["RunHistory", "check_restart", "history_of"]

_MAX_FILES = 6
"""Largest number of files named in a message."""


@dataclass(frozen=True)
class RunHistory:
    """The run's history, as its files record it."""

    stored_step: int = 0
    """Newest step stored since the run last started at step 1; 0: none."""
    done_step: int = 0
    """Newest step that was trained."""
    locations: tuple[str, ...] = ()
    """Earlier values of checkpoint.url, newest first."""
    stored_in: tuple[tuple[str, int], ...] = ()
    """Locations, and the newest step stored in each. A start that resumed from an earlier step discards later
    ones."""
    may_start_over: bool = False
    """Whether the operator has allowed this start to begin at step 1."""
    has_started_over: bool = False
    """Whether an earlier start began at step 1 again; step-N.damaged may be older than that."""


def history_of(
    events: Sequence[Mapping[str, Any]], done_step: int, default_place: str, current_place: str = ""
) -> RunHistory:
    """Return the history in a run's events.

    ``done_step``: the newest step in its metrics. ``default_place``: location of checkpoints if
    checkpoint.url is off. ``current_place``: their location now."""
    stored, allowed, again = 0, False, False
    locations: list[str] = []
    location, stored_in = (
        _first_place(events, default_place) or current_place or default_place,
        dict[str, int](),
    )
    for event in events:
        name, step = event.get("event"), event.get("step")
        if name == "checkpoint" and isinstance(step, int):
            stored, where = max(stored, step), str(event.get("url") or location)
            stored_in[where] = max(step, stored_in.get(where, 0))
        elif name == "restart_from_scratch":
            allowed = event.get("allowed") is True
        elif name == "job_changed" and event.get("key") == "checkpoint.url":
            locations.insert(0, str(event.get("before") or default_place))
            location = str(event.get("after") or default_place)
        elif name == "start":
            again |= allowed and not event.get("resumed_from")
            resumed = event.get("resumed_from") or 0
            stored = 0 if allowed and not resumed else stored
            stored_in = {where: min(known, resumed) for where, known in stored_in.items()}
            allowed = False
    if done_step and not any(event.get("event") == "start" for event in events):
        stored = done_step
    newest = tuple(sorted(stored_in.items(), key=lambda one: -one[1]))
    return RunHistory(stored, done_step, tuple(dict.fromkeys(locations)), newest, allowed, again)


def _first_place(events: Sequence[Mapping[str, Any]], default_place: str) -> str | None:
    """Return the location before checkpoint.url first changed; ``None``: it never changed."""
    for event in events:
        if event.get("event") == "job_changed" and event.get("key") == "checkpoint.url":
            return str(event.get("before") or default_place)
    return None


def check_restart(
    history: RunHistory,
    run: Path,
    url: str,
    *,
    problems: Sequence[str],
    in_memory: Sequence[str],
    committed: Sequence[int],
    damaged: Sequence[int],
    unreadable: bool,
    newest: int | None = None,
) -> None:
    """Return if a run that loaded no state may start at step 1.

    ``problems``: reasons why states could not be loaded. ``in_memory``: descriptions of the nodes' snapshots.
    ``committed`` and ``damaged``: steps of the folder's checkpoints, and of those set aside. ``unreadable``:
    some state could not be read and may be good. ``newest``: the step that the driver rolls back to. Raises
    `NoStateError` if the operator must decide, and `RunFailedError` if a later attempt may succeed."""
    files = _files(problems)
    if unreadable:
        text = f"no checkpoint in {url} can be read now: {files}; nothing was changed; start again later"
        raise RunFailedError(text)
    if newest == 0 or history.may_start_over:
        return
    stored = history.stored_step or max(damaged, default=0)
    has_damaged = bool(damaged) and not history.has_started_over
    if not (problems or committed or has_damaged or history.stored_step):
        return
    known = [files] if files else []
    if not committed and not files:
        known.append(f"{url} holds no checkpoint, but step {stored} was stored")
    if newest is not None:
        wrong = ", ".join(f"step-{step}" for step in committed if step > newest)
        why = "replicas differed, or a spike came"
        known.append(f"states after step {newest} are wrong ({wrong or 'none is stored'}): {why}")
    known += [f"set aside: {', '.join(f'step-{step}.damaged' for step in damaged)}"] if has_damaged else []
    known.append(f"in memory: {', '.join(in_memory) or 'nothing'}")
    others = [location for location in history.locations if location != url]
    back = (
        f"; `myriad train {run} --checkpoint.url {others[0]}` searches the folder of the earlier checkpoints"
        if others
        else ""
    )
    raise NoStateError(
        f"{NO_STATE}{'; '.join(known)}{back}; restore the files and start again, or begin at "
        f"step 1: `myriad train {run} --checkpoint.restart-from-scratch`"
    )


def _files(problems: Sequence[str]) -> str:
    """Return the first problem of each file, up to `_MAX_FILES` files."""
    first: dict[str, str] = {}
    for problem in problems:
        file, _, why = problem.partition(": ")
        first.setdefault(file, why.rsplit(": ", 1)[-1])
    lines = [f"{file}: {why}" for file, why in first.items()]
    more = [f"and {len(lines) - _MAX_FILES} more"] if len(lines) > _MAX_FILES else []
    return ", ".join([*lines[:_MAX_FILES], *more])
