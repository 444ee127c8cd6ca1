"""Seconds of the embedding and of the head, with the loss and prediction layers, for one micro-batch on one
rank."""

import numpy as np

from myriad.model.config import ModelConfig
from myriad.planner.cluster_config import Accelerator
from myriad.planner.cost.collective_costs import (
    all_gather_seconds,
    tensor_group,
)
from myriad.planner.cost.host_costs import host_waits
from myriad.planner.cost.layer_costs import LayerTimes, block_times
from myriad.planner.cost.operator_costs import (
    Number,
    TimeBreakdown,
    stream_seconds,
)
from myriad.planner.cost.product_costs import (
    LayerContext,
    three_passes,
)
from myriad.planner.cost.stage_layers import computed_pairs

__all__ = ["embedding_times", "head_times"]

_LOSS_FORWARD, _LOSS_BACKWARD = {True: 8.0, False: 30.0}, {True: 6.0, False: 14.0}
"""Bytes moved for each logit, by whether the loss is one operator. Otherwise logits are converted to float32,
and maximum, difference, exponential, sum and quotient each pass over them (Megatron-LM's
vocab_parallel_cross_entropy)."""


def embedding_times(model: ModelConfig, context: LayerContext) -> LayerTimes:
    """Return the seconds of the embedding: the lookup of rows and the reduce-scatter of partial sums."""
    tokens = context.micro_batch * model.sequence
    moved = tokens * model.hidden * context.value_bytes
    group = tensor_group(context.cluster, context.tp)
    comm = all_gather_seconds(group, moved)
    lookup = stream_seconds(context.accelerator, 4 * moved / context.tp + 2 * moved, 3)
    back = stream_seconds(context.accelerator, 4 * moved / context.tp + tokens * model.hidden * 8, 3)
    wait, wait_back = host_waits(context, "embedding", lookup + comm, back + comm)
    return LayerTimes(
        TimeBreakdown(memory=lookup, tensor=comm + wait),
        TimeBreakdown(tensor=comm + wait_back),
        TimeBreakdown(memory=back),
        TimeBreakdown(),
    )


def head_times(model: ModelConfig, context: LayerContext) -> LayerTimes:
    """Return the seconds of the head: norm, logits and the loss, which is computed in float32 together with
    the logits; and its prediction layers."""
    one = _loss_times(model, context)
    further = range(model.layers, model.layers + model.prediction_layers)
    return sum((_prediction_times(model, context, layer) + one for layer in further), one)


def _loss_times(model: ModelConfig, context: LayerContext) -> LayerTimes:
    tokens = context.micro_batch * model.sequence
    share = tokens / context.tp if context.profile.sequence_parallel else tokens
    rows = np.ceil(model.padded_vocabulary() / np.asarray(context.tp))
    products = three_passes(context, tokens, ((rows, float(model.hidden)),))
    value = context.value_bytes
    norm = 2 * share * model.hidden * value
    fused = context.profile.fused_loss
    scores, back = tokens * rows * _LOSS_FORWARD[fused], tokens * rows * _LOSS_BACKWARD[fused]
    group = tensor_group(context.cluster, context.tp)
    comm = all_gather_seconds(group, tokens * model.hidden * value)
    loss, loss_back = (
        _loss_seconds(context.accelerator, *passes) for passes in ((norm, scores, 6), (1.5 * norm, back, 4))
    )
    device = products[0] + loss + comm, products[1] + products[2] + loss_back + comm
    wait, wait_back = host_waits(context, "head", *device)
    return LayerTimes(
        TimeBreakdown(products[0], memory=loss, tensor=comm + wait),
        TimeBreakdown(products[1], memory=loss_back, tensor=comm + wait_back),
        TimeBreakdown(products[2]),
        TimeBreakdown(),
    )


def _prediction_times(model: ModelConfig, context: LayerContext, layer: int) -> LayerTimes:
    """Return the seconds of one prediction layer without its loss: a block, the lookup of its tokens, two
    norms and the projection of both, which each rank computes for its share of the sequence."""
    tokens = context.micro_batch * model.sequence
    share = tokens / context.tp if context.profile.sequence_parallel else tokens
    products = three_passes(context, share, ((float(model.hidden), 2.0 * model.hidden),))
    norms = 2 * share * model.hidden * context.value_bytes
    # Two norms read and write a stream each; concatenation does both with both.
    forward, backward = (stream_seconds(context.accelerator, n * norms, 3) for n in (4, 5))
    projected = LayerTimes(
        TimeBreakdown(products[0], memory=forward),
        TimeBreakdown(products[1], memory=backward),
        TimeBreakdown(products[2]),
        TimeBreakdown(),
    )
    pairs = computed_pairs(model, layer, context.context.num_ranks)
    block = block_times(model.of_block(layer), context, pairs, model.layer_window(layer))
    return embedding_times(model, context) + projected + block


def _loss_seconds(accelerator: Accelerator, norm: Number, scores: Number, num_operators: float) -> Number:
    """Return the seconds of the passes over a norm's values and the logits."""
    rate = accelerator.loss_bytes_per_second
    if rate is None:
        return stream_seconds(accelerator, norm + scores, num_operators)
    return stream_seconds(accelerator, norm, num_operators) + scores / rate
