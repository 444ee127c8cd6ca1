"""Seconds of what the ranks of ``layout.cp`` exchange in attention.

    ring       keys and values travel to the next rank in each step but the last, in halves, behind the step's
               compute and that of the half that is there; in the backward the float32 sums of their gradients
               follow them, from the first rank that has any to their owner, behind the rest of its own keys
    gather     keys and values of all ranks before attention, again in the backward, and a reduction of their
               gradients after it: other systems' way, all of it exposed
    ulysses    queries, keys and values for other heads, and the result back: two all-to-alls in each
               direction, with nothing behind which they could hide

With a short window the ranks send each other only what is seen (`myriad.kernels.ring_plan`): one exchange
behind the rank's own keys, and in the backward another for the sums, each behind half of them.

Every other operator of a rank works on its own positions (`Workload.rank_model`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np

from myriad.comm.layout import Layout
from myriad.kernels.ring_plan import halves_sent, pairs_of_steps, received_positions, sent_positions
from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.collective_costs import (
    CommGroup,
    all_gather_seconds,
    all_to_all_seconds,
    group_along,
    message_seconds,
)
from myriad.planner.cost.operator_costs import Number

__all__ = ["ONE_RANK_OF_CONTEXT", "ContextBlock", "ContextGrid", "RingSteps"]

_FIRST_SHARE = 0.25
"""Share of a rank's own pairs that it computes in a backward before keys of others: the first of two chunks
with itself."""
_SUM_BYTES = 4.0
"""Bytes of each element of the sums of gradients that travel around a ring."""


@dataclass(frozen=True)
class ContextGrid:
    """The ranks that share a sequence."""

    ring: int = 1
    ulysses: int = 1
    stride: int = 1
    """Distance of two of them in rank number."""
    slowdown: float = 1.0
    """Factor on the seconds of bytes that travel between nodes: 1 at the rate of the ports."""

    @property
    def num_ranks(self) -> int:
        """Number of the ranks."""
        return self.ring * self.ulysses

    @classmethod
    def of(cls, layout: Layout, slowdown: float = 1.0) -> "ContextGrid":
        """Return the grid of a layout."""
        return cls(layout.ring, layout.ulysses, layout.tp, slowdown)

    def next_rank(self, cluster: Cluster) -> CommGroup:
        """Return a rank and the next one of its ring, where they are farthest apart: a rank that sends to
        another node has its own share of the links only."""
        stride = self.stride * self.ulysses
        nearest = max(stride, cluster.accelerators_per_node) if self._crosses(cluster) else stride
        return group_along(cluster, 2.0, float(nearest))

    def ring_slowdown(self, cluster: Cluster) -> float:
        """Return the factor on the seconds of a ring's bytes: it is as slow as its slowest step."""
        return self.slowdown if self._crosses(cluster) else 1.0

    def _crosses(self, cluster: Cluster) -> bool:
        return self.num_ranks * self.stride > cluster.accelerators_per_node


ONE_RANK_OF_CONTEXT = ContextGrid()
"""A grid in which each rank has all positions."""


class RingSteps(NamedTuple):
    """Consecutive equal steps of a ring, in one direction of a block."""

    first: int
    """Number of the first of them; ``ring``: what is left after the last step."""
    num_steps: int
    wait: Number
    """Exposed seconds before each step."""
    pieces: Number
    """Seconds of attention in each step."""


