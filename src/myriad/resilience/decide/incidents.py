"""A fault of an attempt: what it was, whether it is the same as an earlier one, how it is told."""

import signal
from dataclasses import dataclass

from myriad.resilience.decide.actions import Blame
from myriad.resilience.facts import RankExited

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
"""Causes that a healthy node does not cure: nobody is evicted for them."""
CORRUPTION = "corruption"
"""Replicas that are to be equal are not."""
NOT_FINITE = "nan"
"""A loss or a gradient: whose fault it is remains to be found out (`myriad.resilience.decide.numbers`)."""
SPIKE = "spike"
"""Of the loss or the gradient norm: nobody is to blame, and the run goes back before it."""
MEMORY_FULL = ("device memory", "host memory")
OF_THE_NODE = ("device", "hang", "link")
"""Causes for which the node is suspect at once; for any other when the same comes again without progress."""


@dataclass(frozen=True)
class Incident:
    """Why an attempt ended."""

    rule: str
    cause: str
    rank: int
    node: int
    step: int
    text: str
    """For the user: rank, what happened, where to look."""
    last_line: str
    after_stop: bool
    """The ranks had been asked to stop before."""

    @property
    def signature(self) -> str:
        """Equal for the same fault: of the user's program wherever it shows, of all else where it does."""
        if self.cause in (NOT_FINITE, SPIKE):
            return f"{self.cause} at step {self.step}"
        if self.cause in OF_THE_USER:
            return f"{self.cause} at step {self.step}: {self.last_line}"
        return f"{self.cause} of rank {self.rank} on node {self.node}"

    def blame(self, **evidence: object) -> Blame:
        """Told to the user."""
        return Blame(
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
        """A rank has ended by itself."""
        last = ended.error.rsplit("\n", 1)[-1]
        where = (ended.rank, ended.node, ended.step)
        return Incident(rule, ended.cause, *where, blame_text(ended), last, after_stop)


def blame_text(ended: RankExited) -> str:
    """One rank and its error."""
    error, code = ended.error, ended.code
    if code > 0 and error and "\n" not in error:
        return f"rank {ended.rank}: {error} (log: {ended.log})"
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    why = {"host memory": ", as the host's memory was full"}.get(ended.cause, "")
    return f"rank {ended.rank} {how}{why} (log: {ended.log})" + (f"\n{error}" if error else "")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have numbers alone
        return f"signal {number}"
