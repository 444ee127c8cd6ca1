"""Write trace files. Each file is complete or absent.

Traces on demand are under RUN/traces, and bounded in size:

    rank-R-step-S.json.gz           a profile, for chrome://tracing, Perfetto and others
    rank-R-step-S-flight.json       flight recorder of the communication library: its recent collectives
    rank-R-step-S-stacks.txt        stack of each thread
"""

import gzip
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, BinaryIO, cast

from myriad.system.whole_file import replacing

__all__ = ["MOST_FILE_BYTES", "opened_trace", "pack_profile", "trace_path", "write_bounded"]

MOST_FILE_BYTES = 64 * 2**20
_BLOCK_BYTES = 2**20
_BETWEEN_EVENTS, _END = b"\n  },", b"\n  }\n]}\n"
_BASE, _EVENTS = re.compile(rb'"baseTimeNanoseconds": *(\d+)'), re.compile(rb'"traceEvents": *\[')
_SUFFIXES = {"profile": ".json.gz", "flight": "-flight.json", "stacks": "-stacks.txt"}


def trace_path(folder: Path, rank: int, step: int, what: str) -> Path:
    """Return the path of a new file, which replaces no earlier trace."""
    first = folder / f"rank-{rank}-step-{step}{_SUFFIXES[what]}"
    path, again = first, 1
    while path.exists():
        again += 1
        path = folder / f"rank-{rank}-step-{step}-{again}{_SUFFIXES[what]}"
    return path


def write_bounded(path: Path, data: bytes, most_bytes: int = MOST_FILE_BYTES) -> None:
    """Write a file and create its folder. Data beyond ``most_bytes`` is cut off, with a note at the end.
    Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if len(data) > most_bytes:
        data = data[:most_bytes] + f"\n... cut off after {most_bytes} bytes\n".encode()
    with replacing(path) as draft:
        draft.write_bytes(data)


def pack_profile(
    source: Path,
    path: Path,
    most_bytes: int = MOST_FILE_BYTES,
    more: Callable[[int], bytes] = lambda base_ns: b"",
) -> bool:
    """Compress a Chrome trace that torch wrote, and return whether it is complete.

    A trace that is too long ends after some event and stays valid. ``more`` returns events to insert before
    the trace's own, with times that count from ``base_ns``. Raises ``OSError``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft:
        with source.open("rb") as file, draft.open("wb") as raw, gzip.GzipFile("", "wb", 1, raw) as packed:
            return _copy(file, packed, raw, most_bytes, more)


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
    """Return the first block of a trace with extra events inserted before its own."""
    base, begin = _BASE.search(first), _EVENTS.search(first)
    if begin is None or not (events := more(int(base.group(1)) if base else 0)):
        return first
    return first[: begin.end()] + b"\n" + events + b"," + first[begin.end() :]


@contextmanager
def opened_trace(path: Path) -> Iterator[IO[bytes]]:
    """Open a trace for writing. An error leaves no partial file. Raises ``OSError``."""
    with replacing(path) as draft, draft.open("wb") as plain:
        if path.suffix == ".gz":
            with gzip.GzipFile(path.stem, "wb", compresslevel=5, fileobj=plain) as packed:
                yield cast(IO[bytes], packed)
        else:
            yield plain
