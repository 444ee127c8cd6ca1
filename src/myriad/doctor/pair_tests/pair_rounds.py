"""Find the bad node among N: rounds of tests between pairs, and what follows from them. The caller measures.

    round 1   neighbours, in the given order        (0 1) (2 3) (4 5) (6 7)      3 is bad: (2 3) is slow
    round 2   each suspect with a good helper       (2 0) (3 1)                  (3 1) is slow: 2 is cleared
    round 3   the suspect with a third one          (3 4)                        slow with 2, 1 and 4: node 3

Neighbours come first because nodes are listed by switch: the first round then stays under one switch. The
pairs of a round are disjoint and are measured at the same time, so that no two tests share a node's link.

Rules. A pair is slow below 0.8 of what good pairs reach (`expected`, or the third best of all tests, in large
clusters the upper decile, which bad nodes do not reach). One good test clears a node: noise makes a test
slow, never fast. A node that no test clears is named after three slow tests with three cleared partners. A
slow pair of two cleared nodes is tested again; if it is slow twice, the link between them is named. A slow
test is repeated at once, and the better rate counts. So one test that is slow by chance names no node (with
four nodes or more).

A bad node is named in 3 rounds, or 4 if it has no partner in the first round of an odd number of nodes, for
any number of nodes; several bad nodes take as many rounds. A bad link between good nodes shows only in the
pair that uses it: `links` tests every pair in N - 1 rounds for even N. That is the minimum, since a round
tests N / 2 of the N (N - 1) / 2 pairs.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from myriad.doctor.diagnosis import SLOW_RATIO

__all__ = ["Measure", "Pair", "PairRounds", "PairTestOutcome", "Suspect", "better", "find_suspects"]

Pair = tuple[int, int]
"""Two node indices, the smaller first."""
Measure = Callable[[Sequence[Pair]], Mapping[Pair, float]]
"""Bytes per second of each pair of a round, measured at the same time; a missing pair counts 0."""

_PARTNERS = 3
"""Cleared partners with which a named node must be slow."""
_HOPELESS_ROUNDS = 3
_THIRD = 2
_NO_CONNECTION = 1.0
"""Rates below this count as no connection."""
_LEAST_SCREENED = 6
"""With at least six nodes the first round has three pairs, so one of them is good beside a bad node and a
test that was slow by chance. With fewer nodes all pairs are tested before any conclusion."""


@dataclass(frozen=True)
class Suspect:
    """A bad node, a bad link between two nodes, two nodes of which either may be bad (there is no
    third), or all."""

    kind: Literal["node", "link", "pair", "all"]
    nodes: tuple[int, ...]
    bytes_per_second: float
    """Median rate of the tests that point to it."""
    tests: int


@dataclass(frozen=True)
class PairTestOutcome:
    """Result of all rounds."""

    culprits: Sequence[Suspect]
    expected: float
    """Bytes per second that good pairs reach."""
    rounds: int
    tests: int
    cleared: Sequence[int] = ()
    """Nodes with at least one good test."""


@dataclass(frozen=True)
class _Known:
    """Conclusions from all tests so far."""

    reference: float
    cleared: Sequence[int]
    slow_links: Sequence[Pair]
    """Slow pairs of cleared nodes."""


class PairRounds:
    """Chooses the pairs of each round and receives their rates, until no question is open."""

    def __init__(self, num_nodes: int, *, expected: float | None = None, links: bool = False) -> None:
        self._num_nodes, self._expected, self._links = num_nodes, expected, links
        self._rates: dict[Pair, list[float]] = defaultdict(list)
        self._queue: list[list[Pair]] = []
        self._rounds = 0
        self._known: _Known | None = None
        if num_nodes < _LEAST_SCREENED:
            self._start_links(range(num_nodes))

    def next_round(self) -> list[Pair]:
        """Return disjoint pairs to measure at the same time; empty: `outcome` is final."""
        if not self._rates and not self._queue:
            return [(node, node + 1) for node in range(0, self._num_nodes - 1, 2)]
        while self._queue:
            if pairs := [pair for pair in self._queue.pop(0) if pair not in self._rates]:
                return pairs
        pairs = self._repeat_slow_links()
        pairs += self._pair_suspects({node for pair in pairs for node in pair})
        if not pairs and self._links and self._num_nodes >= _LEAST_SCREENED:
            self._links = False
            self._start_links(self._knowledge().cleared)
            return self.next_round()
        return pairs

    def report(self, pairs: Sequence[Pair], rates: Mapping[Pair, float]) -> None:
        """Record the rates of a round."""
        self._rounds, self._known = self._rounds + 1, None
        for pair in pairs:
            self._rates[pair].append(rates.get(pair, 0.0))

    def doubtful(self, rates: Mapping[Pair, float]) -> list[Pair]:
        """Return the pairs of this round to measure once more before `report`; the better rate counts. Other
        work on a node makes many tests of a round slow at once, more than the rules tolerate."""
        good = self._expected or max([*rates.values(), self._knowledge().reference], default=0.0)
        return [pair for pair, rate in rates.items() if rate < SLOW_RATIO * good]

    def outcome(self) -> PairTestOutcome:
        """Return the result so far."""
        culprits = [self._suspect("node", (node,)) for node in self._named()]
        culprits += [
            self._suspect("link", pair) for pair in self._knowledge().slow_links if len(self._rates[pair]) > 1
        ]
        if not self._knowledge().cleared and self._rates:
            kind: Literal["pair", "all"] = "pair" if self._num_nodes == 2 else "all"
            culprits = [self._suspect(kind, tuple(range(self._num_nodes)))]
        tests = sum(map(len, self._rates.values()))
        return PairTestOutcome(
            culprits, self._knowledge().reference, self._rounds, tests, self._knowledge().cleared
        )

    # What the tests say

    def _knowledge(self) -> "_Known":
        """Conclude from all tests; cached until the next round."""
        if self._known is None:
            reference = self._expected
            if reference is None:
                rates = sorted((rate for found in self._rates.values() for rate in found), reverse=True)
                place = max(min(len(rates) // 4, _THIRD), len(rates) // 10)
                reference = rates[place] if rates else 0.0
            least = max(SLOW_RATIO * reference, _NO_CONNECTION)
            slow = [pair for pair, rates in self._rates.items() if max(rates) < least]
            good = self._rates.keys() - slow
            cleared = {node for pair in good for node in pair}
            links = [pair for pair in slow if cleared.issuperset(pair)]
            self._known = _Known(reference, sorted(cleared), links)
        return self._known

    def _named(self) -> list[int]:
        cleared = set(self._knowledge().cleared)
        needed = min(_PARTNERS, len(cleared))
        others = [node for node in range(self._num_nodes) if node not in cleared]
        return [node for node in others if needed and len(self._partners(node) & cleared) >= needed]

    def _partners(self, node: int) -> set[int]:
        return {other for pair in self._rates if node in pair for other in pair} - {node}

    def _suspect(self, kind: Literal["node", "link", "pair", "all"], nodes: tuple[int, ...]) -> Suspect:
        meant = [pair for pair in self._rates if (set(nodes) <= set(pair) if kind != "all" else True)]
        rates = [rate for pair in meant for rate in self._rates[pair]]
        return Suspect(kind, nodes, statistics.median(rates), len(rates))

    # What to ask next

    def _repeat_slow_links(self) -> list[Pair]:
        """Return slow pairs of cleared nodes for a second test."""
        busy: set[int] = set()
        pairs = []
        for pair in self._knowledge().slow_links:
            if len(self._rates[pair]) == 1 and not busy & set(pair):
                pairs.append(pair)
                busy |= set(pair)
        return pairs

    def _pair_suspects(self, busy: set[int]) -> list[Pair]:
        """Pair each undecided node with a cleared node that it has not met, or with another suspect if there
        is none."""
        cleared, named = self._knowledge().cleared, set(self._named())
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
        """Queue all pairs as a round-robin tournament: one node stays, the others rotate."""
        circle: list[int | None] = list(nodes)
        circle += [None] * (len(circle) % 2)
        for _ in range(len(circle) - 1):
            facing = zip(circle, reversed(circle[len(circle) // 2 :]), strict=False)
            self._queue.append([_pair(a, b) for a, b in facing if a is not None and b is not None])
            circle.insert(1, circle.pop())


def _pair(a: int, b: int) -> Pair:
    return min(a, b), max(a, b)


def find_suspects(
    num_nodes: int, measure: Measure, *, expected: float | None = None, links: bool = False
) -> PairTestOutcome:
    """Run all rounds. ``expected``: bytes per second of a good pair, if known; ``links``: test every pair."""
    rounds = PairRounds(num_nodes, expected=expected, links=links)
    while pairs := rounds.next_round():
        rates = measure(pairs)
        if doubtful := rounds.doubtful(rates):
            rates = better(rates, measure(doubtful))
        rounds.report(pairs, rates)
    return rounds.outcome()


def better(first: Mapping[Pair, float], second: Mapping[Pair, float]) -> Mapping[Pair, float]:
    """Return the higher rate of each pair: noise makes a test slow, never fast."""
    return {pair: max(rate, second.get(pair, 0.0)) for pair, rate in first.items()}
