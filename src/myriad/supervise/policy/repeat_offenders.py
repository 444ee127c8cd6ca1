"""Repeat offenders: machines that cause faults repeatedly, in one run or in many, and their quarantine. Pure.

    offence ──3 times in 28 days, or once if the evidence is hard──► quarantine, for 7 days
                                                                     ├─ `myriad doctor` passes there
                                                                     └─ a person pardons it ──► free

A few nodes cause a large part of a cluster's interruptions, and pass a short test each time (Meta calls them
lemon nodes: Kokolis et al., arXiv 2410.21680). MegaScale removes a node that fails, and lets it back when it
has passed its tests (arXiv 2402.15627, section 4.1). The counts and times are Myriad's own choice.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from myriad.supervise.policy.policy_actions import EvictionCause

__all__ = ["QUARANTINE_SECONDS", "RULES", "OffenceRecord", "Quarantine", "RepeatOffenders", "Rule"]

_DAY_SECONDS = 86_400.0
QUARANTINE_SECONDS = 7 * _DAY_SECONDS
"""Length of a quarantine, counted from the last offence."""
_KINDS = frozenset(get_args(EvictionCause)) - {""}


@dataclass(frozen=True)
class Rule:
    """Quarantine after at least this many offences of these kinds within this time."""

    kinds: frozenset[str]
    least: int
    within_seconds: float
    why: str


RULES = (
    Rule(
        frozenset({"hardware", "corruption", "doctor"}),
        1,
        QUARANTINE_SECONDS,
        "numbers were wrong on it and right elsewhere, twice on it alone, or the doctor found what is wrong",
    ),
    Rule(
        _KINDS,
        3,
        28 * _DAY_SECONDS,
        "one hang, slow hour or request of a person may be chance, or the job's doing; three are not",
    ),
)


@dataclass(frozen=True)
class OffenceRecord:
    """A record that a node was evicted as the cause of a fault."""

    time: float
    """When the fault was recorded, in seconds since 1970."""
    machine: str
    kind: str
    reason: str
    run: str
    node: int


@dataclass(frozen=True)
class Quarantine:
    """A machine that may not take part in any run, until when, and why."""

    machine: str
    since: float
    until: float
    reason: str

    def words(self, until: str) -> str:
        """Return the text of a refusal. ``until``: the time in a readable form."""
        host = self.machine.partition("/")[0]
        free = f"`myriad doctor` passes on it, or `myriad evict --pardon {host}`"
        return f"{host} is in quarantine until {until}, or {free}: {self.reason}"


class RepeatOffenders:
    """The offences of machines, recorded across runs."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """``records``: lines of the file, oldest first. Invalid lines are ignored."""
        self._accused: dict[str, list[OffenceRecord]] = {}
        for record in records:
            self._take(record)

    def _take(self, record: Mapping[str, Any]) -> None:
        machine = record.get("machine")
        if not isinstance(machine, str):
            return
        if "cleared_by" in record:
            kept = [one for one in self._accused.pop(machine, []) if _outlives(one, record["cleared_by"])]
            if kept:
                self._accused[machine] = kept
        elif (found := _accusation(record)) is not None:
            self.add(found)

    def add(self, accusation: OffenceRecord) -> None:
        """Add an offence to its machine's record."""
        self._accused.setdefault(accusation.machine, []).append(accusation)

    @property
    def accused(self) -> Mapping[str, Sequence[OffenceRecord]]:
        """Offences that were not cleared, by machine, oldest first."""
        return self._accused

    def named(self, name: str) -> list[str]:
        """Return the machines with this full name or host name."""
        return [machine for machine in self._accused if name in (machine, machine.partition("/")[0])]

    def quarantine(self, machine: str, now: float) -> Quarantine | None:
        """Return the quarantine of a machine; ``None``: it may join."""
        found = [one for one in self._accused.get(machine, ()) if one.time <= now]
        for rule in RULES:
            counted = [
                one for one in found if one.kind in rule.kinds and now - one.time <= rule.within_seconds
            ]
            since = max([one.time for one in counted], default=0.0)
            if len(counted) >= rule.least and now - since < QUARANTINE_SECONDS:
                times = f"{len(counted)} times, " if rule.least > 1 else ""
                last = max(counted, key=lambda one: one.time)
                reason = f"{times}last in run {last.run}: {last.reason}"
                return Quarantine(machine, since, since + QUARANTINE_SECONDS, reason)
        return None


def _outlives(accusation: OffenceRecord, cleared_by: object) -> bool:
    """Return whether an offence remains when a machine is cleared. The doctor clears hardware faults; only a
    person clears what a person reported."""
    return cleared_by == "doctor" and accusation.kind == "person"


def _accusation(record: Mapping[str, Any]) -> OffenceRecord | None:
    time, kind, node = (record.get(name) for name in ("time", "kind", "node"))
    if isinstance(time, bool) or not isinstance(time, int | float) or kind not in _KINDS:
        return None
    texts = {name: str(record.get(name, "")) for name in ("machine", "kind", "reason", "run")}
    return OffenceRecord(time=float(time), node=node if isinstance(node, int) else -1, **texts)
