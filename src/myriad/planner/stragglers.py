"""Slow nodes and ranks, as a person names them, and which ranks of the pipelines they are.

    node=17:1.1x    all ranks of node 17 (from 0) compute 1.1 times as long
    rank=5:1.2x     rank 5 does, and with it all that share its matrices

Ranks fill nodes in order, or in that of `comm.node_order`; the grid's axes are ``dp pp cp tp ep``, the last
one fastest.
"""

import re
from collections.abc import Sequence

from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.units import format_ranges

__all__ = ["slower_lanes"]

_KEY = "--straggler"
_FORM = re.compile(r"(node|rank)=(\d+):(\d+(?:\.\d*)?|\.\d+)x?")


def slower_lanes(
    given: Sequence[str], layout: Layout, accelerators_per_node: int, order: Sequence[int] | None = None
) -> dict[tuple[int, int], float]:
    """Factor on the compute by (replica, pipeline rank); of several that hit one the largest. ``order``: the
    nodes that the job has, slot by slot; off: the first ones. Raises `BadInputError`."""
    found: dict[tuple[int, int], float] = {}
    for one in given:
        ranks, factor = _parse(one, layout, accelerators_per_node, order)
        for rank in ranks:
            lane = divmod(rank // (layout.cp * layout.tp * layout.ep), layout.pp)
            found[lane] = max(found.get(lane, 0.0), factor)
    return found


def _parse(given: str, layout: Layout, per_node: int, order: Sequence[int] | None) -> tuple[range, float]:
    match = _FORM.fullmatch(given)
    if match is None:
        raise BadInputError(_KEY, given, "node=NUMBER:FACTORx or rank=NUMBER:FACTORx, like node=17:1.1x")
    kind, number, factor = match[1], int(match[2]), float(match[3])
    if factor <= 0:
        raise BadInputError(_KEY, given, "the factor must be above 0")
    if kind == "node" and order is not None:
        if number not in order:
            raise BadInputError(_KEY, given, f"one of the job's nodes, {format_ranges(order)}")
        number = order.index(number)
    nodes = -(-layout.world // per_node)
    most = nodes if kind == "node" else layout.world
    if number >= most:
        where = f"the job's {layout.world} ranks are on {nodes} node{'s' * (nodes > 1)}"
        raise BadInputError(_KEY, given, f"{kind} 0 to {most - 1}: {where}")
    if kind == "rank":
        return range(number, number + 1), factor
    return range(number * per_node, min((number + 1) * per_node, layout.world)), factor
