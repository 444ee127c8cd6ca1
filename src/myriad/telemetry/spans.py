"""Record named time spans of a rank. A span costs about a microsecond.

    with recorder.span("forward", stage, micro_batch):    look up the span's object, which is built once
        ...                                               two clock reads, eight plain stores

Recording takes no lock, makes no system call (the clock is read in user space) and allocates no memory that
grows. The recorder writes a finished span to the rank's ring (`myriad.telemetry.span_io.span_ring`), which
other processes read. It shows the current span on the rank's row of the node's progress page, which the node
agent reads. On a GPU the host's clock only says when work was issued, so the device times the spans
(`myriad.telemetry.progress.device_clock`).

Code of a job (a model, a tokenizer) adds spans with `span`, which uses the recorder of this process.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING

from myriad.telemetry.progress.device_clock import Begun, Ended
from myriad.telemetry.progress.operation_counters import Operation, collective
from myriad.telemetry.progress.progress_page import ProgressRow
from myriad.telemetry.span_io.span_records import PHASES, class_of, evaluated
from myriad.telemetry.span_io.span_ring import SpanRing

if TYPE_CHECKING:
    from myriad.telemetry.progress.device_clock import DeviceClock

__all__ = ["COMMUNICATION", "Recorder", "Span", "span"]

COMMUNICATION = frozenset(
    {
        "exchange",
        "wait",
        "gather",
        "await_gather",
        "reduce",
        "await_reduce",
        "reduce_across",
        "await_across",
        "sync_tied",
        "await_momentum",
        "await_scatter",
        "clip",
        "tensor_comm",
        "expert_comm",
        "context_comm",
    }
)
"""Span names in which a rank waits for others."""
_OPERATIONS = {
    "gather": collective("dp"),
    "await_gather": collective("dp"),
    "reduce": collective("dp"),
    "await_reduce": collective("dp"),
    "reduce_across": collective("dp"),
    "await_across": collective("dp"),
    "sync_tied": collective("tied"),
    "tensor_comm": collective("tp"),
    "expert_comm": collective("dp"),
    "context_comm": collective("tp"),
    "all_reduce": collective("world"),
}
"""Operation for each span name. For messages between stages, the caller passes the operation."""
_ANY_MESSAGE = Operation((), 1 << 62)
"""Operation of a wait whose counters are unknown."""
_COMPUTE = frozenset(name for name in PHASES if class_of(name) == "compute")
_WRITTEN = 2
"""Index of the ring's word that counts the spans written."""


@dataclass(frozen=True, slots=True)
class Span:
    """A named interval of a rank's time."""

    name: str
    stage: int
    micro_batch: int
    start_seconds: float
    duration_seconds: float
    chunk: int = -1


