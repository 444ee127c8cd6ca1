"""Decisions of the policy: each action names the rule by which it was decided, and the evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from myriad.comm.attempt_layout import AS_THE_JOB, AttemptLayout
from myriad.run.run_status import Outcome
from myriad.supervise.messages import EvictionAsked
from myriad.supervise.observations import How
from myriad.supervise.policy.nan_trial import Verdict
from myriad.supervise.policy.step_work import LayerMove

__all__ = [
    "BY_A_PERSON",
    "RULES_OF_LEAVING",
    "Diagnose",
    "DumpStacks",
    "EndRun",
    "Evict",
    "EvictionCause",
    "Examine",
    "Notice",
    "Outcome",
    "PolicyAction",
    "ReportExamination",
    "ReportFault",
    "ReportSlow",
    "RestartAtStep",
    "StartAttempt",
    "StopRanks",
    "evidence_of",
]

EvictionCause = Literal[
    "", "hardware", "corruption", "doctor", "device", "link", "hang", "again", "slow", "person"
]
"""Why a node is evicted. Empty: it was only lost. hardware: its numbers are wrong, and right on another node.
again: another kind of fault recurred on it without progress."""


BY_A_PERSON = "asked for by a person"
"""Rule of an eviction that a person asked for."""
RULES_OF_LEAVING: Mapping[EvictionCause, str] = {
    "slow": "a node is slow, and a spare is there",
    "link": "a link of the node keeps going down, and a spare is there",
    "device": "a device of the node fails, and a spare is there",
    "doctor": "the doctor found a node unfit, and a spare is there",
    "person": BY_A_PERSON,
}


@dataclass(frozen=True, kw_only=True)
class PolicyAction:
    """A decision, its rule and its evidence."""

    rule: str
    evidence: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ReportFault(PolicyAction):
    """Report a fault and its likely cause."""

    cause: str
    rank: int
    """Suspect rank; -1 if there is no single one."""
    node: int
    step: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class StartAttempt(PolicyAction):
    """Start all ranks of a new attempt."""

    epoch: int
    placement: dict[int, tuple[int, ...]]
    """The ranks of each node."""
    again: bool
    """Whether an earlier attempt in this start of the run has failed or was ended."""
    newest_step: int | None = None
    """Newest step that the ranks may restore; ``None``: no limit."""
    skipped_steps: tuple[int, ...] = ()
    """Steps in which no parameter changes."""
    layout: AttemptLayout = AS_THE_JOB


@dataclass(frozen=True, kw_only=True)
class Diagnose(PolicyAction):
    """Report the cause of a non-finite number, found by whether the fault recurred."""

    verdict: Verdict
    cause: str
    step: int
    rank: int
    node: int


@dataclass(frozen=True, kw_only=True)
class ReportSlow(PolicyAction):
    """Report a slow rank, node or stage; training continues."""

    culprit: Literal["rank", "node", "stage"]
    """What is slow. stage: all ranks with the same work are slow, so no node is a suspect."""
    ranks: tuple[int, ...]
    node: int
    """Slow node; -1 if there is no single one."""
    step: int
    problem: str


@dataclass(frozen=True, kw_only=True)
class Notice(PolicyAction):
    """Report an observation about a node; no other action follows from it."""

    what: Literal["link", "device", "clock", "traffic", "hardware"]
    node: int
    rank: int = -1
    """Rank that the notice is about; -1 if there is no single one."""
    problem: str
    level: Literal["", "info", "warning"] = ""
    """warning: an alarm begins. info: an alarm ends, or nothing is wrong. Empty: no level is given."""


@dataclass(frozen=True, kw_only=True)
class RestartAtStep(PolicyAction):
    """End an attempt after the step in progress. No step is lost, and the next attempt differs."""

    epoch: int
    layout: AttemptLayout | None = None
    """Layout of the next attempt; ``None``: unchanged."""
    moved: LayerMove | None = None
    """What is known about the layers if they are not placed as in the job."""
    node: int = -1
    """Node that a spare replaces; -1: no node."""


@dataclass(frozen=True, kw_only=True)
class Examine(PolicyAction):
    """Have the doctor examine a node."""

    node: int
    how: How


@dataclass(frozen=True, kw_only=True)
class ReportExamination(PolicyAction):
    """Report the doctor's verdict on a node."""

    node: int
    verdict: Literal["fit", "unfit", "unknown"]
    problem: str


@dataclass(frozen=True, kw_only=True)
class StopRanks(PolicyAction):
    """Kill the ranks of an attempt on all nodes."""

    epoch: int


@dataclass(frozen=True, kw_only=True)
class DumpStacks(PolicyAction):
    """Write the stacks of suspect ranks into their logs."""

    epoch: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Evict(PolicyAction):
    """End a node, and start another one if the launcher can."""

    node: int
    accused: EvictionCause = ""
    machine: str = ""
    """Machine that is recorded as the cause. Empty: no machine, or one that runs other nodes of this run, any
    of which may be the cause."""


@dataclass(frozen=True, kw_only=True)
class EndRun(PolicyAction):
    """End the run with an outcome and its reason."""

    outcome: Outcome
    reason: str


def evidence_of(asked: EvictionAsked) -> dict[str, object]:
    """Return the person who asked for an eviction, and the reason, as evidence."""
    return {"who": asked.who, **({"reason": asked.reason} if asked.reason else {})}
