"""The trial that finds the cause of a non-finite loss or gradient: chance, the node, or the batch. Pure.

    at step N ──► replayed in place ──gone──► transient
                        │ again
                        ▼
                  the suspect rank runs on another node ──gone, or it stays with the node──► hardware
                        │ again, of the same rank         (if there is another node)
                        ▼
                  the data or the model: stop, or skip the batch

No parameter has changed when the number is found, so a replay costs the steps since the last snapshot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = ["NanTrial", "OnNan", "Verdict", "moved", "next_trial"]

OnNan = Literal["replay", "stop", "skip"]
Verdict = Literal["transient", "hardware", "deterministic"]


@dataclass(frozen=True)
class NanTrial:
    """The trial that is under way."""

    step: int
    rank: int
    """Rank that computed the first non-finite number."""
    node: int
    how: Literal["replay", "move", "moved"]
    """replay: on the same node. move: on another node, from the next start on. moved: already on another
    node."""

    @property
    def if_gone(self) -> Verdict:
        """Verdict if the step passes now."""
        return "hardware" if self.how == "moved" else "transient"

    @property
    def tried(self) -> str:
        """Text for the user that describes what was tried."""
        if self.how == "moved":
            return "it came again on replay and on another node"
        return "it came again on replay, and there is no other node to try it on"


def next_trial(trial: NanTrial | None, step: int, rank: int, node: int, num_nodes: int) -> NanTrial | Verdict:
    """Return what to try after a non-finite number at a step, or the verdict. ``trial``: the trial during
    which it occurred. ``num_nodes``: number of connected nodes, including spares."""
    if trial is None or trial.step != step:
        return NanTrial(step, rank, node, "replay")
    if trial.how == "replay" and num_nodes > 1:
        return NanTrial(step, rank, node, "move")
    if trial.how == "move":
        return trial  # the ranks ended before they were moved
    stays_with_node = trial.how == "moved" and node == trial.node and rank != trial.rank
    return "hardware" if stays_with_node else "deterministic"


def moved(trial: NanTrial, kept: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return the nodes in the order of their ranks. A spare replaces the suspect; without a spare all nodes
    rotate by one."""
    if trial.node not in kept:
        return [*kept, *others]
    if others:
        first, *rest = others
        return [*(first if node == trial.node else node for node in kept), *rest, trial.node]
    return [*kept[1:], *kept[:1]]
