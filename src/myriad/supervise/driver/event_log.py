"""What a driver writes for people: its events in events.jsonl, and the process that sends alarms about them.

Disk faults are handled by `AsyncWriter`. A machine that was evicted as the cause of a fault is also
remembered by `AdmissionCheck`, for later runs. `AlarmProcess` starts the process that sends alarms,
restarts it when it ends, and notifies it of a requested stop and of the end of the run.
"""

import logging
import subprocess
import sys
import time
from contextlib import suppress
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

__all__ = ["AlarmProcess", "EventLog"]

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


_LOG = logging.getLogger(__name__)
_AGAIN_SECONDS = 10.0
_EARLIER_SECONDS = 10.0
"""Seconds before the start of this driver from which events raise alarms: the launcher may have written
some."""


class AlarmProcess:
    """Sends the alarms of one run. A failure of this process does not affect the run."""

    def __init__(self, run: Run) -> None:
        self._run, self._since = run, time.time() - _EARLIER_SECONDS
        self._process: subprocess.Popen[bytes] | None = None
        self._start_at, self._is_stopping = 0.0, False

    def poll(self) -> None:
        """Start the process if it does not run. Call this method each second."""
        if self._process is not None and self._process.poll() is None:
            return
        if (now := time.monotonic()) < self._start_at:
            return
        self._start_at = now + _AGAIN_SECONDS
        words = [sys.executable, "-Pm", "myriad.supervise.driver.alarm_process", str(self._run.path)]
        try:
            # The process shares the driver's log, because opening a file on a disk that hangs would block the
            # driver.
            self._process = subprocess.Popen(
                [*words, str(self._since)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            _LOG.warning("alarms are not sent: %s", error)
        if self._is_stopping:
            self._report(b"stopping\n")

    def stopping(self) -> None:
        """Announce a requested stop, so that the end of driver and launcher raises no alarm."""
        self._is_stopping = True
        self._report(b"stopping\n")

    def _report(self, word: bytes) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError, ValueError):
                self._process.stdin.write(word)
                self._process.stdin.flush()

    def finish(self) -> None:
        """Announce the end of the run. The process sends the remaining messages by itself."""
        self._report(b"over\n")
        if self._process is not None and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()
