"""A driver that does not drive: it waits for the lease, which it has at once when the one before it was of
the same `myriad train`, else when that one's has run out.

    take? ──no: it is another's──► stands by, and is known to ──0.2 s──► take? ... ──yes──► drives

A server that has forgotten the run has no lease to run out. Whoever drove tells it again as soon as it can;
when nobody has for as long as a lease lasts, nobody drives.
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from myriad.comm.store_address import redis_address
from myriad.resilience.drive.journal import Journal
from myriad.resilience.drive.leased import Leased
from myriad.resilience.drive.redis_lease import RedisLease, StoreAwayError, Taken
from myriad.resilience.drive.scribe import Scribe
from myriad.resilience.drive.tenure import boot_seconds
from myriad.resilience.facts import STOP_ASKED
from myriad.run import Run

__all__ = ["Candidate"]

_LOG = logging.getLogger(__name__)
_ASK_SECONDS, _ALIVE_SECONDS = 0.2, 1.0


class Candidate:
    """Of one engine."""

    def __init__(self, run: Run, journal: Journal, store: str, owner: str, seconds: float) -> None:
        """``store``: as the job names it; ``owner``: the engine, among all."""
        address = redis_address(store, "resilience.journal", "file")
        assert address is not None, "else there is nothing to wait for"
        self._run, self._journal = run, journal
        self._lease = RedisLease(address, run.path, owner, seconds)
        self._is_asked = STOP_ASKED in os.environ
        self._said = ""
        self._forgotten_since: float | None = None

    def wait(self, tell_engine: Callable[[dict[str, Any]], None]) -> Leased | None:
        """Until this driver may drive; ``None``: a person wants it no more."""
        signal.signal(signal.SIGINT, self._ask_to_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the engine has blocked it until now
        tell_at = 0.0
        while (tenure := self._take()) is None and not self._is_asked:
            if time.monotonic() >= tell_at:
                tell_at = time.monotonic() + _ALIVE_SECONDS
                tell_engine({})
            time.sleep(_ASK_SECONDS)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until whoever drives hears of it
        if tenure is None:
            tell_engine({"end": "left", "reason": "", "rule": "a person wants it no more"})
        elif self._is_asked:
            os.environ[STOP_ASKED] = "1"
        return tenure

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def _take(self) -> Leased | None:
        asked_at = boot_seconds()
        try:
            taken = self._ask(asked_at)
        except StoreAwayError as error:
            self._forgotten_since = None
            self._say(f"{self._lease} is away: {error}")
            return None
        if not taken.term:
            whose = f"{taken.owner} drives" if taken.owner else "nobody drives, and nobody is to follow"
            self._say(f"{whose}; standing by")
            return None
        if taken.owner != self._lease.owner:
            self._tell(taken)
        _LOG.info("drives, with term %d of the lease in %s; %s", taken.term, self._lease, self._promises())
        scribe = Scribe()  # its own: a disk that hangs must not hold up the lease
        report = partial(scribe.enter_event, self._run, "health", what="redis")
        return Leased(self._lease, self._journal, asked_at, lambda problem: report(problem=problem))

    def _ask(self, now: float) -> Taken:
        taken = self._lease.take()
        if not taken.is_forgotten:
            self._forgotten_since = None
            return taken
        self._forgotten_since = now if self._forgotten_since is None else self._forgotten_since
        if now - self._forgotten_since < self._lease.seconds:
            return taken
        return self._lease.take(1 + self._journal.last_term(), by_force=True)

    def _promises(self) -> str:
        try:
            return self._lease.promises()
        except StoreAwayError:
            return "which is away again"

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            _LOG.info("%s", text)

    def _tell(self, taken: Taken) -> None:
        """For people."""
        rule = "the lease of the driver before had run out"
        if not taken.owner:
            rule = "Redis had forgotten who drives, and nobody told it"
        owner, before = self._lease.owner, taken.owner
        self._run.append_event("takeover", driver=owner, before=before, term=taken.term, rule=rule)
