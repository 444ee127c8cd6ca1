"""Which node holds which part of the rank grid: an order of nodes, `slot` by slot (`traffic`), with the least
T (`fabric`), where links, switches or nodes make orders differ.

    at most 8 nodes   every order
    more              starts, the best of them improved by exchanges, and the best of that; a start is better
                      than none of these only if nodes in their own order are: then they stay

    starts            nodes as they are, the best first, the worst first; laid in blocks of a replicas by b
                      parts, block by block. So a x b nodes under one switch keep their traffic there, and
                      nodes that are alike meet in one ring (a = all replicas) or one pipeline (b = all parts)
    exchanges         two nodes, one of them in the slowest pipeline or ring, or two whole parts; the best of
                      some hundreds, and with it the next best as long as they help together
    restarts          up to 64 nodes: the best order with some exchanges at random, improved again; kept where
                      better (iterated local search): several exchanges at once may help where no single one
                      does

Nodes that are alike are never exchanged. What is tried is drawn with a fixed seed: the same question has the
same answer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np

from myriad.planner.cluster import Cluster
from myriad.planner.fabric import Fabric, Numbers, Orders
from myriad.planner.traffic import Traffic

__all__ = ["Placement", "block_orders", "every_order", "place", "placed_seconds", "searched"]

_EVERY_ORDER = 8
"""Up to so many nodes."""
_ALL_PAIRS = 64
"""Up to so many nodes, all exchanges are tried; with more, `_SOME` in each round."""
_SOME = 384
_TOGETHER = 24
_STARTS = 6
_FIRST_ROUNDS, _ROUNDS = 6, 200
"""Of each start; of the best of them afterwards."""
_RESTARTS, _RANDOM_EXCHANGES = 24, 3
_FAILURES = 3
"""Rounds in turn without an exchange that helps, where not all are tried."""
_SLOTS = 30_000_000
"""That are judged in all, on all orders: some seconds."""
_CLEARLY = 1 - 1e-9


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


def placed_seconds(
    cluster: Cluster, traffic: Traffic, order: Sequence[int], slower: Mapping[int, float] | None = None
) -> float:
    """What an order of nodes decides of an iteration; ``slower``: factor on the compute of single nodes."""
    return float(Fabric(cluster, traffic, slower or {}).judge(np.array([order])).seconds[0])


def place(
    cluster: Cluster,
    traffic: Traffic,
    slower: Mapping[int, float] | None = None,
    nodes: Sequence[int] | None = None,
) -> Placement:
    """The best order found; nodes in their own order where none is better. ``nodes``: those that the job has,
    by whose places in this list the order is; off: the cluster's."""
    fabric = Fabric(cluster, traffic, slower or {}, nodes)
    count = traffic.num_slots
    plain = np.arange(count)
    least = first = float(fabric.judge(plain[None]).seconds[0])
    best = plain
    if count == len(fabric.slower) and fabric.kinds.max() > 0:
        order = every_order(fabric) if count <= _EVERY_ORDER else searched(fabric)
        seconds = float(fabric.judge(order[None]).seconds[0])
        if seconds < least * _CLEARLY:
            best, least = order, seconds
    return Placement(tuple(map(int, best)), least, first)


def every_order(fabric: Fabric) -> Orders:
    """The best of all."""
    orders = np.array(list(permutations(range(fabric.traffic.num_slots))))
    result: Orders = orders[np.argmin(fabric.judge(orders).seconds)]
    return result


def searched(fabric: Fabric) -> Orders:
    """The best that starts and exchanges find."""
    starts = np.array(list(block_orders(fabric)))
    slopes = fabric.judge(starts).slope
    search = _Search(fabric)
    ends = [search.improved(order, _FIRST_ROUNDS) for order in starts[np.argsort(slopes)[:_STARTS]]]
    last = search.improved(ends[int(np.argmin(fabric.judge(np.array(ends)).slope))], _ROUNDS)
    found = np.array([*ends, last])
    best: Orders = found[np.argmin(fabric.judge(found).seconds)]
    return search.restarted(best) if search.tries_all else best


