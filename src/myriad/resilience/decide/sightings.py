"""What the ranks of an attempt were seen to do, kept so that a look at all of them is cheap.

    beat of a node (8 ranks) ──► kept; of them, those that can matter for a deadline:   2 or 3 rows a node
                                 the least idle, the slowest, one of each phase
    ten times a second       ◄── those of all nodes

A deadline asks for the least idle time, for the slowest step and for the phases there are: over these few
rows it comes to the same as over all, and of 12,288 ranks nobody looks at 12,288 rows ten times a second.
Rows are in the order of the placement.
"""

from collections.abc import Container, Mapping, Sequence

from myriad.resilience.facts import RankSeen

__all__ = ["Sightings"]

_Placement = Mapping[int, tuple[int, ...]]


class Sightings:
    """Of an attempt."""

    def __init__(self) -> None:
        self._ranks: dict[int, dict[int, RankSeen]] = {}
        self._few: dict[int, Sequence[RankSeen]] = {}
        """Of the nodes that told of all their ranks; made when it is asked for."""
        self._all_few: list[RankSeen] | None = None
        self.has_news = False
        """Of ranks, since this was last set to False."""

    def heard(self, node: int, ranks: Sequence[RankSeen]) -> None:
        """All that it knows of its ranks."""
        self._ranks[node] = {one.rank: one for one in ranks}
        self.has_news |= bool(ranks)
        self._forget(node)

    def changed(self, node: int) -> None:
        """A rank there has ended."""
        self._forget(node)

    def drop(self, node: int) -> None:
        """It is not there any more, or has come back and has told nothing yet."""
        self._ranks.pop(node, None)
        self._forget(node)

    def _forget(self, node: int) -> None:
        self._few.pop(node, None)
        self._all_few = None

    def few(self, placement: _Placement, ended: Container[int]) -> list[RankSeen]:
        """Rows that stand for all ranks that live; none when a node has not told of all of its own."""
        if self._all_few is None:
            self._all_few = self._gather(placement, ended)
        return self._all_few

    def _gather(self, placement: _Placement, ended: Container[int]) -> list[RankSeen]:
        found: list[RankSeen] = []
        for node, ranks in placement.items():
            rows = self._few.get(node)
            if rows is None:
                living = self._living(node, ranks, ended)
                if living is None:
                    return []
                rows = self._few[node] = _few_of(living)
            found += rows
        return found

    def all(self, placement: _Placement, ended: Container[int]) -> list[RankSeen]:
        """Of every rank that lives; none when a node has not told of all of its own."""
        found: list[RankSeen] = []
        for node, ranks in placement.items():
            living = self._living(node, ranks, ended)
            if living is None:
                return []
            found += living
        return found

    def _living(self, node: int, ranks: tuple[int, ...], ended: Container[int]) -> Sequence[RankSeen] | None:
        """``None``: it has not told of all."""
        rows = self._ranks.get(node, {})
        living = [rows.get(rank) for rank in ranks if rank not in ended]
        return None if None in living else [one for one in living if one is not None]


def _few_of(rows: Sequence[RankSeen]) -> Sequence[RankSeen]:
    """In their order."""
    if len(rows) <= 1:
        return rows
    kept = {
        min(rows, key=lambda one: one.idle_seconds).rank,
        max(rows, key=lambda one: one.step_seconds).rank,
    }
    kinds: dict[tuple[str, bool], int] = {}
    for one in rows:
        kinds.setdefault((one.phase, not one.step_seconds), one.rank)
    kept.update(kinds.values())
    return [one for one in rows if one.rank in kept]
