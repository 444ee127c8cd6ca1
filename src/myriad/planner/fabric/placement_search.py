"""Search for the node order, `slot` by slot, with the least T (`placement_cost`), where links, switches or
nodes make orders differ.

    at most 8 nodes   every order
    more              starts, the best of them improved by exchanges, then restarts from the best; the order
                      of node numbers stays unless a result is better

    starts            nodes in order, the best first, the worst first; placed in blocks of a replicas by b
                      parts, block by block. So a x b nodes under one switch keep their traffic there, and
                      similar nodes share one ring (a = all replicas) or one pipeline (b = all parts)
    exchanges         two nodes, one of them in the slowest pipeline or ring, or two whole parts; the best of
                      some hundreds, and with it the next best as long as they improve it together
    restarts          up to 64 nodes: the best order with some random exchanges, improved again and kept if
                      better (iterated local search): several exchanges at once may help where no single one
                      does

Nodes of one kind are never exchanged. Random choices use a fixed seed, so the same input gives the same
result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from myriad.planner.cluster_config import Cluster
from myriad.planner.fabric.placement_cost import Numbers, Orders, PlacementCost, SlotTraffic

__all__ = [
    "PlacementResult",
    "block_orders",
    "place_nodes",
    "placed_seconds",
    "search_orders",
    "try_every_order",
]

_EVERY_ORDER = 8
"""Largest number of nodes for which every order is tried."""
_ALL_PAIRS = 64
"""Largest number of nodes for which all exchanges are tried; with more, `_SOME` in each round."""
_SOME = 384
_TOGETHER = 24
_STARTS = 6
_FIRST_ROUNDS, _ROUNDS = 6, 200
"""Rounds of exchanges for each start, and for the best of them afterwards."""
_RESTARTS, _RANDOM_EXCHANGES = 24, 3
_FAILURES = 3
"""Consecutive rounds without improvement that end the search, where not all exchanges are tried."""
_SLOTS = 30_000_000
"""Largest number of slots that are scored over all orders: some seconds."""
_CLEARLY = 1 - 1e-9


@dataclass(frozen=True)
class PlacementResult:
    """The result of a placement search; ``order[n]`` is the node in slot n."""

    order: tuple[int, ...]
    seconds: float
    """Seconds of an iteration that depend on the order."""
    plain_seconds: float
    """The same seconds with nodes in the order of their numbers."""

    @property
    def is_plain(self) -> bool:
        """Whether the nodes are in the order of their numbers."""
        return self.order == tuple(range(len(self.order)))


def placed_seconds(
    cluster: Cluster, traffic: SlotTraffic, order: Sequence[int], slower: Mapping[int, float] | None = None
) -> float:
    """Return the seconds of an iteration that depend on the node order. ``slower``: factor on the compute of
    single nodes."""
    return float(PlacementCost(cluster, traffic, slower or {}).score(np.array([order])).seconds[0])


def place_nodes(
    cluster: Cluster,
    traffic: SlotTraffic,
    slower: Mapping[int, float] | None = None,
    nodes: Sequence[int] | None = None,
) -> PlacementResult:
    """Return the best order found, or the order of node numbers where none is better. ``nodes``: the job's
    nodes, and the order holds indices into this list; off: the cluster's nodes."""
    fabric = PlacementCost(cluster, traffic, slower or {}, nodes)
    count = traffic.num_slots
    plain = np.arange(count)
    least = first = float(fabric.score(plain[None]).seconds[0])
    best = plain
    if count == len(fabric.slower) and fabric.kinds.max() > 0:
        order = try_every_order(fabric) if count <= _EVERY_ORDER else search_orders(fabric)
        seconds = float(fabric.score(order[None]).seconds[0])
        if seconds < least * _CLEARLY:
            best, least = order, seconds
    return PlacementResult(tuple(map(int, best)), least, first)


def try_every_order(fabric: PlacementCost) -> Orders:
    """Return the best of all orders."""
    orders = np.array(list(permutations(range(fabric.traffic.num_slots))))
    result: Orders = orders[np.argmin(fabric.score(orders).seconds)]
    return result


def search_orders(fabric: PlacementCost) -> Orders:
    """Return the best order that starts, exchanges and restarts find."""
    starts = np.array(list(block_orders(fabric)))
    slopes = fabric.score(starts).slope
    search = _Search(fabric)
    ends = [search.improved(order, _FIRST_ROUNDS) for order in starts[np.argsort(slopes)[:_STARTS]]]
    last = search.improved(ends[int(np.argmin(fabric.score(np.array(ends)).slope))], _ROUNDS)
    found = np.array([*ends, last])
    best: Orders = found[np.argmin(fabric.score(found).seconds)]
    return search.restarted(best) if search.tries_all else best


def block_orders(fabric: PlacementCost) -> Iterator[Orders]:
    """Yield the start orders."""
    traffic = fabric.traffic
    plain = np.arange(traffic.num_slots)
    best_first = np.lexsort((plain, fabric.slower, fabric.inverse))
    for a in _divisors(traffic.replicas):
        for b in _divisors(traffic.parts):
            blocks = _blocks(traffic, a, b)
            for nodes in (plain, best_first, best_first[::-1]):
                yield _laid(blocks.reshape(-1), nodes)
            yield _laid(*_best_where_heavy(traffic, blocks, best_first))


def _laid(slots: Orders, nodes: Orders) -> Orders:
    """Return the order with the n-th of the nodes in the n-th of the slots."""
    order = np.empty_like(slots)
    order[slots] = nodes
    return order


