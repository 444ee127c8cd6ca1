"""The index of a stream: how many windows each group has, and where the next one begins.

The sample at a position is found by the windows of all groups before it, which are known only once those
were tokenized. So the loader writes a line for each group that it has tokenized, and a resume, a restarted
loader or a certificate goes to the group of its position directly. Lines follow from the files and the job
alone, whichever node writes them. Each has a hash, and a torn, damaged or repeated line is left out.

    RUN/streams/KEY/IDENTITY-RANK.jsonl      one file for the loader of each node
"""

import json
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from myriad.data.streaming.group_order import Cursor, GroupStart
from myriad.system.jsonl import JsonlTail, LineFile

__all__ = ["GroupIndex", "GroupRecord", "dump_record", "parse_record"]

_SELF = "hash"
_MOST = 2**62


class GroupRecord(NamedTuple):
    """What is known of a group that was tokenized."""

    number: int
    """Number of the group in the stream, over all epochs."""
    windows: int
    tokens: int
    documents: int
    skipped: Mapping[str, int]
    """Records without text, by ``null`` and ``empty``, and ``bad`` ones that could not be read."""
    digest: str
    """Hash of the tokens, by which a file that changes in place is found."""
    following: GroupStart
    """Where the next group begins."""


def dump_record(record: GroupRecord) -> dict[str, Any]:
    """Return the line of a group."""
    content = record._asdict()
    start = record.following
    content["skipped"] = dict(record.skipped)
    content["following"] = [*start[:3], *(f"{span}:{'' if at is None else at}" for span, at in start.cursors)]
    return {**content, _SELF: _hash(content)}


def parse_record(line: Mapping[str, Any]) -> GroupRecord | None:
    """Return the record of a line; ``None``: it is none, or is damaged."""
    content = dict(line)
    own = content.pop(_SELF, None)
    try:
        if own != _hash(content) or content.keys() != set(GroupRecord._fields):
            return None
        epoch, bundle, number, *cursors = content.pop("following")
        start = GroupStart(epoch, bundle, number, tuple(map(_cursor, cursors)))
        record = GroupRecord(**content, following=start)
    except (ValueError, TypeError, AttributeError):
        return None
    counts = [*record[:4], *start[:3], *(part or 0 for one in start.cursors for part in one)]
    if not isinstance(record.skipped, dict) or not isinstance(record.digest, str):
        return None
    counts += record.skipped.values()
    return record if all(type(one) is int and 0 <= one <= _MOST for one in counts) else None


def _cursor(text: str) -> Cursor:
    span, _, at = text.partition(":")
    return Cursor(int(span), int(at) if at else None)


def _hash(content: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode())


class GroupIndex:
    """The groups of a stream that are known, from its first one on."""

    def __init__(self, folder: Path | None = None, identity: str = "", writer: str | None = None) -> None:
        """``writer`` names the file that new groups are appended to; ``None``: they are kept in memory."""
        self._ends = array("q")
        self._starts: list[str] = [_dump_start(GroupStart())]
        self._digests: list[str] = []
        self.skipped = Counter[str]()
        """Records of all known groups that were skipped."""
        self._file = None
        if folder is not None:
            for record in _read(folder, identity):
                self.append(record)
            if writer is not None:
                self._file = LineFile(folder / f"{identity}-{writer}.jsonl")

    def __len__(self) -> int:
        return len(self._ends)

    @property
    def num_windows(self) -> int:
        """Windows of all known groups."""
        return self._ends[-1] if self._ends else 0

    def find(self, position: int) -> tuple[int, int] | None:
        """Return the group of a sample, and the sample's place in it; ``None``: it is not known yet."""
        if position >= self.num_windows:
            return None
        group = bisect_right(self._ends, position)
        return group, position - (self._ends[group - 1] if group else 0)

    def start(self, group: int) -> GroupStart:
        """Return where a known group, or the first unknown one, begins."""
        epoch, bundle, number, *cursors = self._starts[group].split()
        return GroupStart(int(epoch), int(bundle), int(number), tuple(map(_cursor, cursors)))

    def digest(self, group: int) -> str:
        """Return the hash of a known group's tokens."""
        return self._digests[group]

    def append(self, record: GroupRecord) -> None:
        """Add the first unknown group."""
        assert record.number == len(self), "groups are known in their order"
        self._digests.append(record.digest)
        self._starts.append(_dump_start(record.following))
        self.skipped.update(record.skipped)
        if self._file is not None:
            self._file.append(dump_record(record))
        self._ends.append(self.num_windows + record.windows)  # last: another thread reads what is known


def _dump_start(start: GroupStart) -> str:
    """Return a start as a short text: a stream of terabytes has a million of them."""
    parts = [*map(str, start[:3]), *(f"{span}:{'' if at is None else at}" for span, at in start.cursors)]
    return " ".join(parts)


def _read(folder: Path, identity: str) -> list[GroupRecord]:
    """Return the groups in the files of a folder, as many as follow each other from the first one on."""
    found: dict[int, GroupRecord] = {}
    for path in sorted(folder.glob(f"{identity}-*.jsonl")):
        with suppress(OSError):
            for line in JsonlTail(path).poll():
                if (record := parse_record(line)) is not None:
                    found.setdefault(record.number, record)
    known: list[GroupRecord] = []
    while (record := found.get(len(known))) is not None:
        known.append(record)
    return known
