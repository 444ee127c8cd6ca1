"""How far this machine's clock is from another's, by round trips.

    asked (own clock) ──────►  heard (other's)           offset = ((heard - asked) + (told - back)) / 2
    back  (own clock) ◄──────  told  (other's)           error  = (back - asked - (told - heard)) / 2

The way there and back may take differently long, so the offset is known to half of what both took (as in NTP,
RFC 5905): of the newest comparisons the surest is believed, which grows unsure as clocks drift apart. The
same machine has the same clock: no error.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

__all__ = ["UNKNOWN_SECONDS", "ClockOffset", "Compared", "boot_id", "compare"]

_NEWEST = 32
_DRIFT = 50e-6
"""Seconds that two clocks part in a second, at most: quartz is within that."""
UNKNOWN_SECONDS = 60.0
"""How wrong a clock is taken to be that nobody has compared."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of this machine since it was switched on: who has the same has the same clock. Empty: it has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Compared:
    """Two clocks, at one time."""

    offset_ns: int
    """To be added to the own clock to have the other's."""
    error_ns: int
    """How wrong that may be, at most."""
    at_ns: int
    """When, by the own clock."""

    def error_at(self, now_ns: int) -> int:
        """The same, later."""
        return self.error_ns + int(_DRIFT * abs(now_ns - self.at_ns))

    @property
    def may_be_same(self) -> bool:
        """They are not known to differ."""
        return abs(self.offset_ns) <= self.error_ns


def compare(asked_ns: int, heard_ns: int, told_ns: int, back_ns: int) -> Compared:
    """By a round trip."""
    offset = ((heard_ns - asked_ns) + (told_ns - back_ns)) // 2
    return Compared(offset, max(0, (back_ns - asked_ns) - (told_ns - heard_ns)) // 2 + 1, back_ns)


class ClockOffset:
    """From this machine's clock to the one that all nodes go by."""

    def __init__(self) -> None:
        self._compared: deque[Compared] = deque(maxlen=_NEWEST)
        self._is_same = False

    def add(self, new: Compared) -> None:
        """The newest. Earlier ones that it contradicts are void: somebody has set a clock."""
        best = self._best(new.at_ns)
        if best is not None and abs(new.offset_ns - best.offset_ns) > new.error_ns + best.error_at(new.at_ns):
            self._compared.clear()
        self._is_same = False
        self._compared.append(new)

    def same(self) -> None:
        """The other's clock is this machine's own."""
        self._is_same = True

    def at(self, now_ns: int) -> tuple[int, float] | None:
        """Nanoseconds to add, and how many seconds that may be wrong, at most; ``None``: nobody knows."""
        if self._is_same:
            return 0, 0.0
        best = self._best(now_ns)
        return None if best is None else (best.offset_ns, best.error_at(now_ns) / 1e9)

    def _best(self, now_ns: int) -> Compared | None:
        return min(tuple(self._compared), key=lambda one: one.error_at(now_ns), default=None)
