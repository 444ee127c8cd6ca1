"""Leadership: whether a driver may act, as the only driver of its run or while it has the lease in Redis.

    decision ──► may the driver act?   only driver: yes. With a lease: once the decision is in Redis, where
                                       only the lease's holder can write; or half a second later if Redis is
                                       away and no other driver can have the lease
    no       ──► the driver ends; its launcher starts another one, which waits for the lease

Lines carry the term and their number in it, in Redis and in RUN/journal.jsonl. Lines that a driver wrote
after it had lost the lease are ignored, and the next driver continues from the newest line of both.
"""

import time
from typing import Any, Protocol

from myriad.supervise.driver.journal import Journal
from myriad.supervise.policy.run_state import RunPlan, RunState

__all__ = ["Leadership", "SoleLeadership", "boot_seconds"]


def boot_seconds() -> float:
    """Return seconds of a clock that does not stop during suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Leadership(Protocol):
    """Decides whether a driver may act."""

    term: int
    """Term of the lease; agents follow the highest that they have seen. 0: only one driver is possible."""
    takeover_seconds: float
    """Seconds until another driver leads if this one's machine is lost; 0: there is no other driver."""

    def replay(self) -> tuple[RunPlan, RunState | None]:
        """Return the plan and state that the last driver left. Raises ``ValueError``."""

    def mark(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the entry with its term and number."""

    def allows(self, record: dict[str, Any]) -> bool:
        """Return whether the driver may act on the decision of this entry."""

    def holds(self) -> bool:
        """Return whether the driver may act at all."""

    def lose(self) -> None:
        """Record that another driver leads."""

    def release(self) -> None:
        """Give up leadership, because the run is over or this driver ends."""


class SoleLeadership:
    """Leadership without a lease: the launcher holds the lock of the run, so there is only one driver."""

    term, takeover_seconds = 0, 0.0

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def replay(self) -> tuple[RunPlan, RunState | None]:
        """Replay the journal file."""
        return self._journal.replay()

    def mark(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the entry unchanged."""
        return record

    def allows(self, record: dict[str, Any]) -> bool:
        """Return true: there is only one driver."""
        return True

    def holds(self) -> bool:
        """Return true: there is only one driver."""
        return True

    def lose(self) -> None:
        """Do nothing, because there is no lease."""

    def release(self) -> None:
        """Do nothing, because there is no lease."""
