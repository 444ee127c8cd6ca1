"""Describe the state of a run in a word and in a sentence, and determine whether processes train it.

A launcher holds the run's lock, which only its own machine can see. Node agents add a line to RUN/counters
every second, whatever the ranks do, and these files are in the run's folder, also on other machines. If a
file is fresh, ranks without output hang; they have not exited."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from myriad.run import Run
from myriad.units import format_number, format_seconds

__all__ = ["State", "is_at_work", "run_state", "state_sentence"]

State = Literal["reading", "starting", "training", "hangs", "finished", "stopped"]
_ENDS: Mapping[str, State] = {"finish": "finished", "interrupted": "stopped"}
_BEGINS = ("start", "restart", "resume")
_QUIET_SECONDS, _QUIET_STEPS = 10.0, 5.0
"""Minimum silence, in seconds and in step times, after which a run does not count as training."""


def run_state(
    events: Sequence[Mapping[str, Any]],
    *,
    quiet_seconds: float,
    step_seconds: float,
    held: bool,
    at_work: bool = False,
) -> State:
    """Return the state of a run.

    ``quiet_seconds`` counts from its newest step, span or event. ``held``: a launcher of this machine holds
    it. ``at_work``: a launcher on any machine holds it, or held it some seconds ago."""
    for event in reversed(events):
        name = str(event.get("event"))
        if name in _ENDS and not (held and name == "interrupted"):
            return _ENDS[name]
        if name in _BEGINS:
            break
    at_work = at_work or held
    if not at_work and quiet_seconds > _QUIET_SECONDS:
        return "stopped"
    if not any(event.get("event") == "start" for event in events):
        return "starting"
    if quiet_seconds < max(_QUIET_SECONDS, _QUIET_STEPS * step_seconds):
        return "training"
    return "hangs" if at_work else "stopped"


def state_sentence(state: State, step: int, steps: int, step_seconds: float, quiet_seconds: float) -> str:
    """Return the state as a sentence."""
    if state == "hangs":
        return f"hangs since {format_seconds(quiet_seconds)}, after step {step} of {steps}"
    if state == "reading":
        behind = f", {format_seconds(quiet_seconds)} behind" if quiet_seconds >= 1 else ""
        return f"its files are being read: step {step} of {steps} so far{behind}"
    if state == "starting":
        return "starts: no step is done yet"
    progress = {"training": "trains: step", "finished": "finished: step", "stopped": "stopped after step"}[
        state
    ]
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


def is_at_work(run: Run, *, sends: bool = False) -> bool:
    """Whether a launcher of this machine holds the run, or node agents write its counters.

    ``sends`` is the answer if there are no files of node agents: whether this server has received spans.
    """
    if run.is_locked:
        return True
    writes = agents_report(run.counters_path)
    return sends if writes is None else writes


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
