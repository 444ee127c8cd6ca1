"""Estimate the offset between this machine's clock and another machine's from round trips.

    asked (own clock) ──────►  heard (other's)           offset = ((heard - asked) + (answered - back)) / 2
    back  (own clock) ◄───  answered (other's)           error  = (back - asked - (answered - heard)) / 2

The two directions may take different times, so the offset is known to half of the round-trip time (as in NTP,
RFC 5905). Of the newest comparisons the one with the smallest error is used; its error grows with its age, as
clocks drift apart. Two processes on the same machine share a clock, so their error is 0.
"""

from collections import deque
from dataclasses import dataclass
from pathlib import Path

__all__ = ["UNKNOWN_SECONDS", "ClockOffset", "Compared", "boot_id", "compare"]

_NEWEST = 32
_DRIFT = 50e-6
"""Maximum drift between two clocks, in seconds per second: quartz stays within it."""
UNKNOWN_SECONDS = 60.0
"""Assumed error of a clock that was never compared."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Return the kernel's boot id. Processes with the same id share a clock. Empty if there is none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Compared:
    """A comparison of two clocks."""

    offset_ns: int
    """Nanoseconds to add to the local clock to get the other clock."""
    error_ns: int
    """Maximum error of the offset."""
    at_ns: int
    """Time of the comparison by the local clock."""

    def error_at(self, now_ns: int) -> int:
        """Return the maximum error at ``now_ns``, including drift."""
        return self.error_ns + int(_DRIFT * abs(now_ns - self.at_ns))

    @property
    def may_be_same(self) -> bool:
        """Whether the offset is within the error, so that the clocks may agree."""
        return abs(self.offset_ns) <= self.error_ns


def compare(asked_ns: int, heard_ns: int, answered_ns: int, back_ns: int) -> Compared:
    """Compare two clocks by the four times of a round trip."""
    offset = ((heard_ns - asked_ns) + (answered_ns - back_ns)) // 2
    return Compared(offset, max(0, (back_ns - asked_ns) - (answered_ns - heard_ns)) // 2 + 1, back_ns)


class ClockOffset:
    """The offset from this machine's clock to the cluster's reference clock."""

    def __init__(self) -> None:
        self._compared: deque[Compared] = deque(maxlen=_NEWEST)
        self._is_same = False

    def add(self, new: Compared) -> None:
        """Add the newest comparison. If it contradicts earlier ones, drop those: a clock was set."""
        best = self._best(new.at_ns)
        if best is not None and abs(new.offset_ns - best.offset_ns) > new.error_ns + best.error_at(new.at_ns):
            self._compared.clear()
        self._is_same = False
        self._compared.append(new)

    def same(self) -> None:
        """Record that the reference clock is this machine's own."""
        self._is_same = True

    def at(self, now_ns: int) -> tuple[int, float] | None:
        """Return the nanoseconds to add and the maximum error in seconds; ``None`` if unknown."""
        if self._is_same:
            return 0, 0.0
        best = self._best(now_ns)
        return None if best is None else (best.offset_ns, best.error_at(now_ns) / 1e9)

    def _best(self, now_ns: int) -> Compared | None:
        return min(tuple(self._compared), key=lambda one: one.error_at(now_ns), default=None)
