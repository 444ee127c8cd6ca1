"""Which events of a run raise an alarm, at which level, of which cause, and which events end it. Pure.

    {"event": "health", "what": "link", "node": 3, "problem": "link eth0 of node 3 is down", ...}
        -> Alarm(level="warning", cause="health/link", subject="node 3 eth0", begins)
    {"event": "health", "what": "link", "node": 3, "problem": "link eth0 of node 3 is up again ...", ...}
        -> the same, ends

An event needs no rule here. Its own fields decide first: ``level`` (info, warning, critical or off) and
``over`` (true: the condition of an earlier event with the same name, ``what``, node, rank, ``kind``,
``device`` and ``place`` has ended; false: it has begun, and lasts until an event ends it). Else the table
decides. Events that are in neither raise no alarm.

The levels: critical needs a person, because training stopped or may lose work. A warning is a fault that the
run repairs itself, or the first sign of a failure. Info is for people who follow the run.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from myriad.alerts.config import LEVELS, Level

__all__ = ["ABOUT_PLACE", "ALL_CAUSES", "Alarm", "alarm_of", "level_of"]

Event = Mapping[str, Any]
ALL_CAUSES = "*"
"""The cause of an alarm that ends all others: the run is over."""
ABOUT_PLACE = "alert/"
"""Prefix of the cause of an alarm about a place. That place does not get the alarm."""
_MOST_TEXT, _MOST_SUBJECT = 300, 80


@dataclass(frozen=True)
class Alarm:
    """The begin, update or end of a condition, as one event reports it."""

    time: float
    """Seconds since the epoch."""
    level: Level
    cause: str
    """Alarms of one cause become one message."""
    subject: str
    """Subject of the alarm among those of one cause; an end names the subject that began."""
    text: str
    ends: bool = False
    """The condition has ended; for `ALL_CAUSES`, all have."""
    lasts: bool = False
    """The condition lasts until an event ends it; otherwise it is over at once."""


@dataclass(frozen=True)
class _Rule:
    level: Level | None
    cause: str = ""
    """Empty: the name of the event."""
    ends: Callable[[Event], bool] | None = None
    """Whether an event of this name ends the condition; ``None``: it does not last."""
    by: tuple[str, ...] = ("node", "rank", "place", "kind", "device")
    """Fields that name the subject."""


def _says(pattern: str) -> Callable[[Event], bool]:
    found = re.compile(pattern)
    return lambda event: found.search(str(event.get("problem") or "")) is not None


def _has_no_problem(event: Event) -> bool:
    return not event.get("problem")


def _never(event: Event) -> bool:
    return False


_FAULT = "fault"
"""A fault: its suspect and the run's reaction, until ranks train again."""
_STORAGE = "checkpoint storage"
_RULES: dict[str, _Rule] = {
    "failed": _Rule("critical", ends=_never),
    "unsupervised": _Rule("critical", ends=_never),
    "held": _Rule("critical", _STORAGE, by=()),
    "start_over": _Rule("critical"),
    "restart_from_scratch": _Rule("warning"),
    "fault": _Rule("warning", _FAULT, ends=_never, by=()),
    "diagnosis": _Rule("warning", _FAULT, by=()),
    "eviction": _Rule("warning", _FAULT, by=()),
    "quarantine": _Rule("warning", _FAULT, by=()),
    "restart": _Rule("info", _FAULT, by=()),
    "move": _Rule("info", _FAULT, by=()),
    "retry": _Rule("warning", _STORAGE, ends=_never, by=()),
    "older_state": _Rule("warning"),
    "spike": _Rule("warning"),
    "skip": _Rule("warning"),
    "log_match": _Rule("warning", by=("what",)),
    "health": _Rule("warning"),
    "health/link": _Rule("warning", ends=_says(r" is up again after "), by=("node", "interface")),
    "health/driver": _Rule("critical", ends=_says(r"^a driver is there again"), by=()),
    "health/launcher": _Rule("critical", ends=_says(r"^goes on"), by=()),
    "telemetry": _Rule("warning", ends=_has_no_problem, by=("place", "node")),
    "journal": _Rule("warning"),
    "logger": _Rule("warning", by=("logger",)),
    "alert": _Rule("warning", ends=_has_no_problem, by=("sink",)),
    "drain": _Rule("warning"),
    "requeue": _Rule("warning"),
    "refusal": _Rule("warning"),
    "replace": _Rule("warning"),
    "takeover": _Rule("warning"),
    "checkpoint": _Rule("info"),
    "finish": _Rule("info"),
    "interrupted": _Rule("info"),
    "start": _Rule("info"),
}
"""Rules by event name, or by event name and ``what``."""
_ENDS_OTHERS = {"start": _FAULT, "checkpoint": _STORAGE, "finish": ALL_CAUSES, "interrupted": ALL_CAUSES}
"""Events that end conditions of another cause."""


