"""What became of each fault, from what was caused and what the run wrote down; beside its aim. Pure.

Faults that come before the run has recovered from the one before are one incident: it is told once, and
whoever of them is named is the culprit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from myriad.resilience.faults.kinds import Aim, aim_of
from myriad.resilience.faults.scenario import Fault
from myriad.resilience.faults.stand_in import BROKEN

__all__ = ["OVERDUE", "Evidence", "Grade", "Report", "failed_report", "grade_end", "grade_run"]

OVERDUE = "it was ended after"
"""How the outcome of a run begins that did not end by itself."""
Line = Mapping[str, Any]
_OWN_AIMS = ("detected_seconds", "trains_seconds", "steps_lost")
"""That a fault of a scenario may set itself."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Of one run."""

    caused: Sequence[Line]
    """By number of the fault: when, and in which step; and successors of what was gone."""
    events: Sequence[Line]
    """Of the run."""
    metrics: Sequence[Line]
    outcome: str
    """How it ended: "finished", or the reason why it failed."""
    equal: bool | None
    """Losses and all tensors at the end, to those of the undisturbed run; ``None``: it has no end."""
    verify_every: int = 0
    """Steps between comparisons of replicas."""


@dataclass(kw_only=True)
class Grade:
    """Of one fault."""

    fault: str
    """In words."""
    aim_seconds: float
    """To be detected in."""
    detected_seconds: float | None = None
    """``None``: it was not."""
    told: str = ""
    """What the run said of it."""
    culprit_right: bool | None = None
    """``None``: nobody is to be named."""
    trains_seconds: float | None = None
    """After the end of the attempt was decided, until ranks trained; ``None``: it had no end, or no next."""
    steps_lost: int | None = None
    """That were done and had to be done again."""
    caused: bool = True
    """Its time came."""
    belongs: bool = False
    """It came so soon after the fault before it that both are one incident."""
    names: bool = False
    """Somebody is to be named."""
    steps_wrong: int = 0
    """That were done before replicas were seen to differ."""
    missed: list[str] = field(default_factory=list)
    """Aims, in words."""


@dataclass(kw_only=True)
class Report:
    """Of a scenario."""

    scenario: str
    grades: list[Grade]
    outcome: str
    equal: bool | None
    evicted_healthy: int
    false_alarms: int
    """Faults that the driver told and nobody caused."""
    missed: list[str]
    """Aims of the run as a whole."""
    ended_right: bool = True
    """Finished, or stopped with the reason where that is right."""
    folder: str = ""

    @property
    def met(self) -> bool:
        """All aims of all faults."""
        return not self.missed and not any(grade.missed for grade in self.grades)


def grade_run(scenario: str, faults: Sequence[Fault], evidence: Evidence) -> Report:
    """All of it."""
    grader = _Grader(faults, evidence)
    grades = grader.grades()
    stops = any(aim_of(fault.kind, fault.where).stops for fault in faults)
    evicted = grader.evicted_healthy()
    missed = []
    if stops == (evidence.outcome == "finished"):
        wanted = "stop with the reason" if stops else "finish"
        missed.append(f"the run was to {wanted}: {evidence.outcome}")
    if evidence.equal is False:
        missed.append("losses or weights differ from those of the undisturbed run")
    if evicted:
        missed.append(f"{evicted} healthy nodes evicted")
    if grader.false_alarms:
        missed.append(f"{grader.false_alarms} faults told that nobody caused")
    return Report(
        scenario=scenario,
        grades=grades,
        outcome=evidence.outcome,
        equal=evidence.equal,
        evicted_healthy=evicted,
        false_alarms=grader.false_alarms,
        missed=missed,
        ended_right=stops != (evidence.outcome == "finished"),
    )


def grade_end(report: Report, problems: Sequence[str]) -> Report:
    """The same report, in which only the end of the run counts: it finished with the right bits, or stopped
    with a reason in time; ``problems``: what else is wrong with what it has left."""
    for grade in report.grades:
        grade.missed = []
    missed = list(problems)
    if report.outcome == "finished" and not report.equal:
        missed.append("losses or weights differ from those of the undisturbed run")
    if report.outcome.startswith(OVERDUE):
        missed.append(f"the run did not end: {report.outcome}")
    report.missed, report.ended_right = missed, not missed
    return report


