"""What each rank of a node is doing now: shared memory, one fixed row a rank.

A rank writes with plain stores: no lock, no system call (the clock is read in user space), so watching costs
it nothing, and a page that nobody reads is as good as one that somebody does. The executor of the node
reads; a reader may see a row between two stores, so it decides nothing from one look.

    bytes   0   8      16     24      32      40      48        56     64 .. 80    80 .. 96    96   104
            pid epoch  step   entered left    changed step_time agreed activity    phase       turn busy

          112   120
          trace trace_answer

          128 .. 256: the newest eight digests of what replicas hold alike, each with its step

          256    264     272
          failed rounds  cost     of checks in gaps: a bit for each of `GAP_CHECKS`, nanoseconds

``step`` is the one under way. ``entered`` and ``left`` count the communication of this attempt: a rank
inside has entered more than it has left. ``changed`` is the machine's monotonic clock in nanoseconds,
written last. ``agreed``, ``turn`` and ``trace`` alone are the reader's to write: after which step replicas
are known to have held the same; that the rank is to end after its step, with a snapshot in memory, for
another attempt; what a person wants to see of it (`trace_request`), to which it answers beside it. A rank
finds its row by MYRIAD_PROGRESS = DESCRIPTOR:ROW; without that it writes into memory of its own, so that
ranks of any launcher run the same code.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = [
    "GAP_CHECKS",
    "IN_MEMORY_ONLY",
    "PROGRESS",
    "TURNED_CODE",
    "ProgressPage",
    "ProgressRow",
    "Seen",
    "own_row",
]

PROGRESS = "MYRIAD_PROGRESS"
ROW_BYTES = 320
_NAME_BYTES = 16
_ACTIVITY, _PHASE = slice(64, 64 + _NAME_BYTES), slice(80, 80 + _NAME_BYTES)
_PID, _EPOCH, _STEP, _ENTERED, _LEFT, _CHANGED, _STEP_TIME, _AGREED = range(8)
_TURN, _BUSY, _TRACE, _TRACE_ANSWER = 12, 13, 14, 15
_FIRST_DIGEST, _NUM_DIGESTS = 16, 8
_CHECKS = 32
_ROW = struct.Struct("8q16s16s2q16x16q3q40x")
GAP_CHECKS = ("product", "memory", "copy", "all-reduce", "all-to-all")
"""Checks of a rank that trains (`myriad.train.gap_checks`), by their bit on its row."""
_ONE = struct.Struct("q")
TURNED_CODE = 75
"""Exit code of a rank that has ended because its row asked for it (sysexits.h: try again later)."""
IN_MEMORY_ONLY = "the last checkpoint is in memory only"
"""How the error of a rank begins whose last step could not be stored; the snapshot servers hold it."""


@dataclass(frozen=True)
class Seen:
    """A row, as a reader found it."""

    pid: int
    epoch: int
    step: int
    entered: int
    left: int
    changed_ns: int
    step_ns: int
    """How long the last step took; 0: there was none."""
    busy_ns: int
    """Of it, in which the rank computed and did not wait; 0: it does not know."""
    activity: str
    phase: str
    digests: tuple[tuple[int, int], ...] = ()
    """(steps done, what all replicas should have then), ascending."""
    failed_checks: tuple[str, ...] = ()
    """Names from `GAP_CHECKS`, in this attempt."""


class ProgressRow:
    """The writer's side."""

    def __init__(self, memory: memoryview) -> None:
        """``memory``: of `ROW_BYTES` bytes."""
        self._bytes, self._words = memory, memory.cast("q")
        self._activity, self._began_ns = bytes(_NAME_BYTES), 0
        self._names: dict[str, bytes] = {}
        self._num_digests = 0

    @staticmethod
    def unseen() -> "ProgressRow":
        """One that nobody reads."""
        return ProgressRow(memoryview(bytearray(ROW_BYTES)))

    def begin(self, epoch: int) -> None:
        """Forgets what an earlier process wrote here."""
        self._bytes[:] = bytes(ROW_BYTES)
        self._words[_PID], self._words[_EPOCH], self._words[_STEP] = os.getpid(), epoch, -1
        self.phase("starting")

    def phase(self, name: str) -> None:
        """What part of its life the rank is in: "starting", "loading", "step", ..."""
        self._bytes[_PHASE] = self._name(name)
        self._words[_CHANGED] = time.monotonic_ns()

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A phase inside another, which goes on afterwards."""
        before = bytes(self._bytes[_PHASE])
        self.phase(name)
        yield
        self._bytes[_PHASE] = before
        self._words[_CHANGED] = time.monotonic_ns()

    def step(self, step: int) -> None:
        """Training of a step begins."""
        self._words[_STEP], self._began_ns = step, time.monotonic_ns()
        self.phase("step")

    @property
    def turns(self) -> bool:
        """The executor asks for the end of this attempt."""
        return self._words[_TURN] != 0

    @property
    def trace_word(self) -> int:
        """What a person wants to see; 0: nobody has asked."""
        return self._words[_TRACE]

    def answer_trace(self, word: int) -> None:
        """What has become of that."""
        self._words[_TRACE_ANSWER] = word

    def step_done(self, busy_seconds: float = 0.0) -> None:
        """It has ended. ``busy_seconds``: in which this rank computed; 0: it does not know."""
        self._words[_BUSY] = int(busy_seconds * 1e9)
        self._words[_STEP_TIME] = time.monotonic_ns() - self._began_ns
        self._words[_CHANGED] = time.monotonic_ns()

    def digest(self, step: int, value: int) -> None:
        """Of what replicas hold alike after so many steps; ``value``: int64. The step is written last: a
        reader never takes the value for another's."""
        at = _FIRST_DIGEST + 2 * (self._num_digests % _NUM_DIGESTS)
        self._words[at] = 0
        self._words[at + 1] = value
        self._words[at] = step + 1
        self._num_digests += 1

    def checked(self, failed: int, rounds: int, cost_ns: int) -> None:
        """What checks in gaps have found in this attempt; ``failed``: a bit for each of `GAP_CHECKS`."""
        self._words[_CHECKS + 1], self._words[_CHECKS + 2] = rounds, cost_ns
        self._words[_CHECKS] = failed

    def agreed_step(self) -> int:
        """After which replicas are known to have held the same; -1: nobody has said."""
        return self._words[_AGREED] - 1

    def enter(self, name: str, communicates: bool, now_ns: int) -> bytes:
        """An activity begins, ``now_ns`` by the machine's monotonic clock; gives the one before it."""
        before, self._activity = self._activity, self._names.get(name) or self._name(name)
        words = self._words
        self._bytes[_ACTIVITY] = self._activity
        if communicates:
            words[_ENTERED] += 1
        words[_CHANGED] = now_ns
        return before

    def leave(self, before: bytes, communicates: bool, now_ns: int) -> None:
        """It has ended; the one before it goes on."""
        words = self._words
        if communicates:
            words[_LEFT] += 1
        self._bytes[_ACTIVITY] = self._activity = before
        words[_CHANGED] = now_ns

    def _name(self, name: str) -> bytes:
        encoded = self._names[name] = name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        return encoded


