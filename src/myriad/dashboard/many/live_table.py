"""The runs below some folders as rows, read again as they change.

One thread looks for runs and reads what has changed, so that a request waits for no disk. A run of 100,000
steps takes seconds to read; while it trains, it is read again only after 20 times that. In between its row
has the state of now and the figures of the last reading. The thread rests nine times as long as a pass took.
"""

import hashlib
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from myriad.errors import BadInputError
from myriad.many_runs.row_cache import RowCache
from myriad.many_runs.run_row import RunRow, find_runs, row_of
from myriad.run import Run
from myriad.run.run_figures import RunFigures

__all__ = ["LiveTable", "id_of"]

_LOG = logging.getLogger(__name__)
_EVERY_SECONDS, _REST_TIMES = 2.0, 9.0
_REREAD_TIMES = 20.0
_SHOW_EVERY_SECONDS = 0.5
_MOST_PROBLEMS = 20


class LiveTable:
    """The rows of all runs below some folders. It is thread-safe."""

    def __init__(self, folders: Sequence[Path], cache: RowCache | None = None) -> None:
        """``cache``: where figures of ended runs are kept; ``None``: in the user's cache."""
        self._folders, self._cache = list(folders), cache or RowCache()
        self._figures: dict[Path, tuple[RunFigures, float]] = {}
        """Figures by path, and the time from which the run may be read again."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="table of runs", daemon=True)
        self.rows: Sequence[RunRow] = ()
        """The rows of the last pass; during the first one those read so far."""
        self.num_unread = 0
        """Number of runs that the first pass has not read yet."""
        self.problems: Sequence[str] = ()
        """Folders and runs that cannot be read, with the reason."""

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the run that it is reading."""
        self._stop.set()
        self._thread.join(5.0)

    def row(self, name: str) -> RunRow | None:
        """Return the row of the run with this id; ``None``: the table has no such run."""
        return next((row for row in self.rows if id_of(row.path) == name), None)

    def refresh(self, path: Path) -> None:
        """Read one run again now; a run that is gone leaves the table."""
        run = Run(path)
        known = self._figures.get(path)
        row = row_of(run, known[0] if known else self._cache.figures(run)) if run.exists else None
        new = [row if one.path == path else one for one in self.rows]
        self.rows = tuple(one for one in new if one is not None)

    def poll(self) -> None:
        """Look for runs, and read those that have changed."""
        problems: list[str] = []
        runs = self._find(problems)
        rows: list[RunRow] = []
        is_first, shown_at = not self.rows, time.monotonic()
        for place, run in enumerate(runs):
            if self._stop.is_set():
                return
            try:
                rows.append(self._row(run))
            except Exception as error:  # whatever a folder holds: the other runs are shown
                _LOG.warning("%s cannot be read: %r", run.path, error)
                problems.append(f"{run.path} cannot be read: {error}")
            if is_first and time.monotonic() - shown_at > _SHOW_EVERY_SECONDS:
                self.rows, self.num_unread, shown_at = tuple(rows), len(runs) - place - 1, time.monotonic()
        there = {run.path for run in runs}
        self._figures = {path: known for path, known in self._figures.items() if path in there}
        self.rows, self.num_unread, self.problems = tuple(rows), 0, tuple(problems[:_MOST_PROBLEMS])

    def _find(self, problems: list[str]) -> list[Run]:
        found: dict[Path, Run] = {}
        for folder in self._folders:
            try:
                found |= {run.path: run for run in find_runs([folder])}
            except BadInputError:
                problems.append(f"{folder} is missing")
        return list({run.path.resolve(): run for run in found.values()}.values())

    def _row(self, run: Run) -> RunRow:
        known = self._figures.get(run.path)
        if known is not None and time.monotonic() < known[1]:
            return row_of(run, known[0])
        began = time.monotonic()
        figures = self._cache.figures(run)
        done = time.monotonic()
        self._figures[run.path] = figures, done + _REREAD_TIMES * (done - began)
        return row_of(run, figures)

    def _work(self) -> None:
        rest = 0.0
        while not self._stop.wait(rest):
            began = time.monotonic()
            try:
                self.poll()
            except Exception as error:  # the next pass may succeed
                _LOG.warning("the runs cannot be listed: %r", error)
                self.problems = (f"the runs cannot be listed: {error}",)
            rest = max(_EVERY_SECONDS, _REST_TIMES * (time.monotonic() - began))


def id_of(path: Path) -> str:
    """Return the name by which the page asks for a run. It says nothing of other files."""
    return hashlib.sha256(os.fsencode(path.resolve())).hexdigest()[:16]
