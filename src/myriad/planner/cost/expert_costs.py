"""Seconds of what experts add to a block beside products: the order of tokens, and their way to the experts.

Ordering the tokens by expert and summing their results moves memory only. Where ranks share experts
(``layout.ep``), tokens travel to their experts and back: two all-to-alls in each direction, and in the
forward one of their numbers. A tensor-parallel rank sends, of T tokens of a micro-batch:

    experts cut by tp      all T, and its peers send the same to other parts of the same experts
    whole experts          T / tp: nothing is gathered before experts or summed after them, apart from shared
                           experts, and the scores for the losses of the router
    between them           T etp / tp: the ranks that share an expert gather them, and scatter their sums
    gathered on arrival    T / tp: the ranks that share an expert gather what arrives, and sum what they
                           computed of it (`FrameworkProfile.gathers_arrived`)

With ``layout.expert_dispatch`` = rank or node a token travels once for its experts on a rank, or on a node
and from there to its ranks (`ExpertGrid.hops`).

All ranks that share experts wait for the busiest of them, which gets ``layout.expert_load`` as many tokens as
the mean one.
"""

from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from myriad.model.config import ModelConfig
from myriad.planner.cost.collective_costs import (
    all_gather_seconds,
    all_to_all_seconds,
    group_along,
    tensor_group,
)
from myriad.planner.cost.expert_ranks import RankGroup
from myriad.planner.cost.operator_costs import Number
from myriad.planner.cost.product_costs import (
    LayerContext,
    attention_products,
    expert_products,
    shared_products,
)

__all__ = [
    "ExpertHop",
    "PairedCompute",
    "expert_exchange",
    "expert_hops",
    "expert_streams",
    "exposed_in_phases",
    "score_gather_seconds",
]


class ExpertHop(NamedTuple):
    """A group of ranks among which tokens travel to their experts, and results back."""

    ranks: RankGroup
    sent_bytes: Number
    """Bytes of tokens that one rank sends to all ranks of the group, itself included."""
    returned_bytes: Number
    """Bytes of results that it sends."""


class PairedCompute(NamedTuple):
    """Seconds of compute in the parts of a block between its exchanges of tokens, without any exchange."""

    entry: Number
    """Forward from the block's input to the dispatch of tokens: attention and router."""
    entry_back: Number
    """Backward of that part, with weights' gradients."""
    experts: Number
    """Forward from the dispatch of tokens to the return of results."""
    experts_back: Number
    """Backward of that part, without weights' gradients."""
    expert_weights: Number
    """Weights' gradients of the experts."""


def expert_streams(model: ModelConfig, context: LayerContext, tokens: Number) -> tuple[Number, Number, float]:
    """Return the bytes that a block moves in the forward and in the backward to order tokens by expert and to
    sum what experts compute, and the operators of each. With k experts a token, copies of k tokens (read and
    written), and sums of results times gates (k read, one written); the backward also writes the gradients of
    k results. Without fused kernels results are ordered, and multiplied in float32, in passes of their own.
    Where ranks share experts, copies that arrive are ordered again, and their results back; or, with
    `FrameworkProfile.orders_on_arrival`, rows that arrive once for several experts are copied for each, and
    results of a row are summed. Biases may add passes (`_bias_streams`)."""
    if model.experts is None:
        return 0.0, 0.0, 0.0
    value = context.value_bytes
    values = context.routed(tokens) * model.experts_per_token * model.hidden
    scores = 4.0 * 6 * tokens * model.experts
    ordered = values
    if context.profile.fused_permutation:
        of_token = value / model.experts_per_token
        ordered = values / context.profile.permutation_ratio
        forward = ordered * (3 * value + of_token) + scores
        backward = ordered * (4 * value + of_token) + scores
    else:
        forward = values * (4 * value + (value + 4) + 4) + scores
        backward = values * (5 * value + (2 * value + 8) + (2 * value + 8)) + scores
    added, added_back = _bias_streams(model, context, values)
    fused, fused_back = _fused_streams(model, context, values)
    forward, backward = forward + added - fused, backward + added_back - fused_back
    kernels = 1.0 if context.profile.grouped_experts else model.experts / context.experts.ep
    if context.experts.ep == 1:
        return forward, backward, 16.0 + kernels
    if context.experts.dispatch != "expert" and context.profile.orders_on_arrival:
        rows = _hop_rows(model, context)[-1][1] / model.experts_per_token
        moved = context.experts.load * ordered * 2 * (1 + rows) * value + scores
        return moved + added - fused, moved + added_back - fused_back, 16.0 + kernels
    if context.experts.dispatch != "expert":  # the order by expert is on arrival, and each hop has its own
        hops = _hop_rows(model, context)
        rows = sum(count for _, count in hops) / model.experts_per_token
        packed, load = ordered * rows * 8 * value, context.experts.load
        operators = 16.0 + 12.0 * len(hops) + kernels
        return load * forward + packed, load * backward + packed, operators
    arrived = ordered * context.experts.load * (context.experts.expert_tp if context.gathers_arrived else 1.0)
    again = arrived * 4 * value
    return forward + again, backward + again, 24.0 + kernels


