"""Covering arrays: few rows of values in which every allowed pair of values occurs.

A fault that needs two features at once shows in any row that has both, so rows that hold every pair find it.
Their number grows with the product of the two longest lists of values, not with the number of combinations.
The method is greedy, as in AETG (Cohen et al., IEEE TSE 23(7), 1997): each row starts from a pair that no row
has yet, and takes the values that add most new pairs.

Constraints are a function that gives all reasons why it refuses a row. A pair is refused if no change of the
other values makes a row with it allowed; the search changes only values that remove a reason, whatever others
they bring.
"""

import random
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

__all__ = ["CoveringArray", "Pair", "Row", "covering_array", "pairs_of"]

Row = dict[str, Hashable]
Pair = tuple[str, Hashable, str, Hashable]
"""Two parameters with a value each, in the parameters' order."""
Reasons = Callable[[Row], Sequence[str]]
"""The reasons why a row is refused; none if it is allowed. The same reason always has the same name."""

_MOST_REPAIRS = 4
"""Largest number of other values that a pair may need."""
_CANDIDATES = 6


@dataclass(frozen=True)
class CoveringArray:
    """Rows, and the pairs that no allowed row has."""

    rows: list[Row]
    covered: set[Pair]
    refused: set[Pair]


def pairs_of(row: Mapping[str, Hashable]) -> Iterator[Pair]:
    """All pairs of values of a row."""
    for (a, x), (b, y) in combinations(row.items(), 2):
        yield a, x, b, y


def covering_array(
    values: Mapping[str, Sequence[Hashable]],
    reasons: Reasons,
    *,
    cost: Callable[[Row], float] = lambda row: 1.0,
    seed: int = 0,
) -> CoveringArray:
    """Return rows that cover all allowed pairs. The first value of every parameter makes an allowed row. Of
    several candidates the row with the most new pairs for its cost is taken."""
    search = _Search(values, reasons, random.Random(seed))
    base = {name: choices[0] for name, choices in values.items()}
    assert not search.reasons(base), "the first value of every parameter must make an allowed row"
    while search.missing:
        starts = {pair: search.row_with(pair) for pair in search.some_missing()}
        filled = [search.fill(row, pair) for pair, row in starts.items() if row is not None]
        if filled:
            search.take(max(filled, key=lambda row: search.gain(row) / cost(row)))
    return CoveringArray(search.rows, search.covered, search.refused)


class _Search:
    def __init__(
        self, values: Mapping[str, Sequence[Hashable]], reasons: Reasons, order: random.Random
    ) -> None:
        self.values = values
        self.rows: list[Row] = []
        self.covered: set[Pair] = set()
        self.refused: set[Pair] = set()
        self.missing: dict[Pair, None] = {
            (a, x, b, y): None for a, b in combinations(values, 2) for x in values[a] for y in values[b]
        }
        self._place = {name: number for number, name in enumerate(values)}
        self._reasons = reasons
        self._known: dict[tuple[Hashable, ...], Sequence[str]] = {}
        self._order = order

    def reasons(self, row: Row) -> Sequence[str]:
        """The reasons why a row is refused, each row asked once."""
        key = tuple(row.values())
        if key not in self._known:
            self._known[key] = self._reasons(row)
        return self._known[key]

    def some_missing(self) -> list[Pair]:
        """The first missing pair, and others at random: candidates to start a row from."""
        missing = list(self.missing)
        others = self._order.sample(missing, min(_CANDIDATES - 1, len(missing)))
        return [*dict.fromkeys((missing[0], *others))]

    def row_with(self, pair: Pair) -> Row | None:
        """An allowed row with a pair; ``None`` if there is none, and then the pair counts as refused."""
        a, x, b, y = pair
        base = {name: choices[0] for name, choices in self.values.items()}
        for repairs in range(_MOST_REPAIRS + 1):
            found = self._repaired(base | {a: x, b: y}, frozenset((a, b)), repairs)
            if found is not None:
                return found
        del self.missing[pair]
        self.refused.add(pair)
        return None

    def _repaired(self, row: Row, pinned: frozenset[str], repairs: int) -> Row | None:
        """The row with at most so many other values changed that it is allowed; ``None`` if none is."""
        reasons = self.reasons(row)
        if not reasons:
            return row
        if repairs == 0:
            return None
        for name, choices in self.values.items():
            for value in choices if name not in pinned else ():
                changed = row | {name: value}
                if value != row[name] and reasons[0] not in self.reasons(changed):
                    found = self._repaired(changed, pinned | {name}, repairs - 1)
                    if found is not None:
                        return found
        return None

    def fill(self, row: Row, pair: Pair) -> Row:
        """Change values, never the pair's, as long as that adds new pairs and the row stays allowed."""
        improved = True
        while improved:
            improved = False
            free = [name for name in self.values if name not in (pair[0], pair[2])]
            self._order.shuffle(free)
            for name in free:
                best = self._best_value(row, name)
                improved |= best != row[name]
                row = row | {name: best}
        return row

    def _best_value(self, row: Row, name: str) -> Hashable:
        gains = {value: self._gain_of(row, name, value) for value in self.values[name]}
        for value in sorted(gains, key=lambda value: -gains[value]):
            if gains[value] <= gains[row[name]]:
                break
            if not self.reasons(row | {name: value}):
                return value
        return row[name]

    def _gain_of(self, row: Row, name: str, value: Hashable) -> int:
        """Number of missing pairs that a row has with this value of one parameter."""
        place = self._place[name]
        return sum(
            ((name, value, other, own) if place < self._place[other] else (other, own, name, value))
            in self.missing
            for other, own in row.items()
            if other != name
        )

    def gain(self, row: Row) -> int:
        """Number of missing pairs of a row."""
        return sum(pair in self.missing for pair in pairs_of(row))

    def take(self, row: Row) -> None:
        """Add a row to the array; its pairs are no longer missing."""
        self.rows.append(row)
        for pair in pairs_of(row):
            self.covered.add(pair)
            self.missing.pop(pair, None)
