"""Leadership by a lease in Redis: waiting for it, renewing it, and how long a driver may act on it.

    StandbyDriver         take? ──no──► registered as standby, 0.2 s ──► take? ──yes──► leads
    LeasedLeadership      allows(decision) ──► writer thread ──► Redis, half a second at most ──► may act?
                          lease thread ──► renew, five times in a lease ──► lost if another driver has it

A driver takes the lease at once if the last one was of the same `myriad train`, otherwise when that one's
lease has expired. If Redis is away, writes are retried in order until it is back. A server that has forgotten
the run has no lease to expire: the current driver writes it again, and if none does for the length of a
lease, a standby takes over.

    Redis     lease ├────────── 3 s ──────────┤ then a standby may take it
    driver       asked ├────── 2.7 s ──────┤ then it stops acting, unless the lease was renewed

The driver counts from before its request and stops a tenth early (`LeaseDeadline`). So no clock of another
machine matters, only that both run at nearly the same speed. Without a standby no other driver can take the
lease, so the driver may act without Redis for as long as that is away. A standby may take the lease only
after the driver was notified of it:

    renewal n     Redis: there is a standby            from now on the driver stops when a renewal is late
    renewal n+1   the driver confirms                  Redis: the standby may take the lease, once it is free
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from myriad.comm.rendezvous.redis_address import redis_address
from myriad.run import Run
from myriad.supervise.background import AsyncWriter
from myriad.supervise.driver.journal import Journal, NewestEntries
from myriad.supervise.driver.leadership import boot_seconds
from myriad.supervise.driver.redis_lease import LeaseAnswer, LeaseLostError, RedisLease, StoreUnavailableError
from myriad.supervise.messages import STOP_ASKED
from myriad.supervise.policy.run_state import RunPlan, RunState

__all__ = ["LeasedLeadership", "StandbyDriver"]

_LOG = logging.getLogger(__name__)
_RENEWALS = 5
"""Number of renewals in the time of a lease."""
_AGAIN_SECONDS = 0.2
_FIND_SECONDS = 3.5
"""Time in which the next driver starts after the lease is free, and agents find it."""


class LeasedLeadership:
    """Leadership of one driver by its lease in Redis."""

    def __init__(
        self,
        lease: RedisLease,
        journal: Journal,
        asked_at: float,
        report: Callable[[str], None] = lambda problem: None,
    ) -> None:
        """``asked_at``: time of the request for the lease, by `boot_seconds`. ``report`` receives a message
        when Redis is away and when it is back; it must not block."""
        self._report = report
        self._lease, self._journal, self.term = lease, journal, lease.term
        self._deadline = LeaseDeadline(lease.seconds, asked_at)
        self._renewing = threading.Lock()
        self._disk_writer, self._number = AsyncWriter(), 0
        self.takeover_seconds = lease.seconds + _FIND_SECONDS
        self._plan: dict[str, Any] | None = None
        self._newest: dict[str, Any] | None = None
        self._is_away = False
        threading.Thread(target=self._keep, name="lease", daemon=True).start()

    def replay(self) -> tuple[RunPlan, RunState | None]:
        """Return the newest plan and state of the file and of Redis, either of which may lack entries. Raises
        `StoreUnavailableError` and ``ValueError``."""
        stored = self._lease.read()
        newest = self._journal.newest(stored)
        self._plan, self._newest = newest.plan, newest.state
        if newest.mark > NewestEntries.of(stored).mark:
            self._append_again()
        return newest.parse("the journal")

    def mark(self, record: dict[str, Any]) -> dict[str, Any]:
        """Add term and number to an entry."""
        self._number += 1
        return record | {"term": self.term, "number": self._number}

    def allows(self, record: dict[str, Any]) -> bool:
        """Write the entry to Redis, waiting half a second at most; return whether the driver may act on
        it."""
        self._newest = record
        self._disk_writer.enter("a decision", partial(self._append, record))
        if not self._disk_writer.wait_written() and self.holds():
            _LOG.warning("acting on what is not in the journal of %s yet: it is away", self._lease)
        return self.holds()

    def holds(self) -> bool:
        """Whether the lease still holds, by this machine's clock."""
        return self._deadline.may_act(boot_seconds())

    def lose(self) -> None:
        """Record that another driver leads, whether or not Redis answers."""
        self._deadline.lose()

    def release(self) -> None:
        """Release the lease if Redis is available; otherwise it expires."""
        self._try(self._lease.release)

    def _append(self, record: dict[str, Any]) -> None:
        """Write an entry to Redis, however long it is away; later entries wait in order."""
        while not self._deadline.is_lost:
            if self._try(partial(self._lease.append, record, self._plan)):
                return
            self._renew()  # the lease may have expired or been taken while Redis was away
            time.sleep(_AGAIN_SECONDS)

    def _keep(self) -> None:
        while not self._deadline.is_lost:
            self._renew()
            time.sleep(self._lease.seconds / _RENEWALS)

    def _renew(self) -> None:
        with self._renewing:
            asked_at, knows = boot_seconds(), self._deadline.is_watched
            try:
                answer = self._try(partial(self._lease.renew, knows=knows))
            except LeaseLostError:
                self._deadline.lose()
                return
            if not answer:
                return
            is_watched, had_forgotten = answer
            self._deadline.renewed(asked_at, is_watched=is_watched)
        if had_forgotten:
            _LOG.warning("%s had lost this run's entries: the newest one is written again", self._lease)
            self._append_again()

    def _append_again(self) -> None:
        if record := self._newest or self._plan:
            self._disk_writer.enter("what was decided before", partial(self._append, record))

    def _try(self, ask: Callable[[], Any]) -> Any:
        """Return the answer; ``None`` if Redis is away."""
        try:
            answer = ask()
        except StoreUnavailableError as error:
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


