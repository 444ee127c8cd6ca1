"""Lanes of what was predicted, for a timeline that is not too wide and not too deep."""

from typing import Any

import numpy as np

from myriad.dashboard.plan import Plan
from myriad.dashboard.store.lanes import Lane
from myriad.dashboard.store.step_block import Columns
from myriad.dashboard.store.timeline import Window
from myriad.dashboard.watched import Watched

__all__ = ["with_predicted"]

_MOST_LANES, _MOST_STEPS = 64, 4


def with_predicted(
    watched: Watched, plan: Plan, spans: Columns, lanes: list[Lane], window: Window
) -> tuple[Columns, list[str], list[dict[str, Any]]]:
    """Spans, names and lanes with the predicted ones behind the measured ones: each step is laid where the
    measured one began. Without them where there are very many."""
    store = watched.store
    names, steps = list(store.names.names), watched.steps_in(window.start_ns, window.stop_ns)
    if len(lanes) > _MOST_LANES or len(steps) > _MOST_STEPS:
        return spans, names, []
    codes = {name: code for code, name in enumerate(names)}
    for name in plan.names:
        codes.setdefault(name, len(codes))
    numbers = np.array([codes[name] for name in plan.names], np.int16)
    begins = [block.first_ns for step in steps for _, block in store.blocks(step, step)]
    parts = [spans]
    for place, lane in enumerate(lanes):
        for begin in begins:
            found = plan.spans_of(lane.rank, begin)
            part = {key: found[key] for key in ("start_ns", "rank", "stage", "micro_batch", "chunk")}
            part |= {"duration": found["duration_ns"] * 1e-9, "name": numbers[found["name"]]}
            parts.append(part | {"lane": np.full(len(found), len(lanes) + place)})
    whole = {key: np.concatenate([part[key] for part in parts]) for key in spans}
    predicted = [{"rank": lane.rank, "worst_of": 1, "predicted": True} for lane in lanes]
    return whole, list(codes), predicted