def block_orders(fabric: Fabric) -> Iterator[Orders]:
    """The starts of the head."""
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
    """The n-th of the nodes into the n-th of the slots."""
    order = np.empty_like(slots)
    order[slots] = nodes
    return order


def _blocks(traffic: Traffic, a: int, b: int) -> Orders:
    """Slots of each block of a replicas by b parts, replica by replica."""
    shape = (traffic.replicas // a, a, traffic.parts // b, b, traffic.width)
    slots = np.arange(traffic.num_slots).reshape(shape).transpose(0, 2, 1, 3, 4)
    result: Orders = slots.reshape(-1, a * b * traffic.width)
    return result


def _best_where_heavy(traffic: Traffic, blocks: Orders, best_first: Orders) -> tuple[Orders, Orders]:
    """Slots and nodes: each block has the nodes that come next, the best of them on the heaviest parts."""
    part = blocks // traffic.width % traffic.parts
    heavy_first = np.argsort(-_weights(traffic)[part], axis=1, kind="stable")
    rank = np.argsort(best_first)
    nodes = best_first[np.sort(rank.reshape(blocks.shape), axis=1)]
    return np.take_along_axis(blocks, heavy_first, axis=1).reshape(-1), nodes.reshape(-1)


def _divisors(number: int) -> list[int]:
    return [one for one in range(1, number + 1) if number % one == 0]


class _Search:
    """Exchanges, as long as there are slots left to judge."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric, self.kinds = fabric, fabric.kinds
        self.columns = _exchanged_parts(fabric.traffic)
        self.draw, self.left = np.random.default_rng(0), _SLOTS
        self.tries_all = fabric.traffic.num_slots <= _ALL_PAIRS

    def improved(self, order: Orders, rounds: int) -> Orders:
        """Until none of those that are tried helps."""
        slope, failures = float(self.fabric.judge(order[None]).slope[0]), 0
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
        least = float(self.fabric.judge(order[None]).seconds[0])
        for _ in range(_RESTARTS):
            changed = order.copy()
            for i, j in self.draw.integers(0, len(order), (_RANDOM_EXCHANGES, 2)):
                changed[[i, j]] = changed[[j, i]]
            changed = self.improved(changed, _FIRST_ROUNDS)
            seconds = float(self.fabric.judge(changed[None]).seconds[0])
            if seconds < least * _CLEARLY:
                order, least = changed, seconds
            if self.left < 0:
                break
        return order

    def _round(self, order: Orders, slope: float) -> tuple[Orders, Numbers]:
        """Orders and their slopes: single exchanges, then the best of them together."""
        pairs = self._pairs(order)
        single = np.concatenate([_with_each(order, pairs), order[self.columns]])
        slopes = self._slopes(single)
        ranked = np.argsort(slopes[: len(pairs)])[:_TOGETHER]
        together = _with_all(order, pairs[ranked[slopes[ranked] < slope * _CLEARLY]])
        return np.concatenate([single, together]), np.concatenate([slopes, self._slopes(together)])

    def _slopes(self, orders: Orders) -> Numbers:
        self.left -= orders.size
        return self.fabric.judge(orders).slope if len(orders) else np.empty(0)

    def _pairs(self, order: Orders) -> Orders:
        """Of slots whose nodes differ."""
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
    """The first two, the first three, ..."""
    made, now = [], order.copy()
    for number, (i, j) in enumerate(pairs):
        now[[i, j]] = now[[j, i]]
        if number:
            made.append(now.copy())
    return np.array(made, dtype=np.intp).reshape(-1, len(order))


def _weights(traffic: Traffic) -> Numbers:
    """Bytes of each part that go over its nodes' links while the pipeline waits."""
    weights = np.array(traffic.ring_bytes) * traffic.exposed_ratio
    for message in traffic.messages:
        count = 1 if traffic.hides_messages else traffic.num_micro_batches
        weights[[message.source, message.target]] += count * message.num_bytes
    return weights


def _exchanged_parts(traffic: Traffic) -> Orders:
    """Slots with two whole parts exchanged, or two neighbours where there are many."""
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
