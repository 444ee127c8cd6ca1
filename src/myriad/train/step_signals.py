"""What all ranks do at the same step: stop, save, begin checks, and collect garbage.

A rank that is asked to stop (SIGINT, SIGTERM) and rank 0's clock decide, and all ranks learn it from a
number that they sum in each step anyway.

    signal = ranks that ask for a stop + 2^20 if a checkpoint is due + 2^21 if a snapshot is due
             + 2^22 if this attempt is to end, for another one
             + 2^23 if checks are to follow this step (`myriad.train.training_checks`)
             + 2^24 x (steps after which replicas are known to have held the same, + 1)

Python's garbage collector runs by step count, so that all ranks pause together or none does. By default it
runs when enough objects were made, on each rank at another time. A full collection takes a tenth of a
second for each million objects. All ranks wait for the one that pauses, with thousands of ranks at nearly
every step (MegaScale, section 6.3).

    step    1                  2 ...  100      101 ...  200    ...  10,000         close
            everything, freeze        young             young       everything     as it was
            off from here on

Objects that exist after the first step (imports, model, programs, indices) stay for the whole run. They
are frozen, so that no collection scans them again. Objects that outlive a collection are scanned only once
in a hundred collections. For a loader that keeps a million samples, each scan takes half a second. Step
counts are the run's, not the process's, so a resumed rank pauses with the others.
"""

import gc
import signal
import threading
import time
from types import FrameType
from typing import Any

from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.snapshots.snapshot_taker import SnapshotPurpose
from myriad.telemetry.spans import Recorder

__all__ = ["GarbageSchedule", "SaveClock", "StopSignal"]

_SAVE, _MEMORY, _TURN, _CHECK, _AGREED = 2**20, 2**21, 2**22, 2**23, 2**24


class SaveClock:
    """One rank's state of what is due."""

    def __init__(self, config: CheckpointConfig, *, decides: bool) -> None:
        """``decides`` is True on rank 0."""
        self._config, self._decides = config, decides
        self.save_due = False
        self.memory_due = False
        self.restart_due = False
        """Whether all ranks end after this step to restart at the step boundary; the run does not end."""
        self.check_due = False
        """Whether checks follow the step of the last received signal."""
        self.agreed_step = -1
        """The last step at which replicas are known to agree, by rank 0; -1 if unknown."""
        self._saved_at, self._kept_at = time.monotonic(), 0.0

    @property
    def save_comes(self) -> bool:
        """Whether a checkpoint is due by time."""
        minutes = self._config.minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def signal(self, stop: bool, agreed_step: int = -1, *, turn: bool = False, check: bool = False) -> float:
        """Return what this rank adds to the next iteration's signal, in which all ranks see what is due."""
        if not self._decides:
            return float(stop)
        now, save = time.monotonic(), self.save_comes
        memory = now - self._kept_at >= self._config.memory_seconds
        due = _SAVE * save + _MEMORY * memory + _TURN * turn + _CHECK * check
        return float(stop + due + _AGREED * (agreed_step + 1))

    def receive(self, signal: float) -> bool:
        """Record the sum of all ranks' signals, and return whether a rank asks for a stop."""
        total = int(signal)
        self.save_due |= bool(total & _SAVE)
        self.memory_due |= bool(total & _MEMORY)
        self.restart_due |= bool(total & _TURN)
        self.check_due = bool(total & _CHECK)
        self.agreed_step = max(self.agreed_step, total // _AGREED - 1)
        return total % _SAVE > 0

    def taken(self, purpose: SnapshotPurpose) -> None:
        """Restart the clocks after a snapshot was begun."""
        self._kept_at, self.memory_due = time.monotonic(), False
        if purpose.durable:
            self._saved_at, self.save_due = self._kept_at, False


class StopSignal:
    """Record whether this rank received a stop request (SIGINT or SIGTERM)."""

    def __init__(self) -> None:
        self.asked = False
        self._previous: dict[signal.Signals, Any] = {}
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            wanted = (signal.SIGINT, signal.SIGTERM)
            self._previous = {number: signal.signal(number, self._note) for number in wanted}

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            if handler is not None:  # None: a handler that Python did not install
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


_YOUNG, _EVERYTHING = 1, 2
_EVERYTHING_EVERY = 100
"""Number of collections after which one is full. Cycles among old objects are rare, but they must not fill
memory over weeks."""


class GarbageSchedule:
    """The schedule of this process's garbage collections. With ``every = 0``, Python's own schedule stays."""

    def __init__(self, every: int, recorder: Recorder) -> None:
        """Collections are recorded as spans ``collect_garbage``."""
        self._every, self._recorder = every, recorder
        self._started = False
        self._was_enabled = gc.isenabled()

    def after_step(self, step: int) -> None:
        """Collect garbage if it is due; ``step`` counts the run's completed steps. Every rank calls this
        after each step."""
        if not self._every:
            return
        if not self._started:
            self._started = True
            self._collect(_EVERYTHING)
            gc.freeze()
            gc.disable()
        elif step % self._every == 0:
            self._collect(_YOUNG if step % (self._every * _EVERYTHING_EVERY) else _EVERYTHING)

    def _collect(self, generation: int) -> None:
        with self._recorder.span("collect_garbage"):
            gc.collect(generation)

    def close(self) -> None:
        """Restore the collector's previous state."""
        if self._started:
            self._started = False
            gc.unfreeze()
            if self._was_enabled:
                gc.enable()
