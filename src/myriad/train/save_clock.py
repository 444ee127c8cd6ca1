"""When a checkpoint, or a snapshot in memory, is due by time: rank 0's clock decides, and all ranks learn it
from a number that they add up anyway.

    signal = ranks that ask for a stop + 2^20 if a checkpoint is due + 2^21 if a snapshot is due
             + 2^22 if this attempt is to end, for another one
             + 2^23 if checks are to follow this step (`myriad.train.gap_checks`)
             + 2^24 x (steps after which replicas are known to have held the same, + 1)
"""

import time

from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.snapshot import Wants

__all__ = ["SaveClock"]

_SAVE, _MEMORY, _TURN, _CHECK, _AGREED = 2**20, 2**21, 2**22, 2**23, 2**24


class SaveClock:
    """One rank's side."""

    def __init__(self, config: CheckpointConfig, *, decides: bool) -> None:
        """``decides``: on rank 0."""
        self._config, self._decides = config, decides
        self.save_due = False
        self.memory_due = False
        self.turn_due = False
        """All ranks are to end after this step; not the run."""
        self.check_due = False
        """Checks follow the step whose signal was heard last."""
        self.agreed_step = -1
        """As rank 0 knew it; -1: nothing is known."""
        self._saved_at, self._kept_at = time.monotonic(), 0.0

    @property
    def save_comes(self) -> bool:
        """A checkpoint is due by time."""
        minutes = self._config.minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def signal(self, stop: bool, agreed_step: int = -1, *, turn: bool = False, check: bool = False) -> float:
        """What this rank adds in the next iteration."""
        if not self._decides:
            return float(stop)
        now, save = time.monotonic(), self.save_comes
        memory = now - self._kept_at >= self._config.memory_seconds
        due = _SAVE * save + _MEMORY * memory + _TURN * turn + _CHECK * check
        return float(stop + due + _AGREED * (agreed_step + 1))

    def hear(self, signal: float) -> bool:
        """Takes what all ranks added up to; gives whether somebody asks for a stop."""
        total = int(signal)
        self.save_due |= bool(total & _SAVE)
        self.memory_due |= bool(total & _MEMORY)
        self.turn_due |= bool(total & _TURN)
        self.check_due = bool(total & _CHECK)
        self.agreed_step = max(self.agreed_step, total // _AGREED - 1)
        return total % _SAVE > 0

    def taken(self, wants: Wants) -> None:
        """A snapshot was begun: the clocks start anew."""
        self._kept_at, self.memory_due = time.monotonic(), False
        if wants.durable:
            self._saved_at, self.save_due = self._kept_at, False
