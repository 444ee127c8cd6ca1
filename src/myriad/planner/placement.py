"""Which node holds which part of the rank grid.

The grid's axes are dp pp cp tp ep, the last one fastest, so consecutive ranks fill a node, and a *slot* (the
n-th node's worth of ranks) is some pipeline ranks of some replica. Free is which node of the cluster is the
n-th: an order of nodes. Two kinds of traffic leave a node: messages between pipeline neighbours, and rings of
data parallelism. Through a switch's uplinks go the messages whose ends lie on both sides, and each ring once,
however many of its members lie below, as rings are made:

    a x b nodes under a switch    a replicas of b pipeline ranks: a ring has 1/a of its members' uplinks for
                                  itself, a message 1/b

    T = the slowest pipeline + messages x their slowest hop + the slowest ring x its exposed share

Nodes of other links (`Cluster.unequal`) and slow ones are put where T is least: by blocks a x b, then by
exchanging pairs of nodes until none helps.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from myriad.planner.cluster import Cluster
from myriad.planner.costs import Costs

__all__ = ["Placement", "Traffic", "place", "placed_seconds", "traffic_of"]

_FEW_NODES = 64
"""Up to so many, pairs are exchanged."""


@dataclass(frozen=True)
class Traffic:
    """What nodes do, by slot: ``slots = replicas x parts``; a part is a node's share of a pipeline."""

    replicas: int
    """Replicas that lie on nodes of their own."""
    parts: int
    """Nodes of one pipeline."""
    compute_seconds: tuple[float, ...]
    """Of each part, for one micro-batch."""
    num_micro_batches: int
    message_bytes: float
    """Of one accelerator, from part to part, for one micro-batch, both ways."""
    ring_bytes: float
    """Of one accelerator, in an iteration."""
    exposed_ratio: float = 1.0
    """Share of the rings' time that nothing hides."""


@dataclass(frozen=True)
class Placement:
    """``order[n]``: the node that holds slot n."""

    order: tuple[int, ...]
    seconds: float
    """What the order decides of an iteration."""
    plain_seconds: float
    """The same with nodes in their own order."""

    @property
    def is_plain(self) -> bool:
        """Whether nodes are in their own order."""
        return self.order == tuple(range(len(self.order)))


