"""``python -m myriad.supervise.agent.log_scan AGENT_PID``: finds error lines in the logs of a node's ranks.

    node agent ──{"epoch": 2, "files": [[0, ".../rank-0-attempt-2.log"], ...]}──► standard input
    rank logs, /dev/kmsg ──► what is new, every 0.25 s ──► patterns ──► a new message? ──► standard output

It runs beside the node agent because a regular expression holds Python's lock while it searches. It uses a
tenth of a core at most: of a log that grows faster, the rest is skipped and counted. Its memory is bounded: a
chunk of each file, and the newest `_MOST_KNOWN` messages. Files may be truncated, replaced, removed or
created later.

The same message with other numbers, from any rank, is one message: the first is reported at once, the others
as a count after 10 s, a minute, and every five minutes.
"""

import json
import os
import re
import select
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from myriad.alerts.log_patterns import MOST_LINE_BYTES, LogPatterns, Match, normalised
from myriad.system.child_process import die_with_parent

__all__ = ["KERNEL", "LogMatch", "LogScanner", "main"]

KERNEL = -1
"""Rank number that stands for the kernel's log."""
_POLL_SECONDS, _CPU_SECONDS = 0.25, 0.025
_CHUNK_BYTES, _MOST_BEHIND_BYTES, _KEPT_BYTES = 2**18, 2**23, 2**18
"""Sizes: of a chunk; how far reading may fall behind; and how far before its end reading then continues."""
_MOST_KNOWN, _MOST_RANKS = 256, 64
_REPORT_AFTER_SECONDS = (10.0, 60.0, 300.0)
_MOST_NEW, _NEW_SECONDS = 20, 10.0
"""Most new messages that are reported one by one within this time."""
_PID = re.compile(rb"\bpid='?(\d+)|Killed process (\d+)")


@dataclass
class LogMatch:
    """A message that was found, and how often it occurred."""

    what: str
    text: str
    rank: int
    count: int = 1
    ranks: list[int] = field(default_factory=list)
    pid: int = 0
    """Process id that the kernel's message names; 0: it names no process."""
    epoch: int = 0
    """Attempt whose logs were searched when the message was found."""
    reported_count: int = 0
    due: float = 0.0
    num_reported: int = 0

    def as_json(self) -> dict[str, Any]:
        """Return the fields that are written as a line of JSON."""
        names = ("what", "text", "rank", "count", "ranks", "pid", "epoch")
        return {name: getattr(self, name) for name in names}


class _Tail:
    """A log file, read from the last position to its end."""

    def __init__(self, path: Path, rank: int, *, from_end: bool = False) -> None:
        self.path, self.rank = path, rank
        self._handle, self._inode = -1, 0
        self._offset, self._rest, self._cut = 0, b"", False
        self._from_end = from_end
        self._idle = False
        self.num_skipped = 0
        """Bytes that were skipped since this was last read."""

    def chunks(self) -> Iterator[bytes]:
        """Yield the new whole lines, a chunk at a time."""
        with suppress(OSError):
            if self._handle < 0 and not self._open():
                return
            while chunk := self._read():
                yield chunk
            if self._was_replaced():
                yield self._take_rest()
                self.close()
                if self._open():
                    yield from self.chunks()

    def _open(self) -> bool:
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        status = os.fstat(self._handle)
        self._inode = status.st_ino
        self._offset = status.st_size if self._from_end else 0
        self._from_end = False
        return True

    def _was_replaced(self) -> bool:
        try:
            return os.stat(self.path).st_ino != self._inode
        except FileNotFoundError:
            return False  # it may be created again; until then the open file is read

    def _read(self) -> bytes:
        size = os.fstat(self._handle).st_size
        if size < self._offset:  # the file was truncated
            self._offset, self._rest, self._cut = 0, b"", False
        if size - self._offset > _MOST_BEHIND_BYTES:
            self.num_skipped += size - _KEPT_BYTES - self._offset
            self._offset, self._rest, self._cut = size - _KEPT_BYTES, b"", True
        data = os.pread(self._handle, _CHUNK_BYTES, self._offset)
        self._offset += len(data)
        if not data:
            return self._take_rest() if self._idle and self._rest else self._wait()
        self._idle = False
        return self._whole_lines(data)

    def _wait(self) -> bytes:
        """Keep an unfinished line; it is searched if nothing more is written until the next poll."""
        self._idle = bool(self._rest)
        return b""

    def _whole_lines(self, data: bytes) -> bytes:
        lines, newline, rest = data.rpartition(b"\n")
        if not newline:
            room = MOST_LINE_BYTES - len(self._rest)
            if not self._cut and room > 0:
                self._rest += data[:room]
            return b"\n"  # later data may belong to the same line
        head, _, tail = lines.partition(b"\n")
        first = self._rest + (b"" if self._cut and not self._rest else head)
        self._rest, self._cut = rest[:MOST_LINE_BYTES], False
        return first + b"\n" + tail

    def _take_rest(self) -> bytes:
        """Return the unfinished line; what is written to it afterwards is ignored."""
        rest, self._rest, self._cut, self._idle = self._rest, b"", True, False
        return rest

    def close(self) -> None:
        """Close the file and forget the position in it."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle, self._offset, self._rest, self._cut = -1, 0, b"", False


class _KernelLog:
    """/dev/kmsg, one record per read, from the newest record on; empty if this user may not read it."""

    rank, num_skipped = KERNEL, 0

    def __init__(self, path: Path) -> None:
        self._handle = -1
        with suppress(OSError):
            self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._handle, 0, os.SEEK_END)

    def chunks(self) -> Iterator[bytes]:
        """Yield the messages of new records, without their header (priority, number, time)."""
        while self._handle >= 0:
            try:
                record = os.read(self._handle, 8192)
            except BrokenPipeError:  # records were overwritten before they were read
                continue
            except OSError:  # no new record
                return
            if not record:
                return
            yield record.partition(b";")[2] or record

    def close(self) -> None:
        """Close the kernel's log."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


