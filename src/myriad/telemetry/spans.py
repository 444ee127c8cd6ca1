"""What a rank did when, in the program's own words.

A span is appended with plain stores: no lock, no system call but the clock. The ring keeps the newest; what
it dropped is counted. Time is seconds since the epoch. What goes on now is written on the rank's row of the
node's progress page, for whoever watches.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from myriad.telemetry.progress_page import ProgressRow

__all__ = ["COMMUNICATION", "Recorder", "Span"]

COMMUNICATION = frozenset(
    {
        "exchange",
        "wait",
        "gather",
        "await_gather",
        "reduce",
        "await_reduce",
        "sync_tied",
        "clip",
        "tensor_comm",
    }
)
"""Span names in which a rank waits for others."""
_COMPUTE = frozenset({"forward", "backward", "backward_input", "backward_weight"})


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a rank's time."""

    name: str
    stage: int
    micro_batch: int
    start_seconds: float
    duration_seconds: float


class Recorder:
    """The newest spans, and seconds by name since the last `take_totals`."""

    def __init__(self, capacity: int = 4096, row: ProgressRow | None = None) -> None:
        """``row``: where it is shown what goes on; nowhere when left out."""
        self.spans: deque[Span] = deque(maxlen=capacity)
        self.num_dropped = 0
        self._totals: defaultdict[str, float] = defaultdict(float)
        self._row = row or ProgressRow.unseen()
        self._computes, self._busy = False, 0.0

    @contextmanager
    def span(self, name: str, stage: int = -1, micro_batch: int = -1) -> Iterator[None]:
        """Records the time of the block under ``name``, also when it raises."""
        communicates, computed = name in COMMUNICATION, self._computes
        self._computes = computed or name in _COMPUTE
        before = self._row.enter(name, communicates)
        start = time.time()
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._add(Span(name, stage, micro_batch, start, seconds))
            if self._computes != computed:
                self._busy += seconds
            elif computed and communicates:
                self._busy -= seconds
            self._computes = computed
            self._row.leave(before, communicates)

    def _add(self, span: Span) -> None:
        self.num_dropped += len(self.spans) == self.spans.maxlen
        self.spans.append(span)
        self._totals[span.name] += span.duration_seconds

    def take_busy(self) -> float:
        """Seconds of forwards and backwards since the last call, without the communication inside them."""
        busy, self._busy = self._busy, 0.0
        return busy

    def take_totals(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        totals, self._totals = self._totals, defaultdict(float)
        return dict(totals)
