"""Count incidents over many reports: how many were handled without a person, how often the suspect was right.

An incident is one fault, or several that the scenario places close together. It counts as handled if the run
finished with the right bits, or stopped with the reason if that is the aim. If a run failed, its last
incident was not handled. If its end is wrong, no incident counts as handled, because the cause is unknown.
Pure.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from myriad.faults.fault_grades import Grade, Report

__all__ = ["GradedIncident", "Tally", "incidents_of", "tally"]

SINGLES_AIM, DOUBLES_AIM, CULPRIT_AIM = 0.99, 0.95, 0.95


@dataclass(frozen=True)
class GradedIncident:
    """One fault, or several faults close together."""

    scenario: str
    folder: str
    grades: Sequence[Grade]
    handled: bool

    @property
    def is_double(self) -> bool:
        """Whether the incident has more than one fault."""
        return len(self.grades) > 1


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts over many reports."""

    singles: int
    singles_handled: int
    doubles: int
    doubles_handled: int
    named: int
    """Number of faults for which a suspect must be named."""
    named_right: int
    evicted_healthy: int
    false_alarms: int

    @property
    def incidents(self) -> int:
        """Number of incidents, single and double faults together."""
        return self.singles + self.doubles

    @property
    def handled_ratio(self) -> float:
        """Share of handled incidents."""
        return (self.singles_handled + self.doubles_handled) / self.incidents if self.incidents else 0.0

    @property
    def culprit_ratio(self) -> float:
        """Share of right suspects."""
        return self.named_right / self.named if self.named else 1.0

    @property
    def met(self) -> bool:
        """Whether all aims are met."""
        enough = self.singles_handled >= SINGLES_AIM * self.singles
        enough &= self.doubles_handled >= DOUBLES_AIM * self.doubles
        return enough and self.culprit_ratio >= CULPRIT_AIM and not self.evicted_healthy

    @property
    def evicted_per_incident(self) -> float:
        """Healthy nodes evicted for each incident."""
        return self.evicted_healthy / self.incidents if self.incidents else 0.0


def tally(reports: Sequence[Report]) -> Tally:
    """Count the incidents of all reports."""
    incidents = [one for report in reports for one in incidents_of(report)]
    doubles = [one for one in incidents if one.is_double]
    singles = [one for one in incidents if not one.is_double]
    named = [grade for one in incidents for grade in one.grades if grade.names]
    return Tally(
        singles=len(singles),
        singles_handled=sum(one.handled for one in singles),
        doubles=len(doubles),
        doubles_handled=sum(one.handled for one in doubles),
        named=len(named),
        named_right=sum(grade.culprit_right is True for grade in named),
        evicted_healthy=sum(report.evicted_healthy for report in reports),
        false_alarms=sum(report.false_alarms for report in reports),
    )


def incidents_of(report: Report) -> list[GradedIncident]:
    """Return the caused incidents. A scenario that could not run counts as one incident that was not
    handled."""
    groups = list(_groups(report.grades))
    caused = [group for group in groups if any(grade.caused for grade in group)] or groups[:1] or [[]]
    found = []
    for place, group in enumerate(caused):
        is_last = place == len(caused) - 1
        handled = report.ended_right and report.equal is not False
        survived = not report.ended_right and not is_last
        found.append(GradedIncident(report.scenario, report.folder, group, handled or survived))
    return found


def _groups(grades: Iterable[Grade]) -> Iterator[list[Grade]]:
    group: list[Grade] = []
    for grade in grades:
        if group and not grade.belongs:
            yield group
            group = []
        group.append(grade)
    if group:
        yield group
