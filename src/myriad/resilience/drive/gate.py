"""Who may become a node of a run, as far as earlier runs tell: machines in quarantine may not.

    a machine asks ──► lemons.jsonl, read in a thread (its disk may hang) ──► may join, or why not
    a node is evicted as the cause of something ──► a line there, for this run and all others

A file that cannot be read keeps nobody out: the watch must not hurt the run.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from myriad.resilience.decide.actions import Evict
from myriad.resilience.decide.lemons import Accusation, Lemons
from myriad.resilience.drive.lemon_file import accuse, read_lemons
from myriad.resilience.drive.scribe import Scribe
from myriad.run import Run

__all__ = ["Gate"]

_LOG = logging.getLogger(__name__)
_FRESH_SECONDS, _READ_SECONDS, _POLL_SECONDS = 5.0, 1.0, 0.002


class Gate:
    """Of one driver."""

    def __init__(self, run: Run, scribe: Scribe, replace: Callable[[int], None]) -> None:
        """``replace``: has the engine bring another machine for a node."""
        self._run, self._scribe, self._replace = run, scribe, replace
        self._remember = Scribe()
        """Of its own: it is another disk, that must not hold up the journal."""
        self._lemons, self._read_at = Lemons(), -_FRESH_SECONDS
        self._reader: threading.Thread | None = None
        self._refused: set[str] = set()

    async def why_not(self, machine: str, node: int) -> str:
        """In a line; empty: it may join. Told in the events once for each machine."""
        if not machine:
            return ""
        await self._freshen()
        found = self._lemons.quarantine(machine, time.time())
        if found is None:
            return ""
        why = found.words(time.strftime("%Y-%m-%d %H:%M", time.localtime(found.until)))
        if machine not in self._refused:
            self._refused.add(machine)
            fields = {"machine": machine, "problem": why} | ({"node": node} if node >= 0 else {})
            self._scribe.enter_event(self._run, "refusal", **fields)
            if node >= 0:
                self._replace(node)
        return why

    def remember(self, evict: Evict) -> None:
        """Of what a machine was the cause."""
        if not evict.machine:
            return
        at, run = time.time(), self._run.path.name
        found = Accusation(at, evict.machine, evict.accused, _told(evict), run, evict.node)
        self._remember.enter("what is remembered of a machine", partial(accuse, found))
        self._lemons.add(found)
        if (quarantine := self._lemons.quarantine(evict.machine, at)) is not None:
            fields = {"machine": evict.machine, "node": evict.node, "until": quarantine.until}
            self._scribe.enter_event(self._run, "quarantine", **fields, problem=quarantine.reason)

    async def _freshen(self) -> None:
        """A read that hangs is not waited for, and no second one is begun."""
        busy = self._reader is not None and self._reader.is_alive()
        if not busy and time.monotonic() - self._read_at > _FRESH_SECONDS:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        deadline = time.monotonic() + _READ_SECONDS
        while self._reader is not None and self._reader.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    def _read(self) -> None:
        try:
            self._lemons = read_lemons()
        except OSError as error:
            _LOG.warning("machines in quarantine are not known: %s", error)
        self._read_at = time.monotonic()


def _told(evict: Evict) -> str:
    """For a person."""
    known = {"cause": "", "who": "by ", "reason": ""}
    told = [f"{before}{evict.evidence[name]}" for name, before in known.items() if evict.evidence.get(name)]
    return f"{evict.rule} ({', '.join(told)})" if told else evict.rule
