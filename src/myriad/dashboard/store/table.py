"""The store's sums as the table that everything of `insight` begins with; no span is looked at."""

import numpy as np

from myriad.dashboard.insight.phase_table import PhaseTable
from myriad.dashboard.store.span_store import SpanStore
from myriad.telemetry.records import class_of

__all__ = ["newest_table"]

_MOST_CELLS = 8_000_000


def newest_table(store: SpanStore, last: int | None, most_steps: int = 1000) -> PhaseTable | None:
    """Of the newest steps up to ``last``, fewer of them the more ranks there are. ``None``: there is none."""
    phases = tuple(store.names.phases)
    most = min(most_steps, max(2, _MOST_CELLS // (store.world * max(1, len(phases)))))
    blocks = store.blocks(0, last)[-most:]
    if not blocks or not phases:
        return None
    steps = np.array([step for step, _ in blocks])
    own = np.full((len(blocks), store.world, len(phases)), np.nan, np.float32)
    for place, (_, block) in enumerate(blocks):
        seconds = block.seconds
        own[place, :, : len(seconds)] = seconds.T
    begin = np.stack([block.begin_ns for _, block in blocks])
    end = np.stack([block.end_ns for _, block in blocks])
    classes = {store.names.phase_of(name): class_of(name) for name in store.names.names}
    known = np.isfinite(own)
    own = np.nan_to_num(own)
    kinds = tuple(classes[phase] for phase in phases)
    return PhaseTable(steps, phases, kinds, own, own, known, begin, _until(steps, begin, end))


def _until(steps: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """A step of a rank goes on until its next one begins."""
    until = end.copy()
    follows = (begin[1:] > 0) & (np.diff(steps) == 1)[:, None]
    until[:-1] = np.where(follows, np.maximum(begin[1:], end[:-1]), end[:-1])
    return until
