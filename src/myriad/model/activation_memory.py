"""Memory of activations: the tensors that the GPT's layers keep between forward and backward. No torch.

A layer is counted with its input (the residual stream, which its first norm keeps) and without its output,
which is the next layer's input. The unit is bytes of one rank per token of a micro-batch: multiply by B S for
B sequences of S tokens, also if ranks share the sequence. Memory that does not grow with the tokens is
counted separately (`kept_bytes_per_micro_batch`). The table is in values of the compute type, for a serial
block with full attention and N heads of keys and values too; t tensor-parallel ranks, F the width of the MLP
(with a gate twice for "up"):

    input            H/t          of the first norm
    norm, gathered   H            not with selective; tensor parallelism does not divide it
    q, k, v          3 N D/t      also of latent attention, with values padded to D; _latent_bytes has more
    attention        N D/t
    stream           H/t          of the second norm; absent in a parallel block, as is the next line
    norm, gathered   H            not with selective
    MLP up           F/t
    activation       F/t          not with selective

With experts, F is the width of those that compute a token, and `_expert_bytes` has what the router and the
order by expert add.

A prediction layer of the head keeps, beside its block: the embedded tokens (H/t), the input of its projection
(2 H/t), the input of its last norm (H/t), and the gradient of the loss by that norm (H).

Inside attention the library's kernel keeps only one float32 for each query and head (Korthikanti et al.,
arXiv 2205.05198, recompute the rest selectively; here it is never kept). On a CPU in float32 with short spans
of keys, `myriad.kernels.attention_blocks` keeps its softmax: ``softmax_block``.

With "full" only a layer's input is kept. While a layer is recomputed for its backward, that one layer keeps
what "none" keeps; so does the last layer of a stage whose backward comes next. In zero-bubble schedules,
products keep their inputs until their weight part, whatever is recomputed.
"""

from typing import Literal, TypedDict

from myriad.model.config import ModelConfig

__all__ = ["LayerKind", "Recompute", "kept_bytes_per_micro_batch", "kept_bytes_per_token"]

LayerKind = Literal["embedding", "block", "head"]
Recompute = Literal["none", "selective", "full"]

_FLOAT32 = 4


def kept_bytes_per_token(
    model: ModelConfig,
    layer_kind: LayerKind,
    layer: int = 0,
    *,
    tp: int = 1,
    bytes_per_value: int = 2,
    recompute: Recompute = "none",
    softmax_block: int | None = None,
    ep: int = 1,
    etp: int | None = None,
    expert_load: float = 1.0,
    context: tuple[int, int] = (1, 1),
) -> float:
    """Return the bytes per token that one layer keeps on one rank. ``layer``: index of the block. ``ep``:
    ranks that share its experts. ``etp``: tensor-parallel ranks that share the width of each; ``None``:
    ``tp``. ``expert_load``: tokens that this rank gets for its experts over those that it sends.
    ``context``: ranks, or rows of ranks, of a ring that shares sequences, and ranks of a row; the model has
    as many positions as one of them. ``bytes_per_value``: size of the compute type. ``softmax_block``:
    positions of a block of queries if the softmax is kept (64 on a CPU in float32 with short spans);
    ``None``: the library's attention."""
    stream = model.hidden * bytes_per_value / tp
    if recompute == "full":
        return 0.0 if layer_kind == "embedding" else stream
    block = model.of_block(layer)
    mask = stream if model.dropout else 0.0
    if layer_kind == "embedding":
        # int64 row and bool for each token; without tp these belong to the batch
        rows = 8 + 1 if tp > 1 else 0
        return mask + rows
    statistics = _norm_statistics(model, bytes_per_value) / tp
    if layer_kind == "head":
        own = stream + statistics + model.hidden * bytes_per_value  # plus the gradient of its gathered input
        options: _Options = {"tp": tp, "bytes_per_value": bytes_per_value, "softmax_block": softmax_block}
        held: _Held = {
            "ep": ep,
            "etp": etp,
            "expert_load": expert_load,
            "context": context,
        }
        return own + sum(
            _prediction_bytes(model, number, recompute, statistics, options, held)
            for number in range(1, model.prediction_layers + 1)
        )
    gathered = 0 if recompute == "selective" else model.hidden * bytes_per_value
    mlp = _mlp_values(block, recompute) * bytes_per_value / tp
    if context == (1, 1):
        attention = _attention_bytes(model, layer, tp, bytes_per_value, softmax_block, recompute)
    else:
        attention = _shared_attention_bytes(model, tp, bytes_per_value, recompute, context[1])
    streams = 1 if model.block == "parallel" else model.num_branch_norms  # two norms share one input
    norms = stream * streams + statistics * model.num_branch_norms
    if model.norm_placement == "after" and model.block == "serial":
        # The stream itself is gathered: there is no norm that the backward could recompute.
        gathered = model.hidden * bytes_per_value
    rest = norms + mask * model.num_scatters + attention + mlp
    if block.experts is None:
        return rest + gathered * model.num_gathers
    groups = tp // (etp or tp)
    arrived = (expert_load - 1) * _arrived_bytes(block, bytes_per_value, tp, groups, recompute)
    return rest + gathered + arrived + _expert_bytes(block, bytes_per_value, groups, ep)


