"""The newest look at each node's network, from the ends of RUN/counters/node-N.jsonl: a folder of many nodes'
files is read in the time of their last lines."""

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from myriad.whole_file import parse_json

__all__ = ["NodeCounters", "NodeLook"]

_NAME = re.compile(r"node-(\d{1,6})\.jsonl")
_HEAD_BYTES, _TAIL_BYTES = 2**14, 2**15
_MOST_NODES, _MOST_SECONDS = 16384, 60.0


@dataclass(frozen=True)
class NodeLook:
    """Of one node; anything that is not as it should be is left out."""

    time: float
    links: dict[str, dict[str, int]]
    """Of interfaces and ports of RDMA: field to number."""
    tcp: dict[str, int]
    speeds: dict[str, float] = field(default_factory=dict)
    """Bytes per second, one way."""
    rates: dict[str, dict[str, float]] = field(default_factory=dict)
    """Growth of each counter per second up to the look before, by link; ``tcp``: TCP's counters."""


class NodeCounters:
    """Of one run; remembers what it has seen, so that a file that has just begun anew is no gap."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heads: dict[int, tuple[int, dict[str, Any]]] = {}
        """Node to the file's number on its disk, and its first line."""
        self._looks: dict[int, NodeLook] = {}

    def newest(self) -> dict[int, NodeLook]:
        """By node."""
        for node, path in self._paths():
            try:
                look = self._read(node, path)
            except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
                continue
            if look is not None:
                self._looks[node] = look
        return dict(sorted(self._looks.items()))

    def _paths(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        found = [(int(match[1]), self._folder / name) for name in names if (match := _NAME.fullmatch(name))]
        return sorted(found)[:_MOST_NODES]

    def _read(self, node: int, path: Path) -> NodeLook | None:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(handle)
            known = self._heads.get(node)
            if known is None or known[0] != status.st_ino:
                text = os.pread(handle, _HEAD_BYTES, 0).partition(b"\n")[0]
                known = self._heads[node] = status.st_ino, parse_json(text)
            tail = os.pread(handle, _TAIL_BYTES, max(0, status.st_size - _TAIL_BYTES))
        finally:
            os.close(handle)
        lines = tail[: tail.rfind(b"\n") + 1].splitlines()
        newest = _look(known[1], parse_json(lines[-1])) if lines else None
        if newest is None or len(lines) < 3 or (before := _look(known[1], parse_json(lines[-2]))) is None:
            return newest
        return replace(newest, rates=_rates(before, newest))


def _look(head: dict[str, Any], line: dict[str, Any]) -> NodeLook | None:
    if "links" not in line:
        return None
    fields = head["fields"]
    links = {
        name: _named(fields[kind], numbers)
        for kind in ("links", "rdma")
        for name, numbers in line[kind].items()
    }
    speeds = {str(name): float(speed) for name, speed in head["speed_bytes_per_second"].items()}
    return NodeLook(float(line["time"]), links, _named(fields["tcp"], line["tcp"]), speeds)


def _rates(before: NodeLook, now: NodeLook) -> dict[str, dict[str, float]]:
    seconds = now.time - before.time
    if not 0 < seconds < _MOST_SECONDS:
        return {}
    both = ({**one.links, "tcp": one.tcp} for one in (before, now))
    old, new = both
    return {
        name: {key: max(0, count - old[name].get(key, count)) / seconds for key, count in counts.items()}
        for name, counts in new.items()
        if name in old
    }


def _named(names: list[str], numbers: list[int]) -> dict[str, int]:
    return {str(name): int(number) for name, number in zip(names, numbers, strict=False)}
