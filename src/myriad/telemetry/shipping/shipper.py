"""Read the ranks' spans from their rings once per second, and pass them on to be written and sent.

    rings ──a second──► Shipper ──►  Outlet: files of some seconds in RUN/spans
                                └──► Outlet: POST to the collector, if the job names one

The shipper only copies memory. Each operation that can hang or fail has a separate thread and a bounded queue
(`myriad.telemetry.shipping.outlets`). Rings outlive their ranks, so the last spans of a killed rank are kept.
"""

import itertools
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from myriad.telemetry.config import TelemetryConfig, is_address
from myriad.telemetry.shipping.clock_offset import UNKNOWN_SECONDS
from myriad.telemetry.shipping.outlets import Outlet, ReportOutlet
from myriad.telemetry.span_io.span_batch import Origin, SpanBatch
from myriad.telemetry.span_io.span_ring import Drained

__all__ = ["Rings", "Shipper", "open_outlets"]

_LOG = logging.getLogger(__name__)
_DRAIN_SECONDS = 1.0
_CLOSE_SECONDS = 3.0

Clock = Callable[[int], tuple[int, float] | None]
"""Returns, for a time of this machine in ns, the ns to add to get the cluster's reference time, and the
maximum error in seconds; ``None`` if unknown."""


class Rings(Protocol):
    """The span rings of a node's ranks, or of one rank."""

    def drain(self, row: int) -> Drained:
        """Return the spans written since the last call."""

    def clear(self, row: int) -> None:
        """Clear a ring for a rank that is about to start."""


def open_outlets(
    folder: Path, place: str, run: str, how: TelemetryConfig, report: ReportOutlet
) -> list[Outlet]:
    """Return the destinations for the spans of ``place`` ("node-3"): ``folder`` in the run's, and a
    collector."""
    from myriad.telemetry.shipping.outlets import Collector, FileWriter
    from myriad.telemetry.shipping.page_token import sender_tokens

    files = FileWriter(folder, place, how.keep)
    outlets = [Outlet("files", files.write, report, every_seconds=how.file_seconds)]
    if how.collector is not None and is_address(how.collector):
        tokens = partial(sender_tokens, folder.parent, how.collector)
        post = Collector(how.collector, run, tokens, how.collector_ca).post
        outlets.append(Outlet("collector", post, report, at_once=1))
    return outlets


class Shipper:
    """Ships the spans of a node, or of a rank without a node agent. It is thread-safe."""

    def __init__(self, rings: Rings, node: int, outlets: Sequence[Outlet], clock: Clock) -> None:
        """Start the thread. ``clock`` is `ClockOffset.at` of this machine."""
        self._rings, self._node, self._outlets, self._clock = rings, node, outlets, clock
        self._rows = 0
        self._name, self._numbers = secrets.token_hex(8), itertools.count()
        self._drains, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="myriad-shipper", daemon=True)
        self._thread.start()

    def begin(self, num_rows: int) -> None:
        """Ship the last spans of the previous ranks, and clear the rings for ``num_rows`` new ones."""
        with self._drains:
            self._drain()
            for row in range(num_rows):
                self._rings.clear(row)
            self._rows = num_rows

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Deliver all pending spans, for at most ``seconds``."""
        deadline = time.monotonic() + seconds
        self._closed.set()
        self._thread.join(seconds)
        for outlet in self._outlets:
            outlet.close(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while not self._closed.wait(_DRAIN_SECONDS):
            with self._drains:
                self._drain()
        with self._drains:
            self._drain()

    def _drain(self) -> None:
        """Drain the rings. Log any error: neither the node agent nor this thread may end because of one."""
        try:
            self._take()
        except Exception:
            _LOG.warning("spans of this second are lost", exc_info=True)

    def _take(self) -> None:
        by_attempt: defaultdict[int, list[Drained]] = defaultdict(list)
        for row in range(self._rows):
            drained = self._rings.drain(row)
            if len(drained.records) or drained.num_dropped:
                by_attempt[drained.attempt].append(drained)
        for attempt, parts in by_attempt.items():
            self._offer(attempt, parts)

    def _offer(self, attempt: int, parts: Sequence[Drained]) -> None:
        from myriad.telemetry.span_io.span_batch import pool

        offset_ns, error_seconds = self._clock(time.time_ns()) or (0, UNKNOWN_SECONDS)
        batch = pool(
            [
                SpanBatch(self._node, attempt, one.names, one.records, one.num_dropped, error_seconds)
                for one in parts
            ]
        )
        batch.records["start_ns"] += offset_ns
        batch = replace(batch, origin=Origin(self._name, next(self._numbers)))
        for outlet in self._outlets:
            outlet.offer(batch)
