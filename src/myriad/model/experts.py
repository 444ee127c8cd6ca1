"""A mixture of experts: a router chooses a few MLPs for each token, and sums what they compute.

    scores = softmax or sigmoid of x W (+ b) float32, [tokens, E]
    chosen = the k largest scores of a token, gates their values (divided by their sum, times a factor)
             (with a bias of each expert: the k largest of score + bias, `myriad.parallel.router_tables`;
             with groups of experts: those of the best groups only)
    y      = sum over the chosen experts of gate x expert(x)  + the shared experts

Routing is dropless: no token is left out, whatever the load of its expert (MegaBlocks, arXiv 2211.15841), so
the result depends on nothing but the token. (A job may set a bound: `myriad.model.expert_capacity`.) Tokens
are ordered by expert, and all experts of a rank multiply theirs at once.

Tensor-parallel ranks share every expert's width (`Boundary.of_width`): they gather their tokens, and each
routes all of them. All compute the same scores, and gradients of scores are partial sums as those of other
parameters that every rank holds. The sum of their results is scattered to them. If fewer than all share it
(``layout.etp``), they gather no more than their part of a sequence; where experts are whole on a rank,
nothing is gathered. What whole sequences are needed for is exchanged with the ranks that have the other parts
(`Boundary.of_parts`): the router's products, for the two losses, and the tokens of shared experts, whose
width all tensor-parallel ranks share.

    tp = 4, etp = 2     positions  0 1 | 2 3 | 4 5 | 6 7       of_width of rank 1: ranks 0 and 1
                        rank         0     1     2     3       of_parts of rank 1: ranks 1 and 3

With expert parallelism (GShard, arXiv 2006.16668) each of several replicas holds some of the experts. Tokens,
ordered by expert, travel to the ranks of their experts (dispatch), and results back to the ranks of their
tokens (combine): two all-to-alls in the forward, and two in the backward. A rank learns first how many tokens
each other one has for its experts. Shared experts compute while results travel.

Training adds two terms to the loss, of each sequence alone, so that no layout changes them: the balance loss
of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2, equations 17 to 20; with the same two factors as in Switch,
arXiv 2101.03961), and the z-loss of the router (ST-MoE, arXiv 2202.08906). They are added where they arise:
the reported loss has neither. The balance loss may take the loads of the last batch instead of a sequence's.

Legend: B batch, S sequence, H hidden, E experts, k experts of a token, T = B S tokens.
"""

from collections.abc import Generator
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F

from myriad.kernels.gradient import LaterProducts
from myriad.kernels.linear import weight_gradient
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.expert_capacity import ExpertCapacity
from myriad.model.expert_dispatch import (
    Combine,
    Dispatch,
    Places,
    Reordered,
    RoutedTokens,
    by_expert,
    travel_once,
)
from myriad.model.interleave import Steps, Whole, finish
from myriad.model.mlp import ExpertMLPs, GatedMLP, SharedMLP

__all__ = ["BATCH_LOADS", "Experts", "Router"]

BATCH_LOADS = ".router.batch_loads"
"""End of the full name of a vector that only training needs: `Router.batch_loads`."""


