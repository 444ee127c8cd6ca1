"""A loss or a gradient that is not finite: chance, the node, or the batch. Pure.

    at step N ──► replayed in place ──gone──► transient
                        │ again
                        ▼
                  the blamed rank's work on another node ──gone, or it stays with the node──► hardware
                        │ again, of the same rank            (where there is one)
                        ▼
                  the data or the model: stop, or skip the batch

Nothing has moved when it is found, so a replay costs the steps since the last snapshot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["OnNan", "Trial", "Verdict", "moved", "next_trial"]

OnNan = Literal["replay", "stop", "skip"]
Verdict = Literal["transient", "hardware", "deterministic"]


@dataclass(frozen=True)
class Trial:
    """What is being found out."""

    step: int
    rank: int
    """Whose number was the first that was not finite."""
    node: int
    how: Literal["replay", "move", "moved"]
    """In place; elsewhere, from the next start on; elsewhere, and that has begun."""

    @property
    def if_gone(self) -> Verdict:
        """What it was when the step passes now."""
        return "hardware" if self.how == "moved" else "transient"

    @property
    def tried(self) -> str:
        """For the user."""
        if self.how == "moved":
            return "it came again on replay and on another node"
        return "it came again on replay, and there is no other node to try it on"


def next_trial(trial: Trial | None, step: int, rank: int, node: int, num_nodes: int) -> Trial | Verdict:
    """After it came, at a step: what is to be tried, or what it is. ``trial``: the one that it came in;
    ``num_nodes``: those that are there, spares too."""
    if trial is None or trial.step != step:
        return Trial(step, rank, node, "replay")
    if trial.how == "replay" and num_nodes > 1:
        return Trial(step, rank, node, "move")
    if trial.how == "move":
        return trial  # the ranks ended before they were moved
    stays_with_node = trial.how == "moved" and node == trial.node and rank != trial.rank
    return "hardware" if stays_with_node else "deterministic"


def moved(trial: Trial, kept: Sequence[int], others: Sequence[int]) -> list[int]:
    """Nodes in the order of their ranks: a spare takes the suspect's place, else all move on by one."""
    if trial.node not in kept:
        return [*kept, *others]
    if others:
        first, *rest = others
        return [*(first if node == trial.node else node for node in kept), *rest, trial.node]
    return [*kept[1:], *kept[:1]]
