"""Checkpoints written while training goes on.

    step N      copy of this rank's state     training waits for this much
    step N+1    ...training...                a thread writes, all ranks' threads agree, rank 0 commits
    step N+k    the next copy                 waits for the write before it, if that is still under way

The threads have a gloo group of their own, so their messages never meet those of the training.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from myriad.checkpoint.folder import CheckpointFolder
from myriad.checkpoint.store import save
from myriad.model.rectangle import Rectangle

__all__ = ["Saved", "Saver"]


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint."""

    step: int
    name: str
    seconds: float
    """From the request to the commit."""


class Saver:
    """Writes one checkpoint at a time."""

    def __init__(
        self, folder: CheckpointFolder, keep: int, group: dist.ProcessGroup | None, *, background: bool
    ) -> None:
        """``group``: all ranks, on the host. ``background`` off: training waits until a checkpoint is
        committed."""
        self._folder, self._keep, self._background = folder, keep, background
        self._group = group
        self._thread: threading.Thread | None = None
        self._done: list[Saved] = []
        self._error: BaseException | None = None

    def start(self, step: int, rectangles: Sequence[Rectangle], progress: dict[str, Any]) -> None:
        """Takes a copy of the rectangles and writes it; every rank calls it after the same step."""
        self._join()
        started = time.perf_counter()
        if not self._background:
            self._write(step, rectangles, progress, started)
            self._raise()
            return
        copies = [replace(part, values=part.values.clone()) for part in rectangles]
        self._thread = threading.Thread(
            target=self._write, args=(step, copies, progress, started), name="myriad-checkpoint", daemon=True
        )
        self._thread.start()

    def take_saved(self) -> Iterator[Saved]:
        """Checkpoints committed since the last call. Raises what a write failed with."""
        self._raise()
        while self._done:
            yield self._done.pop(0)

    def finish(self) -> Iterator[Saved]:
        """The same, after waiting for the write that is under way."""
        self._join()
        yield from self.take_saved()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _write(
        self, step: int, rectangles: Sequence[Rectangle], progress: dict[str, Any], started: float
    ) -> None:
        try:
            path = save(self._folder, step, rectangles, progress, self._group)
            if self._group is None or dist.get_rank() == 0:
                self._folder.prune(self._keep, step)
            self._done.append(Saved(step, path.name, time.perf_counter() - started))
        except BaseException as error:
            self._error = error
