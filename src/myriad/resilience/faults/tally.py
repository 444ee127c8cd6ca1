"""What many faults come to: how many were handled without a person, how often the right one was named. Pure.

An incident is one fault, or those that came so soon after it that the scenario says so. It was handled when
the run went on to an end that is right to the bit, or stopped with the reason where that is right. Of a run
that failed, the last incident that was caused is the one that was not handled; of one whose end is wrong all
are, as nobody knows which.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from myriad.resilience.faults.grade import Grade, Report

__all__ = ["Incident", "Tally", "incidents_of", "tally"]

SINGLES_AIM, DOUBLES_AIM, CULPRIT_AIM = 0.99, 0.95, 0.95


@dataclass(frozen=True)
class Incident:
    """One or more faults, close to each other."""

    scenario: str
    folder: str
    grades: Sequence[Grade]
    handled: bool

    @property
    def is_double(self) -> bool:
        """More than one."""
        return len(self.grades) > 1


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Of many."""

    singles: int
    singles_handled: int
    doubles: int
    doubles_handled: int
    named: int
    """Faults of which somebody is to be named."""
    named_right: int
    evicted_healthy: int
    false_alarms: int

    @property
    def incidents(self) -> int:
        """All."""
        return self.singles + self.doubles

    @property
    def handled_ratio(self) -> float:
        """Of all."""
        return (self.singles_handled + self.doubles_handled) / self.incidents if self.incidents else 0.0

    @property
    def culprit_ratio(self) -> float:
        """Of those of which somebody is to be named."""
        return self.named_right / self.named if self.named else 1.0

    @property
    def met(self) -> bool:
        """Whether that is as much as is aimed at."""
        enough = self.singles_handled >= SINGLES_AIM * self.singles
        enough &= self.doubles_handled >= DOUBLES_AIM * self.doubles
        return enough and self.culprit_ratio >= CULPRIT_AIM and not self.evicted_healthy

    @property
    def evicted_per_incident(self) -> float:
        """Healthy nodes."""
        return self.evicted_healthy / self.incidents if self.incidents else 0.0


def tally(reports: Sequence[Report]) -> Tally:
    """Of all of them."""
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


def incidents_of(report: Report) -> list[Incident]:
    """Those that were caused; of a scenario that could not be tried one, that was not handled."""
    groups = list(_groups(report.grades))
    caused = [group for group in groups if any(grade.caused for grade in group)] or groups[:1] or [[]]
    found = []
    for place, group in enumerate(caused):
        is_last = place == len(caused) - 1
        handled = report.ended_right and report.equal is not False
        survived = not report.ended_right and not is_last
        found.append(Incident(report.scenario, report.folder, group, handled or survived))
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
