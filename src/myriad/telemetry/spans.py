"""What a rank did when, in the program's own words: a span costs about a microsecond.

    with recorder.span("forward", stage, micro_batch):    the words of the span are found, made only once
        ...                                               two looks at the clock, eight plain stores

No lock, no system call (the clock is read in user space), nothing that grows. A span goes to the rank's ring
(`myriad.telemetry.ring`), from where others take it; what goes on now stands on the rank's row of the node's
progress page, for whoever watches. On a GPU the rank's clock says when work was asked for: there spans are
timed by the device (`myriad.telemetry.device_clock`).

A job's own code (a model, a tokenizer) adds spans by `span`, without knowing whose recorder it is.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING

from myriad.telemetry.device_clock import Counted
from myriad.telemetry.progress_page import ProgressRow
from myriad.telemetry.records import PHASES, class_of, evaluated
from myriad.telemetry.ring import SpanRing

if TYPE_CHECKING:
    from myriad.telemetry.device_clock import DeviceClock, Mark

__all__ = ["COMMUNICATION", "Recorder", "Span", "span"]

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
_COMPUTE = frozenset(name for name in PHASES if class_of(name) == "compute")
_WRITTEN = 2
"""Word of a ring: how many spans were written."""


@dataclass(frozen=True, slots=True)
class Span:
    """One stretch of a rank's time."""

    name: str
    stage: int
    micro_batch: int
    start_seconds: float
    duration_seconds: float
    chunk: int = -1


class Recorder:
    """Spans into a ring, and seconds by name since the last `take_totals`. For one thread at a time."""

    def __init__(
        self,
        row: ProgressRow | None = None,
        ring: SpanRing | None = None,
        rank: int = 0,
        device: "DeviceClock | None" = None,
    ) -> None:
        """``row``: where it is shown what goes on; nowhere when left out. ``ring``: one of its own when left
        out. ``device``: times what a GPU does."""
        self.ring = ring or SpanRing.of_its_own()
        self.row = row or ProgressRow.unseen()
        self.device = device
        self._rank = rank
        self._timed: dict[tuple[str, int, int, int], _Timed] = {}
        self._evaluated: dict[tuple[str, int, int, int], _Timed] = {}
        self.evaluates = False
        """What is recorded belongs to a program that trains nothing."""
        self.words, self.written = self.ring.words, 0
        self.at = self.first = self.ring.first
        self.last = self.ring.end - 4
        self.when = 0
        """Step and rank, as a record has them."""
        self.computes, self.busy_ns, self.exposed_ns = False, 0, 0
        self.step(0)

    def serve(self) -> None:
        """`span` records here from now on."""
        _of_this_process[:] = [self]

    def step(self, step: int) -> None:
        """Spans from here on belong to it."""
        self.when = _word(((step, 32), (self._rank, 32)))
        if self.device is not None:
            self._collect(self.device)

    def _collect(self, device: "DeviceClock") -> None:
        busy_ns, exposed_ns = device.collect(self.write)
        self.busy_ns += busy_ns
        self.exposed_ns += exposed_ns

    def settle_clock(self) -> None:
        """The host has just waited for the device: every few seconds, align their clocks."""
        if self.device is not None and self.device.is_due:
            self._collect(self.device)
            self.device.settle()

    def span(self, name: str, stage: int = -1, micro_batch: int = -1, chunk: int = -1) -> "_Timed":
        """Records the time of a ``with`` block under ``name``, also when it raises."""
        timed = self._timed.get((name, stage, micro_batch, chunk))
        if timed is None or timed.start_ns:  # inside itself
            recorded = evaluated(name) if self.evaluates and evaluated(name) in PHASES else name
            what = _word(((self.ring.index_of(recorded), 16), (stage, 16), (micro_batch, 16), (chunk, 16)))
            timed = _Timed(self, name, what, is_compute=recorded in _COMPUTE)
            self._timed.setdefault((name, stage, micro_batch, chunk), timed)
        return timed

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A program that trains nothing: its spans have names of their own (`records.evaluated`), and count
        neither as computing nor in `take_totals`."""
        self._timed, self._evaluated, self.evaluates = self._evaluated, self._timed, True
        try:
            yield
        finally:
            self._timed, self._evaluated, self.evaluates = self._evaluated, self._timed, False

    def write(self, start_ns: int, duration_ns: int, when: int, what: int) -> None:
        """A record; ``when``: step and rank, ``what``: name, stage, micro-batch and chunk."""
        at, words = self.at, self.words
        words[at] = start_ns
        words[at + 1] = duration_ns
        words[at + 2] = when
        words[at + 3] = what
        self.at = at + 4 if at < self.last else self.first
        self.written = words[_WRITTEN] = self.written + 1

    def newest(self) -> list[Span]:
        """What the ring holds, in order of ends."""
        drained = self.ring.newest()
        fields = ("name", "stage", "micro_batch", "chunk", "start_ns", "duration_ns")
        rows = zip(*(drained.records[field].tolist() for field in fields), strict=True)
        return [
            Span(drained.names[name], stage, micro_batch, start / 1e9, duration / 1e9, chunk)
            for name, stage, micro_batch, chunk, start, duration in rows
        ]

    def take_busy(self) -> float:
        """Seconds of forwards and backwards since the last call, without the communication inside them.

        On a GPU they are the device's, of the spans that it had passed when the step began: of the step
        before, as a rule.
        """
        busy, self.busy_ns = self.busy_ns, 0
        return busy / 1e9

    def take_exposed(self) -> float:
        """Seconds in which this rank waited for others since the last call; on a GPU in which the device did,
        as for `take_busy`: the host runs ahead of it, and waits for it in one place for everything."""
        totals = self.take_totals()
        if self.device is None:
            return sum(totals.get(name, 0.0) for name in sorted(COMMUNICATION))
        exposed, self.exposed_ns = self.exposed_ns, 0
        return exposed / 1e9

    def take_totals(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        totals: dict[str, float] = {}
        for timed in self._timed.values():
            if timed.total_ns:
                totals[timed.name] = totals.get(timed.name, 0.0) + timed.total_ns / 1e9
                timed.total_ns = 0
        return totals


_of_this_process: list[Recorder] = []


def span(name: str, stage: int = -1, micro_batch: int = -1) -> AbstractContextManager[None]:
    """Of this process's rank, for a ``with`` block in code of the job; outside a rank nothing is recorded."""
    return _of_this_process[-1].span(name, stage, micro_batch) if _of_this_process else nullcontext()


