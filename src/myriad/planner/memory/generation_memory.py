"""Bytes of a rank that generates texts during training (``eval.tasks``), above what it holds between steps.

    caches         of all texts, as many positions as a micro-batch has; and of one more text, whose next
                   token rounding may decide (`myriad.evaluation.greedy_texts`)
    one block      its caches once more, because new columns are joined to the old ones, and the larger of
      attention    keys and values of every query head; keys in float32, and as the product reads them; the
                   scores of the prompts that are read, twice in float32 and once in the compute type
      the rest     what an operator reads and writes for as many positions
    or the head    scores of the next tokens, in the compute type and in float32

It is an upper bound: texts may be shorter, and fewer. A rank that shares sequences with others
(``layout.cp``) generates whole texts, so that it has more positions here than in training. The forward passes
that score windows of requests need less than a training step, whose forward they are.
"""

from dataclasses import dataclass, replace
from functools import partial, reduce

import numpy as np

from myriad.model.config import ModelConfig
from myriad.model.generation_limits import MOST_NEXT_SCORES, SCORES_OF_HEAD, cached_values
from myriad.planner.cost.operator_costs import Number
from myriad.planner.cost.stage_layers import first_alike
from myriad.planner.memory.layer_memory import layer_bytes
from myriad.planner.memory.micro_batch_shard import MicroBatchShard, of_each_degree
from myriad.planner.workload import FrameworkProfile

__all__ = ["GenerationBytes", "generation_bytes", "whole_model"]

_ATTENTION_BYTES = 12
"""Bytes of one value of a head's keys in attention. In bfloat16: keys and values 2 each, float32 keys 4, and
their copy 4; in float32 the keys need no conversion, and keys, values and the copy have 4 each."""


@dataclass(frozen=True)
class GenerationBytes:
    """Bytes of generation on one rank; numbers or arrays."""

    of_block: Number
    """Bytes of the caches of one block."""
    in_block: Number
    """Peak of temporary bytes in a block."""
    in_head: Number

    def total(self, num_blocks: Number) -> Number:
        """Return the peak of a rank with so many blocks; every rank is counted with the head."""
        return num_blocks * self.of_block + np.maximum(self.in_block, self.in_head)


def generation_bytes(model: ModelConfig, profile: FrameworkProfile, part: MicroBatchShard) -> GenerationBytes:
    """Return the bytes of generation. ``model``: with the positions of whole sequences."""
    part = replace(part, context=(1, 1))
    positions = part.tokens(model)
    values = of_each_degree(part.tp, partial(cached_values, model))
    cached = (positions + model.sequence) * values * part.value_bytes
    width = model.head_width if model.latent is None else model.latent.key_value_rank + model.latent.rotated
    heads = model.heads / part.tp
    scores = np.minimum(positions * model.sequence, SCORES_OF_HEAD)
    if model.rotary_scaling.decisive_length(model.sequence):
        scores = np.maximum(scores, float(model.sequence) ** 2)
    score_bytes = 12 if model.has_capped_scores else 8 + (part.value_bytes if part.value_bytes < 4 else 0)
    attention = heads * (_ATTENTION_BYTES * positions * width + score_bytes * scores)
    blocks = (layer_bytes(model, profile, "block", layer, part, "full") for layer in {*first_alike(model)})
    rest = reduce(np.maximum, (one.forward for one in blocks))
    rows = np.maximum(np.minimum(positions / 2, MOST_NEXT_SCORES // model.vocabulary), 1)
    head = rows * of_each_degree(part.tp, model.vocabulary_rows) * (part.value_bytes + 4)
    return GenerationBytes(cached, cached + np.maximum(attention, rest), head)


def whole_model(model: ModelConfig, context: tuple[int, int]) -> ModelConfig:
    """Return the model with the positions of a whole sequence, from that with a rank's positions.
    ``context``: of `MicroBatchShard`."""
    return model.model_copy(update={"sequence": model.sequence * context[0] * context[1]})