def _inner(model: ModelConfig, context: LayerContext, values: Number) -> Number:
    """Return the values that go into the last matrix of a rank's experts. ``values``: those of results."""
    return values / model.hidden * model.expert_width / context.experts.expert_tp


def _fused_streams(model: ModelConfig, context: LayerContext, values: Number) -> tuple[Number, Number]:
    """Return the bytes that a kernel of products, activation and conversion saves in the forward and in the
    backward (`FrameworkProfile.fused_expert_mlp`): the activation reads and writes nothing of its own, nor do
    its gradients, apart from what was kept; conversions to float8 read nothing."""
    if not context.profile.fused_expert_mlp:
        return 0.0, 0.0
    ups, converts = model.up_matrices, context.profile.quantization is not None
    inner = _inner(model, context, values) * context.value_bytes
    return inner * (ups + 1 + converts), inner * (ups + 1 + (ups + 1) * converts)


def _bias_streams(model: ModelConfig, context: LayerContext, values: Number) -> tuple[Number, Number]:
    """Return the bytes that biases and clamps of experts move in the forward and in the backward, where these
    are operators of their own (`FrameworkProfile.eager_expert_bias`). ``values``: those of all results.

    A bias times the gate is written in float32, added, joined with those of other experts, and cast back. The
    backward casts, multiplies by the gate and by the bias, sums both products, and joins the gradients. The
    clamped halves of the activation's input are joined; the backward reads that input again."""
    if not context.profile.eager_expert_bias or context.profile.cuda_graphs:
        return 0.0, 0.0
    value = context.value_bytes
    forward: Number = 0.0
    backward: Number = 0.0
    if model.bias:
        forward = values * (4 + (value + 4 + 4) + (4 + 4) + (4 + value))
        backward = values * ((value + 4) + (4 + value) + 2 * (4 + 4 + 4) + 2 * value)
    if model.activation == "clamped_swiglu":
        inner = model.up_matrices * _inner(model, context, values)
        forward = forward + inner * 4 * value
        backward = backward + inner * 5 * value
    return forward, backward


def score_gather_seconds(model: ModelConfig, context: LayerContext, tokens: Number) -> Number:
    """Return the seconds in which tensor-parallel ranks that each route a part of the sequence gather the
    scores for the losses of the router: in the backward, sum their gradients."""
    has_losses, experts = model.balance_loss or model.router_z_loss, context.experts
    if model.experts is None or experts.etp_groups == 1 or not has_losses:
        return 0.0
    group = tensor_group(context.cluster, float(experts.etp_groups), experts.expert_tp)
    return all_gather_seconds(group, 4.0 * tokens * model.experts)


def expert_exchange(
    model: ModelConfig,
    context: LayerContext,
    tokens: Number,
    rooms: tuple[Number, Number],
    parts: Number,
    paired: PairedCompute,
) -> tuple[Number, Number]:
    """Return the exposed seconds of the exchanges of tokens between ranks that share experts, forward and
    backward. While results return, shared experts compute; in the backward they do so while the gradients of
    results travel, with the weight products of attention that are still to do (tensor-parallel ranks compute
    those behind a reduce-scatter). The other gradients travel behind the weight products of experts.

    Where ``parts`` of a micro-batch take turns, all but one of them travel behind what others compute.
    ``rooms``: seconds of compute in each direction behind which nothing else travels. ``paired``: compute
    between the exchanges, for a framework that hides them in phases."""
    if model.experts is None or context.experts.ep == 1:
        return 0.0, 0.0
    sent, returned, begun = _travel(model, context, tokens)
    ranks = context.experts.sharing
    busy_ratio = group_along(context.cluster, ranks.size, ranks.stride, ranks.run).busy_ratio
    own, shared = (found(model, context, tokens) for found in (expert_products, shared_products))
    later = np.where(np.asarray(context.tp) > 1, 0.0, attention_products(model, context, tokens)[2])

    def exposed(one: Number, behind: Number) -> Number:
        hidden = np.minimum(one, behind)
        return one - hidden + busy_ratio * hidden

    def in_turns(whole: Number, num_exchanges: int, room: Number) -> Number:
        cut = whole + (parts - 1) * num_exchanges * begun
        hidden = np.minimum(cut * (1 - 1 / parts), room)
        return np.where(context.overlap_mode, cut - hidden + busy_ratio * hidden, whole)

    if context.hides_expert_comm:
        gathered, profile = _gathered_on_arrival(model, context, tokens), context.profile
        if profile.hides_expert_comm and profile.exchange_busy_ratio is not None:
            busy_ratio = profile.exchange_busy_ratio
        if profile.hides_in_phases:
            each = exposed_in_phases(sent, returned, paired, busy_ratio) / 2
            return begun + each + gathered, each + gathered
        there, back = (exposed(sent + returned, room) for room in rooms)
        return begun + there + gathered, back + gathered
    if context.profile.waits_for_exchanges:
        gathered = _gathered_on_arrival(model, context, tokens)
        return begun + sent + returned + gathered, sent + returned + gathered
    forward = begun + sent + exposed(returned, shared[0])
    backward = exposed(returned, shared[1] + later) + exposed(sent, shared[2] + own[2])
    room, room_back = (np.maximum(0.0, rooms[turn] - shared[turn]) for turn in range(2))
    gathered = _gathered_on_arrival(model, context, tokens)
    return in_turns(forward, 3, room) + gathered, in_turns(backward, 2, room_back) + gathered