def kept_bytes_per_micro_batch(
    model: ModelConfig,
    layer_kind: LayerKind,
    layer: int = 0,
    *,
    tp: int = 1,
    bytes_per_value: int = 2,
    recompute: Recompute = "none",
    softmax_block: int | None = None,
    context: tuple[int, int] = (1, 1),
) -> int:
    """Return the bytes per micro-batch that one layer keeps on one rank, for any number of sequences. The
    head keeps its weight's gradient in float32. A block keeps its mask if its window does not divide the
    sequence into three or more blocks."""
    if recompute == "full":
        return 0
    if layer_kind == "head":
        own = _FLOAT32 * model.hidden * model.vocabulary_rows(tp)
        further = model.prediction_layers
        options: _Options = {"tp": tp, "bytes_per_value": bytes_per_value, "softmax_block": softmax_block}
        blocks = range(model.layers, model.layers + further)
        in_blocks = (
            kept_bytes_per_micro_batch(model, "block", layer, context=context, **options) for layer in blocks
        )
        return own * (1 + further) + sum(in_blocks)
    calls_library = layer_kind == "block" and softmax_block is None and context == (1, 1)
    if calls_library and _attention_kind(model, layer) == "band":
        return model.sequence**2 * bytes_per_value
    return 0


class _Options(TypedDict):
    """Arguments of the two functions above."""

    tp: int
    bytes_per_value: int
    softmax_block: int | None


class _Held(TypedDict):
    """Arguments of `kept_bytes_per_token` alone."""

    ep: int
    etp: int | None
    expert_load: float
    context: tuple[int, int]


def _prediction_bytes(
    model: ModelConfig,
    number: int,
    recompute: Recompute,
    statistics: float,
    options: _Options,
    held: _Held,
) -> float:
    """Return the bytes per token of the ``number``-th prediction layer, from 1, without its input, which the
    norm before it keeps: the embedded tokens and their rows, the input of the projection, the block, and the
    last norm with the gradient of its gathered output."""
    tp, bytes_per_value = options["tp"], options["bytes_per_value"]
    stream = model.hidden * bytes_per_value / tp
    rows = 8 + 1 if tp > 1 else 8 * (number > 1)  # one token farther than the targets is a copy of them
    layer = model.layers + number - 1
    block = kept_bytes_per_token(model, "block", layer, recompute=recompute, **held, **options)
    whole = held["context"] == (1, 1)  # else every position is computed
    gathered = model.hidden * bytes_per_value * (model.sequence - number * whole) / model.sequence
    streams = 5 if model.prediction_input == "normed" else 4  # the first norm's input, if not the last one's
    return rows + streams * stream + 3 * statistics + block + gathered


