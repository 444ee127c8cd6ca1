"""What the nodes of a cluster say to each other in an iteration of a layout: what `placement` lays out.

The grid's axes are dp pp cp tp ep, the last one fastest, so consecutive ranks fill a node, and a *slot* (the
n-th node's worth of ranks) is

    slot = (replica x parts + part) x width + column

    part      a node's share of a pipeline: some of its ranks, or with tp wider than a node one of them
    column    of the nodes that a tensor-parallel group fills: one, unless tp is wider than a node
    replica   that lies on nodes of its own: one of dp, or as many as fit in a node
"""

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

from myriad.comm.layout import Layout
from myriad.planner.costs import Costs
from myriad.program.schedules import stage_owners

__all__ = ["Message", "Traffic", "fills_nodes", "traffic_of"]


@dataclass(frozen=True)
class Message:
    """Between two parts of each replica, for one micro-batch."""

    source: int
    target: int
    num_bytes: float
    """Of one accelerator, both ways."""


@dataclass(frozen=True)
class Traffic:
    """By part; ``replicas x parts x width`` slots."""

    replicas: int
    parts: int
    compute_seconds: tuple[float, ...]
    """Of its slowest pipeline rank, for one micro-batch."""
    ring_bytes: tuple[float, ...]
    """Of one accelerator's parameters and gradients among replicas, in an iteration."""
    messages: tuple[Message, ...]
    num_micro_batches: int
    exposed_ratio: float = 1.0
    """Share of the rings' time that nothing hides."""
    hides_messages: bool = True
    """Behind compute, between a pipeline's filling and its draining."""
    width: int = 1
    tensor_seconds: tuple[float, ...] = ()
    """Of compute_seconds, what tensor parallelism between nodes takes on links like most nodes'; empty: it
    stays inside nodes."""

    @property
    def num_slots(self) -> int:
        """Nodes that are needed."""
        return self.replicas * self.parts * self.width


def fills_nodes(layout: Layout, per_node: int) -> bool:
    """Whether tensor-parallel groups and pipelines fill nodes evenly, or nodes a whole number of them."""
    return all(per_node % size == 0 or size % per_node == 0 for size in (layout.tp, layout.tp * layout.pp))


def traffic_of(costs: Costs) -> Traffic:
    """Of a layout that fills nodes."""
    work, layout, per_node = costs.work, costs.work.layout, costs.cluster.accelerators_per_node
    width = max(1, layout.tp // per_node)
    parts = max(1, layout.tp * layout.pp // (per_node * width))
    part_of = [rank * parts // layout.pp for rank in range(layout.pp)]
    owners = stage_owners(layout.schedule_name, layout.pp, layout.virtual_stages)
    compute, held, tensor = ([0.0] * layout.pp for _ in range(3))
    for index, stage in enumerate(costs.stages):
        rank = owners[index // costs.num_chunks]
        compute[rank] += stage.forward + stage.backward
        held[rank] += stage.parameters
        tensor[rank] += float(stage.parts.tensor)
    moved = work.value_bytes + work.practice.gradient_bytes if layout.dp > 1 else 0

    def slowest(values: list[float]) -> tuple[float, ...]:
        return tuple(max(v for v, at in zip(values, part_of, strict=True) if at == p) for p in range(parts))

    return Traffic(
        replicas=max(1, layout.world // (per_node * width * parts)),
        parts=parts,
        compute_seconds=slowest(compute),
        ring_bytes=tuple(moved * value for value in slowest(held)),
        messages=_messages(costs, [part_of[owner] for owner in owners]),
        num_micro_batches=work.num_micro_batches,
        exposed_ratio=1 / (layout.virtual_stages * costs.num_chunks) if work.overlap.data else 1.0,
        hides_messages=work.overlap.pipeline,
        width=width,
        tensor_seconds=slowest(tensor) if width > 1 else (),
    )


def _messages(costs: Costs, parts: list[int]) -> tuple[Message, ...]:
    """Between stages that lie on different nodes; ``parts`` of the stages, in their order."""
    work, layout = costs.work, costs.work.layout
    tokens = layout.micro_batch * work.model.sequence
    num_bytes = 2.0 * tokens * work.model.hidden * work.value_bytes / layout.tp
    pairs = Counter((min(pair), max(pair)) for pair in pairwise(parts) if pair[0] != pair[1])
    return tuple(Message(a, b, count * num_bytes) for (a, b), count in sorted(pairs.items()))
