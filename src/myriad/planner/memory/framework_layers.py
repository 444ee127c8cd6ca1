"""Bytes that blocks of other frameworks keep of one micro-batch on one rank.

Without a list of their values (`BlockValues`) they are those of Korthikanti et al. (arXiv 2205.05198,
sections 4 and 5), generalized to any widths; `myriad.planner.memory.layer_memory` has the formulas.
"""

from myriad.model.config import ModelConfig
from myriad.planner.cost.operator_costs import Number
from myriad.planner.cost.quantization_costs import form_bytes
from myriad.planner.memory.framework_memory import BlockValues
from myriad.planner.memory.micro_batch_shard import (
    MicroBatchShard,
    inner_width,
    key_width,
    ordered_tokens,
)
from myriad.planner.workload import FrameworkProfile, Recompute

__all__ = ["kept_of_values", "published_kept", "saved_of_experts"]


def kept_of_values(
    model: ModelConfig, profile: FrameworkProfile, values: BlockValues, layer: int, part: MicroBatchShard
) -> Number:
    """Return the kept bytes of a block of which the values are listed. Products' inputs in float8 or NVFP4
    take its bytes: of the stream all but norms' inputs, the input of the product down, and attention's
    output, which stays in the compute type too."""
    tokens, block = part.tokens(model), model.of_block(layer)
    own = tokens / (part.tp if profile.sequence_parallel else 1.0)
    queries, inner = model.heads * model.head_width, inner_width(block, part)
    cut = values.attention * 2 * (queries + key_width(model, part.tp))
    cut = cut + (model.up_matrices + values.inner) * inner
    whole = model.hidden * (values.stream * own + values.gathered * tokens)
    kept = part.value_bytes * (whole + tokens * cut / part.tp)
    if not (profile.quantization and profile.keeps_quantized_inputs):
        return kept
    form = form_bytes(profile.quantization)
    entering = model.hidden * own * (values.stream - model.num_branch_norms) + tokens / part.tp * inner
    return kept - (part.value_bytes - form) * entering + form * tokens / part.tp * queries


def published_kept(
    model: ModelConfig, profile: FrameworkProfile, layer: int, part: MicroBatchShard, recompute: Recompute
) -> Number:
    """Return the kept bytes of another framework's block. Elements are sharded among ranks, or whole without
    sequence parallelism."""
    value, tokens, hidden = part.value_bytes, part.tokens(model), model.hidden
    apart = tokens / (part.tp if profile.sequence_parallel else 1.0)
    if recompute == "full":
        return value * apart * hidden
    # Norm inputs, product inputs, and dropout masks of one byte.
    stream = apart * hidden * (value * (model.num_branch_norms + model.num_gathers) + model.num_scatters)
    ups = model.up_matrices
    queries, keys = model.heads * model.head_width, key_width(model, part.tp)
    latent = 0 if model.latent is None else model.latent.down_rows + model.latent.normed
    active = model.of_block(layer).active_width
    inner = tokens / part.tp * value * (2 * queries + 2 * keys + (ups + 1) * active)
    inner = inner + tokens * value * latent
    if profile.attention != "plain" or recompute == "selective":
        return stream + inner
    # Softmax outputs before and after dropout, and a mask of one byte.
    scores = part.micro_batch * model.sequence**2 * model.heads / part.tp
    return stream + inner + scores * (2 * value + 1)


def saved_of_experts(
    model: ModelConfig, profile: FrameworkProfile, part: MicroBatchShard, recompute: Recompute
) -> Number:
    """Return the bytes of a block with experts that a framework does not keep and Myriad does: results of
    experts (`FrameworkMemory.keeps_results`), and of inputs of their products what float8 or NVFP4 saves.
    ``model``: with the widths of this block."""
    if model.experts is None:
        return 0.0
    copies = ordered_tokens(model, part)
    saved = 0.0 if profile.memory.keeps_results else part.value_bytes * copies
    if profile.quantization and profile.keeps_quantized_inputs:
        inner = model.experts_per_token * model.expert_width / part.expert_tp
        entering = copies + (part.routed_tokens(model) * inner if recompute == "none" else 0.0)
        saved = saved + (part.value_bytes - form_bytes(profile.quantization)) * entering
    return saved
