"""Incidents of a run, as its events report them: a fault, the end of the attempt, and the next one.

Faults that come before the run has recovered from the previous one are part of its incident.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Line", "ReportedIncident", "reported_incidents"]

Line = Mapping[str, Any]
"""A line of the run's events, metrics or caused faults."""


@dataclass
class ReportedIncident:
    """A fault that the driver reported, and what followed."""

    fault: Line
    named: float
    """Time at which a suspect was named: for a hang, when the stacks were written, before the end."""
    ended: float = float("inf")
    """Time at which the next attempt was requested."""
    started: float | None = None
    resumed: Line | None = None


def reported_incidents(events: Sequence[Line]) -> list[ReportedIncident]:
    """Return the faults that the driver reported, each with the next start."""
    found: list[ReportedIncident] = []
    diagnosed: float | None = None
    down: dict[int, float] = {}
    for event in events:
        if event["event"] == "diagnosis" and event.keys().isdisjoint(("verdict", "culprit")):
            diagnosed = event["time"]
        elif event["event"] == "fault" and "cause" in event:
            named = diagnosed if event["cause"] == "hang" and diagnosed is not None else event["time"]
            if event["cause"] == "link":
                named = down.get(event["node"], named)
            found.append(ReportedIncident(event, named))
            diagnosed = None
        elif event["event"] == "health" and event["what"] == "link":
            down[event["node"]] = event["time"]
        elif event["event"] == "restart":
            for incident in found:
                incident.ended = min(incident.ended, event["time"])
        elif event["event"] == "start":
            for incident in found:
                incident.started = incident.started or event["time"]
        elif event["event"] == "resume":
            for incident in found:
                incident.resumed = incident.resumed or event
    return found
