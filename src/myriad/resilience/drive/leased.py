"""A lease that was taken: renewed by a thread of its own, its journal written through another.

allows(decision) ──► scribe ──► Redis, half a second at most ──► may it be done?
                                  └─ away: the same again, until it is back; what comes later waits
lease thread ──► renew, five times as often as it runs out ──► told that it is another's: lost
"""

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from myriad.resilience.decide.state import Plan, State
from myriad.resilience.drive.hold import Hold
from myriad.resilience.drive.journal import Journal, Newest
from myriad.resilience.drive.redis_lease import LeaseLostError, RedisLease, StoreAwayError
from myriad.resilience.drive.scribe import Scribe
from myriad.resilience.drive.tenure import boot_seconds

__all__ = ["Leased"]

_LOG = logging.getLogger(__name__)
_RENEWALS = 5
"""In the time that a lease lasts."""
_AGAIN_SECONDS = 0.2
_FIND_SECONDS = 3.5
"""In which another driver begins, once the lease is free, and executors find it."""


class Leased:
    """Of one driver."""

    def __init__(
        self,
        lease: RedisLease,
        journal: Journal,
        asked_at: float,
        report: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """``asked_at``: when it was asked for, by `boot_seconds`; ``report`` gets, in words, that Redis is
        away and that it is back. It must not wait."""
        self._report = report
        self._lease, self._journal, self.term = lease, journal, lease.term
        self._hold = Hold(lease.seconds, asked_at)
        self._renewing = threading.Lock()
        self._scribe, self._number = Scribe(), 0
        self.takeover_seconds = lease.seconds + _FIND_SECONDS
        self._plan: dict[str, Any] | None = None
        self._newest: dict[str, Any] | None = None
        self._is_away = False
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def replay(self) -> tuple[Plan, State | None]:
        """The newest of the file and of Redis, which may each have missed something. Raises `StoreAwayError`
        and ``ValueError``."""
        told = self._lease.read()
        newest = self._journal.newest(told)
        self._plan, self._newest = newest.plan, newest.state
        if newest.mark > Newest.of(told).mark:
            self._tell_again()
        return newest.parse("the journal")

    def mark(self, record: dict[str, Any]) -> dict[str, Any]:
        """With term and number."""
        self._number += 1
        return record | {"term": self.term, "number": self._number}

    def allows(self, record: dict[str, Any]) -> bool:
        """Waits for Redis, half a second at most."""
        self._newest = record
        self._scribe.enter("a decision", partial(self._append, record))
        if not self._scribe.settle() and self.holds():
            _LOG.warning("acting on what is not in the journal of %s yet: it is away", self._lease)
        return self.holds()

    def holds(self) -> bool:
        """By this machine's clock."""
        return self._hold.may_act(boot_seconds())

    def lose(self) -> None:
        """Whatever Redis says, if it says anything."""
        self._hold.lose()

    def release(self) -> None:
        """If Redis is there; else it runs out."""
        self._try(self._lease.release)

    def _append(self, record: dict[str, Any]) -> None:
        """However long Redis is away; what comes later waits."""
        while not self._hold.is_lost:
            if self._try(partial(self._lease.append, record, self._plan)):
                return
            self._renew()  # it may have run out while Redis was away, or be another's
            time.sleep(_AGAIN_SECONDS)

    def _keep(self) -> None:
        while not self._hold.is_lost:
            self._renew()
            time.sleep(self._lease.seconds / _RENEWALS)

    def _renew(self) -> None:
        with self._renewing:
            asked_at, knows = boot_seconds(), self._hold.is_watched
            try:
                answer = self._try(partial(self._lease.renew, knows=knows))
            except LeaseLostError:
                self._hold.lose()
                return
            if not answer:
                return
            is_watched, had_forgotten = answer
            self._hold.renewed(asked_at, is_watched=is_watched)
        if had_forgotten:
            _LOG.warning("%s had forgotten this run: it is told again", self._lease)
            self._tell_again()

    def _tell_again(self) -> None:
        if record := self._newest or self._plan:
            self._scribe.enter("what was decided before", partial(self._append, record))

    def _try(self, ask: Callable[[], Any]) -> Any:
        """The answer; ``None`` when there is none."""
        try:
            answer = ask()
        except StoreAwayError as error:
            if not self._is_away:
                self._report(f"{self._lease} is away, and training goes on: {error}")
                _LOG.warning("%s is away, and training goes on: %s", self._lease, error)
            self._is_away = True
            return None
        if self._is_away:
            self._report(f"{self._lease} is back")
            _LOG.info("%s is back", self._lease)
        self._is_away = False
        return answer
