"""The facts of a run's report, for the terminal, the page and ``--json``. This module only reads the run
folder."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from myriad.reports.run_report.run_summary import Summary, summarize
from myriad.run import Run
from myriad.run.run_lines import EventLines, StepLines, figure_of, missing_lines_text
from myriad.run.run_speed import Peaks, run_speed
from myriad.run.run_status import State, state_now
from myriad.supervise.accounting.accounting import account_of
from myriad.supervise.accounting.ledger import KINDS, Account, Attempt, FaultRecord, Kind, in_order
from myriad.supervise.driver.journal import count_missing
from myriad.system.jsonl import JsonlTail, Record, late_events

if TYPE_CHECKING:
    from myriad.job import Job

__all__ = [
    "ATTEMPT_HEADINGS",
    "FAULT_HEADINGS",
    "MEANING",
    "Facts",
    "at_clock",
    "attempt_cells",
    "facts_of",
    "fault_cells",
]

MEANING: dict[Kind, str] = {
    "training": "steps that count",
    "lost": "steps to be done again, or left unfinished",
    "saving": "training paused for a checkpoint",
    "validating": "evaluation",
    "checking": "active checks in gaps of the program",
    "slow": "waiting for a straggler",
    "detecting": "fault not yet detected",
    "diagnosing": "diagnosis",
    "starting": "from a launch to the first step",
    "restarting": "from the decision to restart to the first step",
    "planned": "stopped on request",
    "waiting": "waiting for a node",
    "person": "stopped, waiting for an operator",
}
FAULT_HEADINGS = ["at", "cause", "culprit", "detected after", "back after", "steps lost", "what"]
ATTEMPT_HEADINGS = ["attempt", "ranks", "trains from", "first step", "last step", "ended"]


@dataclass(frozen=True)
class Facts:
    """Everything that the report of a run shows."""

    run: Run
    job: "Job"
    summary: Summary
    account: Account
    metrics: Sequence[Record] = ()
    """One metrics line for each step that counts."""
    events: Sequence[Record] = ()
    wrong_lines: Mapping[str, int] = field(default_factory=dict)
    """Number of torn or invalid lines by file; empty: there are none."""
    missing_decisions: int = 0
    """Number of lines that are missing in journal.jsonl."""
    loss_problem: str = ""
    """Description of the steps whose loss is not finite; "": there are none."""
    problems: tuple[str, ...] = ()
    """Files that cannot be read, with the reason."""
    state: State = "new"

    @property
    def doubts(self) -> list[str]:
        """Missing or wrong lines in the files on which the report is based."""
        doubts = [missing_lines_text(self.account.steps_without_line), self.loss_problem]
        doubts += [f"{number} lines of {name} are wrong" for name, number in self.wrong_lines.items()]
        if self.missing_decisions:
            doubts.append(f"{self.missing_decisions} decisions are missing in journal.jsonl")
        return [*filter(None, doubts), *self.problems, *self.summary.data_problems]

    def shares(self) -> list[tuple[Kind, float, float]]:
        """Return (class of time, seconds, share of the wall time) for each class that occurred."""
        wall, found = self.account.ledger.wall_seconds or 1.0, self.account.ledger.seconds()
        return [(kind, found[kind], found[kind] / wall) for kind in KINDS if found[kind] > 0]

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        account = self.account
        per_attempt = account.ledger.by_attempt()
        attempts = [asdict(one) | {"classes": per_attempt.get(one.number, {})} for one in account.attempts]
        return {
            "run": str(self.run.path),
            "state": self.state,
            "effective_ratio": account.effective_ratio,
            "effective_ratio_of_meant_time": account.meant_ratio,
            "goodput_tokens_per_second": account.goodput,
            "wall_seconds": account.ledger.wall_seconds,
            "classes": account.ledger.seconds(),
            "spare_node_seconds": account.ledger.spare_node_seconds,
            "steps": account.steps,
            "steps_without_line": account.steps_without_line,
            "steps_lost": account.steps_lost,
            "wrong_lines": sum(self.wrong_lines.values()),
            "missing_decisions": self.missing_decisions,
            "doubts": self.doubts,
            "faults": [asdict(fault) | {"back_seconds": fault.back_seconds} for fault in account.faults],
            "attempts": attempts,
        }


def facts_of(run: Run) -> Facts:
    """Read a run's files. Raises `BadInputError` where there is no run."""
    running = run.is_locked
    job = run.job()
    steps, events = StepLines(run.metrics_path), EventLines(run.events_path)
    journal = JsonlTail(run.path / "journal.jsonl")
    decisions = journal.poll()
    all_events = late_events(events.poll())
    moments = in_order(all_events, steps.poll(), decisions)
    account = account_of(moments, time.time() if running else None)
    files: dict[str, StepLines | EventLines | JsonlTail] = {
        "metrics.jsonl": steps,
        "events.jsonl": events,
        "journal.jsonl": journal,
    }
    wrong = {name: file.num_wrong for name, file in files.items() if file.num_wrong}
    problems = tuple(f"{name} cannot be read: {file.problem}" for name, file in files.items() if file.problem)
    missing, loss_problem = count_missing(decisions), _loss_problem(steps.lines)
    summary = summarize(run, steps.lines, all_events)
    state = summary.state
    if account.running:
        state = _state_now(run, summary, steps.lines, all_events)
    return Facts(
        run,
        job,
        summary,
        account,
        steps.lines,
        all_events,
        wrong,
        missing,
        loss_problem,
        problems,
        state or summary.state,
    )