class Recorder:
    """Writes spans to a ring and adds up seconds by name. One thread at a time may use it."""

    def __init__(
        self,
        row: ProgressRow | None = None,
        ring: SpanRing | None = None,
        rank: int = 0,
        device: "DeviceClock | None" = None,
    ) -> None:
        """Create a recorder.

        ``row`` shows the current span on the progress page (default: not shown). ``ring`` receives the spans
        (default: a ring in private memory). ``device`` times spans on a GPU (default: the host's clock).
        """
        self.ring = ring or SpanRing.of_its_own()
        self.row = row or ProgressRow.unseen()
        self.device = device
        self._rank = rank
        self._timed: dict[_Key, _Timed] = {}
        self._evaluated: dict[_Key, _Timed] = {}
        self.records_details = True
        """Whether `detail` records anything."""
        self.evaluates = False
        """Whether the spans belong to an evaluation."""
        self._is_silent = False
        self.words, self.written = self.ring.words, 0
        self.at = self.first = self.ring.first
        self.last = self.ring.end - 4
        self.when = 0
        """Step and rank, packed as in a record."""
        self.computes, self.busy_ns, self.exposed_ns = False, 0, 0
        self._under_way = 0, 0
        """Nanoseconds of compute and of exposed waiting read from the device for the current step."""
        self.step(0)

    def serve(self) -> None:
        """Make this the recorder that `span` uses."""
        _of_this_process[:] = [self]

    def step(self, step: int) -> None:
        """Assign all following spans to ``step``."""
        self.when = _word(((step, 32), (self._rank, 32)))
        busy_ns, exposed_ns = self._under_way
        self.busy_ns, self.exposed_ns = self.busy_ns + busy_ns, self.exposed_ns + exposed_ns
        self._under_way = 0, 0
        self.collect()

    def collect(self) -> None:
        """Read the marks that the device has passed. Call it where the host is about to wait for the device:
        reading then takes none of the device's time."""
        if self.device is None:
            return
        for when, (busy_ns, exposed_ns) in self.device.collect(self.write).items():
            if when == self.when:
                busy, exposed = self._under_way
                self._under_way = busy + busy_ns, exposed + exposed_ns
            else:
                self.busy_ns += busy_ns
                self.exposed_ns += exposed_ns

    def align_clocks(self) -> None:
        """Align the clocks of host and device every few seconds. Call it after the host has waited for the
        device."""
        if self.device is not None and self.device.is_due:
            self.collect()
            self.device.align()

    def span(
        self,
        name: str,
        stage: int = -1,
        micro_batch: int = -1,
        chunk: int = -1,
        *,
        operation: Operation | None = None,
        follows: bool = False,
        recorded: bool = True,
    ) -> AbstractContextManager[None]:
        """Record the time of a ``with`` block under ``name``, also if the block raises.

        ``operation`` names the communication if ``name`` does not imply it. ``follows`` means that the block
        begins where the previous span's block ended. If ``recorded`` is false, the span only shows on the
        rank's row.
        """
        if self._is_silent:
            return _NOTHING
        key = name, stage, micro_batch, chunk, operation, follows
        timed = self._timed.get(key)
        if timed is None or timed.start_ns:  # the span is nested in itself
            shown = evaluated(name) if self.evaluates and evaluated(name) in PHASES else name
            what = _NOT_RECORDED
            if recorded:
                what = _word(((self.ring.index_of(shown), 16), (stage, 16), (micro_batch, 16), (chunk, 16)))
            timed = _Timed(self, name, what, operation, follows=follows, is_compute=shown in _COMPUTE)
            self._timed.setdefault(key, timed)
        return timed

    def detail(self, name: str, step: int = -1) -> AbstractContextManager[None]:
        """Record a part of another span, which only pictures show. ``step``: that of a ring."""
        return self.span(name, chunk=step) if self.records_details else _NOTHING

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Record the spans of the ``with`` block as evaluation. They get separate names (`records.evaluated`)
        and count neither as compute nor in `take_totals`."""
        self._timed, self._evaluated, self.evaluates = self._evaluated, self._timed, True
        try:
            yield
        finally:
            self._timed, self._evaluated, self.evaluates = self._evaluated, self._timed, False

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Record no spans in the ``with`` block. Work captured in a CUDA graph does not run at capture, and
        an event in a graph has no time."""
        self._is_silent = True
        try:
            yield
        finally:
            self._is_silent = False

    def write(self, start_ns: int, duration_ns: int, when: int, what: int) -> None:
        """Write a record. ``when`` packs step and rank; ``what`` packs name, stage, micro-batch and chunk."""
        at, words = self.at, self.words
        words[at] = start_ns
        words[at + 1] = duration_ns
        words[at + 2] = when
        words[at + 3] = what
        self.at = at + 4 if at < self.last else self.first
        self.written = words[_WRITTEN] = self.written + 1

    def newest(self) -> list[Span]:
        """Return the spans in the ring, ordered by their ends."""
        drained = self.ring.newest()
        fields = ("name", "stage", "micro_batch", "chunk", "start_ns", "duration_ns")
        rows = zip(*(drained.records[field].tolist() for field in fields), strict=True)
        return [
            Span(drained.names[name], stage, micro_batch, start / 1e9, duration / 1e9, chunk)
            for name, stage, micro_batch, chunk, start, duration in rows
        ]

    def take_busy(self) -> float:
        """Return the seconds of forwards and backwards since the last call, without the communication inside.

        On a GPU these are the device's seconds in the finished steps not returned yet, usually one.
        """
        busy, self.busy_ns = self.busy_ns, 0
        return busy / 1e9

    def take_exposed(self) -> float:
        """Return the seconds in which this rank waited for other ranks since the last call.

        On a GPU these are seconds of the device, as for `take_busy`: the host runs ahead of the device and
        waits for it in one place.
        """
        totals = self.take_totals()
        if self.device is None:
            return sum(totals.get(name, 0.0) for name in sorted(COMMUNICATION))
        exposed, self.exposed_ns = self.exposed_ns, 0
        return exposed / 1e9

    def take_totals(self) -> dict[str, float]:
        """Return the seconds by span name since the last call."""
        totals: dict[str, float] = {}
        for timed in self._timed.values():
            if timed.total_ns:
                totals[timed.name] = totals.get(timed.name, 0.0) + timed.total_ns / 1e9
                timed.total_ns = 0
        return totals


