"""Seconds of what the ranks of ``layout.cp`` exchange in attention.

    ring       keys and values travel to the next rank in each step but the last, behind the step's compute;
               in the backward the float32 sums of their gradients follow them, one step behind
    ulysses    queries, keys and values for other heads, and the result back: two all-to-alls in each
               direction, with nothing behind which they could hide

Every other operator of a rank works on its own positions (`Workload.rank_model`). A step of a ring computes
an equal part of the pairs.
"""

from dataclasses import dataclass

import numpy as np

from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.collective_costs import CommGroup, all_to_all_seconds, group_along, message_seconds
from myriad.planner.cost.operator_costs import Number

__all__ = ["ONE_RANK_OF_CONTEXT", "ContextGrid", "context_exchange"]

_SUM_BYTES = 4.0
"""Bytes of each element of the sums of gradients that travel around a ring."""


@dataclass(frozen=True)
class ContextGrid:
    """The ranks that share a sequence."""

    ring: int = 1
    ulysses: int = 1
    stride: int = 1
    """Distance of two of them in rank number."""

    @property
    def num_ranks(self) -> int:
        """Number of the ranks."""
        return self.ring * self.ulysses

    @classmethod
    def of(cls, layout: Layout) -> "ContextGrid":
        """Return the grid of a layout."""
        return cls(layout.ring, layout.ulysses, layout.tp)

    def next_rank(self, cluster: Cluster) -> CommGroup:
        """Return a rank and the next one of its ring, where they are farthest apart: a rank that sends to
        another node has its own share of the links only."""
        stride = self.stride * self.ulysses
        per_node = cluster.accelerators_per_node
        crosses = stride * self.ring > per_node
        return group_along(cluster, 2.0, float(max(stride, per_node) if crosses else stride))


ONE_RANK_OF_CONTEXT = ContextGrid()
"""A grid in which each rank has all positions."""


def context_exchange(
    model: ModelConfig,
    cluster: Cluster,
    grid: ContextGrid,
    tp: Number,
    tokens: Number,
    value_bytes: int,
    attend: tuple[Number, Number],
) -> tuple[Number, Number]:
    """Return the exposed seconds of a block, forward and backward. ``tokens``: those of a rank in a
    micro-batch. ``attend``: seconds of its attention in each direction."""
    kv_heads = np.maximum(model.num_kv_heads / np.asarray(tp), 1.0)
    if model.latent is not None:
        kv_heads = model.heads / np.asarray(tp)
    travelling = 2.0 * tokens * kv_heads * model.head_width
    rows, back = _rows(model, cluster, grid, tp, tokens, value_bytes, travelling)
    if grid.ring == 1:
        return rows, back
    # a row has all its positions of some heads
    travelling = np.maximum(travelling, 2.0 * tokens * grid.ulysses * model.head_width)
    link = grid.next_rank(cluster)
    shift = link.launch_seconds + message_seconds(link, travelling * value_bytes)
    sums = link.launch_seconds + message_seconds(link, travelling * _SUM_BYTES)
    steps = grid.ring - 1
    forward = steps * _exposed(shift, attend[0] / grid.ring, link)
    return rows + forward, back + steps * _exposed(shift + sums, attend[1] / grid.ring, link) + sums


def _exposed(one: Number, behind: Number, link: CommGroup) -> Number:
    hidden = np.minimum(one, behind)
    return one - hidden + link.busy_ratio * hidden


def _rows(
    model: ModelConfig,
    cluster: Cluster,
    grid: ContextGrid,
    tp: Number,
    tokens: Number,
    value_bytes: int,
    travelling: Number,
) -> tuple[Number, Number]:
    if grid.ulysses == 1:
        return 0.0, 0.0
    queries = tokens * model.heads / np.asarray(tp) * model.head_width
    copied = np.maximum(travelling, 2.0 * tokens * grid.ulysses * model.head_width)
    sizes = ((queries + copied) * value_bytes, queries * value_bytes)
    both = sum(all_to_all_seconds(cluster, grid.ulysses, grid.stride, size) for size in sizes)
    return both, both
