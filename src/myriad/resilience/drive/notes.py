"""What a driver does, as people read it in events.jsonl. A fault of the disk is the scribe's matter.

Who is accused of something is remembered by the gate as well, for later runs.
"""

from dataclasses import asdict

from myriad.resilience.decide.actions import (
    Action,
    Blame,
    Diagnose,
    DumpStacks,
    EndRun,
    Evict,
    Notice,
    StartAttempt,
    TellExamined,
    TellSlow,
    TurnRanks,
)
from myriad.resilience.decide.fitness import told
from myriad.resilience.drive.gate import Gate
from myriad.resilience.drive.scribe import Scribe
from myriad.resilience.facts import Examined
from myriad.run import Run

__all__ = ["Notes"]

_EVENTS: dict[type[Action], tuple[str, tuple[str, ...]]] = {
    Blame: ("fault", ("cause", "rank", "node", "step", "problem")),
    Diagnose: ("diagnosis", ("verdict", "cause", "step", "rank", "node")),
    TellSlow: ("diagnosis", ("culprit", "ranks", "node", "step", "problem")),
    TellExamined: ("diagnosis", ("verdict", "node", "problem")),
    Notice: ("health", ("what", "level", "node", "rank", "problem")),
    TurnRanks: ("move", ("layout", "node")),
    DumpStacks: ("diagnosis", ("ranks",)),
    Evict: ("eviction", ("node", "accused", "machine")),
}
"""The event of an action, and which of its values stand there, besides the rule and its evidence."""


class Notes:
    """Of one driver."""

    def __init__(self, run: Run, scribe: Scribe, gate: Gate) -> None:
        self._run, self._scribe, self._gate = run, scribe, gate
        self._spares = 0

    def of_action(self, action: Action) -> None:
        """It is about to be done."""
        if isinstance(action, StartAttempt) and action.again:
            self._event("restart", action, ("epoch", "layout", "newest_step", "skipped_steps"))
        elif (known := _EVENTS.get(type(action))) is not None:
            self._event(known[0], action, known[1])
        if isinstance(action, Evict):
            self._gate.remember(action)
        if isinstance(action, EndRun) and action.outcome == "failed":
            self._scribe.enter_event(self._run, "failed", problem=action.reason, rule=action.rule)

    def of_left_out(self, examined: Examined) -> None:
        """Of a node that was evicted: for people, and for later runs."""
        self.of_action(told(examined, "the doctor has seen a node that was evicted"))
        if examined.verdict == "unfit" and examined.how == "full":
            rule = "the doctor found what is wrong"
            node, machine = examined.node, examined.machine
            self._gate.remember(Evict(rule=rule, node=node, machine=machine, accused="doctor"))

    def of_spares(self, spares: int) -> None:
        """For the account of the run: they stand, and cost."""
        if spares != self._spares:
            self._spares = spares
            self._scribe.enter_event(self._run, "spares", nodes=spares)

    def of_launcher(self, problem: str | None) -> None:
        """What became of the launcher, if anything did."""
        if problem is not None:
            self._scribe.enter_event(self._run, "health", what="launcher", problem=problem)

    def _event(self, event: str, action: Action, names: tuple[str, ...]) -> None:
        values = asdict(action)
        told = (*names, "rule", "evidence")
        fields = {name: values[name] for name in told if values[name] not in (-1, "", {}, (), None)}
        fields |= {key: value for key, value in fields.pop("layout", {}).items() if value not in (None, ())}
        self._scribe.enter_event(self._run, event, **fields)
