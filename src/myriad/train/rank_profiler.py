"""Profile this rank on request while it trains; a profile begins and ends between two steps.

    node agent ── word on the progress page ──► after each step: one load     (no request: that is all)
                                                profile: on ... first end of a step after so many seconds: off
                                                         ──► a thread packs it, with the rank's spans
                                                             ──► RUN/traces ──► answer
                                                flight:  a thread polls once a second, because the request
                                                         concerns ranks that hang

A profile ends early when it has used the allowed memory; it covers at least one step. An error in it is a
line in the rank's log, and the run continues. Communication continues while torch's profiler is on:

gloo records its operations from threads of its own. Operations in flight at the end of a profile are written
into memory that the profile has freed. The trace is then damaged, and minutes later the rank dies by SIGSEGV
(seen with torch 2.13). The profile therefore records only operators and their backwards, which this thread
alone runs. The rank's spans show their purpose and the rank's waits; they come into the same file
(`myriad.telemetry.traces.trace_files`). A GPU's own activity is recorded as usual, with the kernels of NCCL.
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
from torch._C import _autograd
from torch._C._profiler import ProfilerActivity, RecordScope
from torch.autograd import profiler as autograd_profiler

from myriad.telemetry.progress.progress_page import PROGRESS, ProgressRow
from myriad.telemetry.span_io.span_ring import SpanRing
from myriad.telemetry.traces.trace_files import pack_profile, trace_path, write_bounded
from myriad.telemetry.traces.trace_formats import SpanLane
from myriad.telemetry.traces.trace_request import Outcome, TraceAnswerWord, TraceWord

__all__ = ["Tracer", "flight_recorder"]

_LOG = logging.getLogger(__name__)
_MOST_EVENT_BYTES = 48 * 2**20
"""Largest size of a profile's events during recording (some 220 bytes each); they take seven times that at
its end."""
_POLL_SECONDS, _WRITE_SECONDS = 1.0, 30.0
_PAGE_BYTES = 4096


def flight_recorder() -> Callable[[], bytes] | None:
    """Return a function that dumps this process's collectives as JSON, or ``None`` if this torch has none."""
    names = ("_dump_nccl_trace_json",) if torch.cuda.is_available() else ()
    for name in (*names, "_dump_fr_trace_json"):
        if (dump := getattr(c10d, name, None)) is not None:
            found: Callable[[], bytes] = dump
            return found
    return None


class Tracer:
    """The tracer of one rank."""

    def __init__(
        self, folder: Path, rank: int, row: ProgressRow, device: torch.device, ring: SpanRing
    ) -> None:
        """``folder`` is where trace files go; ``ring`` holds the rank's spans."""
        self._folder, self._rank, self._row, self._device = folder, rank, row, device
        self._ring = ring
        self._heard = 0
        """The newest request word that was read."""
        self._step = 0
        self._profile: OperatorProfile | None = None
        self._request = TraceWord(0, "profile", 0.0)
        self._until, self._begin_bytes = 0.0, 0
        self._writer: threading.Thread | None = None
        self._over = threading.Event()
        if PROGRESS in os.environ:  # without a progress page, no request can arrive
            threading.Thread(target=self._watch_flight, name="flight recorder", daemon=True).start()

    @property
    def is_on(self) -> bool:
        """Whether a profile is running, which makes steps slower."""
        return self._profile is not None

    def after_step(self, step: int) -> None:
        """Begin, continue or end a profile. Every rank calls this after each step."""
        self._step = step
        if self._profile is not None:
            self._go_on()
        elif (word := self._row.trace_word) != self._heard:
            self._heard = word
            self._begin(TraceWord.unpack(word), step)

    def close(self) -> None:
        """End and write a running profile, and stop the threads."""
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
        self._lane.collect()
        if time.monotonic() >= self._until or _memory_bytes() - self._begin_bytes >= _MOST_EVENT_BYTES:
            self._end()

    def _end(self) -> None:
        """End the profile. Ending it and writing torch's file block this rank; packing the file does not."""
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
        while not self._over.wait(_POLL_SECONDS):
            if (word := self._row.trace_word) != heard:
                heard = word
                request = TraceWord.unpack(word)
                if request.what == "flight":
                    self._dump_flight(request)

    def _dump_flight(self, request: TraceWord) -> None:
        step = self._step
        try:
            if (dump := flight_recorder()) is None:
                raise RuntimeError("this version of torch has no flight recorder with a Python interface")
            found = dump()
            if not json.loads(found).get("entries"):
                raise RuntimeError("the flight recorder is empty, or off (TORCH_FR_BUFFER_SIZE)")
            write_bounded(trace_path(self._folder, self._rank, step, "flight"), found)
            self._answer("done", request, step)
        except Exception as error:
            self._fail(error, request, step)


def _memory_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


_SCOPES = {RecordScope.FUNCTION, RecordScope.BACKWARD_FUNCTION}


class OperatorProfile(autograd_profiler.profile):
    """A profile of the operators of the thread that begins and ends it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(use_device="cuda" if device.type == "cuda" else None, use_kineto=True)

    def begin(self) -> None:
        """Start recording. The first profile of a process loads libraries for a second."""
        self._prepare_trace()
        self._start_trace()

    def _start_trace(self) -> None:
        self.entered = True
        autograd_profiler._run_on_profiler_start()
        _autograd._enable_profiler(self.config(create_trace_id=False), self._activities(), _SCOPES)  # type: ignore[call-arg]
        self.profiling_start_time_ns = time.perf_counter_ns()

    def _activities(self) -> set[ProfilerActivity]:
        found: set[ProfilerActivity] = self.kineto_activities
        return found

    def end(self, path: Path) -> None:
        """Stop recording, and write a Chrome trace."""
        self.__exit__(None, None, None)
        self.export_chrome_trace(str(path))
