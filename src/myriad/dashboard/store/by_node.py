"""Seconds of each phase by node, for what may not have a number for each rank."""

import math
import warnings
from collections.abc import Iterator

import numpy as np

from myriad.dashboard.insight.ranks import Ranks
from myriad.dashboard.store.span_store import SpanStore

__all__ = ["NodeSums"]


class NodeSums:
    """Of the newest step but one, in which most is known."""

    def __init__(self, store: SpanStore, ranks: Ranks) -> None:
        self._store, self._ranks = store, ranks

    def num_dropped(self) -> int:
        """Spans that were lost, here or before they came."""
        return self._store.counts.lost_before + self._store.counts.too_old

    def node_phase_seconds(self) -> Iterator[tuple[int, str, float, float]]:
        """Node, phase, mean and highest seconds of its ranks."""
        blocks = self._store.blocks(0)[-2:-1]
        phases = list(self._store.names.phases)
        order = np.argsort(self._ranks.node, kind="stable")
        nodes, firsts = np.unique(self._ranks.node[order], return_index=True)
        for _, block in blocks:
            for phase, seconds in zip(phases, block.seconds, strict=False):
                yield from self._of_phase(phase, np.split(seconds[order], firsts[1:]), nodes)

    @staticmethod
    def _of_phase(
        phase: str, by_node: list[np.ndarray], nodes: np.ndarray
    ) -> Iterator[tuple[int, str, float, float]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of nodes that nothing is known of
            for node, seconds in zip(nodes.tolist(), by_node, strict=True):
                if math.isfinite(mean := float(np.nanmean(seconds))):
                    yield node, phase, mean, float(np.nanmax(seconds))
