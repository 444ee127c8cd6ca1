"""Seconds of the host: it launches a layer's operators, and may check what all ranks call.

The device computes meanwhile and waits only for what is longer, unless each operator blocks the host
(`FrameworkProfile.blocks_launches`). Experts that are multiplied one by one, and what converts their tokens
to float8, are launched one by one too. Captured graphs are launched at once. A check of a collective takes
seconds for each rank of its group, in which the host launches nothing (`Link.check_seconds`).
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


def host_seconds(context: LayerContext, role: LayerRole, num_experts: Number = 0.0) -> tuple[Number, Number]:
    """Return the host's seconds to launch a layer's forward and backward. ``num_experts``: those
    of a rank."""
    profile = context.profile
    launches: Number = profile.host_block_seconds if role == "block" else 0.0
    if num_experts:
        others = profile.host_routed_block_seconds + profile.host_quantized_seconds * (
            profile.quantization is not None
        )
        if profile.captures_attention:
            others = 0.0
        others += profile.host_chunk_seconds / context.blocks_per_chunk
        launches = others + num_experts * profile.host_expert_seconds
    if profile.cuda_graphs:
        launches = 0.0
    checks = group_along(context.cluster, context.tp, 1.0).check_seconds
    check: Number = np.where(np.asarray(context.tp) > 1, checks, 0.0)
    forward, backward = _COLLECTIVES[role]
    return _FORWARD * launches + forward * check, (1 - _FORWARD) * launches + backward * check


def host_waits(
    context: LayerContext, role: LayerRole, forward: Number, backward: Number, num_experts: Number = 0.0
) -> tuple[Number, Number]:
    """Return the seconds that a device waits in forward and backward for the host to launch a layer.
    ``forward``, ``backward``: seconds of the device."""
    host, host_back = host_seconds(context, role, num_experts)
    if context.profile.blocks_launches:
        return host, host_back
    return np.maximum(0.0, host - forward), np.maximum(0.0, host_back - backward)
