"""What a span took by itself, less what lies inside of it, from spans that come some at a time.

A wait is recorded when it ends, before the span around it: a batch may end between the two. What may lie in a
span that is still to come is kept until its rank tells more.
"""

from dataclasses import dataclass

import numpy as np

from myriad.dashboard.insight.nesting import Nested, nested
from myriad.dashboard.insight.ranks import Array
from myriad.telemetry.records import RECORD, Records

__all__ = ["OwnSeconds", "Timed", "joined"]

_CARRIED = -1
"""As its name: a span that came before, and counts no more by itself."""


@dataclass(frozen=True)
class Timed:
    """Spans by rank and start."""

    records: Records
    own_seconds: Array


class OwnSeconds:
    """Remembers of each rank what came last."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._carried: Records = np.zeros(0, RECORD)

    def of(self, records: Records, computing: Array) -> Timed:
        """Of new spans. ``computing``: of each name, whether a span of it may hold others."""
        told = np.zeros(self._world, bool)
        told[records["rank"]] = True
        due = told[self._carried["rank"]]
        spans = nested(joined([self._carried[due], records]))
        new = spans.records["name"] != _CARRIED
        kept = [self._carried[~due], _open(spans, new, computing[spans.records["name"]] & new, self._world)]
        self._carried = joined(kept)
        return Timed(spans.records[new], (spans.own[new] * 1e-9).astype(np.float32))


def joined(parts: list[Records]) -> Records:
    """One after the other; as bytes, which is quicker for many small ones."""
    whole = [np.ascontiguousarray(part).view(np.uint8) for part in parts if len(part)]
    return np.concatenate(whole).view(RECORD) if whole else np.zeros(0, RECORD)


def _open(spans: Nested, new: Array, computes: Array, world: int) -> Records:
    """Those inside of nothing yet, after the last that computes on their rank."""
    ranks = spans.records["rank"]
    computed = np.full(world, np.iinfo(np.int64).min, np.int64)
    np.maximum.at(computed, ranks[computes], spans.end[computes])
    places = np.flatnonzero(new & ~computes & (spans.parent < 0) & (spans.start >= computed[ranks]))
    carried: Records = spans.records[places]
    carried["name"] = _CARRIED
    return carried