class _Timed:
    """One span of a program: entered and left again and again. Calls cost more than what they do: the record
    is written in place."""

    __slots__ = (
        "_before",
        "_begun",
        "_busy",
        "_communicates",
        "_computed",
        "_exposed",
        "_is_compute",
        "_recorder",
        "_row",
        "_what",
        "name",
        "start_ns",
        "total_ns",
    )
    _begun: "Mark"
    _busy: int
    """1: its duration counts as computing. -1: it communicates inside such a span, which is then shorter."""

    def __init__(self, recorder: Recorder, name: str, what: int, *, is_compute: bool) -> None:
        self.name, self.start_ns, self.total_ns = str(name), 0, 0  # no StrEnum: it is slow to find
        self._recorder, self._row, self._what = recorder, recorder.row, what
        self._communicates, self._is_compute = name in COMMUNICATION, is_compute
        self._before, self._computed, self._busy = b"", False, 0
        self._exposed = int(self._communicates and not recorder.evaluates)

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.device is not None:
            self._begun = recorder.device.mark()
        self._computed = recorder.computes
        if self._computed:
            self._busy = -1 if self._communicates else 0
        else:
            self._busy = 1 if self._is_compute else 0
            recorder.computes = self._is_compute
        self.start_ns = now = monotonic_ns()
        self._before = self._row.enter(self.name, self._communicates, now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now, start, recorder = monotonic_ns(), self.start_ns, self._recorder
        took = now - start
        self.start_ns = 0
        self.total_ns += took
        if recorder.device is None:
            at, words = recorder.at, recorder.words
            words[at] = start
            words[at + 1] = took
            words[at + 2] = recorder.when
            words[at + 3] = self._what
            recorder.at = at + 4 if at < recorder.last else recorder.first
            recorder.written = words[_WRITTEN] = recorder.written + 1
            recorder.busy_ns += self._busy * took
        elif not recorder.device.add(
            self._begun, recorder.device.mark(), recorder.when, self._what, Counted(self._busy, self._exposed)
        ):
            recorder.write(start, took, recorder.when, self._what)
        recorder.computes = self._computed
        self._row.leave(self._before, self._communicates, now)


def _word(fields: tuple[tuple[int, int], ...]) -> int:
    """Small signed numbers of so many bits, the lowest first, as one of 64."""
    word, at = 0, 0
    for value, bits in fields:
        word |= (value & ((1 << bits) - 1)) << at
        at += bits
    return word - (1 << 64) if word >> 63 else word
