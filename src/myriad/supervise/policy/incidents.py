"""Faults of an attempt: the cause, whether two faults are the same, and the report to the user."""

import signal
from dataclasses import dataclass

from myriad.supervise.observations import RankExited
from myriad.supervise.policy.policy_actions import ReportFault

__all__ = [
    "CORRUPTION",
    "MEMORY_FULL",
    "NOT_FINITE",
    "OF_THE_NODE",
    "OF_THE_USER",
    "SPIKE",
    "Incident",
    "blame_text",
]

OF_THE_USER = ("user", "input", "state", "device memory", "disk", "data")
"""Causes that a healthy node does not fix: no node is evicted for them."""
CORRUPTION = "corruption"
"""Cause: replicas that must be equal differ."""
NOT_FINITE = "nan"
"""Cause: a non-finite loss or gradient. `myriad.supervise.policy.nan_trial` finds out where it comes from."""
SPIKE = "spike"
"""Cause: a spike of the loss or the gradient norm. No node is a suspect, and the run goes back before it."""
MEMORY_FULL = ("device memory", "host memory")
OF_THE_NODE = ("device", "hang", "link")
"""Causes for which the node is a suspect at once. For other causes it is when the fault recurs without
progress."""


@dataclass(frozen=True)
class Incident:
    """The fault that ended an attempt."""

    rule: str
    cause: str
    rank: int
    node: int
    step: int
    text: str
    """Text for the user: rank, what happened, where to look."""
    last_line: str
    after_stop: bool
    """Whether the ranks had been asked to stop before."""

    @property
    def signature(self) -> str:
        """Key that is equal for the same fault. A fault of the user's program is the same on any rank; other
        faults are the same only on the same rank and node."""
        if self.cause in (NOT_FINITE, SPIKE):
            return f"{self.cause} at step {self.step}"
        if self.cause in OF_THE_USER:
            return f"{self.cause} at step {self.step}: {self.last_line}"
        return f"{self.cause} of rank {self.rank} on node {self.node}"

    def blame(self, **evidence: object) -> ReportFault:
        """Build the command that reports this fault to the user."""
        return ReportFault(
            rule=self.rule,
            evidence=dict(evidence),
            cause=self.cause,
            rank=self.rank,
            node=self.node,
            step=self.step,
            problem=self.text,
        )

    @staticmethod
    def of_exit(ended: RankExited, rule: str, *, after_stop: bool) -> "Incident":
        """Build the incident of a rank that ended by itself."""
        last = ended.error.rsplit("\n", 1)[-1]
        where = (ended.rank, ended.node, ended.step)
        return Incident(rule, ended.cause, *where, blame_text(ended), last, after_stop)


def blame_text(ended: RankExited) -> str:
    """Describe a rank's end with its error."""
    error, code = ended.error, ended.code
    if code > 0 and error and "\n" not in error:
        return f"rank {ended.rank}: {error} (log: {ended.log})"
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    why = {"host memory": ", as the host's memory was full"}.get(ended.cause, "")
    return f"rank {ended.rank} {how}{why} (log: {ended.log})" + (f"\n{error}" if error else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name, only a number
        return f"signal {number}"
