"""Fitness of nodes, as the doctor finds it: which nodes it examines next, and what its verdict means. Pure.

    start       each node, before ranks start for the first time     an unfit node takes no part
    spares      idle spares, while ranks train                       an unfit spare replaces no node
    suspects    nodes with ranks, after a hang, wrong numbers, a
                device error or a loss: while ranks train            a spare replaces an unfit node

Only a start that asks for it waits for the doctor: a spare that is needed before its examination is used. On
a machine with ranks, or with other nodes, only tests that disturb nothing are run. An unfit spare is examined
again after a while, because a cable may have been replaced.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from myriad.supervise.messages import NodeJoined
from myriad.supervise.observations import Examined, How
from myriad.supervise.policy.incidents import CORRUPTION, Incident
from myriad.supervise.policy.membership import machine_of
from myriad.supervise.policy.policy_actions import Examine, ReportExamination
from myriad.supervise.policy.run_state import RunPlan

__all__ = ["Fitness"]

_AGAIN_SECONDS: Mapping[str, float] = {"unfit": 600.0, "fit": 21_600.0, "unknown": 21_600.0}
_POLL_SECONDS = 0.5
_UNFIT_SECONDS = 20.0
"""How long to wait for more nodes if enough are connected and some of them are unfit."""
_SUSPECT = ("hang", "device", "node", CORRUPTION)


@dataclass
class _Patient:
    by: str
    asked_at: float | None = None
    found: Examined | None = None
    found_at: float = 0.0

    @property
    def is_awaited(self) -> bool:
        """Whether an examination was requested and has no result yet."""
        return self.asked_at is not None and (self.found is None or self.found_at < self.asked_at)


class Fitness:
    """What the doctor found about the nodes of a run."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._patients: dict[int, _Patient] = {}
        self._suspects: dict[int, str] = {}
        """The fault of which each node is suspect."""
        self._unfit_since: float | None = None
        self._look_at = float("-inf")

    def joined(self, joined: NodeJoined) -> None:
        """Forget the verdict if another agent joins as this node, possibly on another machine."""
        known = self._patients.get(joined.node)
        if known is None or known.by != joined.by or not joined.by:
            self._patients[joined.node] = _Patient(joined.by)
        elif known.is_awaited:
            known.asked_at = None

    def started(self, nodes: Collection[int]) -> None:
        """Drop examinations in progress on nodes where ranks start."""
        for node in nodes:
            if (patient := self._patients.get(node)) is not None and patient.is_awaited:
                patient.asked_at = None

    def suspect(self, incident: Incident) -> None:
        """Record that a node may be the cause of a fault."""
        if incident.cause in _SUSPECT and incident.node >= 0:
            self._suspects[incident.node] = incident.cause

    def is_unfit(self, node: int) -> bool:
        """Whether the doctor's last verdict on the node is unfit."""
        patient = self._patients.get(node)
        return patient is not None and patient.found is not None and patient.found.verdict == "unfit"

    def may_start(self, node: int, *, first: bool) -> bool:
        """Return whether a node may get ranks. ``first``: no rank has run yet."""
        seen = self._patients.get(node)
        awaited = first and self._plan.doctor == "start" and (seen is None or seen.found is None)
        return not awaited and not self.is_unfit(node)

    def due(
        self,
        nodes: Mapping[int, NodeJoined],
        at_work: Collection[int],
        now: float,
        *,
        first: bool,
        training: bool,
    ) -> Iterator[Examine]:
        """Request due examinations. ``at_work``: nodes with ranks. ``training``: these ranks train."""
        if self._plan.doctor == "off" or now < self._look_at:
            return
        self._look_at = now + _POLL_SECONDS
        for node in nodes:
            patient = self._patients[node]
            if first and self._plan.doctor == "start" and patient.asked_at is None:
                yield self._ask(node, "before ranks start", _how(node, nodes), now)
            elif training and node not in at_work and self._is_due(patient, now):
                yield self._ask(node, "a spare stands by", _how(node, nodes), now)
        if training and len(nodes) > 1:
            for node in [one for one in self._suspects if one in nodes and one in at_work]:
                yield self._ask(node, f"suspect after: {self._suspects.pop(node)}", "short", now)

    def _is_due(self, patient: _Patient, now: float) -> bool:
        if patient.is_awaited:
            return False
        if patient.found is None:
            return True
        return now - patient.found_at >= _AGAIN_SECONDS[patient.found.verdict] * self._plan.patience

    def _ask(self, node: int, rule: str, how: How, now: float) -> Examine:
        self._patients[node].asked_at = now
        return Examine(rule=rule, node=node, how=how)

    def record(self, examined: Examined, now: float, *, at_work: bool) -> Iterator[ReportExamination]:
        """Record an examination. Healthy spares produce no event."""
        patient = self._patients.get(examined.node)
        if patient is None:
            return
        patient.found, patient.found_at = examined, now
        if at_work or examined.verdict != "fit":
            where = "its ranks are at work" if at_work else "it has no ranks"
            yield examination_report(examined, f"the doctor has seen a node, while {where}")

    def why_no_start(self, nodes: Mapping[int, NodeJoined], now: float) -> str:
        """Return why the run cannot start: enough nodes are connected, but too many are unfit. Empty: it can
        start, or this has not lasted long enough."""
        unfit = [node for node in nodes if self.is_unfit(node)]
        if not unfit or len(nodes) < self._plan.nodes or len(nodes) - len(unfit) >= self._plan.nodes:
            self._unfit_since = None
            return ""
        self._unfit_since = now if self._unfit_since is None else self._unfit_since
        if now - self._unfit_since < _UNFIT_SECONDS * self._plan.patience:
            return ""
        words = [f"node {node}: {_words(self._patients[node].found)}" for node in unfit]
        return f"too few nodes are fit, of {self._plan.nodes} that are needed; {'; '.join(words)}"


def examination_report(examined: Examined, rule: str) -> ReportExamination:
    """Build the event that reports a verdict."""
    return ReportExamination(
        rule=rule,
        evidence={"how": examined.how, "seconds": examined.seconds},
        node=examined.node,
        verdict=examined.verdict,
        problem=_words(examined),
    )


def _words(examined: Examined | None) -> str:
    if examined is None:
        return ""
    return "; ".join(examined.complaints) or examined.words


def _how(node: int, nodes: Mapping[int, NodeJoined]) -> How:
    """Return the extent: rates are meaningful only on a machine without other work."""
    return "full" if len(nodes) == 1 or machine_of(node, nodes) else "short"
