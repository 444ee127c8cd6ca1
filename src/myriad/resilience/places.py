"""Which nodes have which ranks in the next attempt. Pure.

0 1 2 3    node 1 is lost, 4 stands by      0 4 2 3     no rank of another node moves
0 1 2 3    two a replica, 0 and 3 are lost  2 1         each has the half of a replica that it had
0 1 2 3    0 and 3 are back                 0 1 2 3
"""

from collections.abc import Sequence

__all__ = ["place_nodes"]


def place_nodes(
    before: Sequence[int], there: Sequence[int], needed: int, per_replica: int
) -> tuple[list[int], list[int]]:
    """Nodes in the order of their ranks, as many as are needed or more, and those that are left over.
    ``before``: of the last attempt. Of a node that stays no rank moves; where there are fewer than before, it
    keeps its place within a replica: most of what its ranks load is then in its memory."""
    if needed >= len(before):
        kept, others = _fill_places(before, there)
        return [*kept, *others[: needed - len(before)]], others[needed - len(before) :]
    columns = [[one for one in before[place::per_replica] if one in there] for place in range(per_replica)]
    chosen = [(columns[place % per_replica] or [-1]).pop(0) for place in range(needed)]
    others = [one for one in dict.fromkeys((*before, *there)) if one in there and one not in chosen]
    return [others.pop(0) if one < 0 else one for one in chosen], others


def _fill_places(before: Sequence[int], there: Sequence[int]) -> tuple[list[int], list[int]]:
    """Nodes in the order of their ranks, and those that are left over. Where one of ``before`` is not there a
    spare takes its place, so that no rank of another node moves."""
    others = [number for number in there if number not in before]
    return [number if number in there else others.pop(0) for number in before], others
