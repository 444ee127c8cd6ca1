"""Bytes that a layer holds of one micro-batch on one rank: kept for its backward, and temporary.

    kept       from the layer's forward to its backward, its input included, its output not
    forward    temporary bytes above what is kept afterwards, at the forward's peak
    backward   temporary bytes above what was kept, at the backward's peak, incoming gradient included

The kept bytes of Myriad's own layers come from `myriad.model.activation_memory`, which is measured to the
byte; temporary bytes are counted operator by operator below. For other frameworks the kept bytes are those of
Korthikanti et al. (arXiv 2205.05198, sections 4 and 5), generalized to any widths. Their plain GPT with
dropout and two bytes a value has:

    s b h (34 + 5 a s/h)                 no parallelism (equation 1)
    s b h (10 + 24/t + 5 a s/(h t))      tensor (2)
    s b h/t (34 + 5 a s/h)               and sequence parallelism (4)
    s b h 34/t                           and selective recomputation: no scores (6); full: 2 s b h, once

Every function takes numbers or arrays. Legend: t tensor-parallel ranks, s sequence, b sequences of a
micro-batch, h hidden, a heads, f width of the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

import numpy as np

from myriad.kernels.ring_plan import received_positions
from myriad.model.activation_memory import LayerKind, kept_bytes_per_micro_batch, kept_bytes_per_token
from myriad.model.config import ModelConfig
from myriad.planner.cost.operator_costs import Number
from myriad.planner.cost.quantization_costs import form_bytes
from myriad.planner.memory.framework_memory import BlockValues
from myriad.planner.memory.micro_batch_shard import (
    MicroBatchShard,
    inner_width,
    key_width,
    mlp_ranks,
    mlp_tokens,
    of_each_degree,
    ordered_tokens,
)
from myriad.planner.workload import FrameworkProfile, Recompute

__all__ = [
    "RECOMPUTE",
    "LayerBytes",
    "is_myriad",
    "layer_bytes",
    "layer_elements",
    "message_bytes",
    "product_inputs",
    "softmax_block",
]

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
"""Recomputation modes, in the order of the numbers that encode them in arrays."""
_BLOCK, _MOST_KEYS = 64, 512
"""Limits of `myriad.kernels.attention_blocks`, which runs on a CPU in float32 and short spans."""
_LOGITS, _LOGITS_ON_CPU = 2**30, 2**24
"""Bytes of logits that exist at a time (`myriad.kernels.cross_entropy`)."""
_FEWEST_TOKENS = 512
_GPU_TILE_TOKENS = 256


@dataclass(frozen=True)
class LayerBytes:
    """Bytes of one layer for one micro-batch."""

    kept: Number
    forward: Number
    backward: Number


def is_myriad(profile: FrameworkProfile) -> bool:
    """Return whether the layers are Myriad's own."""
    return profile.attention != "plain" and profile.fused and profile.sequence_parallel


def message_bytes(model: ModelConfig, profile: FrameworkProfile, part: MicroBatchShard) -> Number:
    """Return the bytes of one activation or gradient between stages, on one rank."""
    whole = part.tokens(model) * model.hidden * part.value_bytes
    return whole / part.tp if profile.sequence_parallel else whole


def softmax_block(model: ModelConfig, layer: int, part: MicroBatchShard) -> int | None:
    """Return the number of query positions in a block whose softmax is kept; ``None``: the library's
    attention runs."""
    window = model.layer_window(layer) or model.sequence
    keys = min(model.sequence, window + 2 * _BLOCK)
    short = model.has_capped_scores or keys <= _MOST_KEYS
    fits = model.sequence % min(_BLOCK, model.sequence) == 0 and short
    whole = part.context == (1, 1)
    return _BLOCK if fits and whole and part.on_cpu and part.value_bytes == 4 else None


