"""Admission of machines to a run: quarantine from earlier runs, and which machine is which node.

    a machine asks ──► lemons.jsonl, read in a thread (its disk may hang) ──► it may join, or the reason
    a node is evicted as the cause of a fault ──► a line there, for this run and all others

The file is ~/.local/share/myriad/lemons.jsonl, beside the doctor's baseline: a line for each offence and for
each clearance. Drivers add lines, the doctor and people clear machines. A line is added with one write, so
drivers of several runs need no lock. If the file cannot be read, every machine is admitted.

A machine that comes back gets its earlier node number, under which its snapshots are kept. A new driver
learns the numbers from the agents, and assigns no number before they have reported.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path

from myriad.run import Run
from myriad.supervise.background import AsyncWriter
from myriad.supervise.messages import NodeJoined
from myriad.supervise.policy.policy_actions import Evict
from myriad.supervise.policy.repeat_offenders import OffenceRecord, RepeatOffenders
from myriad.system.jsonl import JsonlTail, append_line
from myriad.system.machine import user_folder

__all__ = ["HEAR_SECONDS", "AdmissionCheck", "NodeNumbers", "clear", "offenders_path", "read_offenders"]

_LOG = logging.getLogger(__name__)
_FRESH_SECONDS, _READ_SECONDS, _POLL_SECONDS = 5.0, 1.0, 0.002


class AdmissionCheck:
    """Checks the machines that want to join against the offences of earlier runs."""

    def __init__(self, run: Run, disk_writer: AsyncWriter, replace: Callable[[int], None]) -> None:
        """``replace``: has the launcher replace the machine of a node."""
        self._run, self._disk_writer, self._replace = run, disk_writer, replace
        self._offence_writer = AsyncWriter()
        """A separate writer, because this file may be on another disk that must not delay the journal."""
        self._offenders, self._read_at = RepeatOffenders(), -_FRESH_SECONDS
        self._reader: threading.Thread | None = None
        self._refused: set[str] = set()

    async def why_not(self, machine: str, node: int) -> str:
        """Return in a line why the machine may not join; empty if it may. Each machine is reported once."""
        if not machine:
            return ""
        await self._freshen()
        found = self._offenders.quarantine(machine, time.time())
        if found is None:
            return ""
        why = found.words(time.strftime("%Y-%m-%d %H:%M", time.localtime(found.until)))
        if machine not in self._refused:
            self._refused.add(machine)
            fields = {"machine": machine, "problem": why} | ({"node": node} if node >= 0 else {})
            self._disk_writer.enter_event(self._run, "refusal", **fields)
            if node >= 0:
                self._replace(node)
        return why

    def remember(self, evict: Evict) -> None:
        """Record a machine that was evicted as the cause of a fault."""
        if not evict.machine:
            return
        at, run = time.time(), self._run.path.name
        found = OffenceRecord(at, evict.machine, evict.accused, _reason(evict), run, evict.node)
        self._offence_writer.enter("what is remembered of a machine", partial(append_offence, found))
        self._offenders.add(found)
        if (quarantine := self._offenders.quarantine(evict.machine, at)) is not None:
            fields = {"machine": evict.machine, "node": evict.node, "until": quarantine.until}
            self._disk_writer.enter_event(self._run, "quarantine", **fields, problem=quarantine.reason)

    async def _freshen(self) -> None:
        """Read the offences again if they are old. A read that hangs is neither waited for nor repeated."""
        busy = self._reader is not None and self._reader.is_alive()
        if not busy and time.monotonic() - self._read_at > _FRESH_SECONDS:
            self._reader = threading.Thread(target=self._read, daemon=True)
            self._reader.start()
        deadline = time.monotonic() + _READ_SECONDS
        while self._reader is not None and self._reader.is_alive() and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_SECONDS)

    def _read(self) -> None:
        try:
            self._offenders = read_offenders()
        except OSError as error:
            _LOG.warning("machines in quarantine are not known: %s", error)
        self._read_at = time.monotonic()


def _reason(evict: Evict) -> str:
    """Describe the eviction for a person."""
    known = {"cause": "", "who": "by ", "reason": ""}
    details = [
        f"{before}{evict.evidence[name]}" for name, before in known.items() if evict.evidence.get(name)
    ]
    return f"{evict.rule} ({', '.join(details)})" if details else evict.rule


def offenders_path() -> Path:
    """Return the path of this user's file of offences."""
    return user_folder() / "lemons.jsonl"


def read_offenders(path: Path | None = None) -> RepeatOffenders:
    """Read the offences; without a file there are no offences. Raises ``OSError``."""
    return RepeatOffenders(JsonlTail(path or offenders_path()).poll())


def append_offence(accusation: OffenceRecord, path: Path | None = None) -> None:
    """Append an offence to the file. Raises ``OSError``."""
    path = path or offenders_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    append_line(path, asdict(accusation))


def clear(machine: str, by: str, path: Path | None = None) -> None:
    """Clear a machine. ``by``: "doctor", or the name of a person. Raises ``OSError``."""
    append_line(path or offenders_path(), {"time": time.time(), "machine": machine, "cleared_by": by})


HEAR_SECONDS = 1.5
"""Time in which agents find a new driver."""
_STALE_SECONDS = 2.5
"""Another agent may take a node number if the node's agent has been silent for this long."""
_PROMISE_SECONDS = 60.0
"""How long an assigned number is reserved until its node joins."""


@dataclass
class _Member:
    by: str
    heard_at: float


class NodeNumbers:
    """The node numbers of the machines that a driver has heard of."""

    def __init__(self) -> None:
        self._members: dict[int, _Member] = {}
        self._host_of: dict[int, str] = {}
        self._given_at: dict[int, float] = {}

    def joined(self, joined: NodeJoined, now: float) -> None:
        """Record that an agent has joined as a node."""
        self._members[joined.node] = _Member(joined.by, now)
        self._host_of[joined.node] = joined.by.rpartition(":")[0]
        self._given_at.pop(joined.node, None)

    def record_beat(self, node: int, now: float) -> None:
        """Record the time of a heartbeat."""
        if node in self._members:
            self._members[node].heard_at = now

    def left(self, node: int) -> None:
        """Record that the connection of a node is lost."""
        self._members.pop(node, None)

    def other_than(self, joined: NodeJoined, now: float) -> str | None:
        """Return the agent that currently is this node, if it is another one."""
        known = self._members.get(joined.node)
        if known is None or known.by == joined.by or now - known.heard_at > _STALE_SECONDS:
            return None
        return known.by

    def number_for(self, host: str, taken: Iterable[int], now: float) -> int:
        """Return a node number for ``host``: the one that it had, else a new one that is not in ``taken``."""
        busy = {*self._members, *self._promised(now)}
        for number, owner in sorted(self._host_of.items()):
            if owner == host and number not in busy:
                break
        else:
            used = {*busy, *taken, *self._host_of}
            number = next(number for number in count() if number not in used)
        self._host_of[number], self._given_at[number] = host, now
        return number

    def _promised(self, now: float) -> set[int]:
        return {number for number, at in self._given_at.items() if now - at < _PROMISE_SECONDS}