class LogScanner:
    """Searches the logs of one node's ranks, and the kernel's log."""

    def __init__(self, patterns: LogPatterns, kernel: Path | None = None) -> None:
        self._patterns, self._tails = patterns, list[_Tail]()
        self._kernel = None if kernel is None else _KernelLog(kernel)
        self._known: OrderedDict[tuple[str, str], LogMatch] = OrderedDict()
        self._new_at: list[float] = []
        self._first, self._epoch = 0, 0

    def watch(
        self, files: Sequence[tuple[int, Path]], now: float, *, from_end: bool = False, epoch: int = 0
    ) -> list[LogMatch]:
        """Watch the files of a new attempt from now on. Return what is left to report of the last one."""
        found = [*self.poll(now), *self.poll(now), *self._repeats(now, all_now=True)]
        for tail in self._tails:
            tail.close()
        self._tails = [_Tail(path, rank, from_end=from_end) for rank, path in files]
        self._known.clear()
        self._epoch = epoch
        return found

    def poll(self, now: float) -> list[LogMatch]:
        """Return new messages, and counts that are due. The search takes about `_CPU_SECONDS` at most."""
        sources: list[_Tail | _KernelLog] = [] if self._kernel is None else [self._kernel]
        turn = self._first % max(1, len(self._tails))
        sources += [*self._tails[turn:], *self._tails[:turn]]
        self._first += 1
        began, found = time.thread_time(), list[LogMatch]()
        for source in sources:
            for chunk in source.chunks():
                found += self._scan(chunk, source.rank, now)
                if time.thread_time() - began > _CPU_SECONDS:
                    break
            if time.thread_time() - began > _CPU_SECONDS:
                break
        found += self._skipped(now)
        for pattern in self._patterns.disabled:
            text = f"the pattern {pattern!r} takes too long for a line, and is not used any more"
            found += self._take("pattern", text, KERNEL, now)
        self._patterns.disabled.clear()
        return [*found, *self._repeats(now)]

    def _scan(self, chunk: bytes, rank: int, now: float) -> Iterator[LogMatch]:
        for match in self._patterns.matches(chunk):
            yield from self._take(
                match.what, _text(match), rank, now, _pid(match.line) if rank == KERNEL else 0
            )

    def _skipped(self, now: float) -> Iterator[LogMatch]:
        for tail in self._tails:
            skipped, tail.num_skipped = tail.num_skipped, 0
            if skipped:
                text = f"the log grows too fast: {skipped} bytes of it were not searched for errors"
                yield from self._take("flood", text, tail.rank, now)

    def _take(self, what: str, text: str, rank: int, now: float, pid: int = 0) -> Iterator[LogMatch]:
        """Count a message; yield it if it is new."""
        key = what, normalised(text)[:200]
        known = self._known.get(key)
        if known is not None:
            known.count += 1
            if rank not in known.ranks and len(known.ranks) < _MOST_RANKS:
                known.ranks.append(rank)
            return
        self._new_at = [at for at in self._new_at if now - at < _NEW_SECONDS]
        if len(self._new_at) >= _MOST_NEW:
            key, text = (what, ""), "many different messages: see the log"
            if key in self._known:
                self._known[key].count += 1
                return
        self._new_at.append(now)
        due = now + _REPORT_AFTER_SECONDS[0]
        one = LogMatch(what, text, rank, ranks=[rank], pid=pid, epoch=self._epoch, reported_count=1, due=due)
        self._known[key] = one
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        yield one

    def _repeats(self, now: float, *, all_now: bool = False) -> list[LogMatch]:
        """Return the repeated messages whose count is due."""
        due = [
            one
            for one in self._known.values()
            if one.count > one.reported_count and (all_now or now >= one.due)
        ]
        for one in due:
            one.reported_count, one.num_reported = one.count, one.num_reported + 1
            one.due = now + _REPORT_AFTER_SECONDS[min(one.num_reported, len(_REPORT_AFTER_SECONDS) - 1)]
        return due


def _text(match: Match) -> str:
    return " ".join(match.line.decode(errors="replace").split())[:300]


def _pid(line: bytes) -> int:
    found = _PID.search(line)
    return int(found.group(1) or found.group(2)) if found else 0


def main(arguments: list[str]) -> int:
    """Scan until the node agent is gone."""
    die_with_parent(int(arguments[0]))
    os.nice(10)
    kernel = Path(arguments[1]) if len(arguments) > 1 else Path("/dev/kmsg")
    scanner, text = LogScanner(LogPatterns(), kernel), b""
    while True:
        if select.select([0], [], [], _POLL_SECONDS)[0]:
            if not (data := os.read(0, 2**16)):
                return 0
            *lines, text = (text + data).split(b"\n")
            for line in lines:
                scanner = _read_commands(scanner, json.loads(line), kernel)
        _report(scanner.poll(time.monotonic()))


def _read_commands(scanner: LogScanner, order: dict[str, Any], kernel: Path) -> LogScanner:
    if "patterns" in order:
        return LogScanner(LogPatterns(order["patterns"], order["ignore"]), kernel)
    files = [(int(rank), Path(path)) for rank, path in order["files"]]
    from_end, epoch = bool(order["from_end"]), int(order["epoch"])
    _report(scanner.watch(files, time.monotonic(), from_end=from_end, epoch=epoch))
    return scanner


def _report(found: Sequence[LogMatch]) -> None:
    if found:
        data = b"".join(json.dumps(one.as_json()).encode() + b"\n" for one in found)
        while data:
            data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