def _blocks(traffic: SlotTraffic, a: int, b: int) -> Orders:
    """Return the slots of each block of a replicas by b parts, replica by replica."""
    shape = (traffic.replicas // a, a, traffic.parts // b, b, traffic.width)
    slots = np.arange(traffic.num_slots).reshape(shape).transpose(0, 2, 1, 3, 4)
    result: Orders = slots.reshape(-1, a * b * traffic.width)
    return result


def _best_where_heavy(traffic: SlotTraffic, blocks: Orders, best_first: Orders) -> tuple[Orders, Orders]:
    """Return slots and nodes such that each block takes the next nodes, with the best of them on the heaviest
    parts."""
    part = blocks // traffic.width % traffic.parts
    heavy_first = np.argsort(-_weights(traffic)[part], axis=1, kind="stable")
    rank = np.argsort(best_first)
    nodes = best_first[np.sort(rank.reshape(blocks.shape), axis=1)]
    return np.take_along_axis(blocks, heavy_first, axis=1).reshape(-1), nodes.reshape(-1)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


class _Search:
    """Improves orders by exchanges until the budget of scored slots is used up."""

    def __init__(self, fabric: PlacementCost) -> None:
        self.fabric, self.kinds = fabric, fabric.kinds
        self.columns = _exchanged_parts(fabric.traffic)
        self.draw, self.left = np.random.default_rng(0), _SLOTS
        self.tries_all = fabric.traffic.num_slots <= _ALL_PAIRS

    def improved(self, order: Orders, rounds: int) -> Orders:
        """Exchange nodes until no exchange that is tried improves the order."""
        slope, failures = float(self.fabric.score(order[None]).slope[0]), 0
        for _ in range(rounds):
            tried, slopes = self._round(order, slope)
            if len(slopes) and slopes.min() < slope * _CLEARLY:
                order, slope, failures = tried[np.argmin(slopes)], float(slopes.min()), 0
            else:
                failures += 1
            if self.left < 0 or failures >= (1 if self.tries_all else _FAILURES):
                break
        return order

    def restarted(self, order: Orders) -> Orders:
        """Return the best order that restarts near ``order`` find, or ``order`` itself."""
        least = float(self.fabric.score(order[None]).seconds[0])
        for _ in range(_RESTARTS):
            changed = order.copy()
            for i, j in self.draw.integers(0, len(order), (_RANDOM_EXCHANGES, 2)):
                changed[[i, j]] = changed[[j, i]]
            changed = self.improved(changed, _FIRST_ROUNDS)
            seconds = float(self.fabric.score(changed[None]).seconds[0])
            if seconds < least * _CLEARLY:
                order, least = changed, seconds
            if self.left < 0:
                break
        return order

    def _round(self, order: Orders, slope: float) -> tuple[Orders, Numbers]:
        """Return orders and their slopes: single exchanges first, then the best of them combined."""
        pairs = self._pairs(order)
        single = np.concatenate([_with_each(order, pairs), order[self.columns]])
        slopes = self._slopes(single)
        ranked = np.argsort(slopes[: len(pairs)])[:_TOGETHER]
        together = _with_all(order, pairs[ranked[slopes[ranked] < slope * _CLEARLY]])
        return np.concatenate([single, together]), np.concatenate([slopes, self._slopes(together)])

    def _slopes(self, orders: Orders) -> Numbers:
        self.left -= orders.size
        return self.fabric.score(orders).slope if len(orders) else np.empty(0)

    def _pairs(self, order: Orders) -> Orders:
        """Return pairs of slots whose nodes differ."""
        count = len(order)
        if self.tries_all:
            pairs = np.array(list(combinations(range(count), 2)))
        else:
            critical, half = np.flatnonzero(self.fabric.critical(order)), _SOME // 2
            ones = [self.draw.choice(critical, half), self.draw.integers(0, count, half)]
            pairs = np.stack([np.concatenate(ones), self.draw.integers(0, count, 2 * half)], axis=1)
        held = self.kinds[order[pairs]]
        result: Orders = pairs[held[:, 0] != held[:, 1]]
        return result


def _with_each(order: Orders, pairs: Orders) -> Orders:
    orders = np.repeat(order[None], len(pairs), axis=0)
    rows = np.arange(len(pairs))
    orders[rows, pairs[:, 0]], orders[rows, pairs[:, 1]] = order[pairs[:, 1]], order[pairs[:, 0]]
    return orders


def _with_all(order: Orders, pairs: Orders) -> Orders:
    """Return the orders with the first two exchanges, the first three, and so on."""
    made, now = [], order.copy()
    for number, (i, j) in enumerate(pairs):
        now[[i, j]] = now[[j, i]]
        if number:
            made.append(now.copy())
    return np.array(made, dtype=np.intp).reshape(-1, len(order))


def _weights(traffic: SlotTraffic) -> Numbers:
    """Return the bytes of each part on its nodes' links while the pipeline waits."""
    weights = np.array(traffic.ring_bytes) * traffic.exposed_ratio
    for message in traffic.messages:
        count = 1 if traffic.hides_messages else traffic.num_micro_batches
        weights[[message.source, message.target]] += count * message.num_bytes
    return weights


def _exchanged_parts(traffic: SlotTraffic) -> Orders:
    """Return slot orders with two whole parts exchanged, or with two neighbouring parts where there are
    many."""
    slots = np.arange(traffic.num_slots).reshape(traffic.replicas, traffic.parts, traffic.width)
    pairs = list(combinations(range(traffic.parts), 2))
    if len(pairs) > _SOME:
        pairs = [(part, part + 1) for part in range(traffic.parts - 1)]
    made = []
    for i, j in pairs:
        parts = list(range(traffic.parts))
        parts[i], parts[j] = j, i
        made.append(slots[:, parts].reshape(-1))
    return np.array(made, dtype=np.intp).reshape(-1, traffic.num_slots)
