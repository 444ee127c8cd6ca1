"""Show the current activity of each rank of a node in shared memory, one fixed row per rank.

A rank writes with plain stores: no lock, no system call (the clock is read in user space). Its cost does not
depend on readers. The node agent reads the page. A reader may see a row between two stores, so it must not
decide from a single read.

    bytes   0   8      16     24      32      40      48        56     64 .. 80    80 .. 96    96   104
            pid epoch  step   entered left    changed step_time agreed activity    phase       turn busy

          112   120
          trace trace_answer

          128 .. 256: the newest eight digests of the state that replicas share, each with its step

          256    264     272
          failed rounds  cost     checks in gaps: a bit for each of `TRAINING_CHECKS`, number, nanoseconds

          320 .. 416   416 counters     waits      communication, as
          `myriad.telemetry.progress.operation_counters` numbers it; the wait bits
                                  are void if entered = left

          424    432     440  448   456 .. 552  552 .. 568
          looked entered left waits counters    activity     the same for the device

``step`` is the current step. ``entered`` and ``left`` count the communication of this attempt: inside an
operation, ``entered`` exceeds ``left``. ``changed`` is the machine's monotonic clock in nanoseconds and is
written last. A GPU runs behind its host, which waits for it in one place for any cause. While the host makes
no progress, a thread (`myriad.telemetry.progress.device_clock`) writes the device's position, and readers get
that instead.

The reader writes three words only. ``agreed`` is the last step after which replicas are known to hold equal
state. ``turn`` asks the rank for a step-boundary restart: end after this step with a snapshot in memory.
``trace`` is a trace request of an operator (`trace_request`); the rank answers in ``trace_answer``.

MYRIAD_PROGRESS = DESCRIPTOR:ROW names a rank's row. Without it the rank writes into private memory, so that
ranks of any launcher run the same code.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from myriad.telemetry.progress.operation_counters import COUNTERS, Operation

if TYPE_CHECKING:
    from myriad.telemetry.progress.device_clock import DevicePosition

__all__ = [
    "EXPERT_DIGEST",
    "IN_MEMORY_ONLY",
    "PROGRESS",
    "TRAINING_CHECKS",
    "TURNED_CODE",
    "ProgressPage",
    "ProgressRow",
    "RowStatus",
    "own_row",
]

PROGRESS = "MYRIAD_PROGRESS"
ROW_BYTES = 576
_NAME_BYTES = 16
_ACTIVITY, _PHASE = slice(64, 64 + _NAME_BYTES), slice(80, 80 + _NAME_BYTES)
_PID, _EPOCH, _STEP, _ENTERED, _LEFT, _CHANGED, _STEP_TIME, _AGREED = range(8)
_TURN, _BUSY, _TRACE, _TRACE_ANSWER = 12, 13, 14, 15
_FIRST_DIGEST, _NUM_DIGESTS = 16, 8
_CHECKS = 32
_COUNTERS, _WAITS = 40, 52
_DEVICE_LOOKED, _DEVICE_ENTERED, _DEVICE_LEFT, _DEVICE_WAITS, _DEVICE_COUNTERS = 53, 54, 55, 56, 57
_DEVICE_ACTIVITY = slice(552, 552 + _NAME_BYTES)
_NUM = len(COUNTERS)
_ROW = struct.Struct(f"8q16s16s2q16x16q3q40x{_NUM + 1}q{_NUM + 4}q16s8x")
assert _ROW.size == ROW_BYTES and _NUM == _WAITS - _COUNTERS
TRAINING_CHECKS = ("product", "memory", "copy", "all-reduce", "all-to-all")
"""Checks that run during training (`myriad.train.training_checks`), in the order of their bits on a row."""
_ONE = struct.Struct("q")
EXPERT_DIGEST = 2**32 - 1
"""Bits of a digest that are those of the experts, if ranks that hold the same parameters hold different
experts."""
TURNED_CODE = 75
"""Exit code of a rank that ended for a step-boundary restart (sysexits.h: EX_TEMPFAIL, retry later)."""
IN_MEMORY_ONLY = "the last checkpoint is in memory only"
"""Prefix of the error of a rank that could not store its last step, which the snapshot servers hold."""


@dataclass(frozen=True)
class RowStatus:
    """The content of a row at one read."""

    pid: int
    epoch: int
    step: int
    entered: int
    left: int
    changed_ns: int
    step_ns: int
    """Duration of the last step; 0 before the first."""
    busy_ns: int
    """Nanoseconds of the last step in which the rank computed; 0 if unknown."""
    activity: str
    phase: str
    digests: tuple[tuple[int, int], ...] = ()
    """Pairs of (steps done, digest of the state that replicas share), ascending."""
    failed_checks: tuple[str, ...] = ()
    """Names from `TRAINING_CHECKS` of the checks that failed in this attempt."""
    counters: tuple[int, ...] = ()
    """Number of operations begun in this attempt, in the order of `COUNTERS`."""
    waits: int = 0
    """A bit for each counter whose newest operation the rank waits for."""
    on_device: bool = False
    """Whether ``entered``, ``left``, ``activity``, ``counters`` and ``waits`` describe the device, not the
    host."""


class ProgressRow:
    """A row of the progress page as its writer sees it."""

    def __init__(self, memory: memoryview) -> None:
        """Use ``memory``, which has `ROW_BYTES` bytes."""
        self._bytes, self._words = memory, memory.cast("q")
        self._activity, self._began_ns = bytes(_NAME_BYTES), 0
        self._names: dict[str, bytes] = {}
        self._num_digests = 0

    @staticmethod
    def unseen() -> "ProgressRow":
        """Return a row in private memory, which has no reader."""
        return ProgressRow(memoryview(bytearray(ROW_BYTES)))

    def begin(self, epoch: int) -> None:
        """Clear the row of an earlier process's values, and write this process's id and attempt."""
        self._bytes[:] = bytes(ROW_BYTES)
        self._words[_PID], self._words[_EPOCH], self._words[_STEP] = os.getpid(), epoch, -1
        self.phase("starting")

    def phase(self, name: str) -> None:
        """Set the phase of the rank: "starting", "loading", "step", ..."""
        self._bytes[_PHASE] = self._name(name)
        self._words[_CHANGED] = time.monotonic_ns()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Set a phase for the ``with`` block, and restore the previous one after it."""
        before = bytes(self._bytes[_PHASE])
        self.phase(name)
        yield
        self._bytes[_PHASE] = before
        self._words[_CHANGED] = time.monotonic_ns()

    def step(self, step: int) -> None:
        """Record the start of a training step."""
        self._words[_STEP], self._began_ns = step, time.monotonic_ns()
        self.phase("step")

    @property
    def restart_requested(self) -> bool:
        """Whether the node agent asks the rank to end for a step-boundary restart."""
        return self._words[_TURN] != 0

    @property
    def trace_word(self) -> int:
        """The pending trace request as a word; 0 if there is none."""
        return self._words[_TRACE]

    def answer_trace(self, word: int) -> None:
        """Write the answer to the trace request."""
        self._words[_TRACE_ANSWER] = word

    def step_done(self, busy_seconds: float = 0.0) -> None:
        """Record the end of the step. ``busy_seconds`` is its time in compute; 0 if unknown."""
        self._words[_BUSY] = int(busy_seconds * 1e9)
        self._words[_STEP_TIME] = time.monotonic_ns() - self._began_ns
        self._words[_CHANGED] = time.monotonic_ns()

    def digest(self, step: int, value: int) -> None:
        """Write the int64 digest of the state that replicas share after ``step`` steps. The step is written
        last, so that a reader never pairs the value with another step."""
        at = _FIRST_DIGEST + 2 * (self._num_digests % _NUM_DIGESTS)
        self._words[at] = 0
        self._words[at + 1] = value
        self._words[at] = step + 1
        self._num_digests += 1

    def checked(self, failed: int, rounds: int, cost_ns: int) -> None:
        """Write the results of the checks in gaps in this attempt; ``failed`` has a bit per `TRAINING_CHECKS`
        entry."""
        self._words[_CHECKS + 1], self._words[_CHECKS + 2] = rounds, cost_ns
        self._words[_CHECKS] = failed

    def agreed_step(self) -> int:
        """Return the last step after which replicas are known to hold equal state; -1 if unknown."""
        return self._words[_AGREED] - 1

    @property
    def changed_ns(self) -> int:
        """Monotonic time of the last progress written to the row."""
        return self._words[_CHANGED]

    def enter(self, name: str, operation: Operation | None, now_ns: int) -> bytes:
        """Record the start of an activity at ``now_ns`` (monotonic clock), and return the previous one."""
        before, self._activity = self._activity, self._names.get(name) or self._name(name)
        words = self._words
        self._bytes[_ACTIVITY] = self._activity
        if operation is not None:
            for counter in operation.counters:
                words[_COUNTERS + counter] += 1
            if operation.waits:
                words[_WAITS] = operation.waits
                words[_ENTERED] += 1
        words[_CHANGED] = now_ns
        return before

    def device_at(self, position: "DevicePosition", *, moved: bool) -> None:
        """Write the device's position while the host makes no progress. ``moved``: it differs from the
        last."""
        words, now = self._words, time.monotonic_ns()
        for counter, value in enumerate(position.counters):
            words[_DEVICE_COUNTERS + counter] = value
        words[_DEVICE_ENTERED], words[_DEVICE_LEFT] = position.entered, position.left
        words[_DEVICE_WAITS] = position.waits
        activity = position.activity
        self._bytes[_DEVICE_ACTIVITY] = self._activity if activity is None else self._name(activity)
        if moved:
            words[_CHANGED] = now
        words[_DEVICE_LOOKED] = now

    def leave(self, before: bytes, operation: Operation | None, now_ns: int) -> None:
        """Record the end of an activity, and restore the previous one."""
        words = self._words
        if operation is not None and operation.waits:
            words[_LEFT] += 1
        self._bytes[_ACTIVITY] = self._activity = before
        words[_CHANGED] = now_ns

    def _name(self, name: str) -> bytes:
        encoded = self._names[name] = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        return encoded


