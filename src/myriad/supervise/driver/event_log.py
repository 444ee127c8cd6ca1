"""Writes what a driver does into events.jsonl, for people. Disk faults are handled by `AsyncWriter`.

A machine that was evicted as the cause of a fault is also remembered by `AdmissionCheck`, for later runs.
"""

from dataclasses import asdict

from myriad.run import Run
from myriad.supervise.background import AsyncWriter
from myriad.supervise.driver.admission import AdmissionCheck
from myriad.supervise.observations import Examined
from myriad.supervise.policy.fitness import examination_report
from myriad.supervise.policy.policy_actions import (
    Diagnose,
    DumpStacks,
    EndRun,
    Evict,
    Notice,
    PolicyAction,
    ReportExamination,
    ReportFault,
    ReportSlow,
    RestartAtStep,
    StartAttempt,
)

__all__ = ["EventLog"]

_EVENTS: dict[type[PolicyAction], tuple[str, tuple[str, ...]]] = {
    ReportFault: ("fault", ("cause", "rank", "node", "step", "problem")),
    Diagnose: ("diagnosis", ("verdict", "cause", "step", "rank", "node")),
    ReportSlow: ("diagnosis", ("culprit", "ranks", "node", "step", "problem")),
    ReportExamination: ("diagnosis", ("verdict", "node", "problem")),
    Notice: ("health", ("what", "level", "node", "rank", "problem")),
    RestartAtStep: ("move", ("layout", "node")),
    DumpStacks: ("diagnosis", ("ranks",)),
    Evict: ("eviction", ("node", "accused", "machine")),
}
"""Event of each kind of action, and the values that it contains besides the rule and the evidence."""


class EventLog:
    """Writes the actions of a driver as events."""

    def __init__(self, run: Run, disk_writer: AsyncWriter, admission: AdmissionCheck) -> None:
        self._run, self._disk_writer, self._admission = run, disk_writer, admission
        self._spares = 0

    def of_action(self, action: PolicyAction) -> None:
        """Write the event of an action that is about to be carried out."""
        if isinstance(action, StartAttempt) and action.again:
            self._event("restart", action, ("epoch", "layout", "newest_step", "skipped_steps"))
        elif (known := _EVENTS.get(type(action))) is not None:
            self._event(known[0], action, known[1])
        if isinstance(action, Evict):
            self._admission.remember(action)
        if isinstance(action, EndRun) and action.outcome == "failed":
            self._disk_writer.enter_event(self._run, "failed", problem=action.reason, rule=action.rule)

    def of_left_out(self, examined: Examined) -> None:
        """Report the examination of an evicted node, and remember a bad machine for later runs."""
        self.of_action(examination_report(examined, "the doctor has seen a node that was evicted"))
        if examined.verdict == "unfit" and examined.how == "full":
            rule = "the doctor found what is wrong"
            node, machine = examined.node, examined.machine
            self._admission.remember(Evict(rule=rule, node=node, machine=machine, accused="doctor"))

    def of_spares(self, spares: int) -> None:
        """Report the number of idle spares, for the account of the run."""
        if spares != self._spares:
            self._spares = spares
            self._disk_writer.enter_event(self._run, "spares", nodes=spares)

    def of_launcher(self, problem: str | None) -> None:
        """Report a problem of the launcher, or that it has passed."""
        if problem is not None:
            self._disk_writer.enter_event(self._run, "health", what="launcher", problem=problem)

    def _event(self, event: str, action: PolicyAction, names: tuple[str, ...]) -> None:
        values = asdict(action)
        reported = (*names, "rule", "evidence")
        fields = {name: values[name] for name in reported if values[name] not in (-1, "", {}, (), None)}
        fields |= {key: value for key, value in fields.pop("layout", {}).items() if value not in (None, ())}
        self._disk_writer.enter_event(self._run, event, **fields)
