"""Bytes that the fullest stage holds: what a layout needs of an accelerator's memory.

weights, gradients, optimizer   by parameters of a rank, cut among replicas as `zero` says
activations                     of a layer and micro-batch (arXiv 2205.05198, section 4), times layers of a
                                rank, times micro-batches in flight
"""

from dataclasses import dataclass
from math import erf

import numpy as np

from myriad.model.config import ModelConfig
from myriad.planner.operators import Number
from myriad.planner.work import Practice

__all__ = ["Memory", "fits_probability", "worst_stage_memory"]


@dataclass(frozen=True)
class Memory:
    """Of one rank, in bytes."""

    weights: Number
    gradients: Number
    optimizer: Number
    activations: Number
    logits: Number
    buffers: Number
    margin: Number

    @property
    def total(self) -> Number:
        """All of it."""
        held = self.weights + self.gradients + self.optimizer + self.activations
        return held + self.logits + self.buffers + self.margin

    @property
    def deviation(self) -> Number:
        """Standard deviation of the total."""
        return 0.03 * self.total


def fits_probability(memory: Memory, capacity_bytes: Number) -> Number:
    """Of not running out of memory."""
    away = (capacity_bytes - memory.total) / (np.sqrt(2) * memory.deviation)
    return np.vectorize(lambda x: 0.5 * (1 + erf(x)), otypes=[float])(away)


def worst_stage_memory(
    model: ModelConfig,
    practice: Practice,
    *,
    dp: Number,
    tp: Number,
    pp: Number,
    virtual_stages: Number,
    micro_batch: Number,
    num_micro_batches: Number,
    zero: Number,
    reduce_each: Number,
    recompute: Number,
    eager: Number,
    zero_bubble: Number,
    value_bytes: int,
) -> Memory:
    """All layout arguments are numbers or arrays of one length; ``recompute``: 0 none, 1 selective, 2
    full."""
    layers = np.ceil(model.layers / (pp * virtual_stages)) * virtual_stages
    rows = model.padded_vocabulary() * model.hidden
    block = (model.num_parameters(embeddings=False) - model.hidden) / model.layers
    parameters = (layers * block + rows) / tp
    shard = np.where(np.asarray(zero) >= 1, 1 / np.asarray(dp), 1.0)
    held = np.where(np.asarray(pp) == 1, 1.0, np.minimum(num_micro_batches, pp * (1 + np.asarray(eager))))
    extra = np.where(np.asarray(virtual_stages) > 1, (pp - 1) / (pp * virtual_stages), 0.0)
    tokens = micro_batch * model.sequence
    wide = tokens * model.hidden / tp
    kept = np.where(np.asarray(recompute) == 2, 2.0, np.where(np.asarray(recompute) == 1, 22.0, 34.0))
    activations = wide * kept * layers * (held + extra * pp) * value_bytes / 2
    return Memory(
        weights=parameters * value_bytes * np.where(np.asarray(zero) == 3, 1 / np.asarray(dp) + 0.1, 1.0),
        gradients=parameters * 4 * np.where(np.asarray(reduce_each) > 0, 1 / np.asarray(dp), 1.0),
        optimizer=parameters * 12 * shard,
        activations=activations,
        logits=tokens * model.padded_vocabulary() / tp * (value_bytes + 8),
        buffers=wide * 8.0 * np.ones_like(layers),
        margin=1.0 * 2**30 * np.ones_like(layers),
    )
