"""The rank of a process in the grid, if the job orders the nodes. This module does not import torch.

A launcher numbers ranks node by node, and nodes in its own order (torchrun: --node-rank; Slurm: its list of
hosts). ``comm.node_order`` lists these nodes in the order in which the grid fills them:

    launcher   node 0: ranks 0 1   node 1: ranks 2 3   node 2: ranks 4 5        node_order [2, 0, 1]
    grid       node 0: ranks 2 3   node 1: ranks 4 5   node 2: ranks 0 1

Only the grid changes. The store is still served by the launcher's rank 0, whose address all ranks have, and
devices are assigned by the local rank.
"""

import os
from collections.abc import Sequence

from myriad.comm.config import CommConfig
from myriad.errors import BadInputError

__all__ = ["check_node_order", "grid_rank"]


def check_node_order(order: Sequence[int] | None, world: int) -> None:
    """Raise `BadInputError` unless the order lists each of the equal nodes of ``world`` ranks once."""
    if order is None:
        return
    count = len(order)
    if count == 0 or world % count:
        raise BadInputError("comm.node_order", count, f"as many nodes as divide the {world} ranks")
    for node in order:
        if not 0 <= node < count:
            allowed = f"each of the {count} nodes once, 0 to {count - 1}"
            raise BadInputError("comm.node_order", f"... {node} ...", allowed)
    if len(set(order)) < count:
        twice = next(node for place, node in enumerate(order) if node in order[:place])
        missing = min(set(range(count)).difference(order))
        allowed = f"each of the {count} nodes once: {twice} is listed twice, {missing} is missing"
        raise BadInputError("comm.node_order", f"... {twice} ...", allowed)


def grid_rank(comm: CommConfig, world: int) -> int:
    """Return this process's rank in the grid, from the launcher's variables.

    On one machine all ranks are on one node, and the order has no effect. Raises `BadInputError` if the
    launcher started other nodes.
    """
    rank, local_world = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", world))
    order = comm.node_order
    if order is None or local_world == world:
        return rank
    node, local_rank = divmod(rank, local_world)
    if local_world * len(order) != world:
        allowed = f"{len(order)} nodes of {world // len(order)} ranks; the launcher made one of {local_world}"
        raise BadInputError("comm.node_order", f"{len(order)} nodes", allowed)
    if local_rank != int(os.environ.get("LOCAL_RANK", local_rank)):
        allowed = f"needs ranks that are numbered node by node; rank {rank} is another one on its node"
        raise BadInputError("comm.node_order", f"{len(order)} nodes", allowed)
    return order.index(node) * local_world + local_rank
