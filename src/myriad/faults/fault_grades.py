"""Grade how a run reacted to each fault, from the caused faults and the recorded events, against the aims.
Pure.

Faults that come before the run has recovered from the previous one are one incident: it is reported once, and
naming any of its suspects counts as right.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from myriad.faults.fault_kinds import recovery_target
from myriad.faults.recovery_targets import RecoveryTarget
from myriad.faults.reported_incidents import Line, ReportedIncident, reported_incidents
from myriad.faults.scenario import Fault
from myriad.faults.simulated_devices import DEVICE_FAULTS

__all__ = ["OVERDUE", "Evidence", "Grade", "Report", "failed_report", "grade_end", "grade_run"]

OVERDUE = "it was ended after"
"""Start of the outcome of a run that exceeded its time limit."""
_OWN_AIMS = ("detected_seconds", "trains_seconds", "steps_lost")
"""Aims that a fault of a scenario can set."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The recorded facts about one run."""

    caused: Sequence[Line]
    """Caused faults by number, with time and step; and successors of lost processes."""
    events: Sequence[Line]
    """All events of the run."""
    metrics: Sequence[Line]
    outcome: str
    """"finished", or the reason why the run failed."""
    equal: bool | None
    """Whether losses and final tensors equal those of the undisturbed run; ``None`` if the run did not
    finish."""
    verify_every: int = 0
    """Steps between comparisons of replicas."""


@dataclass(kw_only=True)
class Grade:
    """The grade of one fault."""

    fault: str
    """Description of the fault."""
    aim_seconds: float
    """Target for the time to detection."""
    detected_seconds: float | None = None
    """Time to detection; ``None``: it was not detected."""
    report: str = ""
    """Report of the run about the fault."""
    culprit_right: bool | None = None
    """Whether the right suspect was named; ``None``: no suspect is expected."""
    trains_seconds: float | None = None
    """Seconds from the decision to end the attempt until ranks trained; ``None``: the attempt did not end,
    or had no successor."""
    steps_lost: int | None = None
    """Steps that were recomputed."""
    caused: bool = True
    """Whether the fault was caused."""
    belongs: bool = False
    """Whether it belongs to the same incident as the fault before it."""
    names: bool = False
    """Whether a suspect is expected."""
    steps_wrong: int = 0
    """Steps before the difference of replicas was detected."""
    missed: list[str] = field(default_factory=list)
    """Missed aims, in words."""

    def detected(self, seconds: float, report: str) -> None:
        """Record the report of the run, which came ``seconds`` after the fault."""
        self.detected_seconds, self.report = seconds, report


@dataclass(kw_only=True)
class Report:
    """The report of a scenario."""

    scenario: str
    grades: list[Grade]
    outcome: str
    equal: bool | None
    evicted_healthy: int
    false_alarms: int
    """Reported faults that were not caused."""
    missed: list[str]
    """Missed aims of the run as a whole."""
    ended_right: bool = True
    """Whether the run finished, or stopped with the reason if that is the aim."""
    folder: str = ""

    @property
    def met(self) -> bool:
        """Whether all aims of all faults are met."""
        return not self.missed and not any(grade.missed for grade in self.grades)


def grade_run(scenario: str, faults: Sequence[Fault], evidence: Evidence) -> Report:
    """Grade a run against the aims of its faults."""
    grader = _Grader(faults, evidence)
    grades = grader.grades()
    stops = any(recovery_target(fault.kind, fault.where).stops for fault in faults)
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
        missed.append(f"{grader.false_alarms} faults reported that were not caused")
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
    """Return the report with only the end of the run graded: it finished with the right bits, or stopped
    with a reason in time. ``problems`` lists what else is wrong after the end."""
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
    """Return the report of a scenario that could not run to its end."""
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