def layer_bytes(
    model: ModelConfig,
    profile: FrameworkProfile,
    kind: LayerKind,
    layer: int,
    part: MicroBatchShard,
    recompute: Recompute,
) -> LayerBytes:
    """Return the bytes of a layer. ``layer``: index of the block."""
    if recompute == "selective" and profile.selective_attention and profile.attention != "plain":
        recompute = "none"  # A flash kernel's scores are not there to be freed.
    if recompute == "full":
        return _again(model, profile, kind, layer, part)
    if recompute == "selective" and profile.selective_blocks is not None and kind == "block":
        none = layer_bytes(model, profile, kind, layer, part, "none")
        return _on_average(none, _again(model, profile, kind, layer, part), profile.selective_blocks)
    if kind == "embedding":
        return _embedding_held(model, profile, part)
    if kind == "head":
        return _head_held(model, profile, part, recompute)
    kept = _block_kept(model, profile, layer, part, recompute)
    return LayerBytes(kept, *_block_passing(model.of_block(layer), profile, part, recompute))


def _on_average(none: LayerBytes, full: LayerBytes, share: float) -> LayerBytes:
    """Return the bytes of blocks of which a share keeps only its input: the mean of what they keep, and the
    larger temporary bytes."""
    kept = (1 - share) * none.kept + share * full.kept
    return LayerBytes(kept, np.maximum(none.forward, full.forward), np.maximum(none.backward, full.backward))


def _again(
    model: ModelConfig, profile: FrameworkProfile, kind: LayerKind, layer: int, part: MicroBatchShard
) -> LayerBytes:
    """Return the bytes of a layer that keeps only its input. Its forward, without a graph, holds what one
    operator reads and writes. Before its backward it recomputes everything that it otherwise keeps."""
    none = layer_bytes(model, profile, kind, layer, part, "none")
    kept = 0.0 if kind == "embedding" else message_bytes(model, profile, part)
    forward = none.forward
    if kind == "block":
        ups, block = model.up_matrices, model.of_block(layer)
        value = part.value_bytes
        entering = mlp_tokens(block, part)
        inner = part.tokens(model) * (ups + 1) * inner_width(block, part) / part.tp
        forward = value * (2 * model.hidden * entering + inner) + ordered_tokens(block, part) * 2 * value
        forward = np.maximum(forward, value * 2 * model.hidden * part.tokens(model))  # of attention
    return LayerBytes(kept, forward, none.kept - kept + none.backward)


def _block_kept(
    model: ModelConfig, profile: FrameworkProfile, layer: int, part: MicroBatchShard, recompute: Recompute
) -> Number:
    values = profile.memory.block_values
    plain = model.latent is None and model.of_block(layer).experts is None
    if values is not None and recompute == "none" and plain:
        return _kept_of_values(model, profile, values, layer, part)
    if not is_myriad(profile):
        return _published_kept(model, profile, layer, part, recompute)
    block, apart = model.of_block(layer), replace(part, etp=1)
    if profile.gathers_arrived and part.ep > 1:
        # Of the copies of a rank's own part only the inputs of experts are gathered.
        own = _ours_kept(model, "block", layer, apart, recompute)
        copies = part.expert_load * ordered_tokens(block, part) * part.value_bytes
        return own + copies * (1 - 1 / part.expert_tp) - _saved_of_experts(block, profile, apart, recompute)
    own = _ours_kept(model, "block", layer, part, recompute)
    return own - _saved_of_experts(block, profile, part, recompute)


def _ours_kept(
    model: ModelConfig, kind: LayerKind, layer: int, part: MicroBatchShard, recompute: Recompute
) -> Number:
    """Return the kept bytes of Myriad's layer."""
    if kind == "head":
        layer = model.layers  # that of the first prediction layer
    block = None if kind == "embedding" else softmax_block(model, layer, part)

    def each(function: Callable[..., float]) -> Number:
        own = partial(
            function,
            model,
            kind,
            layer,
            bytes_per_value=part.value_bytes,
            recompute=recompute,
            softmax_block=block,
            context=part.context,
        )
        return of_each_degree(part.tp, lambda tp: own(tp=tp))

    tokens = part.tokens(model)
    per_token = partial(kept_bytes_per_token, ep=part.ep, etp=part.etp, expert_load=part.expert_load)
    return tokens * each(per_token) + each(kept_bytes_per_micro_batch)


