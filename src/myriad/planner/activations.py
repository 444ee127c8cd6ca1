"""Bytes that a layer holds of one micro-batch on one rank: kept for its backward, and on the way.

    kept       from the layer's forward to its backward, its input included, its output not
    forward    above what is kept when it is over, at the forward's highest moment
    backward   above what was kept, at the backward's highest moment, incoming gradient included

Myriad's own layers: what is kept is `myriad.model.activations`, which is measured to the byte; what is on the
way is counted operator by operator below. With other practices what is kept is Korthikanti et al.'s (arXiv
2205.05198, sections 4 and 5), written for any widths; their plain GPT with dropout and two bytes a value:

    s b h (34 + 5 a s/h)                 no parallelism (equation 1)
    s b h (10 + 24/t + 5 a s/(h t))      tensor (2)
    s b h/t (34 + 5 a s/h)               and sequence parallelism (4)
    s b h 34/t                           and selective recomputation: no scores (6); full: 2 s b h, once

Every function takes numbers or arrays. Legend: t tensor-parallel ranks, s sequence, b sequences of a
micro-batch, h hidden, a heads, f width of the MLP.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import numpy as np

from myriad.model.activations import LayerKind, kept_bytes_per_micro_batch, kept_bytes_per_token
from myriad.model.config import ModelConfig
from myriad.planner.operators import Number
from myriad.planner.work import Practice, Recompute

__all__ = [
    "RECOMPUTE",
    "Held",
    "Part",
    "is_ours",
    "layer_held",
    "message_bytes",
    "product_inputs",
    "softmax_block",
]

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
"""By the number that stands for it in arrays."""
_BLOCK, _MOST_KEYS = 64, 512
"""Of `myriad.kernels.attention_blocks`, which runs on a CPU in float32 and short spans."""
_LOGITS, _LOGITS_ON_CPU = 2**30, 2**24
"""Bytes of logits that exist at a time (`myriad.kernels.cross_entropy`)."""
_FEWEST_TOKENS = 512
_GPU_TILE_TOKENS = 256
_MESSAGE = 2**18
"""Least bytes of a part's message (``overlap.tensor_message``)."""


@dataclass(frozen=True)
class Part:
    """Of a micro-batch, what one rank has; numbers or arrays."""

    tp: Number
    micro_batch: Number
    value_bytes: int
    on_cpu: bool = False
    turns: bool = True
    """Parts of it take turns while tensors travel (``overlap.tensor``)."""

    def tokens(self, model: ModelConfig) -> Number:
        return self.micro_batch * model.sequence


@dataclass(frozen=True)
class Held:
    """By one layer of one micro-batch."""

    kept: Number
    forward: Number
    backward: Number


def is_ours(practice: Practice) -> bool:
    """Myriad's own layers."""
    return practice.attention != "plain" and practice.fused and practice.sequence_parallel


def message_bytes(model: ModelConfig, practice: Practice, part: Part) -> Number:
    """Of one activation or gradient between stages, on one rank."""
    whole = part.tokens(model) * model.hidden * part.value_bytes
    return whole / part.tp if practice.sequence_parallel else whole


def softmax_block(model: ModelConfig, layer: int, part: Part) -> int | None:
    """Positions of a block of queries where the softmax is kept; ``None``: the library's attention."""
    window = model.layer_window(layer) or model.sequence
    keys = min(model.sequence, window + 2 * _BLOCK)
    fits = model.sequence % min(_BLOCK, model.sequence) == 0 and keys <= _MOST_KEYS
    return _BLOCK if fits and part.on_cpu and part.value_bytes == 4 else None


def layer_held(
    model: ModelConfig, practice: Practice, kind: LayerKind, layer: int, part: Part, recompute: Recompute
) -> Held:
    """``layer``: index of the block."""
    if recompute == "full":
        return _again(model, practice, kind, layer, part)
    if kind == "embedding":
        return _embedding_held(model, practice, part)
    if kind == "head":
        return _head_held(model, practice, part)
    kept = _block_kept(model, practice, layer, part, recompute)
    return Held(kept, *_block_passing(model, practice, part, recompute))


