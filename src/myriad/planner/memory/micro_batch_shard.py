"""One rank's share of a micro-batch, and the widths and tokens that its layers have.

Every function takes numbers or arrays.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from myriad.model.config import ModelConfig
from myriad.planner.cost.operator_costs import Number

__all__ = [
    "MicroBatchShard",
    "inner_width",
    "key_width",
    "mlp_ranks",
    "mlp_tokens",
    "of_each_degree",
    "ordered_tokens",
]


@dataclass(frozen=True)
class MicroBatchShard:
    """One rank's share of a micro-batch; numbers or arrays."""

    tp: Number
    micro_batch: Number
    value_bytes: int
    on_cpu: bool = False
    ep: int = 1
    """Ranks that share the experts of a block."""
    etp: int | None = None
    """Tensor-parallel ranks that share the width of each expert; ``None``: all of them."""
    expert_load: float = 1.0
    """Tokens that the busiest of the ranks that share experts gets over those of the mean rank."""
    context: tuple[int, int] = (1, 1)
    """Ranks, or rows of ranks, of a ring that shares sequences, and ranks of a row. A model has as many
    positions as one of them."""

    def tokens(self, model: ModelConfig) -> Number:
        return self.micro_batch * model.sequence

    @property
    def expert_tp(self) -> Number:
        """Tensor-parallel ranks that share the width of each expert."""
        return self.tp if self.etp is None else float(self.etp)

    @property
    def etp_groups(self) -> Number:
        """Groups of tensor-parallel ranks of which each shares the width of experts."""
        return self.tp / self.expert_tp

    @property
    def folds_experts(self) -> bool:
        """Whether experts lie on other ranks than the other parameters of their block."""
        return self.ep > 1 or bool(np.any(np.asarray(self.etp_groups) > 1))

    def routed_tokens(self, model: ModelConfig) -> Number:
        """Return the tokens that the rank routes to experts: those of its group's part of the sequence."""
        return self.tokens(model) / self.etp_groups


def of_each_degree(tp: Number, function: Callable[[int], float]) -> Number:
    """Return a function of the tensor-parallel degree for one degree or an array of them."""
    if np.ndim(tp) == 0:
        return float(function(int(tp)))
    return np.array([float(function(int(one))) for one in np.ravel(tp)]).reshape(np.shape(tp))


def ordered_tokens(model: ModelConfig, part: MicroBatchShard) -> Number:
    """Return the number of values of the tokens that a block orders by expert, one copy for each expert of a
    token."""
    copies = model.experts_per_token if model.experts else 0
    return part.routed_tokens(model) * model.hidden * copies


def inner_width(model: ModelConfig, part: MicroBatchShard) -> float:
    """Return the inner width of a block's MLPs that compute a token, by the tokens of the busiest rank."""
    routed = 0 if model.experts is None else model.experts_per_token * model.expert_width
    return model.active_width + (part.expert_load - 1) * routed


def mlp_tokens(model: ModelConfig, part: MicroBatchShard) -> Number:
    """Return the tokens that enter a block's MLP on a rank: all of them, also for shared experts, or those
    that it routes."""
    if model.experts is None or model.shared_experts:
        return part.tokens(model)
    return part.routed_tokens(model)


def mlp_ranks(model: ModelConfig, part: MicroBatchShard) -> Number:
    """Return the tensor-parallel ranks that share a block's MLP, or each of its routed experts."""
    return part.tp if model.experts is None else part.expert_tp


def key_width(model: ModelConfig, tp: Number) -> Number:
    """Return the width of keys on all tensor-parallel ranks, copies included."""
    return model.num_kv_heads * model.head_width * of_each_degree(tp, model.kv_copies)