def _norm_statistics(model: ModelConfig, bytes_per_value: int) -> int:
    """Return bytes per token: the root in float32 or, for LayerNorm, mean and deviation (in the compute type
    on a CPU)."""
    return _FLOAT32 if model.norm == "rms" else 2 * bytes_per_value


def _mlp_values(model: ModelConfig, recompute: Recompute) -> int:
    """Return values per token, over all ranks: the input and the output of the activation function."""
    up = model.up_matrices * model.active_width
    return up if recompute == "selective" else up + model.active_width


def _expert_bytes(model: ModelConfig, bytes_per_value: int, groups: int, ep: int) -> float:
    """Return bytes per token of a mixture of experts, beside the inner values of the experts. Each of
    ``groups`` of tensor-parallel ranks (``layout.etp``) keeps of its part of the sequence the input of the
    router, and for each chosen expert its copy of the token, its result, four indices of 8 bytes and a gate;
    the scores. If ``ep`` ranks share the experts, also the order of the tokens that arrive, and its inverse.
    Where there are several groups, the inputs of shared experts are gathered apart, as are the scores for the
    losses."""
    stream = float(model.hidden * bytes_per_value)
    gathered = stream if model.shared_experts and groups > 1 else 0.0
    routed = stream + _routed_bytes(model, bytes_per_value, ep)
    return routed / groups + gathered + _sequence_bytes(model, bytes_per_value)


def _arrived_bytes(
    model: ModelConfig, bytes_per_value: int, tp: int, groups: int, recompute: Recompute
) -> float:
    """Return the bytes for each token that a rank sends of what it gets for its experts, where ranks share
    them: inputs, inner values, and two indices."""
    inner = model.up_matrices + (recompute != "selective")
    each = inner * model.expert_width * bytes_per_value / tp
    copy = model.hidden * bytes_per_value + 2 * 8
    return model.experts_per_token * (each + copy / groups)


def _routed_bytes(model: ModelConfig, bytes_per_value: int, ep: int) -> float:
    """Return the bytes of each token that a rank routes, beside the router's input."""
    assert model.experts is not None
    chosen, indices = model.experts_per_token, 4 if ep == 1 else 6
    found = chosen * (2 * model.hidden * bytes_per_value + indices * 8 + _FLOAT32)
    found += (chosen + 1) * _FLOAT32 if model.router_normalized else 0
    found += 0 if model.expert_capacity is None else 8  # where the kept pairs of a token begin
    return float(found + _FLOAT32 * model.experts)


def _sequence_bytes(model: ModelConfig, bytes_per_value: int) -> float:
    """Return the bytes per token of what needs whole sequences: the losses of the router, and the gate of
    shared experts."""
    assert model.experts is not None
    scores, found = _FLOAT32 * model.experts, 0.0
    if model.balance_loss:  # the scores again, with their sum if they have none, and a sequence's load
        found += scores + (_FLOAT32 if model.router_scores == "sigmoid" else 0)
        found += 0 if model.has_batch_loads else scores / model.sequence
    if model.shared_expert_gate:
        found += (model.hidden + 1) * bytes_per_value
    if model.router_z_loss:
        found += scores + _FLOAT32
    return found


def _attention_kind(model: ModelConfig, layer: int) -> Literal["causal", "windows", "band"]:
    """Return how `myriad.kernels.attention` calls the library."""
    window = model.layer_window(layer)
    if window is None or window >= model.sequence:
        return "causal"
    fits = model.sequence % window == 0 and 2 * window < model.sequence
    return "windows" if fits else "band"


