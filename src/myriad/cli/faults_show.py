"""Grades of fault scenarios as Markdown tables."""

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from myriad.faults.fault_grades import Grade, Report
from myriad.faults.fault_tally import GradedIncident, Tally, incidents_of, tally

__all__ = ["matrix_lines", "random_lines", "tally_line"]

_HEADINGS = (
    "scenario",
    "fault",
    "found after",
    "aim",
    "reported as",
    "culprit",
    "trains again",
    "lost",
    "equal",
    "aims",
)
_RANDOM_HEADINGS = (
    "incidents",
    "fault",
    "tried",
    "handled",
    "culprit right",
    "found after: median",
    "longest",
    "trains again: median",
    "longest",
    "most steps lost",
)


def matrix_lines(reports: Sequence[Report]) -> Iterator[str]:
    """Yield a row for each fault, the missed goals, and the totals."""
    yield from _table(_HEADINGS, [_row(report, grade) for report in reports for grade in report.grades])
    yield ""
    yield from _missed(reports, lambda grade: grade.missed)
    yield tally_line(tally(reports))


def random_lines(reports: Sequence[Report]) -> Iterator[str]:
    """Yield a row for each kind of fault, the faults that were not handled or not attributed, and the
    totals."""
    incidents = [one for report in reports for one in incidents_of(report)]
    rows = []
    for name, some in (
        ("single", [one for one in incidents if not one.is_double]),
        ("double", [one for one in incidents if one.is_double]),
    ):
        for kind in sorted({_kind(grade) for one in some for grade in one.grades}):
            rows.append(_kind_row(name, kind, some))
    yield from _table(_RANDOM_HEADINGS, rows)
    yield ""
    yield from _missed(reports, _not_named)
    yield tally_line(tally(reports))


def tally_line(found: Tally) -> str:
    """Return the totals in one line."""
    parts = [f"{found.incidents} incidents, {found.handled_ratio:.1%} handled without a person"]
    if found.singles and found.doubles:
        parts[0] += f" (single {found.singles_handled} of {found.singles}, "
        parts[0] += f"double {found.doubles_handled} of {found.doubles})"
    share = f" ({found.culprit_ratio:.1%})" if found.named else ""
    parts.append(f"culprit right {found.named_right} of {found.named}{share}")
    parts.append(f"healthy nodes evicted per incident {found.evicted_per_incident:.2f}")
    parts.append(f"false alarms {found.false_alarms}")
    return "; ".join(parts)


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    for cells in (headings, tuple("-" * width for width in widths), *rows):
        yield f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"


def _missed(reports: Sequence[Report], of: Callable[[Grade], Sequence[str]]) -> Iterator[str]:
    said = False
    for report in reports:
        for text in [*report.missed, *(text for grade in report.grades for text in of(grade))]:
            said = True
            yield f"- {report.scenario}: {text} ({report.folder})"
    if said:
        yield ""


def _row(report: Report, grade: Grade) -> tuple[str, ...]:
    lost = "-" if grade.steps_lost is None else str(grade.steps_lost)
    culprit = {True: "right", False: "wrong", None: "-"}[grade.culprit_right]
    equal = {True: "yes", False: "no", None: "-"}[report.equal]
    met = "met" if not grade.missed and not report.missed else "missed"
    reported = grade.told if len(grade.told) <= 60 else f"{grade.told[:57]}..."
    return (
        report.scenario,
        grade.fault,
        _seconds(grade.detected_seconds),
        f"{grade.aim_seconds:.3g} s" if grade.aim_seconds else "-",
        reported,
        culprit,
        _seconds(grade.trains_seconds),
        lost,
        equal,
        met,
    )


def _kind(grade: Grade) -> str:
    """Return the kind of a fault: of ``kill rank 1 at step 20``, ``kill rank``."""
    return " ".join(grade.fault.split()[:2])


def _kind_row(name: str, kind: str, incidents: Sequence[GradedIncident]) -> tuple[str, ...]:
    mine = [
        (one, grade) for one in incidents for grade in one.grades if grade.caused and _kind(grade) == kind
    ]
    named = [grade for _, grade in mine if grade.names]
    right = f"{sum(grade.culprit_right is True for grade in named)} of {len(named)}" if named else "-"
    found = [grade.detected_seconds for _, grade in mine if grade.detected_seconds is not None]
    again = [grade.trains_seconds for _, grade in mine if grade.trains_seconds is not None]
    lost = [grade.steps_lost for _, grade in mine if grade.steps_lost is not None]
    return (
        name,
        kind,
        str(len(mine)),
        str(sum(one.handled for one, _ in mine)),
        right,
        _seconds(median(found) if found else None),
        _seconds(max(found, default=None)),
        _seconds(median(again) if again else None),
        _seconds(max(again, default=None)),
        str(max(lost, default="-")),
    )


def _not_named(grade: Grade) -> list[str]:
    return [f"{grade.fault}: {text}" for text in grade.missed if text.startswith(("wrong", "not det", "did"))]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