def _again(model: ModelConfig, practice: Practice, kind: LayerKind, layer: int, part: Part) -> Held:
    """A layer of which the input is kept: its forward, without a graph, has what one operator reads and
    writes; before its backward all that it keeps otherwise is made again."""
    none = layer_held(model, practice, kind, layer, part, "none")
    kept = 0.0 if kind == "embedding" else message_bytes(model, practice, part)
    forward = none.forward
    if kind == "block":
        ups = 2 if model.activation == "swiglu" else 1
        whole = part.value_bytes * part.tokens(model)
        forward = whole * (2 * model.hidden + (ups + 1) * model.ffn_width / part.tp)
    return Held(kept, forward, none.kept - kept + none.backward)


def _block_kept(
    model: ModelConfig, practice: Practice, layer: int, part: Part, recompute: Recompute
) -> Number:
    if not is_ours(practice):
        return _published_kept(model, practice, layer, part, recompute)
    return _ours_kept(model, "block", layer, part, recompute)


def _ours_kept(model: ModelConfig, kind: LayerKind, layer: int, part: Part, recompute: Recompute) -> Number:
    """All terms are constant or divided by tp, so two values of tp say everything."""
    block = softmax_block(model, layer, part) if kind == "block" else None

    def linear(function: Callable[..., float]) -> Number:
        one, two = (
            float(
                function(
                    model,
                    kind,
                    layer,
                    tp=tp,
                    bytes_per_value=part.value_bytes,
                    recompute=recompute,
                    softmax_block=block,
                )
            )
            for tp in (1, 2)
        )
        shared = 2 * (one - two)
        return (one - shared) + shared / part.tp

    tokens = part.tokens(model)
    kept = tokens * linear(kept_bytes_per_token) + linear(kept_bytes_per_micro_batch)
    return kept + (_kept_twice(model, part) if kind == "block" and recompute != "full" else 0.0)


def _kept_twice(model: ModelConfig, part: Part) -> Number:
    """Attention's output, where a single sequence is cut in positions (`myriad.model.interleave`)."""
    tokens, value = part.tokens(model), part.value_bytes
    share = tokens / part.tp * model.hidden * value
    is_cut = (np.asarray(part.tp) > 1) & (np.asarray(part.micro_batch) == 1) & (share >= 2 * _MESSAGE)
    output = tokens / part.tp * model.heads * model.head_width * value
    return np.where(is_cut & part.turns, output, 0.0)


def _published_kept(
    model: ModelConfig, practice: Practice, layer: int, part: Part, recompute: Recompute
) -> Number:
    """Elements for each token: cut among ranks, or whole without sequence parallelism."""
    value, tokens, hidden = part.value_bytes, part.tokens(model), model.hidden
    apart = tokens / (part.tp if practice.sequence_parallel else 1.0)
    if recompute == "full":
        return value * apart * hidden
    entries = 1 if model.block == "parallel" else 2
    # norms' inputs, what enters the products, dropout masks of one byte
    stream = apart * hidden * (value * 2 * entries + entries)
    ups = 2 if model.activation == "swiglu" else 1
    queries, keys = model.heads * model.head_width, model.num_kv_heads * model.head_width
    inner = tokens / part.tp * value * (2 * queries + 2 * keys + (ups + 1) * model.ffn_width)
    if practice.attention != "plain" or recompute == "selective":
        return stream + inner
    # softmax's output and what dropout makes of it, and a mask of one byte
    scores = part.micro_batch * model.sequence**2 * model.heads / part.tp
    return stream + inner + scores * (2 * value + 1)


