"""Files of what was traced on demand, under RUN/traces: each there whole or not at all, none without bound.

rank-R-step-S.json.gz           a profile, for chrome://tracing, Perfetto and others
rank-R-step-S-flight.json       collectives that the communication library remembers
rank-R-step-S-stacks.txt        where each thread was
"""

import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

__all__ = ["MOST_FILE_BYTES", "pack_profile", "trace_path", "write_bounded"]

MOST_FILE_BYTES = 64 * 2**20
_BLOCK_BYTES = 2**20
_BETWEEN_EVENTS, _END = b"\n  },", b"\n  }\n]}\n"
_BASE, _EVENTS = re.compile(rb'"baseTimeNanoseconds": *(\d+)'), re.compile(rb'"traceEvents": *\[')
_SUFFIXES = {"profile": ".json.gz", "flight": "-flight.json", "stacks": "-stacks.txt"}


def trace_path(folder: Path, rank: int, step: int, what: str) -> Path:
    """Of a new file; nothing that was traced before is replaced."""
    first = folder / f"rank-{rank}-step-{step}{_SUFFIXES[what]}"
    path, again = first, 1
    while path.exists():
        again += 1
        path = folder / f"rank-{rank}-step-{step}-{again}{_SUFFIXES[what]}"
    return path


def write_bounded(path: Path, data: bytes, most_bytes: int = MOST_FILE_BYTES) -> None:
    """Makes the folder too; what is over the limit is cut off, and said. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(data) > most_bytes:
        data = data[:most_bytes] + f"\n... cut off after {most_bytes} bytes\n".encode()
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(data)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def pack_profile(
    source: Path,
    path: Path,
    most_bytes: int = MOST_FILE_BYTES,
    more: Callable[[int], bytes] = lambda base_ns: b"",
) -> bool:
    """Packs a Chrome trace as torch writes it; one that would be too long ends after some event, and still is
    a valid one. ``more``: gives events that are put before its own, of which times count from ``base_ns``.
    Gives whether it is all there. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with source.open("rb") as file, draft.open("wb") as raw, gzip.GzipFile("", "wb", 1, raw) as packed:
            whole = _copy(file, packed, raw, most_bytes, more)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return whole


def _copy(
    file: BinaryIO, packed: gzip.GzipFile, raw: BinaryIO, most_bytes: int, more: Callable[[int], bytes]
) -> bool:
    first = file.read(_BLOCK_BYTES)
    packed.write(_with_more(first, more))
    while block := file.read(_BLOCK_BYTES):
        if raw.tell() + len(block) // 4 > most_bytes and _BETWEEN_EVENTS in block:
            packed.write(block[: block.rindex(_BETWEEN_EVENTS)] + _END)
            return False
        packed.write(block)
    return True


def _with_more(first: bytes, more: Callable[[int], bytes]) -> bytes:
    """The first block of a trace, with other events before its own."""
    base, begin = _BASE.search(first), _EVENTS.search(first)
    if begin is None or not (events := more(int(base.group(1)) if base else 0)):
        return first
    return first[: begin.end()] + b"\n" + events + b"," + first[begin.end() :]
