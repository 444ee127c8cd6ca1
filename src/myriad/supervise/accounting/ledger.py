"""The ledger of a run's time: every second of every attempt in exactly one class. Pure.

    ledger.until(now, "training")       classifies the time since the last call
    ledger.until(now, {"training": 0.99, "saving": 0.01})
    ledger.lose(30.0)                   the last 30 s of training have to be repeated

One cursor only moves forward, so no second is missing or counted twice, in a simulation as in the account of
a real run. Lost steps are charged where they were computed first; computing them again is training. Spare
nodes are charged separately.

`Account` is the result for a real run: ledger, faults and attempts (`accounting`). `Moment` is one entry of
the run's files, all in one list ordered by time:

    events.jsonl  ─┐
    metrics.jsonl ─┼──► Moment(time, what, fields) ...
    journal.jsonl ─┘

A writer that was killed, a full disk or a clock that was set back may have damaged the files: a line without
a time is ignored, and a time before that of the previous line counts as that one. So time never goes
backward.
"""

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any, Literal, get_args

__all__ = [
    "KINDS",
    "Account",
    "Attempt",
    "FaultRecord",
    "Kind",
    "Ledger",
    "LedgerPeriod",
    "Moment",
    "in_order",
]

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Moment:
    """An entry of the run's files, at a time."""

    time: float
    """When it happened, in seconds since 1970."""
    what: str
    """Name of an event; "launch", "attempt" and "end" of the journal; "step" of the metrics."""
    fields: Line

    def seconds(self, name: str) -> float:
        """Return a field as a duration in seconds; 0 if it is missing."""
        return max(0.0, number(self.fields.get(name)) or 0.0)

    def count(self, name: str, default: int) -> int:
        """Return a field as an integer; ``default`` if it is missing."""
        found = number(self.fields.get(name))
        return default if found is None else int(found)


def in_order(events: Iterable[Line], metrics: Iterable[Line], journal: Iterable[Line]) -> list[Moment]:
    """Return all moments in order; at the same instant decisions come before steps."""
    tracks = (
        _timed((what, line) for record in journal for what, line in _decisions(record)),
        _timed(("step", line) for line in metrics if number(line.get("step")) is not None),
        _timed((str(line.get("event")), line) for line in events),
    )
    return list(heapq.merge(*tracks, key=lambda moment: moment.time))


def _timed(lines: Iterable[tuple[str, Line]]) -> Iterator[Moment]:
    latest = 0.0
    for what, line in lines:
        at = number(line.get("time"))
        if at is not None:
            latest = max(latest, at)
            yield Moment(latest, what, line)


def _decisions(record: Line) -> Iterator[tuple[str, Line]]:
    """Yield the driver's moments: starts and ends of attempts and runs."""
    at = record.get("time")
    if "plan" in record:
        yield "launch", {**_mapping(record["plan"]), "time": at}
    actions = record.get("actions")
    for action in map(_mapping, actions if isinstance(actions, list) else []):
        if action.get("kind") == "StartAttempt":
            yield "attempt", {**action, "time": at}
        elif action.get("kind") == "EndRun":
            yield "end", {**action, "time": at}


def _mapping(value: object) -> Line:
    return value if isinstance(value, Mapping) else {}


