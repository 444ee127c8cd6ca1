"""What a store of spans tells Prometheus: by node, of the newest steps."""

from collections.abc import Iterator

import numpy as np

from myriad.dashboard.watched import Watched

__all__ = ["NodePhases"]

_STEPS, _MOST_PHASES = 10, 16


class NodePhases:
    """Of one run."""

    def __init__(self, watched: Watched) -> None:
        self._watched = watched

    def num_dropped(self) -> int:
        """Lost by who sent them, by what came too late, and with batches that were too many at once."""
        counts = self._watched.store.counts
        return counts.lost_before + counts.too_old

    def node_phase_seconds(self) -> Iterator[tuple[int, str, float, float]]:
        """Node, phase, mean and highest seconds of its ranks; those of which something is known."""
        watched, last = self._watched, self._watched.last_step
        if last is None:
            return
        node = watched.ranks.node
        nodes = int(node.max()) + 1
        for phase in watched.store.names.phases_in_order()[:_MOST_PHASES]:
            seconds = watched.heat.heat(phase, max(0, last - _STEPS + 1), last).seconds
            known = np.isfinite(seconds)
            count = np.bincount(node[known], minlength=nodes)
            total = np.bincount(node[known], weights=seconds[known], minlength=nodes)
            highest = np.full(nodes, -np.inf)
            np.maximum.at(highest, node[known], seconds[known])
            for number in np.flatnonzero(count).tolist():
                yield number, phase, float(total[number] / count[number]), float(highest[number])
