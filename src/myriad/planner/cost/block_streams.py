"""Bytes that the operators between a block's matrix products move: norms, residual sums, activations, rotary
positions, and the order of tokens by expert.

    fused        each reads and writes its values once, forward and backward (`BlockStreams`)
    unfused      `FrameworkProfile.fused` is False: 2.2 passes for each of these
    apart        what other frameworks do in passes of their own (`_apart`)

`expert_costs` has the bytes of tokens in the order of experts.
"""

from typing import NamedTuple

from myriad.model.config import ModelConfig
from myriad.planner.cost.expert_costs import expert_streams
from myriad.planner.cost.operator_costs import Number
from myriad.planner.cost.product_costs import LayerContext, qkv_width

__all__ = ["BlockStreams", "block_streams"]

_UNFUSED = 2.2
"""Passes over memory of the unfused norm, activation and dropout for each pass of the fused ones."""
_EAGER_NORM, _EAGER_TURN, _EAGER_GATE = (32.0, 68.0), 16.0, (4.0, 8.0)
"""Bytes moved for each value, forward and backward, beyond a fused operator's: RMSNorm converts to float32
(6 bytes), squares (8), averages (4), scales (8), converts back (6) and multiplies by its factors (4); rotary
positions convert (6), multiply (8) and convert back (6), either way; a gate writes its activation once more.
In the backward the norm's operators have two inputs each, and gradients of its two uses are summed."""
_FLOAT32 = 4.0
"""Bytes of a value in float32."""


class BlockStreams(NamedTuple):
    """Bytes that a block's operators between products move for one micro-batch, on one rank."""

    forward: Number
    backward: Number
    repeated: Number
    """Those of norms and activations, which Myriad's selective recomputation repeats."""
    operators: Number
    """Number of operators of either direction."""
    experts: Number
    """Those of the forward between the dispatch of tokens to experts and the return of results."""
    experts_back: Number
    """The same of the backward."""


class _Values(NamedTuple):
    """Numbers of values of a block, or bytes where it says so."""

    norms: Number
    """Inputs of norms."""
    residuals: Number
    """Sums of the residual stream."""
    inner: Number
    """Inner values of the MLP, of one matrix."""
    stream: Number
    """Values of the residual stream."""
    qkv_bytes: Number
    """Bytes to read and write queries, keys and values."""


def block_streams(model: ModelConfig, context: LayerContext, tokens: Number) -> BlockStreams:
    """Return the bytes of a block of a model whose blocks are alike, for so many tokens."""
    profile, value, ups = context.profile, context.value_bytes, model.up_matrices
    own = _values(model, context, tokens)
    norms, residuals, inner, _, qkv = own
    passes = 1.0 if profile.fused else _UNFUSED
    turned, normed = qkv * (model.position == "rotary"), qkv * (model.qk_norm != "none")
    normed = normed + (0 if model.latent is None else 2 * tokens * model.latent.normed * value)
    joined = profile.fused_add_norm and not context.cluster.on_cpu
    added, added_back = (2, 1) if joined else (3, 2)
    forward = passes * value * (2 * norms + (ups + 1) * inner) + added * value * residuals + turned + normed
    backward = passes * value * (3 * norms + (2 * ups + 1) * inner) + added_back * value * residuals
    backward = backward + turned + 2 * normed
    eager, eager_back = _eager(model, context, tokens, own)
    apart, apart_back = _apart(model, context, tokens, own)
    ordered, ordered_back, ordering = expert_streams(model, context, tokens)
    operators = (3 if joined else model.num_branch_norms + 3) * (1 if profile.fused else 3)
    gated, gated_back = (passes * value * count * inner for count in (ups + 1, 2 * ups + 1))
    return BlockStreams(
        forward + eager + apart + ordered,
        backward + eager_back + apart_back + ordered_back,
        value * (2 * norms + (ups + 1) * inner) + eager,
        operators + ordering,
        ordered + gated,
        ordered_back + gated_back,
    )


def _values(model: ModelConfig, context: LayerContext, tokens: Number) -> _Values:
    stream = (tokens / context.tp if context.profile.sequence_parallel else tokens) * model.hidden
    return _Values(
        norms=stream * model.num_branch_norms,
        residuals=stream * model.num_scatters,
        inner=tokens * model.active_width / context.tp,
        stream=stream,
        qkv_bytes=2 * tokens * qkv_width(model, context) / context.tp * context.value_bytes,
    )


def _eager(model: ModelConfig, context: LayerContext, tokens: Number, own: _Values) -> tuple[Number, Number]:
    """Return the bytes that forward and backward move in addition where norms, rotary positions and gates are
    operators one by one (`FrameworkProfile.eager_operators`)."""
    forward = backward = 0.0 * own.norms
    if not context.profile.eager_operators:
        return forward, backward
    if model.norm == "rms":
        forward, backward = forward + _EAGER_NORM[0] * own.norms, backward + _EAGER_NORM[1] * own.norms
    if model.position == "rotary":
        turned = tokens * (model.heads + model.num_kv_heads) * model.head_width / context.tp
        forward, backward = forward + _EAGER_TURN * turned, backward + _EAGER_TURN * turned
    if model.up_matrices > 1:
        forward, backward = forward + _EAGER_GATE[0] * own.inner, backward + _EAGER_GATE[1] * own.inner
    return forward, backward


def _apart(model: ModelConfig, context: LayerContext, tokens: Number, own: _Values) -> tuple[Number, Number]:
    """Return the bytes of passes of their own that other frameworks make in forward and backward."""
    profile, value, norms, qkv = context.profile, context.value_bytes, own.norms, own.qkv_bytes
    forward = backward = 0.0 * norms
    if profile.sums_gradients_apart:
        biased = (qkv / 2 + value * (model.up_matrices * own.inner + 2 * own.stream)) * model.bias
        backward = backward + qkv + biased + value * (2 * norms + own.residuals)
    if profile.unpads_attention:  # Gathered, and scattered onto zeros.
        mixed = tokens * model.mixed_width / context.tp * value
        forward, backward = forward + qkv + 3 * mixed, backward + 1.5 * qkv + 2 * mixed
    converted = 2 * _FLOAT32 * norms if profile.norms_in_float32 else 0.0
    if profile.norms_in_float32:
        forward, backward = forward + converted, backward + (3 * _FLOAT32 - value) * norms
    if context.repeats_norms:
        passes = 1.0 if profile.fused else _UNFUSED
        backward = backward + passes * value * 2 * norms + converted + value * own.residuals
    return forward, backward