def _kept_of_values(
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


def _published_kept(
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


def _saved_of_experts(
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


def _block_passing(
    model: ModelConfig, profile: FrameworkProfile, part: MicroBatchShard, recompute: Recompute
) -> tuple[Number, Number]:
    """Return the temporary bytes of a block in forward and backward. The forward's are the last branch's
    output before it is added. The backward's peak is in the MLP, which is differentiated first, or without a
    flash kernel in the scores."""
    value, tokens = part.value_bytes, part.tokens(model)
    stream = message_bytes(model, profile, part)
    whole = value * tokens * model.hidden
    inner = value * tokens * inner_width(model, part) / part.tp
    ups = model.up_matrices
    apart = profile.memory.gather_buffers == 0
    gathered = np.where((np.asarray(part.tp) > 1) & apart, whole, 0.0)
    of_mlp = mlp_tokens(model, part) / tokens
    again = inner if recompute == "selective" else 0.0
    product = _product_bytes(model.hidden * model.mlp_width / mlp_ranks(model, part), part)
    at_down = inner + again + product
    at_activation = inner * (ups + (1 if ups == 2 else 0)) + again
    entering = np.where(of_mlp * np.asarray(part.tp) > 1.5, of_mlp * gathered, 0.0)
    backward = stream + entering + np.maximum(at_down, at_activation)
    # Results of experts in the order of tokens, times their gates in float32; and their gradients.
    ordered = ordered_tokens(model, part)
    forward = entering + ordered * (value + 4) + np.maximum(of_mlp * whole, stream)
    forward = np.maximum(forward, whole + gathered)  # of attention
    backward = backward + ordered * (2 * value + 4)
    if model.latent is not None:
        # The gradients of padded queries, keys and values, and of the products that they were joined from.
        joined = model.qkv_width + model.heads * (model.head_width + model.latent.plain + model.latent.value)
        backward = np.maximum(backward, stream + gathered + value * tokens * joined / part.tp)
    if part.context != (1, 1):
        # On the way: keys and values in two buffers, and in the backward their float32 sums in two, or three
        # around a longer ring, beside the rank's own, and the float32 output or gradient of queries.
        width = model.heads * model.head_width
        own = tokens * 2 * key_width(model, part.tp) / part.tp
        travelling = own * _largest_message(model, part)
        wide = 4.0 * tokens * width / part.tp
        forward = np.maximum(forward, 2 * value * travelling + wide)
        sums = 12.0 if part.context[0] > 2 else 8.0
        backward = np.maximum(backward, stream + (2 * value + sums) * travelling + 4.0 * own + wide)
    if profile.attention == "plain":
        scores = part.micro_batch * model.sequence**2 * model.heads / part.tp * value
        backward = np.maximum(backward, stream + 2 * scores)
    return forward, backward


def _largest_message(model: ModelConfig, part: MicroBatchShard) -> float:
    """Return the largest size of what ranks that share sequences send at once, in shares of a rank."""
    ring, ulysses = part.context
    sequence = model.sequence * ring * ulysses
    windows = {model.layer_window(layer) for layer in range(model.layers)}
    received = (received_positions(sequence, window, ring) for window in windows)
    return max(1.0 if one is None else one * ring / sequence for one in received)


def _product_bytes(elements: Number, part: MicroBatchShard) -> Number:
    """Return the bytes of a weight's gradient before it is added to the float32 buffer: only bfloat16 on a
    CPU is not accumulated in place."""
    return elements * part.value_bytes if part.on_cpu and part.value_bytes < 4 else 0.0


def _embedding_held(model: ModelConfig, profile: FrameworkProfile, part: MicroBatchShard) -> LayerBytes:
    tokens = part.tokens(model)
    kept = _ours_kept(model, "embedding", 0, part, "none") if is_myriad(profile) else 8.0 * tokens
    whole = tokens * model.hidden * part.value_bytes
    # A CPU adds rows to the buffer in float32; a GPU writes the gradient of the whole table.
    wide = tokens * model.hidden * (4.0 if part.value_bytes == 2 else 0.0)
    if not part.on_cpu:
        wide = of_each_degree(part.tp, model.vocabulary_rows) * model.hidden * part.value_bytes
    gathered = np.where(np.asarray(part.tp) > 1, whole, 0.0)
    stream = message_bytes(model, profile, part)
    return LayerBytes(kept, gathered, stream + gathered + wide)


def _head_held(
    model: ModelConfig, profile: FrameworkProfile, part: MicroBatchShard, recompute: Recompute
) -> LayerBytes:
    """Return the bytes of the head. Myriad's computes its gradients in the forward, a chunk of tokens at a
    time. Others keep all logits in float32, and the product's input. Prediction layers are Myriad's only."""
    value, tokens = part.value_bytes, part.tokens(model)
    whole = value * tokens * model.hidden
    rows = of_each_degree(part.tp, model.vocabulary_rows)
    if not (is_myriad(profile) and profile.fused_loss):
        stream = message_bytes(model, profile, part)
        logits, memory = tokens * rows, profile.memory
        return LayerBytes(
            2 * stream + memory.logits_kept_bytes * logits,
            (memory.logits_forward_bytes + value - 2) * logits,
            (memory.logits_backward_bytes + value - 2) * logits,
        )
    kept = _ours_kept(model, "head", 0, part, recompute)
    several = np.asarray(part.tp) > 1
    limit = np.floor((_LOGITS_ON_CPU if part.on_cpu else _LOGITS) / (4 * rows))
    limit = limit if part.on_cpu else limit - limit % _GPU_TILE_TOKENS
    limit = np.where(several, np.minimum(limit, np.ceil(tokens / 2)), limit)
    chunk = np.minimum(np.maximum(_FEWEST_TOKENS, limit), tokens)
    logits = chunk * rows * (4.0 * np.where(several, 2.0, 1.0) + (value if value == 2 else 0.0))
    product = _product_bytes(rows * model.hidden, part)
    forward, backward = whole + logits + product, whole + np.where(several, whole, 0.0)
    if model.prediction_layers:  # their blocks run in the same forward and backward
        for block, _ in model.block_counts(range(model.layers, model.layers + model.prediction_layers)):
            in_block = _block_passing(block, profile, part, recompute)
            forward, backward = np.maximum(forward, in_block[0]), np.maximum(backward, in_block[1])
    return LayerBytes(kept, forward, backward)


def product_inputs(model: ModelConfig, layer: int, part: MicroBatchShard) -> Number:
    """Return the bytes that the weight products of block ``layer`` and one micro-batch still need after the
    gradient of its input is computed: inputs and gradients of the outputs."""
    model = model.of_block(layer)
    tokens = part.tokens(model) * part.value_bytes
    ups = model.up_matrices
    width, keys = model.heads * model.head_width, key_width(model, part.tp)
    inner = (ups + 1) * inner_width(model, part)
    cut = 2 * width + 2 * keys + inner
    whole: Number = (model.num_gathers + model.num_scatters) * model.hidden
    if model.experts is not None:  # copies of tokens and the gradients of their results
        several = np.asarray(part.etp_groups) > 1
        if not model.shared_experts:  # else their input and its counterpart, of the whole sequence
            whole = np.where(several, 2 * model.hidden, whole)
        copies: Number = 2 * part.expert_load * model.experts_per_token
        # the router's input, and the gathered gradient of the results
        copies = copies + np.where(several, 1.0 + (np.asarray(part.expert_tp) > 1), 0.0)
        whole = whole + copies * model.hidden * part.routed_tokens(model) / part.tokens(model)
    if model.latent is not None:  # the latents' gradients, normalized latents, and the heads' gradients
        latent = model.latent
        whole = whole + latent.down_rows + latent.normed
        cut = model.heads * (latent.head + latent.plain + 2 * latent.value) + inner
    return tokens * (whole + cut / part.tp)


def layer_elements(model: ModelConfig, kind: LayerKind, tp: Number, layer: int = 0) -> Number:
    """Return the number of parameters of one layer on one rank; a tied table counts in the embedding and in
    the head. ``layer``: index of the block."""
    table = of_each_degree(tp, model.vocabulary_rows) * model.hidden
    if kind == "embedding":
        return table + (model.sequence * model.hidden if model.position == "learned" else 0)
    if kind == "head":
        copied = table if model.prediction_layers and not model.tied else 0.0
        own = model.prediction_parameters - model.block_parameters
        further = range(model.layers, model.layers + model.prediction_layers)
        blocks = sum(own + layer_elements(model, "block", tp, number) for number in further)
        return table + copied + model.norm_size + blocks
    block = model.of_block(layer)
    shared = block.block_shared_parameters
    copied = of_each_degree(tp, model.copied_parameters)
    return (block.block_parameters - shared + copied) / tp + shared