class _Grader:
    def __init__(self, faults: Sequence[Fault], evidence: Evidence) -> None:
        self._faults, self._evidence = faults, evidence
        self._incidents = reported_incidents(evidence.events)
        caused = (line for line in evidence.caused if "time" in line)
        self._caused = sorted(caused, key=lambda line: line["time"])
        self._of = self._attribute()
        self._median = median([line["step_seconds"] for line in evidence.metrics] or [0.0])

    @property
    def false_alarms(self) -> int:
        """Number of reported incidents without a caused fault."""
        return len(self._incidents) - len(set(self._of.values()))

    def evicted_healthy(self) -> int:
        """Number of evicted nodes that had no fault."""
        sick = sum(
            fault.where in ("executor", "node") or fault.kind in DEVICE_FAULTS for fault in self._faults
        )
        evictions = sum(event["event"] == "eviction" for event in self._evidence.events)
        return max(0, evictions - sick)

    def grades(self) -> list[Grade]:
        """Return the grades in the order of the scenario; they are found in the order of time."""
        found: dict[int, Grade] = {}
        for line in self._caused:
            number = line["number"]
            grade = self._grade(number, line)
            if number not in found or not found[number].missed:  # for repeated faults, the worst grade counts
                found[number] = grade
        for number, fault in enumerate(self._faults):
            grade = found.setdefault(number, _never(fault))
            grade.belongs = number > 0 and self._belongs(fault, self._faults[number - 1])
            grade.names = grade.caused and recovery_target(fault.kind, fault.where).seen == "driver"
        return [found[number] for number in range(len(self._faults))]

    def _belongs(self, fault: Fault, before: Fault) -> bool:
        return fault.after_seconds is not None or (fault.step is not None and fault.step == before.step)

    def _grade(self, number: int, line: Line) -> Grade:
        fault = self._faults[number]
        aim = recovery_target(fault.kind, fault.where)
        own = {name: getattr(fault, name) for name in _OWN_AIMS if getattr(fault, name) is not None}
        aim = replace(aim, **own)
        grade = Grade(fault=_in_words(fault, line["step"]), aim_seconds=self._limit(aim))
        if aim.seen == "driver":
            self._by_driver(grade, line)
        elif aim.seen == "diagnosis":
            self._grade_diagnosis(grade, fault, line)
        elif aim.seen == "ranks":
            self._grade_ranks(grade, line)
        elif aim.seen == "health":
            self._grade_health(grade, fault, line)
        elif aim.seen == "successor":
            self._by_successor(grade, number, line)
        elif aim.seen == "nothing":
            self._grade_nothing(grade, line)
        else:
            self._grade_storage(grade, aim, line)
        self._grade_fencing(grade, number, line)
        if aim.verified and grade.steps_wrong > self._evidence.verify_every:
            every = self._evidence.verify_every
            grade.missed.append(f"found after {grade.steps_wrong} steps, not {every}")
        return _judged(grade, aim)

    def _limit(self, aim: RecoveryTarget) -> float:
        """Return the time limit for detection in seconds. It includes the steps between two comparisons of
        replicas, where detection needs one."""
        if aim.verified:
            return aim.detected_seconds + self._evidence.verify_every * self._median
        return max(aim.detected_seconds, aim.median_steps * self._median)

    def _by_driver(self, grade: Grade, line: Line) -> None:
        index = self._of.get(line["time"])
        if index is None:
            return
        incident = self._incidents[index]
        report = incident.fault["problem"].partition("\n")[0].partition(" (log:")[0]
        grade.detected(incident.named - line["time"], report)
        together = [one for one in self._caused if self._of.get(one["time"]) == index]
        grade.culprit_right = any(self._is_culprit(incident, one) for one in together)
        grade.steps_wrong = max(0, incident.fault.get("step", 0) - line["step"] + 1)
        self._follow(grade, incident, line)

    def _attribute(self) -> dict[float, int]:
        """Return the index of the incident that each fault caused, by the fault's time. It is the first one
        reported after the fault. If none was reported before the incident in progress ended, the fault is a
        part of that incident."""
        found: dict[float, int] = {}
        for line in self._caused:
            fault, at = self._faults[line["number"]], line["time"]
            if recovery_target(fault.kind, fault.where).seen not in ("driver", "load"):
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

    def _is_culprit(self, incident: ReportedIncident, line: Line) -> bool:
        fault = self._faults[line["number"]]
        aim = recovery_target(fault.kind, fault.where)
        seen = incident.fault
        suspects = seen.get("evidence", {}).get("suspects", ())  # both replicas, if only two exist and differ
        same = fault.rank is None or seen.get("rank") == fault.rank or fault.rank in suspects
        same &= fault.node is None or seen.get("node") == fault.node
        return seen["cause"] in aim.causes and same

    def _follow(self, grade: Grade, incident: ReportedIncident, line: Line) -> None:
        if incident.started is not None:
            before = (one.fault["time"] for one in self._incidents if one.fault["time"] < incident.started)
            grade.trains_seconds = incident.started - max(before)  # another incident may have come in between
            resumed = incident.resumed["step"] if incident.resumed is not None else 0
            grade.steps_lost = max(0, line["step"] - 1 - resumed)

    def _grade_diagnosis(self, grade: Grade, fault: Fault, line: Line) -> None:
        """Grade a slow rank: the first report must name this rank alone."""
        slow = (one for one in self._evidence.events if one["event"] == "diagnosis" and "culprit" in one)
        first = next((one for one in slow if one["time"] >= line["time"]), None)
        if first is not None:
            grade.detected(first["time"] - line["time"], first["problem"])
            grade.culprit_right = list(first["ranks"]) == [fault.rank]

    def _grade_ranks(self, grade: Grade, line: Line) -> None:
        """Grade a spike: it must be observed in the same step, and be gone when the step is recomputed."""
        spikes = (one for one in self._evidence.events if one["event"] == "spike")
        first = next((one for one in spikes if one["step"] == line["step"]), None)
        if first is not None:
            grade.detected(first["time"] - line["time"], first["problem"])
            grade.steps_lost = 0 if first.get("verdict") == "transient" else None

    def _grade_health(self, grade: Grade, fault: Fault, line: Line) -> None:
        """Grade a fault of a link or device: the first report must be about it, and the run must continue if
        that is the aim."""
        later = [one for one in self._evidence.events if one["time"] >= line["time"]]
        first = next((one for one in later if one["event"] == "health"), None)
        if first is not None:
            grade.detected(first["time"] - line["time"], first["problem"])
            suspect = "node" if fault.where == "node" else "rank"
            grade.culprit_right = first.get(suspect) == getattr(fault, suspect)
        again = next((one["time"] for one in later if one["event"] == "restart"), None)
        if recovery_target(fault.kind, fault.where).gives_way:
            started = (
                one["time"] for one in later if one["event"] == "start" and one["time"] >= (again or 0.0)
            )
            grade.trains_seconds = next((at - again for at in started), None) if again is not None else None
            return
        grade.steps_lost = 0
        if again is not None and not self._restarts():
            grade.missed.append("all ranks restarted")

    def _grade_fencing(self, grade: Grade, number: int, line: Line) -> None:
        """Grade the other effects on the node: its replacement, and the end of its ranks if it is cut off."""
        fault = self._faults[number]
        aim = recovery_target(fault.kind, fault.where)
        left = [one for one in self._evidence.events if one["event"] == "eviction"]
        mine = [one for one in left if fault.node is None or one["node"] == fault.node]
        if aim.gives_way and not any(one["time"] >= line["time"] for one in mine):
            grade.missed.append("the node did not give way")
        if aim.fenced_seconds is None:
            return
        fenced = (one for one in self._evidence.caused if one["number"] == number and "fenced" in one)
        seconds = next((one["fenced"] - line["time"] for one in fenced), float("inf"))
        grade.report += f"; its own ranks ended after {seconds:.2f} s"
        if seconds > aim.fenced_seconds:
            grade.missed.append(f"its own side ended after {seconds:.2f} s, not {aim.fenced_seconds:.2f} s")

    def _by_successor(self, grade: Grade, number: int, line: Line) -> None:
        followed = (line for line in self._evidence.caused if "successor" in line)
        at = next((one["successor"] for one in followed if one["number"] == number), None)
        if at is not None:
            grade.detected(at - line["time"], "another took its place")
            grade.steps_lost = 0

    def _grade_nothing(self, grade: Grade, line: Line) -> None:
        """Grade a fault that must cause no report, unless other faults were caused, too."""
        grade.steps_lost = 0
        if any(recovery_target(fault.kind, fault.where).seen != "nothing" for fault in self._faults):
            return
        wrong = ("fault", "restart", "eviction", "takeover")
        for event in self._evidence.events:
            if event["event"] in wrong and event["time"] >= line["time"]:
                grade.missed.append(f"{event['event']}: {event.get('problem', '')}")

    def _restarts(self) -> bool:
        """Return whether a fault of the scenario must restart all ranks."""
        return any(recovery_target(fault.kind, fault.where).restarts for fault in self._faults)

    def _grade_storage(self, grade: Grade, aim: RecoveryTarget, line: Line) -> None:
        """Grade a report of the process that stores or loads. A damaged checkpoint is loaded after a rank was
        killed to force that."""
        reports = [
            event
            for event in self._evidence.events
            if event["event"] == "fault"
            and "cause" not in event
            and event["time"] >= line["time"]
            and ("set_aside" in event) == (aim.seen == "load")
        ]
        if aim.seen == "load" and (index := self._of.get(line["time"])) is not None:
            self._follow(grade, self._incidents[index], line)
        if reports:
            grade.detected(reports[0]["time"] - line["time"], reports[0]["problem"])
        if aim.seen == "storage":
            grade.steps_lost = 0


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
    aim = recovery_target(fault.kind, fault.where)
    return Grade(
        fault=f"{fault.kind} {target} at {when}",
        aim_seconds=aim.detected_seconds,
        caused=False,
        missed=["its time never came: the run was over"],
    )


def _judged(grade: Grade, aim: RecoveryTarget) -> Grade:
    missed = grade.missed
    if aim.seen == "nothing":
        return grade
    if grade.detected_seconds is None:
        missed.append("not detected")
        return grade
    if grade.detected_seconds > grade.aim_seconds:
        missed.append(f"detected after {grade.detected_seconds:.2f} s, not {grade.aim_seconds:.2f} s")
    if grade.culprit_right is False:
        missed.append(f"wrong culprit: {grade.report}")
    if aim.restarts and not aim.stops and grade.trains_seconds is None:
        missed.append("did not train again")
    if aim.trains_seconds is not None and (grade.trains_seconds or 0.0) > aim.trains_seconds:
        missed.append(f"trained again after {grade.trains_seconds:.2f} s, not {aim.trains_seconds:.2f} s")
    if aim.steps_lost is not None and (grade.steps_lost or 0) > aim.steps_lost:
        missed.append(f"{grade.steps_lost} steps lost, not {aim.steps_lost}")
    return grade
