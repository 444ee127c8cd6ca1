"""Find the lines of a log that are errors to report: by the built-in list and the job's own patterns.

    chunk of a log ──► holds one of the built-in literals?   no: done (1 GB/s)
                        └─ yes, or the job has patterns ──► line by line, the first `MOST_LINE_BYTES` of each

A built-in pattern begins from a literal, so that a log without errors costs a search for a few words.
Python's regular expressions can take exponential time, and a job's own are untrusted: nested repetition,
back-references and long patterns are refused; each is tried on lines made to be slow before a run starts; and
a search that takes longer than `MATCH_SECONDS` is interrupted (`re` looks for signals), after which the
pattern is no longer used.
"""

import re
import signal
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

from myriad.errors import BadInputError

__all__ = ["MATCH_SECONDS", "MOST_LINE_BYTES", "LogPatterns", "Match", "normalised", "pattern_problem"]

MOST_LINE_BYTES = 2048
"""Bytes of a line that are searched; the rest of the line is ignored."""
MATCH_SECONDS = 0.05
_MOST_PATTERN = 256
_MANY = 64
"""A repetition of at least this length counts as unbounded."""


class _BuiltIn(NamedTuple):
    name: str
    literals: tuple[bytes, ...]
    """Each line that the pattern matches contains one of these."""
    pattern: re.Pattern[bytes]


_BUILT_IN = (
    _BuiltIn("Xid", (b"Xid",), re.compile(rb"\bS?Xid\b")),
    _BuiltIn(
        "ECC",
        (b"ECC",),
        re.compile(rb"\bECC\b.{0,80}(?:error|uncorrect|fail)|(?:[Uu]ncorrect|UNCORRECT)\w{0,10} ECC"),
    ),
    _BuiltIn(
        "OOM",
        (
            *(b"ut of memory", b"OutOfMemory", b"oom-kill", b"Cannot allocate memory"),
            *(b"MemoryError", b"ALLOC_FAILED"),
        ),
        re.compile(
            rb"[Oo]ut of memory|OutOfMemory|oom-kill|Cannot allocate memory|\bMemoryError\b"
            rb"|CUBLAS_STATUS_ALLOC_FAILED"
        ),
    ),
    _BuiltIn(
        "CUDA error",
        (
            *(b"CUDA error", b"CUDA failure", b"cudaError", b"_STATUS_"),
            *(b"illegal memory access", b"device-side assert"),
        ),
        re.compile(
            rb"CUDA (?:error|failure)|\bcudaError[A-Z]\w+|illegal memory access|device-side assert"
            rb"|\bCU(?:BLAS|DNN|SPARSE|SOLVER|FFT)_STATUS_(?!SUCCESS)[A-Z]"
        ),
    ),
    _BuiltIn(
        "NCCL",
        (
            *(b"NCCL WARN", b"NCCL ERROR", b"NCCL error", b"timed out", b"timeout:", b"abort"),
            *(b"ncclUnhandled", b"ncclSystem", b"ncclInternal", b"ncclRemote", b"ncclInvalid"),
            *(b"DistBackendError", b"Watchdog caught"),
        ),
        re.compile(
            rb"NCCL (?:WARN|ERROR)|NCCL error|\bnccl(?:Unhandled|System|Internal|Remote|Invalid)\w+"
            rb"|DistBackendError|Watchdog caught collective|NCCL.{0,80}(?:timed out|timeout:|abort)"
        ),
    ),
    _BuiltIn(
        "storage",
        (b"No space left", b"Input/output error", b"Stale file handle", b"Read-only file system"),
        re.compile(rb"No space left on device|Input/output error|Stale file handle|Read-only file system"),
    ),
)


class Match(NamedTuple):
    """A line that matches."""

    what: str
    """Name of the built-in pattern, or the job's own pattern."""
    line: bytes


class _TooSlow(Exception):
    pass


