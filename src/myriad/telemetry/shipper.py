"""Takes ranks' spans out of their rings, once a second, and has them written and sent.

    rings ──a second──► Shipper ──►  Outlet: files of some seconds in RUN/spans
                                └──► Outlet: POST to the collector, if the job names one

It copies memory and nothing else: what can hang or fail has a thread and a bounded queue of its own
(`myriad.telemetry.outlet`). Rings outlive their ranks, so what a killed rank did last is there.
"""

import itertools
import logging
import secrets
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from myriad.telemetry.batch import Origin, SpanBatch
from myriad.telemetry.clock import UNKNOWN_SECONDS
from myriad.telemetry.config import TelemetryConfig, is_address
from myriad.telemetry.outlet import Outlet, Tell
from myriad.telemetry.ring import Drained

__all__ = ["Rings", "Shipper", "open_outlets"]

_LOG = logging.getLogger(__name__)
_DRAIN_SECONDS = 1.0
_CLOSE_SECONDS = 3.0

Clock = Callable[[int], tuple[int, float] | None]
"""Gives, for a time of this machine, nanoseconds to add for the time that all nodes go by, and how wrong that
may be in seconds."""


class Rings(Protocol):
    """Of the ranks of a node, or of one rank alone."""

    def drain(self, row: int) -> Drained:
        """What was written since the last look."""

    def clear(self, row: int) -> None:
        """For a rank that is about to start."""


def open_outlets(folder: Path, place: str, run: str, how: TelemetryConfig, tell: Tell) -> list[Outlet]:
    """Where the spans of ``place`` ("node-3") go."""
    from myriad.telemetry.outlets import Collector, FileWriter

    files = FileWriter(folder, place, how.keep)
    outlets = [Outlet("files", files.write, tell, every_seconds=how.file_seconds)]
    if how.collector is not None and is_address(how.collector):
        outlets.append(Outlet("collector", Collector(how.collector, run).post, tell, at_once=1))
    return outlets


class Shipper:
    """Of a node, or of a rank that has no executor. Its methods may be called by any thread."""

    def __init__(self, rings: Rings, node: int, outlets: Sequence[Outlet], clock: Clock) -> None:
        """``clock``: `ClockOffset.at` of this machine."""
        self._rings, self._node, self._outlets, self._clock = rings, node, outlets, clock
        self._rows = 0
        self._name, self._numbers = secrets.token_hex(8), itertools.count()
        self._drains, self._closed = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="myriad-shipper", daemon=True)
        self._thread.start()

    def begin(self, num_rows: int) -> None:
        """So many ranks are about to start; what those before them did last is taken."""
        with self._drains:
            self._drain()
            for row in range(num_rows):
                self._rings.clear(row)
            self._rows = num_rows

    def close(self, seconds: float = _CLOSE_SECONDS) -> None:
        """Everything that is there is delivered, if that takes no longer."""
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
        """Whatever a ring holds: neither the executor nor this thread ends by it."""
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
        from myriad.telemetry.pool import pool

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