def failed_report(scenario: str, problem: str) -> Report:
    """Of one that could not be tried to its end."""
    return Report(
        scenario=scenario,
        grades=[],
        outcome=problem,
        equal=None,
        evicted_healthy=0,
        false_alarms=0,
        missed=[f"it could not be tried: {problem}"],
        ended_right=False,
    )


@dataclass
class _Incident:
    """What the driver has told, and what followed."""

    fault: Line
    named: float
    """When somebody was named: with the stacks of a hang, before the end."""
    ended: float = float("inf")
    """When the next attempt was asked for."""
    started: float | None = None
    resumed: Line | None = None


class _Grader:
    def __init__(self, faults: Sequence[Fault], evidence: Evidence) -> None:
        self._faults, self._evidence = faults, evidence
        self._incidents = _incidents(evidence.events)
        caused = (line for line in evidence.caused if "time" in line)
        self._caused = sorted(caused, key=lambda line: line["time"])
        self._of = self._attribute()
        self._median = median([line["step_seconds"] for line in evidence.metrics] or [0.0])

    @property
    def false_alarms(self) -> int:
        """Incidents that no fault was the cause of."""
        return len(self._incidents) - len(set(self._of.values()))

    def evicted_healthy(self) -> int:
        """Nodes, but those that a fault was done to."""
        sick = sum(fault.where in ("executor", "node") or fault.kind in BROKEN for fault in self._faults)
        evictions = sum(event["event"] == "eviction" for event in self._evidence.events)
        return max(0, evictions - sick)

    def grades(self) -> list[Grade]:
        """In the order of the scenario; found in the order of time."""
        found: dict[int, Grade] = {}
        for line in self._caused:
            number = line["number"]
            grade = self._grade(number, line)
            if number not in found or not found[number].missed:  # of several times the worst
                found[number] = grade
        for number, fault in enumerate(self._faults):
            grade = found.setdefault(number, _never(fault))
            grade.belongs = number > 0 and self._belongs(fault, self._faults[number - 1])
            grade.names = grade.caused and aim_of(fault.kind, fault.where).seen == "driver"
        return [found[number] for number in range(len(self._faults))]

    def _belongs(self, fault: Fault, before: Fault) -> bool:
        return fault.after_seconds is not None or (fault.step is not None and fault.step == before.step)

    def _grade(self, number: int, line: Line) -> Grade:
        fault = self._faults[number]
        aim = aim_of(fault.kind, fault.where)
        own = {name: getattr(fault, name) for name in _OWN_AIMS if getattr(fault, name) is not None}
        aim = replace(aim, **own)
        grade = Grade(fault=_in_words(fault, line["step"]), aim_seconds=self._limit(aim))
        if aim.seen == "driver":
            self._by_driver(grade, line)
        elif aim.seen == "diagnosis":
            self._by_diagnosis(grade, fault, line)
        elif aim.seen == "ranks":
            self._by_ranks(grade, line)
        elif aim.seen == "health":
            self._by_health(grade, fault, line)
        elif aim.seen == "successor":
            self._by_successor(grade, number, line)
        elif aim.seen == "nothing":
            self._by_nothing(grade, line)
        else:
            self._by_storage(grade, aim, line)
        self._beside(grade, number, line)
        if aim.verified and grade.steps_wrong > self._evidence.verify_every:
            every = self._evidence.verify_every
            grade.missed.append(f"found after {grade.steps_wrong} steps, not {every}")
        return _judged(grade, aim)

    def _limit(self, aim: Aim) -> float:
        """Replicas are compared every so many steps, and heard of once a second."""
        if aim.verified:
            return aim.detected_seconds + self._evidence.verify_every * self._median
        return max(aim.detected_seconds, aim.median_steps * self._median)

    def _by_driver(self, grade: Grade, line: Line) -> None:
        index = self._of.get(line["time"])
        if index is None:
            return
        incident = self._incidents[index]
        grade.detected_seconds = incident.named - line["time"]
        grade.told = incident.fault["problem"].partition("\n")[0].partition(" (log:")[0]
        together = [one for one in self._caused if self._of.get(one["time"]) == index]
        grade.culprit_right = any(self._is_culprit(incident, one) for one in together)
        grade.steps_wrong = max(0, incident.fault.get("step", 0) - line["step"] + 1)
        self._follow(grade, incident, line)

    def _attribute(self) -> dict[float, int]:
        """Incidents, by when they were caused: the next that is told, unless ranks were started again before
        that; then it came into the one that was under way."""
        found: dict[float, int] = {}
        for line in self._caused:
            fault, at = self._faults[line["number"]], line["time"]
            if aim_of(fault.kind, fault.where).seen not in ("driver", "load"):
                continue
            under_way = [index for index, one in enumerate(self._incidents) if one.ended >= at]
            own = [
                index
                for index in under_way
                if index not in found.values()
                and self._incidents[index].fault["time"] >= at
                and self._incidents[index].fault["time"] <= self._incidents[under_way[0]].ended
            ]
            if under_way:
                found[at] = (own or under_way)[0]
        return found

    def _is_culprit(self, incident: _Incident, line: Line) -> bool:
        fault = self._faults[line["number"]]
        aim = aim_of(fault.kind, fault.where)
        told = incident.fault
        suspects = told.get("evidence", {}).get("suspects", ())  # of two replicas that differ, both
        same = fault.rank is None or told.get("rank") == fault.rank or fault.rank in suspects
        same &= fault.node is None or told.get("node") == fault.node
        return told["cause"] in aim.causes and same

    def _follow(self, grade: Grade, incident: _Incident, line: Line) -> None:
        if incident.started is not None:
            told = (one.fault["time"] for one in self._incidents if one.fault["time"] < incident.started)
            grade.trains_seconds = incident.started - max(told)  # another may have come in between
            resumed = incident.resumed["step"] if incident.resumed is not None else 0
            grade.steps_lost = max(0, line["step"] - 1 - resumed)

    def _by_diagnosis(self, grade: Grade, fault: Fault, line: Line) -> None:
        """The first that is told of anybody who is slow is to be of this one alone."""
        told = (one for one in self._evidence.events if one["event"] == "diagnosis" and "culprit" in one)
        first = next((one for one in told if one["time"] >= line["time"]), None)
        if first is not None:
            grade.detected_seconds, grade.told = first["time"] - line["time"], first["problem"]
            grade.culprit_right = list(first["ranks"]) == [fault.rank]

    def _by_ranks(self, grade: Grade, line: Line) -> None:
        """In the same step; computed once more, it was to be gone."""
        told = (one for one in self._evidence.events if one["event"] == "spike")
        first = next((one for one in told if one["step"] == line["step"]), None)
        if first is not None:
            grade.detected_seconds, grade.told = first["time"] - line["time"], first["problem"]
            grade.steps_lost = 0 if first.get("verdict") == "transient" else None

    def _by_health(self, grade: Grade, fault: Fault, line: Line) -> None:
        """The first that is told after it is to be of this one; a run that is to go on is to do so."""
        later = [one for one in self._evidence.events if one["time"] >= line["time"]]
        first = next((one for one in later if one["event"] == "health"), None)
        if first is not None:
            grade.detected_seconds, grade.told = first["time"] - line["time"], first["problem"]
            whom = "node" if fault.where == "node" else "rank"
            grade.culprit_right = first.get(whom) == getattr(fault, whom)
        again = next((one["time"] for one in later if one["event"] == "restart"), None)
        if aim_of(fault.kind, fault.where).gives_way:
            started = (
                one["time"] for one in later if one["event"] == "start" and one["time"] >= (again or 0.0)
            )
            grade.trains_seconds = next((at - again for at in started), None) if again is not None else None
            return
        grade.steps_lost = 0
        if again is not None and not self._restarts():
            grade.missed.append("all began anew")

    def _beside(self, grade: Grade, number: int, line: Line) -> None:
        """What else is to come of it, on the node."""
        fault = self._faults[number]
        aim = aim_of(fault.kind, fault.where)
        left = [one for one in self._evidence.events if one["event"] == "eviction"]
        mine = [one for one in left if fault.node is None or one["node"] == fault.node]
        if aim.gives_way and not any(one["time"] >= line["time"] for one in mine):
            grade.missed.append("the node did not give way")
        if aim.fenced_seconds is None:
            return
        told = (one for one in self._evidence.caused if one["number"] == number and "fenced" in one)
        seconds = next((one["fenced"] - line["time"] for one in told), float("inf"))
        grade.told += f"; its own ranks ended after {seconds:.2f} s"
        if seconds > aim.fenced_seconds:
            grade.missed.append(f"its own side ended after {seconds:.2f} s, not {aim.fenced_seconds:.2f} s")

    def _by_successor(self, grade: Grade, number: int, line: Line) -> None:
        told = (line for line in self._evidence.caused if "successor" in line)
        at = next((one["successor"] for one in told if one["number"] == number), None)
        if at is not None:
            grade.detected_seconds, grade.told = at - line["time"], "another took its place"
            grade.steps_lost = 0

    def _by_nothing(self, grade: Grade, line: Line) -> None:
        """Where no other fault is caused, none is to be reported after it."""
        grade.steps_lost = 0
        if any(aim_of(fault.kind, fault.where).seen != "nothing" for fault in self._faults):
            return
        wrong = ("fault", "restart", "eviction", "takeover")
        for event in self._evidence.events:
            if event["event"] in wrong and event["time"] >= line["time"]:
                grade.missed.append(f"{event['event']}: {event.get('problem', '')}")

    def _restarts(self) -> bool:
        """Some fault of the scenario is to have all ranks begin again."""
        return any(aim_of(fault.kind, fault.where).restarts for fault in self._faults)

    def _by_storage(self, grade: Grade, aim: Aim, line: Line) -> None:
        """Told by whoever stores or loads; a damaged piece is loaded after a rank was killed for it."""
        told = [
            event
            for event in self._evidence.events
            if event["event"] == "fault"
            and "cause" not in event
            and event["time"] >= line["time"]
            and ("set_aside" in event) == (aim.seen == "load")
        ]
        if aim.seen == "load" and (index := self._of.get(line["time"])) is not None:
            self._follow(grade, self._incidents[index], line)
        if told:
            grade.detected_seconds = told[0]["time"] - line["time"]
            grade.told = told[0]["problem"]
        if aim.seen == "storage":
            grade.steps_lost = 0


