"""Which nodes the doctor has seen, whom it is to see next, and what its verdict means. Pure.

    start       each node, before ranks start for the first time     who is unfit takes no part in it
    spares      who stands by, while ranks train                     who is unfit takes nobody's place
    suspects    with ranks, after a hang, wrong numbers, a device
                error or when they were lost: while ranks train      who is unfit gives way to a spare

Nobody waits for it but a start that asks for it: a spare that is needed before it was seen is taken. On a
machine with ranks, or with other nodes, only what disturbs nobody is tested. An unfit spare is seen again
after a while: a cable may be back.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from myriad.resilience.decide.actions import Examine, TellExamined
from myriad.resilience.decide.evictions import machine_of
from myriad.resilience.decide.incidents import CORRUPTION, Incident
from myriad.resilience.decide.state import Plan
from myriad.resilience.facts import Examined, How, NodeJoined

__all__ = ["Fitness"]

_AGAIN_SECONDS: Mapping[str, float] = {"unfit": 600.0, "fit": 21_600.0, "unknown": 21_600.0}
_LOOK_SECONDS = 0.5
_UNFIT_SECONDS = 20.0
"""How long others are waited for when enough have come, and some of them are unfit."""
_SUSPECT = ("hang", "device", "node", CORRUPTION)


@dataclass
class _Patient:
    by: str
    asked_at: float | None = None
    found: Examined | None = None
    found_at: float = 0.0

    @property
    def is_awaited(self) -> bool:
        """It was asked for, and has not said anything yet."""
        return self.asked_at is not None and (self.found is None or self.found_at < self.asked_at)


class Fitness:
    """Of the nodes of one run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._patients: dict[int, _Patient] = {}
        self._suspects: dict[int, str] = {}
        """Node to what it is suspect of."""
        self._unfit_since: float | None = None
        self._look_at = float("-inf")

    def joined(self, joined: NodeJoined) -> None:
        """What was found of another executor, of perhaps another machine, counts no more."""
        known = self._patients.get(joined.node)
        if known is None or known.by != joined.by or not joined.by:
            self._patients[joined.node] = _Patient(joined.by)
        elif known.is_awaited:
            known.asked_at = None

    def started(self, nodes: Collection[int]) -> None:
        """Ranks start there, and end what was under way."""
        for node in nodes:
            if (patient := self._patients.get(node)) is not None and patient.is_awaited:
                patient.asked_at = None

    def suspect(self, incident: Incident) -> None:
        """It may be the cause."""
        if incident.cause in _SUSPECT and incident.node >= 0:
            self._suspects[incident.node] = incident.cause

    def is_unfit(self, node: int) -> bool:
        """As the doctor last said."""
        patient = self._patients.get(node)
        return patient is not None and patient.found is not None and patient.found.verdict == "unfit"

    def may_start(self, node: int, *, first: bool) -> bool:
        """Ranks may be put there; ``first``: none ran yet."""
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
        """Who is to be seen. ``at_work``: nodes with ranks; ``training``: these have begun to."""
        if self._plan.doctor == "off" or now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
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

    def heard(self, examined: Examined, now: float, *, at_work: bool) -> Iterator[TellExamined]:
        """The doctor's verdict. Who is fit and stands by, as expected, is not told of."""
        patient = self._patients.get(examined.node)
        if patient is None:
            return
        patient.found, patient.found_at = examined, now
        if at_work or examined.verdict != "fit":
            where = "its ranks are at work" if at_work else "it has no ranks"
            yield told(examined, f"the doctor has seen a node, while {where}")

    def why_no_start(self, nodes: Mapping[int, NodeJoined], now: float) -> str:
        """Enough nodes have come, and too many are unfit; empty: it is not so, or not for long."""
        unfit = [node for node in nodes if self.is_unfit(node)]
        if not unfit or len(nodes) < self._plan.nodes or len(nodes) - len(unfit) >= self._plan.nodes:
            self._unfit_since = None
            return ""
        self._unfit_since = now if self._unfit_since is None else self._unfit_since
        if now - self._unfit_since < _UNFIT_SECONDS * self._plan.patience:
            return ""
        words = [f"node {node}: {_words(self._patients[node].found)}" for node in unfit]
        return f"too few nodes are fit, of {self._plan.nodes} that are needed; {'; '.join(words)}"


def told(examined: Examined, rule: str) -> TellExamined:
    """The verdict, for people."""
    return TellExamined(
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
    """Rates mean something only where nobody else is at work."""
    return "full" if len(nodes) == 1 or machine_of(node, nodes) else "short"
