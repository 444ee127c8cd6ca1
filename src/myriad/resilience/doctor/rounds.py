"""Who is to blame among N nodes: rounds of tests between pairs, and what follows from them. Whoever calls
has the nodes measure.

    round 1   neighbours, in the order given     (0 1) (2 3) (4 5) (6 7)      3 is bad: (2 3) is slow
    round 2   each suspect with a good helper    (2 0) (3 1)                  (3 1) is slow: 2 is cleared
    round 3   the suspect with a third one       (3 4)                        slow with 2, 1 and 4: node 3

Neighbours come first because nodes are listed as they hang on switches: the first round is then all-reduces
under the same switch. All pairs of a round measure at once and are disjoint, so that no node shares its
link.

Rules. A pair is slow below 0.8 of what good pairs reach (`expected`, or the third best of all tests, in
large clusters the upper decile, which bad nodes do not reach). One good test clears a node: noise makes a
test slow, never fast. A node that no test clears is named after three slow ones with three cleared partners;
a slow pair of two cleared nodes is tested again, and if it is slow twice the link between them is named. A
slow test is repeated at once, and the better rate counts. So one test that was slow by chance, anywhere,
names no node (from four nodes on).

A bad node is named in 3 rounds (4 where it sits out the first, as the last of an odd number does), however
many nodes there are, and several bad ones in as many. A bad link that is not its end's fault (one path
through the fabric) is seen only by the pair that uses it: `links` tests every pair, N - 1 rounds for even
N, which is the least there can be, since a round tests N / 2 of the N (N - 1) / 2 pairs.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from myriad.resilience.doctor.item import SLOW_RATIO

__all__ = ["Culprit", "Measure", "Outcome", "Pair", "Rounds", "better", "find_culprits"]

Pair = tuple[int, int]
"""Two nodes, the smaller index first."""
Measure = Callable[[Sequence[Pair]], Mapping[Pair, float]]
"""Bytes per second of each pair, measured at once; 0 where none arrived; left out is 0."""

_PARTNERS = 3
"""Cleared ones that a node must be slow with."""
_HOPELESS_ROUNDS = 3
_THIRD = 2
_NOTHING = 1.0
"""Bytes per second that are none."""
_LEAST_SCREENED = 6
"""Nodes for three pairs in the first round, so that one is good beside a bad node and a test that was slow by
chance; with fewer, all pairs are tested before anything is concluded."""


@dataclass(frozen=True)
class Culprit:
    """A node, a link between two, two nodes of which nobody can tell which (there is no third), or all."""

    kind: Literal["node", "link", "pair", "all"]
    nodes: tuple[int, ...]
    bytes_per_second: float
    """The median of the tests that speak against it."""
    tests: int


@dataclass(frozen=True)
class Outcome:
    """After the last round."""

    culprits: Sequence[Culprit]
    expected: float
    """Bytes per second that good pairs reach."""
    rounds: int
    tests: int
    cleared: Sequence[int] = ()
    """Nodes that some good test has cleared."""


@dataclass(frozen=True)
class _Known:
    """What all tests so far say together."""

    reference: float
    cleared: Sequence[int]
    slow_links: Sequence[Pair]
    """Between cleared nodes."""


class Rounds:
    """Gives the pairs of each round and takes what they measured, until there is nothing left to ask."""

    def __init__(self, num_nodes: int, *, expected: float | None = None, links: bool = False) -> None:
        self._num_nodes, self._expected, self._links = num_nodes, expected, links
        self._rates: dict[Pair, list[float]] = defaultdict(list)
        self._queue: list[list[Pair]] = []
        self._rounds = 0
        self._known: _Known | None = None
        if num_nodes < _LEAST_SCREENED:
            self._start_links(range(num_nodes))

    def next_round(self) -> list[Pair]:
        """Disjoint pairs to measure at once; none: `outcome` is final."""
        if not self._rates and not self._queue:
            return [(node, node + 1) for node in range(0, self._num_nodes - 1, 2)]
        while self._queue:
            if pairs := [pair for pair in self._queue.pop(0) if pair not in self._rates]:
                return pairs
        pairs = self._ask_again()
        pairs += self._ask_suspects({node for pair in pairs for node in pair})
        if not pairs and self._links and self._num_nodes >= _LEAST_SCREENED:
            self._links = False
            self._start_links(self._know().cleared)
            return self.next_round()
        return pairs

    def report(self, pairs: Sequence[Pair], rates: Mapping[Pair, float]) -> None:
        """What a round has measured."""
        self._rounds, self._known = self._rounds + 1, None
        for pair in pairs:
            self._rates[pair].append(rates.get(pair, 0.0))

    def doubtful(self, rates: Mapping[Pair, float]) -> list[Pair]:
        """Pairs of this round to measure once more before `report`, the better rate to count: other work on a
        node makes many tests of a round slow at once, more than the rules can forgive."""
        good = self._expected or max([*rates.values(), self._know().reference], default=0.0)
        return [pair for pair, rate in rates.items() if rate < SLOW_RATIO * good]

    def outcome(self) -> Outcome:
        """What is known so far."""
        culprits = [self._accuse("node", (node,)) for node in self._named()]
        culprits += [
            self._accuse("link", pair) for pair in self._know().slow_links if len(self._rates[pair]) > 1
        ]
        if not self._know().cleared and self._rates:
            kind: Literal["pair", "all"] = "pair" if self._num_nodes == 2 else "all"
            culprits = [self._accuse(kind, tuple(range(self._num_nodes)))]
        tests = sum(map(len, self._rates.values()))
        return Outcome(culprits, self._know().reference, self._rounds, tests, self._know().cleared)

    # What the tests say

    def _know(self) -> "_Known":
        """Of all tests; made anew after each round, when it is asked for."""
        if self._known is None:
            reference = self._expected
            if reference is None:
                rates = sorted((rate for found in self._rates.values() for rate in found), reverse=True)
                place = max(min(len(rates) // 4, _THIRD), len(rates) // 10)
                reference = rates[place] if rates else 0.0
            least = max(SLOW_RATIO * reference, _NOTHING)
            slow = [pair for pair, rates in self._rates.items() if max(rates) < least]
            good = self._rates.keys() - slow
            cleared = {node for pair in good for node in pair}
            links = [pair for pair in slow if cleared.issuperset(pair)]
            self._known = _Known(reference, sorted(cleared), links)
        return self._known

    def _named(self) -> list[int]:
        cleared = set(self._know().cleared)
        needed = min(_PARTNERS, len(cleared))
        others = [node for node in range(self._num_nodes) if node not in cleared]
        return [node for node in others if needed and len(self._partners(node) & cleared) >= needed]

    def _partners(self, node: int) -> set[int]:
        return {other for pair in self._rates if node in pair for other in pair} - {node}

    def _accuse(self, kind: Literal["node", "link", "pair", "all"], nodes: tuple[int, ...]) -> Culprit:
        meant = [pair for pair in self._rates if (set(nodes) <= set(pair) if kind != "all" else True)]
        rates = [rate for pair in meant for rate in self._rates[pair]]
        return Culprit(kind, nodes, statistics.median(rates), len(rates))

    # What to ask next

    def _ask_again(self) -> list[Pair]:
        """Slow pairs of good nodes, a second time."""
        busy: set[int] = set()
        pairs = []
        for pair in self._know().slow_links:
            if len(self._rates[pair]) == 1 and not busy & set(pair):
                pairs.append(pair)
                busy |= set(pair)
        return pairs

    def _ask_suspects(self, busy: set[int]) -> list[Pair]:
        """Each that is neither cleared nor named with a cleared one that it has not met, or with another
        suspect when there is none."""
        cleared, named = self._know().cleared, set(self._named())
        if not cleared and (self._rounds >= _HOPELESS_ROUNDS or self._num_nodes < _LEAST_SCREENED):
            return []
        suspects = [node for node in range(self._num_nodes) if node not in named.union(cleared)]
        pairs = []
        for suspect in suspects:
            if suspect in busy:
                continue
            taken = busy | self._partners(suspect) | {suspect}
            free = (node for node in (*cleared, *suspects) if node not in taken)
            if (helper := next(free, None)) is not None:
                pairs.append(_pair(suspect, helper))
                busy |= {suspect, helper}
        return pairs

    def _start_links(self, nodes: Iterable[int]) -> None:
        """All pairs, as a tournament: one stays, the others go round."""
        circle: list[int | None] = list(nodes)
        circle += [None] * (len(circle) % 2)
        for _ in range(len(circle) - 1):
            facing = zip(circle, reversed(circle[len(circle) // 2 :]), strict=False)
            self._queue.append([_pair(a, b) for a, b in facing if a is not None and b is not None])
            circle.insert(1, circle.pop())


def _pair(a: int, b: int) -> Pair:
    return min(a, b), max(a, b)


def find_culprits(
    num_nodes: int, measure: Measure, *, expected: float | None = None, links: bool = False
) -> Outcome:
    """All rounds. ``expected``: bytes per second of a good pair, if it is known; ``links``: every pair."""
    rounds = Rounds(num_nodes, expected=expected, links=links)
    while pairs := rounds.next_round():
        rates = measure(pairs)
        if doubtful := rounds.doubtful(rates):
            rates = better(rates, measure(doubtful))
        rounds.report(pairs, rates)
    return rounds.outcome()


def better(first: Mapping[Pair, float], second: Mapping[Pair, float]) -> Mapping[Pair, float]:
    """The higher rate of each pair: noise makes a test slow, never fast."""
    return {pair: max(rate, second.get(pair, 0.0)) for pair, rate in first.items()}
