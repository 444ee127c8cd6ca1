"""Seconds of the host: it launches a layer's operators, and may check what all ranks call.

The device computes meanwhile and waits only for what is longer, unless each operator blocks the host
(`FrameworkProfile.blocks_launches`). A check of a collective takes seconds for each rank of its group, in
which the host launches nothing (`Link.check_seconds`).
"""

from typing import Literal

import numpy as np

from myriad.planner.cost.collective_costs import group_along
from myriad.planner.cost.operator_costs import Number
from myriad.planner.cost.product_costs import LayerContext

__all__ = ["LayerRole", "host_seconds", "host_waits"]

LayerRole = Literal["embedding", "block", "head"]
_COLLECTIVES: dict[LayerRole, tuple[int, int]] = {"embedding": (1, 1), "block": (4, 6), "head": (4, 2)}
"""Tensor-parallel collectives in forward and backward. Those of the head are of its input, of its gradient,
and of each token's maximum, sum and logit."""
_FORWARD = 0.4
"""Share of a block's launches that its forward has."""


def host_seconds(context: LayerContext, role: LayerRole) -> tuple[Number, Number]:
    """Return the host's seconds to launch a layer's forward and backward."""
    launches = context.profile.host_block_seconds if role == "block" else 0.0
    checks = group_along(context.cluster, context.tp, 1.0).check_seconds
    check: Number = np.where(np.asarray(context.tp) > 1, checks, 0.0)
    forward, backward = _COLLECTIVES[role]
    return _FORWARD * launches + forward * check, (1 - _FORWARD) * launches + backward * check


def host_waits(
    context: LayerContext, role: LayerRole, forward: Number, backward: Number
) -> tuple[Number, Number]:
    """Return the seconds that a device waits in forward and backward for the host to launch a layer.
    ``forward``, ``backward``: seconds of the device."""
    host, host_back = host_seconds(context, role)
    if context.profile.blocks_launches:
        return host, host_back
    return np.maximum(0.0, host - forward), np.maximum(0.0, host_back - backward)
