"""What is decided: each action says by which rule, and from what evidence."""

from dataclasses import dataclass, field
from typing import Any, Literal

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout
from myriad.resilience.decide.layers import Moved
from myriad.resilience.decide.numbers import Verdict
from myriad.resilience.facts import How

__all__ = [
    "Accused",
    "Action",
    "Blame",
    "Diagnose",
    "DumpStacks",
    "EndRun",
    "Evict",
    "Examine",
    "Notice",
    "Outcome",
    "StartAttempt",
    "StopRanks",
    "TellExamined",
    "TellSlow",
    "TurnRanks",
]

Outcome = Literal["finished", "interrupted", "failed"]
Accused = Literal["", "hardware", "corruption", "doctor", "device", "link", "hang", "again", "slow", "person"]
"""Of what a node is the cause that is evicted; "": of nothing, it was only lost. hardware: numbers are wrong
there and right elsewhere; again: a fault of any other kind came again on it without progress."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """Why."""

    rule: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Blame(Action):
    """A fault was found, and its culprit."""

    cause: str
    rank: int
    """-1: no single one."""
    node: int
    step: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class StartAttempt(Action):
    """Start all ranks."""

    epoch: int
    placement: dict[int, tuple[int, ...]]
    """Node to its ranks."""
    again: bool
    """An earlier attempt of this start of the run has failed, or was ended."""
    newest_step: int | None = None
    """From which step they may go on at most; ``None``: from any."""
    skipped_steps: tuple[int, ...] = ()
    """In which nothing is to move."""
    layout: AttemptLayout = AS_THE_JOB


@dataclass(frozen=True, kw_only=True)
class Diagnose(Action):
    """What a fault was, from how it came again or did not."""

    verdict: Verdict
    cause: str
    step: int
    rank: int
    node: int


@dataclass(frozen=True, kw_only=True)
class TellSlow(Action):
    """Somebody is slow, and goes on."""

    culprit: Literal["rank", "node", "stage"]
    """stage: all that do the same work are, so that nobody is to blame."""
    ranks: tuple[int, ...]
    node: int
    """-1: no single one."""
    step: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class Notice(Action):
    """Something about a node that people are to know; nothing follows from it by itself."""

    what: Literal["link", "device", "clock", "traffic", "hardware"]
    node: int
    rank: int = -1
    """-1: no single one."""
    problem: str
    level: Literal["", "info", "warning"] = ""
    """warning: an alarm begins; info: it has ended, or nothing is wrong; "": not said."""


@dataclass(frozen=True, kw_only=True)
class TurnRanks(Action):
    """End an attempt after the step under way; nothing of it is lost, and the next one differs."""

    epoch: int
    layout: AttemptLayout | None = None
    """Of the next one; ``None``: as it is."""
    moved: Moved | None = None
    """What is known of its layers, where they do not lie as in the job."""
    node: int = -1
    """That is to give way to a spare; -1: none."""


@dataclass(frozen=True, kw_only=True)
class Examine(Action):
    """Have the doctor look at a node."""

    node: int
    how: How


@dataclass(frozen=True, kw_only=True)
class TellExamined(Action):
    """What it says."""

    node: int
    verdict: Literal["fit", "unfit", "unknown"]
    problem: str


@dataclass(frozen=True, kw_only=True)
class StopRanks(Action):
    """Kill the ranks of an attempt, wherever they are."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class DumpStacks(Action):
    """Keep the stacks of suspects, in their logs."""

    epoch: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Evict(Action):
    """The engine is to end a node, and to bring another if it can."""

    node: int
    accused: Accused = ""
    machine: str = ""
    """Which is then remembered; empty: none, or one with other nodes of this run, of which any may be it."""


@dataclass(frozen=True, kw_only=True)
class EndRun(Action):
    """It is over."""

    outcome: Outcome
    reason: str
