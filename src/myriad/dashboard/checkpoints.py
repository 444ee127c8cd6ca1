"""A run's checkpoints as they are now: on storage, and in the memory of this machine.

Each was read back and compared before it was committed (`myriad.checkpoint`); here it is looked whether all
of it is still there, in its size. Looking costs a folder's time, so it is done rarely, and never on a storage
that is not a folder: of that there is what the run's events tell.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.listing import list_checkpoints
from myriad.dashboard.rarely import Rarely
from myriad.dashboard.run_files import RunFiles, number

__all__ = ["Checkpoints"]

_REST_SECONDS = 5.0
_MOST_ROWS = 500
_TOLD = ("step", "tier", "state", "bytes", "time", "problems")


class Checkpoints:
    """Of one run; asked by any number of threads."""

    def __init__(self, files: RunFiles) -> None:
        self._files = files
        self.newest = Rarely(self._look, _REST_SECONDS)
        """By step; as they were some seconds ago."""

    def _look(self) -> Sequence[dict[str, Any]]:
        return (self._seen() or self._told())[-_MOST_ROWS:]

    def _seen(self) -> list[dict[str, Any]]:
        where = self._files.run.checkpoints(self._files.job)
        if "://" in where or not Path(where).is_dir():
            return []
        try:
            rows = list_checkpoints(self._files.run.path, CheckpointFolder(where))
        except (OSError, ValueError):
            return []
        return [{key: row[key] for key in _TOLD} for row in rows]

    def _told(self) -> list[dict[str, Any]]:
        """By the run, when it committed them."""
        found = []
        for event in self._files.events:
            if event.get("event") == "checkpoint" and number(event.get("step")) is not None:
                known = {"tier": "storage", "state": "complete", "problems": []}
                told = {key: event[key] for key in ("tier",) if isinstance(event.get(key), str)}
                figures = {key: number(event.get(key)) for key in ("step", "bytes", "time")}
                found.append(known | told | figures)
        return found
