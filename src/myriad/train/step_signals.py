"""What ranks agree on after each step: whether all stop, and what is due by time.

A rank that is asked to stop (SIGINT, SIGTERM) and rank 0's clock decide, and all ranks learn it from a number
that they sum in each step anyway.

    signal = ranks that ask for a stop + 2^20 if a checkpoint is due + 2^21 if a snapshot is due
             + 2^22 if this attempt is to end, for another one
             + 2^23 if checks are to follow this step (`myriad.train.training_checks`)
             + 2^24 x (steps after which replicas are known to have held the same, + 1)
"""

import signal
import threading
import time
from types import FrameType
from typing import Any

from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.snapshots.snapshot_taker import SnapshotPurpose

__all__ = ["SaveClock", "StopSignal"]

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
        """Return the value that this rank adds to the signal in the next iteration."""
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
