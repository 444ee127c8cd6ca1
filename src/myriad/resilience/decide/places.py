"""Which nodes have which ranks in the next attempt. Pure.

full       before     there        next
0 1 2 3    0 1 2 3    0 2 3 4      0 4 2 3    as many nodes: no rank of another node moves
0 1 2 3    0 1 2 3    1 2          2 1        fewer, two a replica: each has the half that it had
0 1 2 3    2 1        0 1 2 3      0 1 2 3    more: all in their old places
0 1 2      0 4        0 1 2 4      0 4 1      who has the state comes first
"""

from collections.abc import Sequence

__all__ = ["place_nodes"]


def place_nodes(
    full: Sequence[int], before: Sequence[int], there: Sequence[int], needed: int, per_replica: int
) -> tuple[list[int], list[int]]:
    """Nodes in the order of their ranks, as many as are needed, and those that are left over. ``full``: of
    the last attempt with all replicas; ``before``: of the last one. ``per_replica``: nodes that a replica
    fills. What a node's ranks load is then mostly in its memory."""
    if needed == len(before):
        others = [one for one in there if one not in before]
        return [one if one in there else others.pop(0) for one in before], others
    place_of = {one: place for nodes in (before, full) for place, one in enumerate(nodes)}
    present = set(there)
    waiting = [one for one in dict.fromkeys((*place_of, *there)) if one in present]
    each, columns = needed // per_replica, list[list[int]]()
    for part in range(per_replica):
        fits = [one for one in waiting if one in place_of and place_of[one] % per_replica == part]
        columns.append(fits[:each])
        taken = set(columns[-1])
        waiting = [one for one in waiting if one not in taken]
    for column in columns:
        missing = each - len(column)
        column += waiting[:missing]
        waiting = waiting[missing:]
        column.sort(key=lambda one: place_of.get(one, len(place_of)))
    return [columns[place % per_replica][place // per_replica] for place in range(needed)], waiting
