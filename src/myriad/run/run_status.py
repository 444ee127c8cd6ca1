"""The state of a run: one definition for the driver's outcome, the page, the terminal and tables of runs.

    new           never started, such as an imported checkpoint
    starting      ranks start; none has begun to train
    training      steps are done
    hangs         its processes live, but no step, span or event has come for a while
    finished      all steps are done
    interrupted   stopped on request, or its job has got more steps since it finished
    failed        started, but none of these: killed, or ended by a fault
    unreadable    job.toml is damaged, or of another version
    reading       only on the page of a run: its files are being read for the first time

"running" in filters stands for starting, training and hangs. A driver ends a run as finished, interrupted or
failed, with the same words.

A launcher holds the run's lock, which only its own machine can see. Node agents add a line to RUN/counters
every second, whatever the ranks do, and these files are in the run's folder, also on other machines. If a
file is fresh, ranks without output hang; they have not exited. A run without such files that this machine
does not hold may train elsewhere, so it counts as ended only after a longer silence."""

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from myriad.run.run_folder import Run
from myriad.units import format_number, format_seconds

__all__ = [
    *("RUNNING", "STATES", "STATE_EVENTS", "Outcome", "State"),
    *("ended_state", "is_at_work", "newest_event", "run_state", "state_now", "state_sentence"),
]

State = Literal[
    "new", "starting", "training", "hangs", "finished", "interrupted", "failed", "unreadable", "reading"
]
Outcome = Literal["finished", "interrupted", "failed"]
"""States in which a driver ends a run."""
RUNNING: tuple[State, ...] = ("starting", "training", "hangs")
"""States of a run that processes train."""
STATES: tuple[State, ...] = (*RUNNING, "finished", "interrupted", "failed", "new", "unreadable")
"""States in tables of runs."""
_ENDS = ("finish", "interrupted")
_BEGINS = ("start", "restart", "resume")
STATE_EVENTS = (*_ENDS, *_BEGINS)
"""Events that determine the state: the newest of each is enough."""
_QUIET_SECONDS, _QUIET_STEPS = 10.0, 5.0
"""Minimum silence, in seconds and in step times, after which a run does not count as training."""
_UNSEEN_SECONDS, _UNSEEN_STEPS = 60.0, 10.0
"""The same for a run whose processes cannot be seen from here."""


def run_state(
    events: Sequence[Mapping[str, Any]],
    *,
    steps: int,
    planned: int | None,
    quiet_seconds: float | None,
    step_seconds: float,
    held: bool,
    at_work: bool | None = None,
) -> State:
    """Return the state of a run whose job can be read.

    ``steps`` are done of ``planned``. ``quiet_seconds`` counts from its newest step, span or event; ``None``:
    there is none. ``held``: a launcher of this machine holds it. ``at_work``: see `is_at_work`."""
    newest = newest_event(events, STATE_EVENTS)
    if newest in _ENDS and not (held and newest == "interrupted"):
        return ended_state(events, steps, planned)
    at_work = held or at_work
    quiet = math.inf if quiet_seconds is None else quiet_seconds
    seconds, count = (_UNSEEN_SECONDS, _UNSEEN_STEPS) if at_work is None else (_QUIET_SECONDS, _QUIET_STEPS)
    is_quiet = quiet >= max(seconds, count * step_seconds)
    if is_quiet and not at_work:
        return ended_state(events, steps, planned)
    if not newest_event(events, ("start",)):
        return "starting"
    return "hangs" if is_quiet else "training"


def state_now(
    run: Run,
    events: Sequence[Mapping[str, Any]],
    *,
    steps: int,
    planned: int | None,
    newest: float | None,
    step_seconds: float,
) -> State:
    """Return the state of a run now, by its lines and its processes. ``newest``: time of its newest line;
    ``None``: it has none."""
    return run_state(
        events,
        steps=steps,
        planned=planned,
        quiet_seconds=None if newest is None else max(0.0, time.time() - newest),
        step_seconds=step_seconds,
        held=run.is_locked,
        at_work=is_at_work(run),
    )


def ended_state(events: Sequence[Mapping[str, Any]], steps: int, planned: int | None) -> State:
    """Return the state of a run that no process trains."""
    newest = newest_event(events, (*_ENDS, "start"))
    if newest == "finish":
        return "finished" if planned is None or steps >= planned else "interrupted"
    if newest == "interrupted":
        return "interrupted"
    return "failed" if newest or steps else "new"


def newest_event(events: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Return the newest of these kinds of event; "": there is none."""
    return next((str(event["event"]) for event in reversed(events) if event.get("event") in names), "")


_PROGRESS: Mapping[State, str] = {
    "training": "trains: step",
    "finished": "finished: step",
    "interrupted": "stopped after step",
    "failed": "failed after step",
}


def state_sentence(state: State, step: int, steps: int, step_seconds: float, quiet_seconds: float) -> str:
    """Return the state as a sentence."""
    if state == "hangs":
        return f"hangs since {format_seconds(quiet_seconds)}, after step {step} of {steps}"
    if state == "reading":
        behind = f", {format_seconds(quiet_seconds)} behind" if quiet_seconds >= 1 else ""
        return f"its files are being read: step {step} of {steps} so far{behind}"
    if state == "starting":
        return "starts: no step is done yet"
    if state == "new":
        return "has not started"
    progress = _PROGRESS.get(state, state)
    pace = f", {_pace(step_seconds)} a step" if step_seconds > 0 else ""
    return f"{progress} {step} of {steps}{pace}"


def _pace(seconds: float) -> str:
    if seconds >= 120:
        return format_seconds(seconds)
    return f"{format_number(seconds)} s" if seconds >= 1 else f"{format_number(seconds * 1e3)} ms"


_NAME = re.compile(r"node-\d{1,6}\.jsonl")
_FRESH_SECONDS, _MOST_AHEAD_SECONDS = 10.0, 60.0
"""Maximum age of a fresh file; maximum lead of a file server's clock over the local clock."""
_MOST_FILES = 8
"""Maximum number of files to check; a few nodes are enough."""


def is_at_work(run: Run, *, sends: bool = False) -> bool | None:
    """Whether a launcher of this machine holds the run, or node agents write its counters.

    ``sends``: this server has received spans, which decides if there are no files of node agents. ``None``:
    neither shows it."""
    if run.is_locked:
        return True
    writes = agents_report(run.counters_path)
    return sends or None if writes is None else writes


def agents_report(folder: Path) -> bool | None:
    """Return whether node agents write their files; ``None`` if there are no files."""
    ages, names = list[float](), list[str]()
    with suppress(OSError):
        names = [one for one in os.listdir(folder) if _NAME.fullmatch(one)]
    for name in names[:_MOST_FILES]:
        with suppress(OSError):
            ages.append(time.time() - _changed(folder / name))
    return any(-_MOST_AHEAD_SECONDS < age < _FRESH_SECONDS for age in ages) if ages else None


def _changed(path: Path) -> float:
    """Return the modification time of a file. Opening it makes NFS refresh the attributes."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        return os.fstat(handle).st_mtime
    finally:
        os.close(handle)
