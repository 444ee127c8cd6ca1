"""What lets a driver drive: alone on its run, or for as long as it has the lease in Redis.

    decided ──► may it be done?   alone: yes. With a lease: once it is in Redis, where only who has the lease
                                  can write; half a second later where Redis is away, if nobody can have it
    no      ──► the driver ends; its engine starts another, which waits for the lease

Lines carry the term and their number in it, in Redis and in RUN/journal.jsonl: what a driver wrote that had
lost the lease counts for nothing, and the newest of both is what the next one goes on from.
"""

import time
from typing import Any, Protocol

from myriad.resilience.decide.state import Plan, State
from myriad.resilience.drive.journal import Journal

__all__ = ["Alone", "Tenure", "boot_seconds"]


def boot_seconds() -> float:
    """A clock that goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Tenure(Protocol):
    """Of one driver."""

    term: int
    """Executors follow the highest that they know; 0: there is no other driver."""
    takeover_seconds: float
    """After which there is another driver, if this one's machine is lost; 0: there is none."""

    def replay(self) -> tuple[Plan, State | None]:
        """Where the last driver was. Raises ``ValueError``."""

    def mark(self, record: dict[str, Any]) -> dict[str, Any]:
        """The line, with its place among all."""

    def allows(self, record: dict[str, Any]) -> bool:
        """Whether the decision on this line may be acted upon."""

    def holds(self) -> bool:
        """Whether anything may be done at all."""

    def lose(self) -> None:
        """Another driver has shown itself."""

    def release(self) -> None:
        """The run is over."""


class Alone:
    """No other driver can be: the launcher has the run's lock."""

    term, takeover_seconds = 0, 0.0

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def replay(self) -> tuple[Plan, State | None]:
        """Of the file."""
        return self._journal.replay()

    def mark(self, record: dict[str, Any]) -> dict[str, Any]:
        """As it is."""
        return record

    def allows(self, record: dict[str, Any]) -> bool:
        """All."""
        return True

    def holds(self) -> bool:
        """Always."""
        return True

    def lose(self) -> None:
        """Nobody asks that it does."""

    def release(self) -> None:
        """There is nothing."""