def exposed_in_phases(sent: Number, returned: Number, own: PairedCompute, busy_ratio: Number) -> Number:
    """Return the exposed seconds of the four exchanges of a pair of a forward and a backward, with the
    slowdown of the compute beside them. Megatron-Core issues on two streams, and waits at each bar
    (`model_chunk_schedule_plan.py`, TransformerLayerSchedulePlan.run):

        exchanges   gradients of results | tokens       gradients of tokens         | results
        compute     entry                | experts_back expert_weights then experts | entry_back

    The experts' forward waits for the tokens, and the second exchange of the middle for experts_back."""
    first, last = np.maximum(returned, own.entry), np.maximum(returned, own.entry_back)
    arrived = np.maximum(sent, own.experts_back)
    computed = np.maximum(sent, own.experts_back + own.expert_weights) + own.experts
    exposed = first + np.maximum(computed, arrived + sent) + last - sum(own)
    return exposed + busy_ratio * (2 * (sent + returned) - exposed)


def _travel(model: ModelConfig, context: LayerContext, tokens: Number) -> tuple[Number, Number, Number]:
    """Return the seconds in which tokens travel to their experts, in which results return, and in which
    nothing but their numbers travels. A token that travels once for several experts has its gates and their
    numbers with it."""
    experts = context.experts
    assert model.experts is not None
    hops: list[tuple[Number, Number, Number]] = []
    for ranks, sent_bytes, returned_bytes in expert_hops(model, context, tokens):
        to_all = partial(
            all_to_all_seconds,
            context.cluster,
            ranks.size,
            ranks.stride,
            run=ranks.run,
            slowdown=experts.slowdown,
        )
        sent, returned = (to_all(num_bytes=experts.load * each) for each in (sent_bytes, returned_bytes))
        hops.append((sent, returned, to_all(num_bytes=8.0 * model.experts)))
    if context.profile.overlaps_hops:
        sent, returned, begun = (reduce(np.maximum, each) for each in zip(*hops, strict=True))
    else:
        sent, returned, begun = (sum(each) for each in zip(*hops, strict=True))
    if experts.dispatch != "expert" and not context.profile.cuda_graphs:
        called = context.profile.dispatch_seconds
        sent, returned = sent + called, returned + called
    return sent, returned, begun


def expert_hops(model: ModelConfig, context: LayerContext, tokens: Number) -> tuple[ExpertHop, ...]:
    """Return the groups among which tokens of a block travel, one after the other, with the bytes of a rank
    whose experts have the mean load."""
    routed, value = context.routed(tokens), context.value_bytes
    behind = 0.0 if context.experts.dispatch == "expert" else 8.0 * model.experts_per_token
    row = model.hidden * value
    return tuple(
        ExpertHop(ranks, routed * rows * (row + behind), routed * rows * row)
        for ranks, rows in _hop_rows(model, context)
    )


def _hop_rows(model: ModelConfig, context: LayerContext) -> tuple[tuple[RankGroup, float], ...]:
    """Return the groups among which tokens travel, and the rows of each token there."""
    assert model.experts is not None
    per_node, groups = context.cluster.accelerators_per_node, model.router_groups
    # Groups of experts are nodes where there are as many of both (arXiv 2412.19437, section 2.1.2).
    ranks = context.experts.sharing
    nodes = ranks.size // max(1, int(ranks.run.within(per_node, ranks.size, ranks.stride)))
    limit = model.router_group_limit if 1 < groups == nodes else None
    return context.experts.hops(model.experts, model.experts_per_token, per_node, limit)


def _gathered_on_arrival(model: ModelConfig, context: LayerContext, tokens: Number) -> Number:
    """Return the seconds in which the ranks that share an expert gather the tokens that arrived, and sum
    results."""
    if not context.gathers_arrived:
        return 0.0
    experts = context.experts
    copies = experts.load * tokens / experts.etp_groups * model.experts_per_token
    num_bytes = copies * model.hidden * context.value_bytes
    return 2 * all_gather_seconds(tensor_group(context.cluster, float(experts.expert_tp)), num_bytes)