def _state_now(run: Run, summary: Summary, metrics: Sequence[Record], events: Sequence[Record]) -> State:
    times = (figure_of(line.get("time")) for line in (*metrics[-1:], *events))
    speed = run_speed(metrics, Peaks(events))
    return state_now(
        run,
        events,
        steps=summary.steps,
        planned=summary.steps_planned,
        newest=max((at for at in times if at is not None), default=None),
        step_seconds=speed.step_seconds if speed else 0.0,
    )


def _loss_problem(lines: Sequence[Record]) -> str:
    """Return a sentence about non-finite losses; "" if there are none."""
    num_gone = sum(line.get("loss") is None for line in lines)
    if not num_gone:
        return ""
    last = next((line["step"] for line in reversed(lines) if line.get("loss") is not None), None)
    if last is None:
        return "no step has a loss that is a number"
    if last == lines[-1]["step"]:
        return f"the loss of {num_gone} steps is not a number"
    return f"the loss is not a number after step {last}"


def at_clock(seconds: float) -> str:
    """Return a time in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _in_words(fault: FaultRecord) -> str:
    """Return a fault's problem without the path of the log."""
    return fault.problem.partition("\n")[0].partition(" (log:")[0]


def fault_cells(faults: Sequence[FaultRecord]) -> list[list[str]]:
    """Return a row for each fault under `FAULT_HEADINGS`."""
    return [
        [
            at_clock(fault.reported),
            fault.cause or "storage",
            _culprit(fault),
            _after(fault.detected_seconds) if fault.cause else "-",
            _after(fault.back_seconds),
            "-" if fault.steps_lost is None else str(fault.steps_lost),
            _in_words(fault),
        ]
        for fault in faults
    ]


def _culprit(fault: FaultRecord) -> str:
    if fault.rank is not None:
        return f"rank {fault.rank}"
    return "-" if fault.node is None else f"node {fault.node}"


def _after(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return "at once" if seconds < 0.005 else f"{seconds:.2f} s"


def attempt_cells(attempts: Sequence[Attempt]) -> list[list[str]]:
    """Return a row for each attempt under `ATTEMPT_HEADINGS`."""
    return [
        [
            str(one.number),
            str(one.world or "-"),
            at_clock(one.began),
            str(one.resumed_from + 1),
            "-" if one.last_step is None else str(one.last_step),
            one.ended or "-",
        ]
        for one in attempts
    ]
