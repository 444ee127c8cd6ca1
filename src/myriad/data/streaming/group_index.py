"""The index of a stream: how many windows each group has, and where the next one begins.

The sample at a position is found by the windows of all groups before it, which are known only once those
were tokenized. So the loader writes a line for each group that it has tokenized, and a resume, a restarted
loader or a certificate goes to the group of its position directly. Lines follow from the files and the job
alone, whichever node writes them. Each has a hash, and a torn or damaged line is left out.

    RUN/streams/KEY/IDENTITY-RANK.jsonl      one file for the loader of each node

Nodes whose lines differ read different text, as from local copies of a file of which one is damaged
(`GroupIndex.find_difference`). A group in which they differed is unknown to the next start. A loader that
makes it again appends a line that replaces its own earlier line, and its lines of later groups.
"""

import json
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from myriad.data.streaming.group_order import Cursor, GroupStart
from myriad.system.jsonl import JsonlTail, LineFile

__all__ = ["GroupIndex", "GroupRecord", "dump_record", "parse_record"]

_SELF = "hash"
_MOST_COMPARED = 8
"""Other files of an index that a loader reads while it makes groups: as many as may be left of nodes that are
gone, and few on a file system that thousands of nodes share."""
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
        self._lines = _IndexLines(folder, identity)
        self._not_compared: list[tuple[int, str]] = []
        for record in _known(self._lines.poll(self._lines.paths())):
            self.append(record)
        if folder is not None and writer is not None:
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

    def find_difference(self) -> int | None:
        """Return the first group that another loader has tokenized to other tokens since this index was
        opened; ``None``: there is none. Each of many loaders reads the lines of a few, in a ring."""
        if self._file is None:
            return None
        paths = self._lines.paths()
        after = bisect_right(paths, self._file.path)
        near = [*paths[after:], *paths[:after]][:_MOST_COMPARED]
        found = [(record.number, record.digest) for records in self._lines.poll(near) for record in records]
        every = [*self._not_compared, *found]
        self._not_compared = [one for one in every if one[0] >= len(self)]
        differ = (number for number, digest in every if number < len(self) and digest != self.digest(number))
        return min(differ, default=None)

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


class _IndexLines:
    """The lines of all files of an index, as they are appended."""

    def __init__(self, folder: Path | None, identity: str) -> None:
        self._folder, self._identity = folder, identity
        self._tails: dict[Path, JsonlTail] = {}

    def paths(self) -> list[Path]:
        """Return the files, sorted."""
        return [] if self._folder is None else sorted(self._folder.glob(f"{self._identity}-*.jsonl"))

    def poll(self, paths: Iterable[Path]) -> list[list[GroupRecord]]:
        """Return the new records of each of these files."""
        tails = (self._tails.setdefault(path, JsonlTail(path)) for path in paths)
        every = ([parse_record(line) for line in tail.poll()] for tail in tails)
        return [[record for record in records if record is not None] for records in every]


def _known(files: Iterable[Sequence[GroupRecord]]) -> list[GroupRecord]:
    """Return the groups that follow each other from the first one on, up to one in which files differ."""
    by_number: dict[int, GroupRecord] = {}
    differ: set[int] = set()
    for records in files:
        own: dict[int, GroupRecord] = {}
        for record in records:
            while own and next(reversed(own)) >= record.number:
                own.popitem()
            own[record.number] = record
        for number, record in own.items():
            if by_number.setdefault(number, record).digest != record.digest:
                differ.add(number)
    known: list[GroupRecord] = []
    while len(known) not in differ and (found := by_number.get(len(known))) is not None:
        known.append(found)
    return known