class RoutingHook(Protocol):
    """Records the chosen experts of tokens, and may choose others."""

    def __call__(
        self, purpose: str, chosen: torch.Tensor, samples: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """Return the experts ``[B, S, k]`` to use instead of ``chosen``. ``purpose``: "gates", or "balance"
        for the balance loss. ``samples`` ``[B]``: global indices of the sequences. ``positions``: those
        of the tokens in them, ``[S]`` or ``[B, S]``."""
        ...


class Router(nn.Module):
    """The matrix ``[E, H]`` that gives each expert a score. Products and scores are in float32."""

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        assert config.experts is not None
        self.weight = nn.Parameter(torch.empty(config.experts, config.hidden))
        self.logit_bias = nn.Parameter(torch.empty(config.experts)) if config.router_logit_bias else None
        self._later, self._num_ranks, self._kind = boundary.later, boundary.size, config.router_scores
        self._peers = boundary.context
        self.num_chosen, self._scale = config.experts_per_token, config.router_scale
        self._normalizes = config.router_normalized
        self._balance, self._z_loss = config.balance_loss, config.router_z_loss
        self.bias = nn.Parameter(torch.empty(config.experts)) if config.has_router_bias else None
        self._groups, self._group_limit = config.router_groups, config.router_group_limit
        self._sums_two = config.router_group_score == "two_largest"
        self.batch_loads = nn.Parameter(torch.empty(config.experts)) if config.has_batch_loads else None
        """Tokens of each expert in the step before, over those of the mean one, for the balance loss."""
        self.exact_loads: torch.Tensor | None = None
        """The values of these in float32, if the parameter may have fewer digits."""
        self.exact_bias: torch.Tensor | None = None
        """The values of the bias in float32, if the parameter may have fewer digits."""
        self.routing: RoutingHook | None = None
        """What records the chosen experts in training, and may choose others."""

    def forward(self, x: torch.Tensor, loss_factor: float, context: Context | None = None) -> torch.Tensor:
        """Return the logits ``[B, S, E]`` of whole sequences ``[B, S, H]``, or of this rank's share. In
        training their gradient includes that of the two losses. ``loss_factor``: factor of the loss of the
        micro-batch. ``context``: for `routing`."""
        return self.with_losses(self.products(x), loss_factor, context)

    def products(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of tokens ``[..., H]``."""
        logits: torch.Tensor = _Logits.apply(x, self.weight, self.logit_bias, self._later)
        return logits

    @property
    def adds_losses(self) -> bool:
        """Whether the two losses are computed: only in training, where a gradient is."""
        return self.training and torch.is_grad_enabled() and bool(self._balance or self._z_loss)

    def with_losses(
        self, logits: torch.Tensor, loss_factor: float, context: Context | None = None
    ) -> torch.Tensor:
        """Return the logits ``[B, S, E]`` of whole sequences. Their gradient includes that of the losses."""
        if not self.adds_losses:
            return logits
        # every tensor-parallel rank computes the whole loss, and gradients are summed over them
        factor = loss_factor / self._num_ranks
        added: torch.Tensor = _WithLoss.apply(logits, self.loss(logits, context), factor)
        return added

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the positive scores of all experts."""
        return logits.softmax(-1) if self._kind == "softmax" else logits.sigmoid()

    def entropies(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the entropy of each token's scores, divided by their sum, in nats: ``[..., E]`` to
        ``[...]``."""
        return torch.special.entr(self._shares_of(self.scores(logits))).sum(-1)

    def _shares_of(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self._kind == "softmax" else scores / scores.sum(-1, keepdim=True)

    def choose(
        self, logits: torch.Tensor, context: Context | None = None, first: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gates ``[T, k]`` and the chosen experts ``[T, k]`` of logits ``[..., E]``. ``context``
        and ``first``, the number of the first of this rank's positions, are for `routing`."""
        scores = self.scores(logits.flatten(0, -2))
        if self.bias is None and self._groups == 1:
            gates, chosen = scores.topk(self.num_chosen, -1)
        else:
            chosen = self._preferences(scores).topk(self.num_chosen, -1).indices
            gates = scores.gather(-1, chosen)
        if self.routing is not None and context is not None and self.training:
            whole = chosen.view(*logits.shape[:-1], -1)
            chosen = self._routed("gates", whole, context, first).view_as(chosen)
            gates = scores.gather(-1, chosen)
        if self._normalizes:
            gates = gates / gates.sum(-1, keepdim=True)
        return gates * self._scale, chosen

    def _routed(self, purpose: str, chosen: torch.Tensor, context: Context, first: int) -> torch.Tensor:
        """Return what `routing` gives instead of the chosen experts ``[B, S, k]``."""
        assert self.routing is not None, "nothing records or replays"
        if context.samples is None:
            return chosen
        positions = context.positions(first, chosen.shape[1], chosen.device)
        return self.routing(purpose, chosen, context.samples, positions)

    @torch.no_grad()
    def _preferences(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the values ``[T, E]`` of which the largest decide the chosen experts."""
        preferred = scores
        if self.bias is not None:
            preferred = scores + (self.bias.float() if self.exact_bias is None else self.exact_bias)
        if self._groups == 1:
            return preferred
        groups = preferred.unflatten(-1, (self._groups, -1))
        of_groups = groups.topk(2, -1).values.sum(-1) if self._sums_two else groups.amax(-1)
        others = torch.ones_like(of_groups, dtype=torch.bool)
        others.scatter_(-1, of_groups.topk(self._group_limit, -1).indices, value=False)
        return groups.masked_fill(others[..., None], -torch.inf).flatten(-2)

    def loss(self, logits: torch.Tensor, context: Context | None = None) -> torch.Tensor:
        """Return the balance loss and the z-loss, summed over the tokens of sequences ``[B, S, E]``: of all
        their positions, or of this rank's share."""
        found = logits.new_zeros(())
        if self._z_loss:
            found = found + self._z_loss * logits.logsumexp(-1).square().sum()
        if self._balance:
            scores, of_batch = self.scores(logits), self.batch_loads is not None
            weighted = self._by_batch(scores) if of_batch else self._by_sequence(scores, context)
            found = found + self._balance * weighted
        return found

    def _by_batch(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the sum over tokens of their shares of each score times the load of the last batch."""
        assert self.batch_loads is not None, "of the job's scope"
        loads = self.batch_loads.detach().float() if self.exact_loads is None else self.exact_loads
        return (self._shares_of(scores).sum((0, 1)) * loads).sum()

    def _by_sequence(self, scores: torch.Tensor, context: Context | None) -> torch.Tensor:
        """Return the same with the loads of each sequence."""
        _, tokens, experts = scores.shape
        largest = scores.detach().topk(self.num_chosen, -1).indices
        if self.routing is not None and context is not None:
            largest = self._routed("balance", largest, context, 0)
        chosen = largest.flatten(1)
        counts = scores.new_zeros(len(scores), experts)
        counts.scatter_add_(1, chosen, torch.ones_like(chosen, dtype=scores.dtype))
        of_sequence = tokens
        if self._peers is not None:  # each rank adds the part of its tokens to a loss of whole sequences
            counts, of_sequence = self._peers.sum(counts), tokens * self._peers.num_ranks
        load = counts * (experts / (self.num_chosen * of_sequence))
        return tokens * (load * self._shares_of(scores).mean(1)).sum()


class Experts(nn.Module):
    """The experts of a block, and their router: ``[B, S, H]`` to this rank's partial sum, ``[B, S, H]``, of
    the positions that the peers of `Boundary.of_width` have together."""

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        assert config.experts is not None
        self.router = Router(config, boundary)
        self.boundary, self.num_experts = boundary, config.experts
        held = self.num_experts // boundary.expert_ranks
        first = boundary.expert_rank * held
        self.experts = ExpertMLPs(config, boundary.of_width, range(first, first + held))
        shared = config.shared_experts
        kind = GatedMLP if config.shared_expert_gate else SharedMLP
        self.shared = kind(config, boundary, shared * config.expert_width) if shared else None
        self.loads: torch.Tensor | None = None
        """Where training adds up the tokens of each expert, ``[E]``, once for each backward, whether it
        recomputes the experts or not; ``None``: they are not counted."""
        self.entropy: torch.Tensor | None = None
        """Where it adds up the tokens' `Router.entropies` at the same time, once for each chosen expert,
        float64 ``[]``."""
        self.dropped: torch.Tensor | None = None
        """Where it adds up the pairs of a token and an expert that the capacity drops, ``[]``."""
        self.capacity = None if config.expert_capacity is None else ExpertCapacity(config, boundary)

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return finish(self.steps(x, logits, Context()))

    def route(self, x: torch.Tensor, context: Context) -> Steps:
        """Return the logits ``[B, S, E]`` of tokens ``[B, S, H]``."""
        router, peers = self.router, self.boundary.of_parts
        factor = context.loss_scale
        if peers.size == 1:
            whole = Whole(partial(router, loss_factor=factor, context=context), x)
            yield whole
            return whole.result
        logits = router.products(x)
        if not router.adds_losses:
            return logits
        arriving = peers.start_all_gather(logits)
        yield None
        with_losses = partial(router.with_losses, loss_factor=factor, context=context)
        whole = Whole(with_losses, arriving.wait())
        yield whole
        return whole.result.unflatten(1, (peers.size, -1))[:, peers.rank]

    def steps(self, x: torch.Tensor, logits: torch.Tensor, context: Context) -> Steps:
        """Return this rank's partial sum of what the chosen and the shared experts compute. Yields where
        tokens travel."""
        width = self.boundary.of_width
        length = x.shape[1] // width.size
        first = context.first_of_share(length, self.boundary.rank) - width.rank * length
        gates, chosen = self.router.choose(logits, context, first)
        kept = chosen
        if self.capacity is not None and self.training:
            kept = (yield from self.capacity.steps(chosen.view(*x.shape[:-1], -1), context)).flatten(0, 1)
        self._count(logits, chosen, kept)
        if self.boundary.expert_hops:
            return (yield from self._travel_once(x, gates, kept))
        places = (Places.of if kept is chosen else Places.of_some)(
            kept, self.num_experts, self.boundary.kernels
        )
        if self.boundary.expert_ranks == 1:
            entering: torch.Tensor = Dispatch.apply(x.flatten(0, -2), places)
            leaving, shared = self.experts(entering, places.counts), self._shared_result(x)
        else:  # no name for the tokens here: they are freed once they have left
            leaving, shared = yield from self._travel(
                Dispatch.apply(x.flatten(0, -2), places), places.counts, x
            )
        out: torch.Tensor = Combine.apply(leaving, gates, places)
        out = out.view(x.shape)
        return out if shared is None else out + shared

    def _count(self, logits: torch.Tensor, chosen: torch.Tensor, kept: torch.Tensor) -> None:
        """Add up the tokens that chose each expert, and the entropies of all tokens, in training. ``kept``:
        ``chosen`` with -1 for experts that drop a token."""
        if not (self.training and torch.is_grad_enabled()):
            return
        if self.loads is not None:
            each = chosen.flatten()  # `bincount` would wait for a GPU
            self.loads.scatter_add_(0, each, torch.ones_like(each, dtype=self.loads.dtype))
        if self.dropped is not None:
            self.dropped += kept.lt(0).sum()
        if self.entropy is not None:
            num_chosen = self.router.num_chosen
            self.entropy += num_chosen * self.router.entropies(logits.detach()).sum(dtype=torch.float64)

    def _travel(
        self, entering: torch.Tensor, counts: torch.Tensor, x: torch.Tensor
    ) -> Generator[None, None, tuple[torch.Tensor, torch.Tensor | None]]:
        """Send tokens ``[T k, H]``, ordered by expert, to their experts, and return the results in the same
        order. Also return what the shared experts compute of ``x`` while the results travel."""
        boundary = self.boundary
        counting = boundary.start_counts(counts)
        yield None
        arrived = counting.wait()
        sizes, arriving_sizes = (
            counts.view(boundary.expert_ranks, -1).sum(1).tolist(),
            arrived.sum(1).tolist(),
        )
        arriving = boundary.start_exchange(entering, sizes, arriving_sizes)
        del entering
        yield None
        order, back = by_expert(arrived)
        rows: torch.Tensor = Reordered.apply(arriving.wait(), order, back)
        rows = self.experts(rows, arrived.sum(0))
        arriving = boundary.start_exchange(Reordered.apply(rows, back, order), arriving_sizes, sizes)
        del rows
        # here and not earlier: in the backward too, it then comes between an all-to-all and its end
        shared = self._shared_result(x)
        yield None
        return arriving.wait(), shared

    def _travel_once(self, x: torch.Tensor, gates: torch.Tensor, chosen: torch.Tensor) -> Steps:
        """Return the result where a token travels once for several experts."""
        shared: list[torch.Tensor | None] = []
        routed = RoutedTokens(x.flatten(0, -2), gates, chosen)
        out = yield from travel_once(
            self.boundary,
            routed,
            self.num_experts,
            self._gated_sums,
            lambda: shared.append(self._shared_result(x)),
        )
        out = out.view(x.shape)
        return out if shared[0] is None else out + shared[0]

    def _gated_sums(self, tokens: RoutedTokens) -> torch.Tensor:
        """Return the sum ``[n, H]`` of what this rank's experts compute of each token, times their gates."""
        places = Places.of_some(tokens.chosen, len(self.experts), self.boundary.kernels)
        rows = self.experts(Dispatch.apply(tokens.x, places), places.counts)
        found: torch.Tensor = Combine.apply(rows, tokens.gates, places)
        return found

    def _shared_result(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.shared is None:
            return None
        peers = self.boundary.of_parts
        return peers.start_reduce_scatter(self.shared(peers.start_all_gather(x).wait())).wait()


class _Logits(torch.autograd.Function):
    """The router's product in float32. It keeps its input as it is, not a copy in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        later: LaterProducts | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.later, ctx.bias_type = weight, later, None if bias is None else bias.dtype
        return F.linear(x.float(), weight.float(), None if bias is None else bias.float())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        grad_rows = grads[0].flatten(0, -2)
        grad_x = (grad_rows @ ctx.weight.float()).view(x.shape).to(x.dtype)
        grad_weight = weight_gradient(ctx.weight, grad_rows, x.flatten(0, -2).float(), ctx.later)
        grad_bias = None if ctx.bias_type is None else grad_rows.sum(0).to(ctx.bias_type)
        return grad_x, grad_weight, grad_bias, None


class _WithLoss(torch.autograd.Function):
    """The values unchanged. The backward also differentiates a loss that was computed from them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, loss: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grads[0], grads[0].new_full((), ctx.factor), None