def traffic_of(costs: Costs) -> Traffic:
    """Of a layout whose tensor-parallel groups and nodes fill each other evenly."""
    layout, per_node = costs.work.layout, costs.cluster.accelerators_per_node
    pipeline = layout.pp * layout.tp
    parts = max(1, pipeline // per_node)
    replicas = max(1, layout.world // per_node // parts)
    seconds = [0.0] * parts
    owners = [stage % layout.pp for stage in range(layout.num_stages) for _ in range(costs.num_chunks)]
    for stage, owner in zip(costs.stages, owners, strict=True):
        part = min(parts - 1, owner * parts // layout.pp)
        seconds[part] += (stage.forward + stage.backward) * parts / layout.pp
    work = costs.work
    tokens = layout.micro_batch * work.model.sequence * work.model.hidden
    held = max(stage.parameters for stage in costs.stages) * layout.virtual_stages * costs.num_chunks
    hidden = work.overlap.data
    return Traffic(
        replicas=replicas,
        parts=parts,
        compute_seconds=tuple(seconds),
        num_micro_batches=work.num_micro_batches,
        message_bytes=2.0 * layout.virtual_stages * tokens * work.value_bytes / layout.tp,
        ring_bytes=held * (work.value_bytes + work.practice.gradient_bytes) if layout.dp > 1 else 0.0,
        exposed_ratio=1 / (layout.virtual_stages * costs.num_chunks) if hidden else 1.0,
    )


def placed_seconds(
    cluster: Cluster, traffic: Traffic, order: Sequence[int], slower: Mapping[int, float] | None = None
) -> float:
    """What an order of nodes decides of an iteration; ``slower``: factor on the compute of single nodes."""
    return _Fabric(cluster, traffic, dict(slower or {})).seconds(order)


class _Fabric:
    def __init__(self, cluster: Cluster, traffic: Traffic, slower: dict[int, float]) -> None:
        self.traffic, self.slower = traffic, slower
        self.per_switch = cluster.nodes_per_switch or cluster.nodes
        rate = cluster.link("network").bytes_per_second * cluster.ratio("network")
        self.rates = [rate] * cluster.nodes
        for group in cluster.unequal:
            for node in group.nodes:
                self.rates[node] = group.bytes_per_second * cluster.ratio("network")
        self.uplinks = cluster.link("spine").bytes_per_second * cluster.ratio("spine") * self.per_switch

    def seconds(self, order: Sequence[int]) -> float:
        """Three terms, each the slowest of its kind."""
        traffic = self.traffic
        pipelines = [
            order[first : first + traffic.parts]
            for first in range(0, traffic.replicas * traffic.parts, traffic.parts)
        ]
        crossing = self._crossing(pipelines)
        compute = max(self._compute(nodes) for nodes in pipelines)
        hops = [self._hop(a, b, crossing) for nodes in pipelines for a, b in pairwise(nodes)]
        messages = traffic.num_micro_batches * traffic.message_bytes * max(hops, default=0.0)
        rings = [[nodes[part] for nodes in pipelines] for part in range(traffic.parts)]
        ring = max((self._ring(nodes, crossing) for nodes in rings), default=0.0)
        return compute + messages + traffic.exposed_ratio * traffic.ring_bytes * ring

    def _compute(self, nodes: Sequence[int]) -> float:
        times = self.traffic.compute_seconds
        own = [time * self.slower.get(node, 1.0) for time, node in zip(times, nodes, strict=True)]
        return (self.traffic.num_micro_batches - 1) * max(own) + sum(own)

    def _crossing(self, pipelines: Sequence[Sequence[int]]) -> dict[int, int]:
        """Flows through each switch's uplinks, of accelerators' share of a node."""
        flows: defaultdict[int, int] = defaultdict(int)
        for nodes in pipelines:
            for a, b in pairwise(nodes):
                if self._switch(a) != self._switch(b):
                    flows[self._switch(a)] += 1
                    flows[self._switch(b)] += 1
        for part in range(self.traffic.parts):
            below = {self._switch(nodes[part]) for nodes in pipelines}
            for switch in below if len(below) > 1 else ():
                flows[switch] += 1
        return flows

    def _switch(self, node: int) -> int:
        return node // self.per_switch

    def _hop(self, a: int, b: int, crossing: Mapping[int, int]) -> float:
        """Seconds for each byte."""
        rate = min(self.rates[a], self.rates[b])
        if self._switch(a) != self._switch(b):
            busiest = max(crossing[self._switch(a)], crossing[self._switch(b)])
            rate = min(rate, self.uplinks / busiest)
        return 1 / rate

    def _ring(self, nodes: Sequence[int], crossing: Mapping[int, int]) -> float:
        if len(nodes) < 2:
            return 0.0
        rate = min(self.rates[node] for node in nodes)
        switches = {self._switch(node) for node in nodes}
        if len(switches) > 1:
            rate = min(rate, *(self.uplinks / crossing[switch] for switch in switches))
        return (len(nodes) - 1) / len(nodes) / rate


def place(cluster: Cluster, traffic: Traffic, slower: Mapping[int, float] | None = None) -> Placement:
    """The best order found; nodes in their own order where none is better."""
    fabric = _Fabric(cluster, traffic, dict(slower or {}))
    count = traffic.replicas * traffic.parts
    plain = tuple(range(count))
    alike = cluster.links.spine is None and not cluster.unequal and not slower
    best, least = plain, fabric.seconds(plain)
    first = least
    for start in () if alike or count > cluster.nodes else _starts(fabric, traffic):
        order = _exchanged(fabric, start) if count <= _FEW_NODES else start
        seconds = fabric.seconds(order)
        if seconds < least * (1 - 1e-9):
            best, least = tuple(order), seconds
    return Placement(best, least, first)


def _starts(fabric: _Fabric, traffic: Traffic) -> Iterator[list[int]]:
    """Blocks of a replicas and b parts, filled node by node, with odd nodes first or last."""
    count = traffic.replicas * traffic.parts
    every = list(range(count))
    odd = sorted(every, key=lambda node: (fabric.slower.get(node, 1.0), -fabric.rates[node]))
    for nodes in (every, odd, odd[::-1]):
        for a in range(1, min(fabric.per_switch, traffic.replicas) + 1):
            if traffic.replicas % a == 0:
                for b in range(1, traffic.parts + 1):
                    if traffic.parts % b == 0 and a * b <= fabric.per_switch:
                        yield _blocks(nodes, traffic, a, b)


def _blocks(nodes: Sequence[int], traffic: Traffic, a: int, b: int) -> list[int]:
    order = [0] * len(nodes)
    place = iter(nodes)
    for replica in range(0, traffic.replicas, a):
        for part in range(0, traffic.parts, b):
            for row in range(replica, replica + a):
                for column in range(part, part + b):
                    order[row * traffic.parts + column] = next(place)
    return order


def _exchanged(fabric: _Fabric, order: Sequence[int]) -> list[int]:
    """Pairs exchanged until none makes it quicker."""
    best, least = list(order), fabric.seconds(order)
    improved = True
    while improved:
        improved = False
        for i, j in combinations(range(len(best)), 2):
            best[i], best[j] = best[j], best[i]
            seconds = fabric.seconds(best)
            if seconds < least * (1 - 1e-9):
                least, improved = seconds, True
            else:
                best[i], best[j] = best[j], best[i]
    return best
