"""How a run goes, in a word and in a sentence."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from myriad.units import format_number, format_seconds

__all__ = ["State", "run_state", "state_sentence"]

State = Literal["starting", "training", "hangs", "finished", "stopped"]
_ENDS: Mapping[str, State] = {"finish": "finished", "interrupted": "stopped"}
_BEGINS = ("start", "restart", "resume")
_QUIET_SECONDS, _QUIET_STEPS = 10.0, 5.0
"""A run that says nothing for so long, and for so many of its steps, does not train."""


def run_state(
    events: Sequence[Mapping[str, Any]],
    *,
    quiet_seconds: float,
    step_seconds: float,
    held: bool,
    at_work: bool = False,
) -> State:
    """``quiet_seconds``: since its newest step, span or event; ``held``: a launcher of this machine has it;
    ``at_work``: somebody has, here or elsewhere, or had it some seconds ago."""
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
    """For people."""
    if state == "hangs":
        return f"hangs since {format_seconds(quiet_seconds)}, after step {step} of {steps}"
    if state == "starting":
        return "starts: no step is done yet"
    told = {"training": "trains: step", "finished": "finished: step", "stopped": "stopped after step"}[state]
    pace = f", {_pace(step_seconds)} a step" if step_seconds > 0 else ""
    return f"{told} {step} of {steps}{pace}"


def _pace(seconds: float) -> str:
    if seconds >= 120:
        return format_seconds(seconds)
    return f"{format_number(seconds)} s" if seconds >= 1 else f"{format_number(seconds * 1e3)} ms"