class ProgressPage:
    """The page of a node: anonymous memory with a descriptor, which processes inherit; gone with the last."""

    NAME = "memfd:myriad-progress"
    """As /proc shows the descriptor."""

    def __init__(self, num_rows: int, descriptor: int | None = None) -> None:
        """``descriptor``: of one that is there already, which is read along."""
        if descriptor is None:
            descriptor = os.memfd_create(self.NAME.removeprefix("memfd:"), 0)
            os.ftruncate(descriptor, num_rows * ROW_BYTES)
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, num_rows * ROW_BYTES)

    def address(self, row: int) -> str:
        """The value of `PROGRESS` for the process that writes a row."""
        return f"{self.descriptor}:{row}"

    def read(self, row: int) -> Seen:
        """A look at a row."""
        values, again = (_ROW.unpack_from(self._memory, row * ROW_BYTES) for _ in range(2))
        pid, epoch, step, entered, left, changed, took, _, activity, phase, _, busy = values[:12]
        names, digests = (_text(activity), _text(phase)), _digests(values[12:28], again[12:28])
        failed = tuple(name for bit, name in enumerate(GAP_CHECKS) if values[28] >> bit & 1)
        return Seen(pid, epoch, step, entered, left, changed, took, busy, *names, digests, failed)

    def agree(self, row: int, step: int) -> None:
        """Tells a rank after which step replicas were known to hold the same."""
        self._write(row, _AGREED, step + 1)

    def turn(self, row: int) -> None:
        """Asks a rank to end after its step."""
        self._write(row, _TURN, 1)

    def ask_trace(self, row: int, word: int) -> None:
        """Asks a rank for what a person wants to see of it."""
        self._write(row, _TRACE, word)

    def trace_answer(self, row: int) -> int:
        """What it says of that; 0: nothing yet."""
        answer: int = _ONE.unpack_from(self._memory, row * ROW_BYTES + 8 * _TRACE_ANSWER)[0]
        return answer

    def _write(self, row: int, word: int, value: int) -> None:
        _ONE.pack_into(self._memory, row * ROW_BYTES + 8 * word, value)

    def clear(self, row: int) -> None:
        """For a rank that is about to start."""
        self._memory[row * ROW_BYTES : (row + 1) * ROW_BYTES] = bytes(ROW_BYTES)


def _digests(words: Sequence[int], again: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Those that were the same in two looks: one that is just written could show a step with the value of
    another, and a healthy rank would be blamed."""
    looks = (zip(each[::2], each[1::2], strict=True) for each in (words, again))
    same = (one for one, other in zip(*looks, strict=True) if one == other)
    return tuple(sorted((step - 1, value) for step, value in same if step))


def _text(name: bytes) -> str:
    return name.rstrip(b"\0").decode(errors="replace")


def own_row() -> ProgressRow:
    """This process's, begun anew."""
    descriptor, _, index = os.environ.get(PROGRESS, "").partition(":")
    if index:
        memory = memoryview(mmap.mmap(int(descriptor), 0))
        row = ProgressRow(memory[int(index) * ROW_BYTES :][:ROW_BYTES])
    else:
        row = ProgressRow.unseen()
    row.begin(int(os.environ.get("MYRIAD_EPOCH", "0")))
    return row