def _block_passing(
    model: ModelConfig, practice: Practice, part: Part, recompute: Recompute
) -> tuple[Number, Number]:
    """Forward: the last branch's output before it is added. Backward: the highest is in the MLP, which is
    differentiated first, or without a flash kernel in the scores."""
    value, tokens = part.value_bytes, part.tokens(model)
    stream = message_bytes(model, practice, part)
    whole = value * tokens * model.hidden
    inner = value * tokens * model.ffn_width / part.tp
    ups = 2 if model.activation == "swiglu" else 1
    gathered = np.where(np.asarray(part.tp) > 1, whole, 0.0)
    again = inner if recompute == "selective" else 0.0
    product = _product_bytes(model.hidden * model.ffn_width / part.tp, part)
    at_down = inner + again + product
    at_activation = inner * (ups + (1 if ups == 2 else 0)) + again
    backward = stream + gathered + np.maximum(at_down, at_activation)
    if practice.attention == "plain":
        scores = part.micro_batch * model.sequence**2 * model.heads / part.tp * value
        backward = np.maximum(backward, stream + 2 * scores)
    return whole + gathered, backward


def _product_bytes(elements: Number, part: Part) -> Number:
    """A weight's gradient on its way to the float32 sum: only a CPU's bfloat16 is not added in place."""
    return elements * part.value_bytes if part.on_cpu and part.value_bytes < 4 else 0.0


def _embedding_held(model: ModelConfig, practice: Practice, part: Part) -> Held:
    tokens = part.tokens(model)
    kept = _ours_kept(model, "embedding", 0, part, "none") if is_ours(practice) else 8.0 * tokens
    whole = tokens * model.hidden * part.value_bytes
    # a CPU adds rows to the sum, in float32; a GPU makes the whole table's gradient
    wide = tokens * model.hidden * (4.0 if part.value_bytes == 2 else 0.0)
    if not part.on_cpu:
        wide = model.padded_vocabulary() * model.hidden / part.tp * part.value_bytes
    gathered = np.where(np.asarray(part.tp) > 1, whole, 0.0)
    stream = message_bytes(model, practice, part)
    return Held(kept, gathered, stream + gathered + wide)


def _head_held(model: ModelConfig, practice: Practice, part: Part) -> Held:
    """Ours makes its gradients in the forward, a chunk of tokens at a time; others keep all logits, in
    float32, and what enters the product."""
    value, tokens = part.value_bytes, part.tokens(model)
    whole = value * tokens * model.hidden
    rows = model.padded_vocabulary() / part.tp
    if not (is_ours(practice) and practice.fused_loss):
        stream = message_bytes(model, practice, part)
        logits = tokens * rows
        return Held(2 * stream + 4 * logits, value * logits, 4 * logits + value * logits)
    kept = _ours_kept(model, "head", 0, part, "none")
    several = np.asarray(part.tp) > 1
    limit = np.floor((_LOGITS_ON_CPU if part.on_cpu else _LOGITS) / (4 * rows))
    limit = limit if part.on_cpu else limit - limit % _GPU_TILE_TOKENS
    limit = np.where(several, np.minimum(limit, np.ceil(tokens / 2)), limit)
    chunk = np.minimum(np.maximum(_FEWEST_TOKENS, limit), tokens)
    logits = chunk * rows * (4.0 * np.where(several, 2.0, 1.0) + (value if value == 2 else 0.0))
    product = _product_bytes(rows * model.hidden, part)
    return Held(kept, whole + logits + product, whole + np.where(several, whole, 0.0))


def product_inputs(model: ModelConfig, part: Part) -> Number:
    """Of one block and micro-batch, what its weights' products still need when the gradient of its input is
    there: inputs and gradients of the outputs."""
    tokens = part.tokens(model) * part.value_bytes
    entries = 1 if model.block == "parallel" else 2
    ups = 2 if model.activation == "swiglu" else 1
    width, keys = model.heads * model.head_width, model.num_kv_heads * model.head_width
    cut = 2 * width + 2 * keys + (ups + 1) * model.ffn_width
    return tokens * (entries * 2 * model.hidden + cut / part.tp)