class LogPatterns:
    """The built-in list with a job's own patterns and exceptions."""

    MOST = 32

    def __init__(self, patterns: Sequence[str] = (), ignore: Sequence[str] = ()) -> None:
        """Compile the patterns. Raises ``re.error``; check a pattern with `pattern_problem` first."""
        self._own = {one: re.compile(one.encode()) for one in patterns}
        self._ignore = {one: re.compile(one.encode()) for one in ignore}
        self._literals = tuple(dict.fromkeys(word for one in _BUILT_IN for word in one.literals))
        self.disabled: list[str] = []
        """Patterns that were too slow and are no longer used."""

    def matches(self, chunk: bytes) -> Iterator[Match]:
        """Yield the lines of a chunk that match. In a process's main thread slow patterns are interrupted."""
        if not self._own and not any(word in chunk for word in self._literals):
            return
        for line in chunk.split(b"\n"):
            found = self.match(line[:MOST_LINE_BYTES]) if line else None
            if found is not None:
                yield found

    def match(self, line: bytes) -> Match | None:
        """Return what a line matches, if anything."""
        what = next((one.name for one in _BUILT_IN if _is_built_in(one, line)), None)
        if what is None:
            what = self._search(self._own, line)
        if what is None or self._search(self._ignore, line) is not None:
            return None
        return Match(what, line)

    def _search(self, patterns: dict[str, re.Pattern[bytes]], line: bytes) -> str | None:
        for text, pattern in list(patterns.items()):
            try:
                with _limited(MATCH_SECONDS):
                    if pattern.search(line):
                        return text
            except _TooSlow:
                del patterns[text]
                self.disabled.append(text)
        return None

    def check_speed(self) -> None:
        """Try the job's own patterns on lines that make bad ones slow. Raises `BadInputError`."""
        for key, patterns in (("alerts.log_patterns", self._own), ("alerts.log_ignore", self._ignore)):
            for text in list(patterns):
                lines = _slow_lines(text)
                if any(self._is_slow(patterns, text, line) for line in lines):
                    allowed = f"takes over {MATCH_SECONDS * 1e3:.0f} ms for a line: use fewer * and +"
                    raise BadInputError(key, text, allowed)

    def _is_slow(self, patterns: dict[str, re.Pattern[bytes]], text: str, line: bytes) -> bool:
        self._search({text: patterns[text]}, line)
        slow, self.disabled = bool(self.disabled), []
        return slow


def _is_built_in(one: _BuiltIn, line: bytes) -> bool:
    return any(word in line for word in one.literals) and one.pattern.search(line) is not None


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise `_TooSlow` in the block after ``seconds`` of CPU time; without limit in threads other than the
    main one, which cannot receive signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


def _slow_lines(pattern: str) -> list[bytes]:
    """Return long lines of one repeated character, for each character of the pattern and a few others,
    without a match at the end."""
    own = [char for char in dict.fromkeys(pattern.encode()) if chr(char).isalnum() or chr(char) in " -_:/"]
    return [bytes([char]) * (MOST_LINE_BYTES - 1) + b"\0" for char in [*b"a0 x.", *own][:24]]


def pattern_problem(pattern: str) -> str:
    """Return why a regular expression is refused, as the end of an error; empty if it is accepted."""
    if not 0 < len(pattern) <= _MOST_PATTERN:
        return f"a regular expression of 1 to {_MOST_PATTERN} characters"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            compiled = re.compile(pattern.encode())
            parsed = re._parser.parse(pattern.encode())  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError, ValueError, Warning) as error:
        return f"is no regular expression of Python: {error}"
    if compiled.search(b""):
        return "matches an empty line, and so every line"
    return _tree_problem(parsed, in_repeat=False)


def _tree_problem(parsed: Any, *, in_repeat: bool) -> str:
    for kind, value in parsed:
        name = str(kind)
        if name in ("GROUPREF", "GROUPREF_EXISTS"):
            return "back-references are refused: they can take exponential time"
        unbounded = name in ("MAX_REPEAT", "MIN_REPEAT") and int(value[1]) >= _MANY
        if unbounded and in_repeat:
            return "a repetition inside of a repetition is refused: it can take exponential time"
        for child in _children(name, value):
            if problem := _tree_problem(child, in_repeat=in_repeat or unbounded):
                return problem
    return ""


def _children(name: str, value: Any) -> list[Any]:
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
        return [value[2]]
    if name == "SUBPATTERN":
        return [value[3]]
    if name == "BRANCH":
        return list(value[1])
    if name in ("ASSERT", "ASSERT_NOT"):
        return [value[1]]
    return [value] if name == "ATOMIC_GROUP" else []


_STAMP = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.,]?\d*(?:Z|[+-]\d\d:?\d\d)?")
_HEX = re.compile(r"\b0[xX][0-9a-fA-F]+\b|\b[0-9a-fA-F]{8,}\b")
_NUMBER = re.compile(r"\d+")


def normalised(text: str) -> str:
    """Return a message without its variable parts: times, addresses, numbers."""
    return " ".join(_NUMBER.sub("#", _HEX.sub("#", _STAMP.sub("#", text))).split())