_Key = tuple[str, int, int, int, Operation | None, bool]
_NOT_RECORDED = -1
"""Value of ``what`` for a span that is not recorded."""

_NOTHING = nullcontext()
_of_this_process: list[Recorder] = []


def span(name: str, stage: int = -1, micro_batch: int = -1) -> AbstractContextManager[None]:
    """Return a span of this process's rank for a ``with`` block in the job's code. Outside a rank process it
    records nothing."""
    return _of_this_process[-1].span(name, stage, micro_batch) if _of_this_process else nullcontext()


class _Timed:
    """A span of a program, entered and left once per use. The record is written inline, because a function
    call costs more than the stores."""

    __slots__ = (
        "_before",
        "_begun",
        "_busy",
        "_communicates",
        "_computed",
        "_ended",
        "_exposed",
        "_follows",
        "_is_compute",
        "_on_device",
        "_operation",
        "_recorder",
        "_row",
        "_what",
        "name",
        "start_ns",
        "total_ns",
    )
    _busy: int
    """1: the duration counts as compute. -1: the span communicates inside a compute span and shortens it."""

    def __init__(
        self,
        recorder: Recorder,
        name: str,
        what: int,
        operation: Operation | None,
        *,
        follows: bool,
        is_compute: bool,
    ) -> None:
        self.name, self.start_ns, self.total_ns = str(name), 0, 0  # not a StrEnum, whose lookup is slow
        self._recorder, self._row, self._what = recorder, recorder.row, what
        self._communicates, self._is_compute = name in COMMUNICATION, is_compute
        self._before, self._computed, self._busy = b"", False, 0
        self._exposed = int(self._communicates and not recorder.evaluates)
        self._operation = operation or _OPERATIONS.get(name)
        if self._operation is None and self._communicates and name != "clip":  # which contains an operation
            self._operation = _ANY_MESSAGE
        self._follows, self._on_device = follows, False
        self._begun = Begun(self.name, self._operation)
        self._ended = Ended(0, what, 0, self._exposed, what != _NOT_RECORDED)

    def __enter__(self) -> None:
        recorder = self._recorder
        if recorder.device is not None:
            self._on_device = recorder.device.begin(self._begun, follows=self._follows)
        self._computed = recorder.computes
        if self._computed:
            self._busy = -1 if self._communicates else 0
        else:
            self._busy = 1 if self._is_compute else 0
            recorder.computes = self._is_compute
        self.start_ns = now = monotonic_ns()
        self._before = self._row.enter(self.name, self._operation, now)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now, start, recorder = monotonic_ns(), self.start_ns, self._recorder
        took = now - start
        self.start_ns, what = 0, self._what
        if what != _NOT_RECORDED:
            self.total_ns += took
        if recorder.device is None:
            if what != _NOT_RECORDED:
                at, words = recorder.at, recorder.words
                words[at] = start
                words[at + 1] = took
                words[at + 2] = recorder.when
                words[at + 3] = what
                recorder.at = at + 4 if at < recorder.last else recorder.first
                recorder.written = words[_WRITTEN] = recorder.written + 1
            recorder.busy_ns += self._busy * took
        elif self._on_device:
            ended = self._ended
            if ended.when != recorder.when or ended.busy != self._busy:
                self._ended = ended = ended._replace(when=recorder.when, busy=self._busy)
            recorder.device.end(ended)
        elif what != _NOT_RECORDED:
            recorder.write(start, took, recorder.when, what)
        recorder.computes = self._computed
        self._row.leave(self._before, self._operation, now)


def _word(fields: tuple[tuple[int, int], ...]) -> int:
    """Pack signed numbers into a 64-bit word. Each field is (value, bits), the lowest bits first."""
    word, at = 0, 0
    for value, bits in fields:
        word |= (value & ((1 << bits) - 1)) << at
        at += bits
    return word - (1 << 64) if word >> 63 else word