@dataclass(frozen=True)
class ContextBlock:
    """What a rank's attention in one block exchanges with the ranks that share its sequences."""

    model: ModelConfig
    """With the positions that one rank has of a sequence."""
    cluster: Cluster
    grid: ContextGrid
    tp: Number
    tokens: Number
    """Tokens of a rank in a micro-batch."""
    value_bytes: int
    window: int | None
    """Window of the block."""
    gathers: bool = False
    """Whether the ranks gather keys and values (`FrameworkProfile.gathers_sequences`)."""

    def exposed(self, attend: tuple[Number, Number]) -> tuple[Number, Number]:
        """Return the exposed seconds, forward and backward. ``attend``: seconds of attention in each
        direction."""
        if self.grid.num_ranks == 1:
            return 0.0, 0.0
        forward, backward = (
            sum((step.num_steps * step.wait for step in steps), self._row_seconds)
            for steps in (self.forward(attend[0]), self.backward(attend[1]))
        )
        return forward, backward

    def forward(self, attend: Number) -> list[RingSteps]:
        """Return the steps of the ring in the forward; with a gather, one."""
        if self.gathers:
            return [RingSteps(0, 1, self._gather_seconds, attend)]
        message, _, around = self._messages
        found = [RingSteps(first, count, 0.0, share * attend) for first, count, share in self._shares]
        if around:
            return self._around(found, message, message, found[0].pieces)
        own, *others = found
        return [own, *self._waited(others, self._behind(message, own.pieces))]

    def backward(self, attend: Number) -> list[RingSteps]:
        """Return the steps of the ring in the backward. After the last, the sums of gradients arrive."""
        if self.gathers:
            gather = self._gather_seconds  # Gradients travel in the compute type.
            return [RingSteps(0, 1, gather, attend), RingSteps(self.grid.ring, 1, gather, 0.0)]
        message, sums, around = self._messages
        found = [RingSteps(first, count, 0.0, share * attend) for first, count, share in self._shares]
        if around:
            first = _FIRST_SHARE * found[0].pieces
            found = self._around(found, message, message + sums, first)
            last = found[0].pieces - first + found[-1].pieces / 2
            wait = self._behind(sums, last) if self.grid.ring > 1 else 0.0
            return [*found, RingSteps(self.grid.ring, 1, wait, 0.0)]
        own, *others = found
        half = own.pieces / 2
        end = RingSteps(self.grid.ring, 1, self._behind(sums, half), 0.0)
        return [own, *self._waited(others, self._behind(message, half)), end]

    @cached_property
    def _shares(self) -> list[tuple[int, int, float]]:
        """First, number and share of the pairs of each run of equal steps that compute anything."""
        pairs = pairs_of_steps(self.sequence, self.window, self.grid.ring)
        total, first = max(1, sum(pairs)), 0
        found = []
        for one, run in groupby(pairs):
            count = len(list(run))
            if one or first == 0:
                found.append((first, count, one / total))
            first += count
        return found

    @cached_property
    def _messages(self) -> tuple[Number, Number, bool]:
        """Seconds in which keys and values arrive, seconds of the sums of their gradients, and whether they
        go around the ring: then of each step, else of all together."""
        received = received_positions(self.sequence, self.window, self.grid.ring)
        ratio = 1.0 if received is None else received * self.grid.ring / self.sequence
        link, slower = self._link, self.grid.ring_slowdown(self.cluster)
        shift, sums = (
            link.launch_seconds + message_seconds(link, ratio * slower * each) for each in self.share_bytes
        )
        return shift, sums, received is None

    @property
    def share_bytes(self) -> tuple[Number, Number]:
        """Bytes of the keys and values of a rank's share of the sequence, and of the float32 sums of their
        gradients."""
        return self._copied * self.value_bytes, self._copied * _SUM_BYTES

    @property
    def row_bytes(self) -> tuple[Number, Number]:
        """Bytes that a rank exchanges in its row in each direction: queries, keys and values; and results."""
        queries = self.tokens * self.model.heads / np.asarray(self.tp) * self.model.head_width
        return (queries + self._copied) * self.value_bytes, queries * self.value_bytes

    @property
    def messages(self) -> list[list[int]]:
        """Positions of each sequence that ranks of a ring send each other directly (`sent_positions`)."""
        return sent_positions(self.sequence, self.window, self.grid.ring)

    @property
    def halves(self) -> list[tuple[int, int]]:
        """Halves of shares, and of sums, that each rank of a ring sends around it (`halves_sent`)."""
        return halves_sent(self.sequence, self.window, self.grid.ring)

    @property
    def sequence(self) -> int:
        """Positions of a whole sequence."""
        return self.model.sequence * self.grid.num_ranks

    @cached_property
    def _link(self) -> CommGroup:
        return self.grid.next_rank(self.cluster)

    @cached_property
    def _gather_seconds(self) -> Number:
        """Seconds in which the keys and values of all ranks arrive, or their gradients are reduced."""
        ring, stride = self.grid.ring, self.grid.stride * self.grid.ulysses
        group = group_along(self.cluster, float(ring), float(stride))
        return all_gather_seconds(group, ring * self.grid.ring_slowdown(self.cluster) * self.share_bytes[0])

    @property
    def _copied(self) -> Number:
        """Elements of a rank's keys and values; in a row each rank has all its positions of some heads."""
        kv_heads = np.maximum(self.model.num_kv_heads / np.asarray(self.tp), 1.0)
        if self.model.latent is not None:
            kv_heads = self.model.heads / np.asarray(self.tp)
        return 2.0 * self.tokens * np.maximum(kv_heads, self.grid.ulysses) * self.model.head_width

    def _around(
        self, steps: Sequence[RingSteps], first: Number, each: Number, ahead: Number
    ) -> list[RingSteps]:
        """Return the steps with the wait for what travelled during the step before. ``first``: seconds of the
        first message, which travels while the rank computes for ``ahead`` seconds, and its second half while
        the first one is attended to. ``each``: seconds of what travels in each further step."""
        found = [steps[0]]
        wait = self._behind(first, ahead + steps[1].pieces / 2) if len(steps) > 1 else 0.0
        for step in steps[1:]:
            among = self._behind(each, step.pieces)
            rest = step._replace(first=step.first + 1, num_steps=step.num_steps - 1, wait=among)
            found += [step._replace(num_steps=1, wait=wait), rest][: step.num_steps]
            wait = among
        return found

    def _waited(self, steps: Sequence[RingSteps], seconds: Number) -> list[RingSteps]:
        """Return the steps with a wait before the first of them."""
        if not steps:
            return []
        first, rest = steps[0], steps[0]._replace(first=steps[0].first + 1, num_steps=steps[0].num_steps - 1)
        return [first._replace(num_steps=1, wait=seconds), *([rest] if rest.num_steps else []), *steps[1:]]

    def _behind(self, one: Number, compute: Number) -> Number:
        hidden = np.minimum(one, compute)
        return one - hidden + self._link.busy_ratio * hidden

    @property
    def _row_seconds(self) -> Number:
        """Seconds of the exchange of positions for heads, in each direction."""
        if self.grid.ulysses == 1:
            return 0.0
        grid = self.grid
        both: Number = sum(
            all_to_all_seconds(self.cluster, grid.ulysses, grid.stride, size, slowdown=grid.slowdown)
            for size in self.row_bytes
        )
        return both