def number(value: object) -> float | None:
    """Return a value as a float if it is a finite number, and else ``None``."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) < 1e300 and isfinite(value) else None


Kind = Literal[
    "training",
    "lost",
    "saving",
    "validating",
    "checking",
    "slow",
    "detecting",
    "diagnosing",
    "starting",
    "restarting",
    "planned",
    "waiting",
    "person",
]
"""Classes of time, in order: training that counts; training that was lost; stalls for saving; evaluation;
checks in gaps; time lost to a straggler; a fault not yet detected; the search for its cause; from a launch to
the first step; from the decision to restart to the first step; a requested stop; waiting for a node; stopped,
waiting for an operator."""
KINDS: tuple[Kind, ...] = get_args(Kind)
_CLOSE = 1e-6


@dataclass(frozen=True)
class LedgerPeriod:
    """An interval of one attempt, and the classes of its time."""

    attempt: int
    start: float
    stop: float
    shares: Mapping[Kind, float]
    """Share of each class; the shares add up to 1."""

    @property
    def seconds(self) -> float:
        """Seconds of the interval."""
        return self.stop - self.start


class Ledger:
    """The ledger of one run."""

    def __init__(self, began: float = 0.0) -> None:
        self.began = self.now = began
        self.attempt = 0
        self.stretches: list[LedgerPeriod] = []
        self.spare_node_seconds = 0.0

    def until(self, now: float, what: Kind | Mapping[Kind, float], *, spares: int = 0) -> None:
        """Classify all time since the last call as one class, or as several by their shares. ``spares``:
        number of idle spare nodes in that time."""
        shares: Mapping[Kind, float] = {what: 1.0} if isinstance(what, str) else what
        assert now >= self.now, "a ledger goes forward"
        assert abs(sum(shares.values()) - 1) < _CLOSE and min(shares.values()) >= 0, "shares of one whole"
        if now > self.now:
            last = self.stretches[-1] if self.stretches else None
            if last is not None and (last.attempt, last.stop, last.shares) == (
                self.attempt,
                self.now,
                shares,
            ):
                self.stretches[-1] = LedgerPeriod(last.attempt, last.start, now, shares)
            else:
                self.stretches.append(LedgerPeriod(self.attempt, self.now, now, shares))
            self.spare_node_seconds += spares * (now - self.now)
        self.now = now

    def lose(self, seconds: float) -> None:
        """Count the newest ``seconds`` of training as lost, because they must be repeated."""
        for index in range(len(self.stretches) - 1, -1, -1):
            if seconds <= 0:
                return
            stretch = self.stretches[index]
            share = stretch.shares.get("training", 0.0)
            if not share:
                continue
            cut = max(stretch.start, stretch.stop - seconds / share)
            kept, lost = replace(stretch, stop=cut), replace(stretch, start=cut, shares=_lost(stretch.shares))
            self.stretches[index : index + 1] = [kept, lost] if kept.seconds > 0 else [lost]
            seconds -= share * lost.seconds
        assert seconds < _CLOSE * max(1.0, self.wall_seconds), "more is lost than was done"

    @property
    def wall_seconds(self) -> float:
        """Seconds from the beginning until now."""
        return self.now - self.began

    def seconds(self, attempt: int | None = None) -> dict[Kind, float]:
        """Return the seconds of each class, of one attempt or of all."""
        found = dict.fromkeys(KINDS, 0.0)
        for number, seconds in self.by_attempt().items():
            if attempt in (None, number):
                for kind in KINDS:
                    found[kind] += seconds[kind]
        return found

    def by_attempt(self) -> dict[int, dict[Kind, float]]:
        """Return the seconds of each class for each attempt."""
        found: dict[int, dict[Kind, float]] = {}
        for stretch in self.stretches:
            seconds = found.setdefault(stretch.attempt, dict.fromkeys(KINDS, 0.0))
            for kind, share in stretch.shares.items():
                seconds[kind] += share * stretch.seconds
        return found

    @property
    def effective_ratio(self) -> float:
        """Effective training time ratio: iterations done x iteration time / wall time."""
        return self.seconds()["training"] / self.wall_seconds if self.wall_seconds else 1.0


def _lost(shares: Mapping[Kind, float]) -> Mapping[Kind, float]:
    rest = {kind: share for kind, share in shares.items() if kind not in ("training", "lost")}
    return {**rest, "lost": shares.get("training", 0.0) + shares.get("lost", 0.0)}


@dataclass(kw_only=True)
class FaultRecord:
    """A fault that the run reported, and its outcome. Times are in seconds since 1970."""

    reported: float
    problem: str
    cause: str = ""
    """Cause according to the driver; empty: a checkpoint process reported it, and training continued."""
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    detected_seconds: float | None = None
    """Seconds from the last sign of the suspect to the report; ``None``: training did not stop."""
    ending_seconds: float | None = None
    """Seconds from the report until all ranks had ended and a new attempt was decided."""
    starting_seconds: float | None = None
    """Seconds from that decision until the ranks were about to load."""
    loading_seconds: float | None = None
    """Seconds from then until the ranks trained."""
    steps_lost: int | None = None
    """Steps to repeat. If one start repairs several faults, the first fault has them."""

    @property
    def back_seconds(self) -> float | None:
        """Seconds from the report until all ranks trained again; ``None``: they did not."""
        parts = (self.ending_seconds, self.starting_seconds, self.loading_seconds)
        return None if None in parts else sum(part or 0.0 for part in parts)


@dataclass(kw_only=True)
class Attempt:
    """One start of the ranks."""

    number: int
    began: float
    world: int = 0
    """Number of ranks; 0: unknown."""
    resumed_from: int = 0
    last_step: int | None = None
    """Newest step that the attempt finished; ``None``: it finished no step."""
    ended: str = ""
    """What ended the attempt; empty: it has not ended."""


@dataclass
class Account:
    """The account of one run; ``ledger`` counts from ``began``."""

    began: float
    ledger: Ledger = field(default_factory=Ledger)
    faults: list[FaultRecord] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    steps: int = 0
    """Number of steps that are done and not lost."""
    steps_without_line: int = 0
    """Steps among `steps` that have no line in metrics.jsonl."""
    steps_lost: int = 0
    tokens: int = 0
    """Tokens of the steps that count."""
    running: bool = False

    @property
    def effective_ratio(self) -> float:
        """Effective training time ratio (ETTR)."""
        return self.ledger.effective_ratio

    @property
    def meant_ratio(self) -> float:
        """Effective training time ratio without the time of planned stops."""
        seconds = self.ledger.seconds()
        meant = self.ledger.wall_seconds - seconds["planned"]
        return seconds["training"] / meant if meant > 0 else 1.0

    @property
    def goodput(self) -> float:
        """Tokens of counted steps, per second of wall time."""
        return self.tokens / self.ledger.wall_seconds if self.ledger.wall_seconds else 0.0
