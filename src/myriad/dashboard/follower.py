"""Read a run's folder as it grows, in a separate thread, so that a hung disk blocks no request.

At the start it reads the newest span files first, and then older ones until memory is full.
"""

import logging
import threading
import time
from pathlib import Path

from myriad.dashboard.watched_run import WatchedRun
from myriad.telemetry.span_io.span_batch import BatchError
from myriad.telemetry.span_io.span_files import read_span_file

__all__ = ["Follower"]

_LOG = logging.getLogger(__name__)
_EVERY_SECONDS, _REST_TIMES = 1.0, 4.0
_MOST_FILE_BYTES = 2**30


class Follower:
    """Follows the files of one run."""

    def __init__(self, watched: WatchedRun) -> None:
        self._watched = watched
        self._seen: dict[Path, tuple[int, int]] = {}
        self._looked = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="follower", daemon=True)

    def start(self) -> None:
        """Start the thread. Call it once."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, after the file that it is reading."""
        self._stop.set()
        self._thread.join(5.0)

    def poll(self) -> None:
        """Read new data once."""
        files, began = self._watched.files, time.monotonic()
        with self._watched.reading():
            files.poll()
        if self._watched.follow_layout():
            self._seen.clear()
            self._looked = False
        store = self._watched.store
        store.limit_step = files.job.train.steps
        left_out = 0
        for path, state in files.span_paths():
            if self._stop.is_set():
                return
            if self._seen.get(path) == state:
                continue
            if not self._looked and store.counts.dropped_steps:
                left_out += 1  # memory is full of newer ones
            else:
                self._read(path, state[1])
            self._seen[path] = state
        self._looked = True
        if left_out:
            store.counts.add_problem(f"{left_out} older files of spans are not read: --memory is full")
        self._watched.looked(began)

    def _read(self, path: Path, size: int) -> None:
        store = self._watched.store
        try:
            if size > _MOST_FILE_BYTES:
                raise BatchError(f"{size} bytes: at most {_MOST_FILE_BYTES}")
            store.add(read_span_file(path))
        except FileNotFoundError:
            return
        except (BatchError, OSError) as error:
            store.counts.refused_files += 1
            store.counts.add_problem(f"{path.name}: {error}")

    def _work(self) -> None:
        rest = 0.0
        while not self._stop.wait(rest):
            began = time.monotonic()
            try:
                self.poll()
            except Exception as error:  # whatever a folder holds: the next poll may find it well
                _LOG.warning("the run's folder cannot be read: %s", error)
                self._watched.store.counts.add_problem(f"the run's folder: {error}")
            rest = max(_EVERY_SECONDS, _REST_TIMES * (time.monotonic() - began))