def level_of(event: Event, levels: Mapping[str, Level | None]) -> Level | None:
    """Return the level of an event; ``None``: it raises no alarm. ``levels``: those that a job sets."""
    name = str(event.get("event"))
    full = f"{name}/{event.get('what')}"
    for key in (full, name):
        if key in levels:
            return levels[key]
    own = event.get("level")
    if own == "off":
        return None
    if isinstance(own, str) and (known := next((one for one in LEVELS if one == own), None)) is not None:
        return known
    if name == "fault" and event.get("alarm"):
        return "critical"
    rule = _rule(event)
    return None if rule is None else rule.level


def _rule(event: Event) -> _Rule | None:
    name = str(event.get("event"))
    return _RULES.get(f"{name}/{event.get('what')}") or _RULES.get(name)


def alarm_of(event: Event, text: str, levels: Mapping[str, Level | None] | None = None) -> list[Alarm]:
    """Return what an event begins and ends. ``text``: the event in words."""
    levels, level, rule = levels or {}, level_of(event, levels or {}), _rule(event)
    at = _time(event)
    name, what = str(event.get("event")), event.get("sink" if event.get("event") == "alert" else "what")
    found = []
    if name in _ENDS_OTHERS:
        found.append(Alarm(at, "info", _ENDS_OTHERS[name], "", text[:_MOST_TEXT], ends=True))
    if level is None:
        return found
    cause = (rule.cause if rule else "") or (f"{name}/{what}" if what and name != "log_match" else name)
    if name == "fault" and _is_storage(event):
        cause = _STORAGE
    over = event.get("over")
    ends = over if isinstance(over, bool) else rule is not None and rule.ends is not None and rule.ends(event)
    lasts = isinstance(over, bool) or (rule is not None and rule.ends is not None)
    subject = _subject(event, rule)
    return [*found, Alarm(at, level, cause, subject, _headed(event, text), ends, lasts)]


def _headed(event: Event, text: str) -> str:
    """Return the text with its subject and the step."""
    name, step = str(event.get("event")), event.get("step")
    head = "" if name == "health" else f"{name}: "
    at = f" (step {step})" if isinstance(step, int) and step >= 0 else ""
    return f"{head}{text}"[: _MOST_TEXT - len(at)] + at


def _is_storage(event: Event) -> bool:
    """A save that failed: no rank is at fault, and the next save that succeeds ends it."""
    return bool(event.get("alarm")) or "failures" in event


def _subject(event: Event, rule: _Rule | None) -> str:
    keys = _Rule("info").by if rule is None else rule.by
    evidence = event.get("evidence")
    known = {**(evidence if isinstance(evidence, Mapping) else {}), **event}
    named = [f"{key} {known[key]}" for key in keys if isinstance(known.get(key), str | int)]
    return " ".join(named)[:_MOST_SUBJECT]


def _time(event: Event) -> float:
    at = event.get("time")
    return float(at) if isinstance(at, int | float) and not isinstance(at, bool) else 0.0
