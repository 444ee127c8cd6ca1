"""Figures of ended runs, kept in the user's cache, so that a table of many long runs opens at once.

    ~/.cache/myriad/runs/HASH.json    figures of one run, with the stamps of the files they were read from

Reading takes about 2 CPU-seconds for 100,000 steps. Kept figures count only while size, inode, and the times
of the last write and change of job.toml, metrics.jsonl and events.jsonl are those of the reading. The state
is never kept: it depends on processes and on the present time. Figures of a run whose files were written in
the last seconds are not kept, because a file system may give two writes the same time.

The folder and its files are the user's alone. A file of another version, or with a value of another type, is
read as missing. Nothing is written into a run, and where the cache cannot be written, or another user could
write it, runs are read each time.
"""

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import convert

from myriad.many_runs.run_row import RunRow, row_of
from myriad.run import Run
from myriad.run.run_figures import RunFigures, read_figures
from myriad.run.run_status import RUNNING
from myriad.system.state_folder import cache_folder, make_private
from myriad.system.whole_file import read_json, replacing

__all__ = ["RowCache", "Stamp", "stamp_of"]

_VERSION = 1
"""Version of the kept figures; increment it when the same files would give others."""
_SETTLED_SECONDS = 2.0
_MOST_FILES = 4096

Stamp = tuple[tuple[int, ...], ...]


def stamp_of(run: Run) -> Stamp:
    """Return a value that changes when a file of the run's figures changes."""
    return tuple(map(_stamp, (run.job_path, run.metrics_path, run.events_path)))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_size, found.st_ino, found.st_dev, found.st_mtime_ns, found.st_ctime_ns


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    """Content of a file of the cache."""

    version: int
    run: str
    stamp: Stamp
    figures: RunFigures


class RowCache:
    """Reads rows of runs, each file at most once until it changes."""

    def __init__(self, folder: Path | None = None) -> None:
        """``folder``: where figures are kept; ``None``: in the user's cache."""
        self._folder: Path | None = folder or cache_folder() / "runs"
        try:
            make_private(self._folder)
        except (OSError, RuntimeError):
            self._folder = None
        self._known: dict[Path, tuple[Stamp, RunFigures]] = {}

    def row(self, run: Run) -> RunRow:
        """Return the row of a run now."""
        return row_of(run, self.figures(run))

    def figures(self, run: Run) -> RunFigures:
        """Return the figures of a run's files."""
        stamp = stamp_of(run)
        if (kept := self._kept(run, stamp)) is not None:
            return kept
        figures = read_figures(run)
        self._known[run.path] = stamp, figures
        if _is_settled(stamp) and row_of(run, figures).state not in RUNNING:
            self._write(run, stamp, figures)
        return figures

    def _kept(self, run: Run, stamp: Stamp) -> RunFigures | None:
        """Return the figures that were read from these files; ``None``: they have to be read."""
        before = self._known.get(run.path)
        if before is not None and before[0] == stamp:
            return before[1]
        figures = self._read(run, stamp)
        if figures is not None:
            self._known[run.path] = stamp, figures
        return figures

    def _read(self, run: Run, stamp: Stamp) -> RunFigures | None:
        if self._folder is None:
            return None
        try:
            found = convert(read_json(self._path(self._folder, run)), _Kept)
        except (OSError, ValueError):
            return None
        is_same = found.version == _VERSION and found.run == str(run.path.resolve()) and found.stamp == stamp
        return found.figures if is_same else None

    def _write(self, run: Run, stamp: Stamp, figures: RunFigures) -> None:
        if self._folder is None:
            return
        path = self._path(self._folder, run)
        kept = _Kept(_VERSION, str(run.path.resolve()), stamp, figures)
        with suppress(OSError, ValueError, TypeError):
            data = msgspec.json.encode(kept)
            with replacing(path) as draft, open(draft, "wb", opener=_open_private) as file:
                file.write(data)
            self._forget_old(self._folder)

    @staticmethod
    def _path(folder: Path, run: Run) -> Path:
        return folder / f"{hashlib.sha256(os.fsencode(run.path.resolve())).hexdigest()[:32]}.json"

    @staticmethod
    def _forget_old(folder: Path) -> None:
        """Remove the oldest quarter of too many files."""
        with os.scandir(folder) as entries:
            ages = [(one.stat().st_mtime_ns, one.path) for one in entries]
        if len(ages) > _MOST_FILES:
            for _, path in sorted(ages)[: len(ages) // 4]:
                os.unlink(path)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def _is_settled(stamp: Stamp) -> bool:
    now = time.time_ns()
    return all(now - at > _SETTLED_SECONDS * 1e9 for one in stamp for at in one[-2:])
