"""Questions about where a step's time goes."""

from collections.abc import Mapping
from typing import Any

from myriad.dashboard.analyst import Analyst
from myriad.dashboard.api.questions import as_int
from myriad.dashboard.insight.losses import Losses
from myriad.dashboard.watched import Watched

__all__ = ["shares", "waterfall"]

_MOST_STEP = 2**31 - 1


def waterfall(watched: Watched, analyst: Analyst, query: Mapping[str, str]) -> dict[str, Any]:
    """From the peak down to the MFU, over the newest steps and as planned."""
    found, plan = analyst.losses(None, None), watched.plan
    return {
        "measured": None if found is None else _as_json(found),
        "predicted": None if plan is None else _as_json(plan.losses),
    }


def shares(watched: Watched, analyst: Analyst, query: Mapping[str, str]) -> dict[str, Any]:
    """The same over some steps, as shares of the time."""
    last = as_int(query, "last", -1, 0, _MOST_STEP)
    first = as_int(query, "first", -1, 0, _MOST_STEP)
    found = analyst.losses(None if first < 0 else first, None if last < 0 else last)
    return {} if found is None else {"seconds": found.step_seconds, "shares": dict(found.shares)}


def _as_json(found: Losses) -> dict[str, Any]:
    rows = [{"name": name, "lost": lost, "left": left} for name, lost, left in found.waterfall()]
    return {
        "step_seconds": found.step_seconds,
        "ideal_seconds": found.ideal_seconds,
        "mfu": found.mfu,
        "bubble_and_slower_told_apart": found.split,
        "losses": rows,
    }