_SAFE_RATIO = 0.9
"""Share of the lease that is used; the rest allows for clocks of different speed."""


class LeaseDeadline:
    """The time until which a driver may act on its lease."""

    def __init__(self, seconds: float, asked_at: float) -> None:
        self._seconds = seconds
        self._until = asked_at + _SAFE_RATIO * seconds
        self.is_watched = True
        """Whether another driver may take the lease as soon as it is free. Assumed until Redis reports
        otherwise."""
        self.is_lost = False

    def renewed(self, asked_at: float, *, is_watched: bool) -> None:
        """Record a renewal that was requested at ``asked_at``."""
        self._until = max(self._until, asked_at + _SAFE_RATIO * self._seconds)
        self.is_watched = is_watched

    def lose(self) -> None:
        """Record that another driver has the lease."""
        self.is_lost = True

    def may_act(self, now: float) -> bool:
        """Return whether no other driver can have the lease."""
        return not self.is_lost and (not self.is_watched or now < self._until)


_ASK_SECONDS, _ALIVE_SECONDS = 0.2, 1.0


class StandbyDriver:
    """A driver that waits for the lease of a run."""

    def __init__(self, run: Run, journal: Journal, store: str, owner: str, seconds: float) -> None:
        """``store``: address of Redis, as in the job. ``owner``: unique name of the launcher."""
        address = redis_address(store, "resilience.journal", "file")
        assert address is not None, "else there is nothing to wait for"
        self._run, self._journal = run, journal
        self._lease = RedisLease(address, run.path, owner, seconds)
        self._is_asked = STOP_ASKED in os.environ
        self._said = ""
        self._forgotten_since: float | None = None

    def wait(self, to_launcher: Callable[[dict[str, Any]], None]) -> LeasedLeadership | None:
        """Wait until this driver may lead; ``None``: a person stopped the wait."""
        signal.signal(signal.SIGINT, self._ask_to_stop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the launcher has blocked it until now
        alive_at = 0.0
        while (leadership := self._take()) is None and not self._is_asked:
            if time.monotonic() >= alive_at:
                alive_at = time.monotonic() + _ALIVE_SECONDS
                to_launcher({})
            time.sleep(_ASK_SECONDS)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the driver handles it
        if leadership is None:
            to_launcher({"end": "left", "reason": "", "rule": "a person wants it no more"})
        elif self._is_asked:
            os.environ[STOP_ASKED] = "1"
        return leadership

    def _ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self._is_asked = True

    def _take(self) -> LeasedLeadership | None:
        asked_at = boot_seconds()
        try:
            taken = self._ask(asked_at)
        except StoreUnavailableError as error:
            self._forgotten_since = None
            self._report(f"{self._lease} is away: {error}")
            return None
        if not taken.term:
            whose = f"{taken.owner} drives" if taken.owner else "no driver leads, and none may follow it"
            self._report(f"{whose}; standing by")
            return None
        if taken.owner != self._lease.owner:
            self._report_takeover(taken)
        _LOG.info("drives, with term %d of the lease in %s; %s", taken.term, self._lease, self._promises())
        disk_writer = AsyncWriter()  # a writer of its own, so that a disk that hangs does not delay the lease
        report = partial(disk_writer.enter_event, self._run, "health", what="redis")
        return LeasedLeadership(self._lease, self._journal, asked_at, lambda problem: report(problem=problem))

    def _ask(self, now: float) -> LeaseAnswer:
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
        except StoreUnavailableError:
            return "which is away again"

    def _report(self, text: str) -> None:
        if text != self._said:
            self._said = text
            _LOG.info("%s", text)

    def _report_takeover(self, taken: LeaseAnswer) -> None:
        """Write the takeover as an event."""
        rule = "the lease of the driver before had run out"
        if not taken.owner:
            rule = "Redis had lost the lease, and no driver renewed it"
        owner, before = self._lease.owner, taken.owner
        self._run.append_event("takeover", driver=owner, before=before, term=taken.term, rule=rule)
