"""What a person wants to see of this rank while it trains: begun and ended between two steps.

    executor ── word on the progress page ──► after each step: one load     (nobody asks: that is all)
                                              profile: on ... first end of a step after so many seconds: off
                                                       ──► a thread packs it, with the rank's spans
                                                           ──► RUN/traces ──► answer
                                              flight:  a thread looks once a second, as it is a rank that
                                                       hangs of which one wants to know it

A profile ends early when it has taken as much memory as is allowed; a step is the least. Whatever goes wrong
in it is a line in the rank's log, and the run goes on.
"""

import json
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._C._distributed_c10d as c10d

from myriad.telemetry.progress_page import PROGRESS, ProgressRow
from myriad.telemetry.ring import SpanRing
from myriad.telemetry.span_lane import SpanLane
from myriad.telemetry.trace_files import pack_profile, trace_path, write_bounded
from myriad.telemetry.trace_request import Outcome, TraceAnswerWord, TraceWord
from myriad.train.profiler import OperatorProfile

__all__ = ["Tracer", "flight_recorder"]

_LOG = logging.getLogger(__name__)
_MOST_EVENT_BYTES = 48 * 2**20
"""Of a profile's events while they are recorded (some 220 each); they take seven times that at its end."""
_LOOK_SECONDS, _WRITE_SECONDS = 1.0, 30.0
_PAGE_BYTES = 4096


def flight_recorder() -> Callable[[], bytes] | None:
    """What tells, as JSON, which collectives this process has entered; ``None``: this torch cannot."""
    names = ("_dump_nccl_trace_json",) if torch.cuda.is_available() else ()
    for name in (*names, "_dump_fr_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            found: Callable[[], bytes] = dump
            return found
    return None


class Tracer:
    """Of one rank."""

    def __init__(
        self, folder: Path, rank: int, row: ProgressRow, device: torch.device, ring: SpanRing
    ) -> None:
        """``folder``: where files go; ``ring``: of the rank's spans."""
        self._folder, self._rank, self._row, self._device = folder, rank, row, device
        self._ring = ring
        self._heard = 0
        """The newest word that was looked at."""
        self._step = 0
        self._profile: OperatorProfile | None = None
        self._request = TraceWord(0, "profile", 0.0)
        self._until, self._begin_bytes = 0.0, 0
        self._writer: threading.Thread | None = None
        self._over = threading.Event()
        if PROGRESS in os.environ:  # else nobody can ask
            threading.Thread(target=self._watch_flight, name="flight recorder", daemon=True).start()

    @property
    def is_on(self) -> bool:
        """Steps take longer than they would."""
        return self._profile is not None

    def after_step(self, step: int) -> None:
        """Every rank calls this after each step."""
        self._step = step
        if self._profile is not None:
            self._go_on()
        elif (word := self._row.trace_word) != self._heard:
            self._heard = word
            self._begin(TraceWord.unpack(word), step)

    def close(self) -> None:
        """What is begun is written first."""
        self._over.set()
        if self._profile is not None:
            self._end()
        if self._writer is not None:
            self._writer.join(_WRITE_SECONDS)

    # Profiles

    def _begin(self, request: TraceWord, step: int) -> None:
        if request.what != "profile":
            return
        self._request = request
        self._answer("begun", request, step)
        try:
            with self._row.within("tracing"):
                begun = OperatorProfile(self._device)
                begun.begin()
        except Exception as error:
            self._fail(error, request, step)
            return
        self._profile, self._begin_step, self._lane = begun, step, SpanLane(self._ring)
        self._until, self._begin_bytes = time.monotonic() + request.seconds, _memory_bytes()

    def _go_on(self) -> None:
        self._lane.look()
        if time.monotonic() >= self._until or _memory_bytes() - self._begin_bytes >= _MOST_EVENT_BYTES:
            self._end()

    def _end(self) -> None:
        """The end and the file that torch writes hold this rank up; packing it does not."""
        ended, self._profile = self._profile, None
        assert ended is not None
        try:
            with self._row.within("tracing"):
                with tempfile.NamedTemporaryFile(suffix=".json", delete=False) as file:
                    source = Path(file.name)
                ended.end(source)
        except Exception as error:
            self._fail(error, self._request, self._begin_step)
            return
        packing = (source, self._request, self._begin_step, self._lane)
        self._writer = threading.Thread(target=self._pack, args=packing, daemon=True)
        self._writer.start()

    def _pack(self, source: Path, request: TraceWord, step: int, lane: SpanLane) -> None:
        try:
            path = trace_path(self._folder, self._rank, step, "profile")
            if not pack_profile(source, path, more=lane.events):
                _LOG.warning("the profile was too long: %s ends early", path)
            self._answer("done", request, step)
        except Exception as error:
            self._fail(error, request, step)
        finally:
            source.unlink(missing_ok=True)

    def _answer(self, outcome: Outcome, request: TraceWord, step: int) -> None:
        self._row.answer_trace(TraceAnswerWord(request.number, outcome, step).pack())

    def _fail(self, error: Exception, request: TraceWord, step: int) -> None:
        _LOG.warning("no %s of this rank: %s: %s", request.what, type(error).__name__, error)
        self._answer("failed", request, step)

    # The flight recorder

    def _watch_flight(self) -> None:
        heard = 0
        while not self._over.wait(_LOOK_SECONDS):
            if (word := self._row.trace_word) != heard:
                heard = word
                request = TraceWord.unpack(word)
                if request.what == "flight":
                    self._dump_flight(request)

    def _dump_flight(self, request: TraceWord) -> None:
        step = self._step
        try:
            if (dump := flight_recorder()) is None:
                raise RuntimeError("this version of torch has no flight recorder that can be asked")
            found = dump()
            if not json.loads(found).get("entries"):
                raise RuntimeError("the flight recorder is empty, or off (TORCH_FR_BUFFER_SIZE)")
            write_bounded(trace_path(self._folder, self._rank, step, "flight"), found)
            self._answer("done", request, step)
        except Exception as error:
            self._fail(error, request, step)


def _memory_bytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