def _incidents(events: Sequence[Line]) -> list[_Incident]:
    """Faults that the driver told, each with the start after it."""
    found: list[_Incident] = []
    diagnosed: float | None = None
    down: dict[int, float] = {}
    for event in events:
        if event["event"] == "diagnosis" and event.keys().isdisjoint(("verdict", "culprit")):
            diagnosed = event["time"]
        elif event["event"] == "fault" and "cause" in event:
            named = diagnosed if event["cause"] == "hang" and diagnosed is not None else event["time"]
            if event["cause"] == "link":
                named = down.get(event["node"], named)
            found.append(_Incident(event, named))
            diagnosed = None
        elif event["event"] == "health" and event["what"] == "link":
            down[event["node"]] = event["time"]
        elif event["event"] == "restart":
            for incident in found:
                incident.ended = min(incident.ended, event["time"])
        elif event["event"] == "start":
            for incident in found:
                incident.started = incident.started or event["time"]
        elif event["event"] == "resume":
            for incident in found:
                incident.resumed = incident.resumed or event
    return found


def _in_words(fault: Fault, step: int) -> str:
    target = f"rank {fault.rank}" if fault.rank is not None else fault.where
    target += f" {fault.node}" if fault.node is not None else ""
    during = f' in "{fault.during}"' if fault.during else ""
    return f"{fault.kind} {target} at step {step}{during}"