def _latent_bytes(
    model: ModelConfig, tp: int, bytes_per_value: int, recompute: Recompute, *, mixed_is_kept: bool
) -> float:
    """Return the bytes per token that latent attention keeps beyond queries, keys, values and the output of
    attention, each of the padded width: latents and their roots, normalized latents, and the input of the
    output projection without padding. ``mixed_is_kept``: whether attention keeps its output too."""
    latent = model.latent
    if latent is None:
        return 0.0
    shared = latent.down_rows if latent.query_rank else latent.key_value_rank
    shared += 0 if recompute == "selective" else latent.normed
    padded = model.heads * model.head_width
    unpadded = 0 if model.mixed_width == padded else model.mixed_width - (0 if mixed_is_kept else padded)
    return (shared + unpadded / tp) * bytes_per_value + _FLOAT32 * latent.num_latents


def _attention_bytes(
    model: ModelConfig,
    layer: int,
    tp: int,
    bytes_per_value: int,
    softmax_block: int | None,
    recompute: Recompute,
) -> float:
    """Return bytes per token: queries, keys, values, and the input of the output projection."""
    num_keys = model.num_kv_heads * model.kv_copies(tp)
    queries, keys = (heads * model.head_width for heads in (model.heads, num_keys))
    extra = _latent_bytes(model, tp, bytes_per_value, recompute, mixed_is_kept=softmax_block is None)
    if model.qk_norm != "none":  # the input of the norm of queries and keys, and its roots
        roots = 2 * tp if model.qk_norm == "all" else model.heads + num_keys
        extra += ((queries + 2 * keys) * bytes_per_value + roots * _FLOAT32) / tp
    if softmax_block is not None:
        softmax = model.heads * _mean_keys(model, layer, softmax_block)
        return (2 * queries + 2 * keys + softmax) * bytes_per_value / tp + extra
    if model.has_capped_scores:  # the backward attends again; kernels of a GPU keep a float32 a query
        return (2 * queries + 2 * keys) * bytes_per_value / tp + extra
    kind = _attention_kind(model, layer)
    turned = model.layer_rotary(layer) is not None and model.latent is None
    values = 2 * queries + (keys if turned else 2 * keys)  # views keep the tensor that they were split from
    if kind == "windows":  # each block of queries copies two blocks of keys and values
        values += 2 * 2 * queries
    elif keys < queries:  # the library's kernel gets as many key heads as query heads
        values += 2 * queries
    elif turned:
        values += keys
    mask = 2 * (model.layer_window(layer) or 0) if kind == "windows" else 0
    return values * bytes_per_value / tp + _FLOAT32 * model.heads / tp + mask * bytes_per_value + extra


def _shared_attention_bytes(
    model: ModelConfig, tp: int, bytes_per_value: int, recompute: Recompute, ulysses: int
) -> float:
    """Return the same where ranks share sequences (`myriad.kernels.ring_attention`): queries, this rank's
    keys and values as one tensor, the output, and a float32 for each query and head. With ``ulysses`` ranks
    of a row also the output that has come back from them, for the projection."""
    num_keys = model.num_kv_heads * model.kv_copies(tp)
    queries, keys = (heads * model.head_width for heads in (model.heads, num_keys))
    roots = 2 * tp if model.qk_norm == "all" else model.heads + num_keys
    extra = _latent_bytes(model, tp, bytes_per_value, recompute, mixed_is_kept=ulysses == 1)
    if model.qk_norm != "none":
        extra += ((queries + 2 * keys) * bytes_per_value + roots * _FLOAT32) / tp
    values = 2 * queries + 2 * keys
    if ulysses > 1:  # heads are copied where there are fewer than ranks
        values = 3 * queries + 2 * max(keys, ulysses * tp * model.head_width)
    return values * bytes_per_value / tp + _FLOAT32 * model.heads / tp + extra


def _mean_keys(model: ModelConfig, layer: int, block: int) -> float:
    """Return the mean number of keys that a query is multiplied with in blocked attention, masked ones
    included."""
    size, window = min(block, model.sequence), model.layer_window(layer) or model.sequence
    first_keys = [max(0, start - window + 1) // size * size for start in range(0, model.sequence, size)]
    spans = [index * size + size - first for index, first in enumerate(first_keys)]
    return sum(spans) / len(spans)