class ProgressPage:
    """The page of a node, in anonymous memory. Processes inherit its descriptor; the last one frees it."""

    NAME = "memfd:myriad-progress"
    """Name of the descriptor in /proc."""

    def __init__(self, num_rows: int, descriptor: int | None = None) -> None:
        """Create a page, or map the existing one that ``descriptor`` refers to."""
        if descriptor is None:
            descriptor = os.memfd_create(self.NAME.removeprefix("memfd:"), 0)
            os.ftruncate(descriptor, num_rows * ROW_BYTES)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, num_rows * ROW_BYTES)

    def address(self, row: int) -> str:
        """The value of `PROGRESS` for the process that writes a row."""
        return f"{self.descriptor}:{row}"

    def read(self, row: int) -> RowStatus:
        """Return the current content of a row."""
        values, again = (_ROW.unpack_from(self._memory, row * ROW_BYTES) for _ in range(2))
        pid, epoch, step, entered, left, changed, took, _, activity, phase, _, busy = values[:12]
        counters, waits = values[31 : 31 + _NUM], values[31 + _NUM]
        looked, *of_device, device_activity = values[32 + _NUM :]
        on_device = looked > 0 and looked >= changed
        if on_device:
            (entered, left, waits, *counted), activity = of_device, device_activity
            counters = tuple(counted)
        waits = waits if entered > left else 0
        names, digests = (_text(activity), _text(phase)), _digests(values[12:28], again[12:28])
        failed = tuple(name for bit, name in enumerate(TRAINING_CHECKS) if values[28] >> bit & 1)
        return RowStatus(
            pid,
            epoch,
            step,
            entered,
            left,
            changed,
            took,
            busy,
            *names,
            digests,
            failed,
            counters,
            waits,
            on_device=on_device,
        )

    def agree(self, row: int, step: int) -> None:
        """Write the last step after which replicas are known to hold equal state."""
        self._write(row, _AGREED, step + 1)

    def request_restart(self, row: int) -> None:
        """Ask a rank to end after its current step."""
        self._write(row, _TURN, 1)

    def ask_trace(self, row: int, word: int) -> None:
        """Write an operator's trace request for a rank."""
        self._write(row, _TRACE, word)

    def trace_answer(self, row: int) -> int:
        """Return the rank's answer to the trace request; 0 if there is none yet."""
        answer: int = _ONE.unpack_from(self._memory, row * ROW_BYTES + 8 * _TRACE_ANSWER)[0]
        return answer

    def _write(self, row: int, word: int, value: int) -> None:
        _ONE.pack_into(self._memory, row * ROW_BYTES + 8 * word, value)

    def clear(self, row: int) -> None:
        """Clear the row for a rank that is about to start."""
        self._memory[row * ROW_BYTES : (row + 1) * ROW_BYTES] = bytes(ROW_BYTES)


def _digests(words: Sequence[int], again: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the digests that are equal in two reads. A digest that is being written could pair a step with
    another step's value, and a healthy rank would become suspect."""
    reads = (zip(each[::2], each[1::2], strict=True) for each in (words, again))
    same = (one for one, other in zip(*reads, strict=True) if one == other)
    return tuple(sorted((step - 1, value) for step, value in same if step))


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


def own_row() -> ProgressRow:
    """Return this process's row, cleared for its attempt."""
    descriptor, _, index = os.environ.get(PROGRESS, "").partition(":")
    if index:
        memory = memoryview(mmap.mmap(int(descriptor), 0))
        row = ProgressRow(memory[int(index) * ROW_BYTES :][:ROW_BYTES])
    else:
        row = ProgressRow.unseen()
    row.begin(int(os.environ.get("MYRIAD_EPOCH", "0")))
    return row