def _never(fault: Fault) -> Grade:
    when = f"{fault.seconds:.0f} s" if fault.seconds is not None else f"step {fault.step}"
    if fault.after_seconds is not None:
        when = f"{fault.after_seconds:.1f} s after the one before"
    target = f"rank {fault.rank}" if fault.rank is not None else fault.where
    aim = aim_of(fault.kind, fault.where)
    return Grade(
        fault=f"{fault.kind} {target} at {when}",
        aim_seconds=aim.detected_seconds,
        caused=False,
        missed=["its time never came: the run was over"],
    )


def _judged(grade: Grade, aim: Aim) -> Grade:
    missed = grade.missed
    if aim.seen == "nothing":
        return grade
    if grade.detected_seconds is None:
        missed.append("not detected")
        return grade
    if grade.detected_seconds > grade.aim_seconds:
        missed.append(f"detected after {grade.detected_seconds:.2f} s, not {grade.aim_seconds:.2f} s")
    if grade.culprit_right is False:
        missed.append(f"wrong culprit: {grade.told}")
    if aim.restarts and not aim.stops and grade.trains_seconds is None:
        missed.append("did not train again")
    if aim.trains_seconds is not None and (grade.trains_seconds or 0.0) > aim.trains_seconds:
        missed.append(f"trained again after {grade.trains_seconds:.2f} s, not {aim.trains_seconds:.2f} s")
    if aim.steps_lost is not None and (grade.steps_lost or 0) > aim.steps_lost:
        missed.append(f"{grade.steps_lost} steps lost, not {aim.steps_lost}")
    return grade
