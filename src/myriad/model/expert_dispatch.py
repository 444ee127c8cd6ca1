"""Order of the tokens that travel to experts, and their way there and back.

A token has k experts. `Places` orders pairs of a token and one of its destinations: experts, ranks or nodes.
`Dispatch` copies tokens to their places, and `Combine` sums for each token what comes back from them.

``layout.expert_dispatch`` is how often a token travels. Two nodes of two ranks, two experts a rank, a token
of rank 0 with the experts 4, 5 and 7:

    expert   a row to rank 2, one more to rank 2, one to rank 3                       3 rows between nodes
    rank     a row to rank 2, one to rank 3                                           2
    node     a row to rank 2, the rank with the same place in that node, and from
             there one to rank 3                                                      1

Where a token travels once for several experts, its gates travel with it, and what it gets back is the sum of
their results times their gates (DeepEP, github.com/deepseek-ai/DeepEP). Each way has two hops with "node" and
one with "rank", and a hop is the same function: to a destination, on to the next, back, and the sum.

Legend: T tokens, H hidden, k experts of a token, m destinations of a token at most, D destinations.
"""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import torch

from myriad.kernels.config import Kernels
from myriad.kernels.expert_sums import gate_gradients, sum_pairs
from myriad.model.boundary import Boundary

__all__ = ["Combine", "Dispatch", "Places", "Reordered", "RoutedTokens", "by_expert", "travel_once"]


class Places(NamedTuple):
    """Where each pair of a token and one of its destinations is, if pairs are ordered by destination: int64
    ``[P]``. The tokens of a destination stay in their order."""

    counts: torch.Tensor
    """Tokens of each destination, ``[D]``."""
    pairs: torch.Tensor
    """Number of each pair, destination by destination: pair ``m t + i`` is of token t and its i-th one."""
    tokens: torch.Tensor
    """Token of each pair, destination by destination."""
    back: torch.Tensor
    """Place of each pair, token by token."""
    begins: torch.Tensor | None = None
    """Where the pairs of each token begin in ``back``, ``[T]``; ``None``: each token has m."""
    kernels: Kernels = "auto"
    """The kernels that sum rows."""

    @classmethod
    def of(cls, chosen: torch.Tensor, number: int, kernels: Kernels = "auto") -> "Places":
        """Order all tokens by their destinations ``[T, m]``, of which there are ``number``."""
        wanted, pairs = chosen.flatten().sort(stable=True)
        numbers = torch.arange(number, device=wanted.device)
        ends = torch.searchsorted(wanted, numbers, right=True)  # `bincount` would wait for a GPU
        counts = ends.diff(prepend=ends.new_zeros(1))
        back = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
        tokens = pairs.div(chosen.shape[1], rounding_mode="floor")
        return cls(counts, pairs, tokens, back, kernels=kernels)

    @classmethod
    def of_some(cls, chosen: torch.Tensor, number: int, kernels: Kernels = "auto") -> "Places":
        """Order tokens by those of their destinations ``[T, m]`` that are not negative."""
        present = chosen >= 0
        whole = cls.of(torch.where(present, chosen, number), number + 1)
        counts, back = whole.counts[:number], whole.back[present.flatten()]
        of_tokens, last = present.sum(1), len(back)
        begins = of_tokens.cumsum(0) - of_tokens
        return cls(counts, whole.pairs[:last], whole.tokens[:last], back, begins, kernels)

    def sum_by_token(
        self, rows: torch.Tensor, num_tokens: int, gates: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the sums ``[T, ...]`` of the rows ``[P, ...]`` of each token, which are ordered by
        destination; ``gates`` ``[T, m]`` multiply them, in float32."""
        begins = self.begins
        if begins is None:
            each = max(1, len(rows) // max(1, num_tokens))
            begins = torch.arange(0, num_tokens * each, each, device=rows.device)
        return sum_pairs(rows, self.back, begins, self.pairs, gates, self.kernels)


def by_expert(arrived: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the order of rows by expert, and its inverse, if they arrive by rank and then by expert.
    ``arrived`` ``[ranks, experts]``: numbers of rows."""
    ranks, experts = arrived.shape
    numbers = torch.arange(experts, device=arrived.device).repeat(ranks)
    order = numbers.repeat_interleave(arrived.flatten()).argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order, back


class RoutedTokens(NamedTuple):
    """Tokens, and what was chosen for them."""

    x: torch.Tensor
    """The values of the tokens, ``[T, H]``."""
    gates: torch.Tensor
    """Factor of the result of each chosen expert, float32 ``[T, k]``."""
    chosen: torch.Tensor
    """Numbers of the chosen experts among those that the next hop leads to, int64 ``[T, k]``; negative:
    another one."""


def travel_once(
    boundary: Boundary,
    tokens: RoutedTokens,
    num_experts: int,
    compute: Callable[[RoutedTokens], torch.Tensor],
    meanwhile: Callable[[], None] = lambda: None,
    hop: int = 0,
) -> Generator[None, None, torch.Tensor]:
    """Send each token once to each place that holds some of its ``num_experts``, and return the sums of what
    comes back, ``[T, H]``. Yields where something travels.

    ``compute``: gated sums of the experts of this rank, ``[n, H]``, of n tokens that arrived here.
    ``meanwhile`` is called while results travel.
    """
    if hop == len(boundary.expert_hops):
        return compute(tokens)
    own, number = boundary.expert_hops[hop]
    num_tokens, hidden, most = *tokens.x.shape, tokens.chosen.shape[1]
    held = num_experts // number
    places = Places.of_some(_destinations(tokens.chosen, held, number), number, boundary.kernels)
    counting = boundary.start_counts(places.counts, hop)
    yield None
    leaving, arrived = places.counts.tolist(), counting.wait().flatten().tolist()
    arriving = boundary.start_exchange(_Leave.apply(*tokens, places), leaving, arrived, hop)
    del tokens
    yield None
    x, gates, chosen = _Arrive.apply(arriving.wait(), hidden, most)
    here = chosen.div(held, rounding_mode="floor") == own
    there = RoutedTokens(x, gates, torch.where(here, chosen - own * held, -1))
    del x, gates
    results = yield from travel_once(boundary, there, held, compute, hop=hop + 1)
    del there
    arriving = boundary.start_exchange(results, arrived, leaving, hop)
    del results
    meanwhile()
    yield None
    total: torch.Tensor = _Sum.apply(arriving.wait(), num_tokens, places)
    return total


def _destinations(chosen: torch.Tensor, held: int, number: int) -> torch.Tensor:
    """Return the distinct destinations ``[T, m]`` of tokens with these experts, if each holds ``held``; the
    rest is -1."""
    ends = chosen.div(held, rounding_mode="floor").sort(1, descending=True).values
    again = torch.zeros_like(ends, dtype=torch.bool)
    again[:, 1:] = ends[:, 1:] == ends[:, :-1]
    ends = ends.masked_fill(again, -1)
    return ends.sort(1, descending=True).values[:, :number]


class Dispatch(torch.autograd.Function):
    """Tokens ``[T, H]`` to ``[P, H]``, ordered by destination. Gradients are summed in the order of a token's
    destinations, not as they happen to arrive."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: Places) -> torch.Tensor:
        _keep(ctx, places)
        ctx.num_tokens = len(x)
        return x.index_select(0, places.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _kept(ctx).sum_by_token(grads[0], ctx.num_tokens), None


class Combine(torch.autograd.Function):
    """Results ``[P, H]``, ordered by destination, times their gates ``[T, m]``, summed for each token."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, gates: torch.Tensor, places: Places) -> torch.Tensor:
        _keep(ctx, places, rows, gates)
        return places.sum_by_token(rows, len(gates), gates)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        places, (rows, gates) = _kept(ctx), ctx.saved_tensors[4:]
        found = gate_gradients(grads[0], rows, places.tokens, places.pairs, gates, places.kernels)
        return *found, None


class _Sum(torch.autograd.Function):
    """Results ``[P, H]``, ordered by destination, summed for each of ``num_tokens`` tokens."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, num_tokens: int, places: Places) -> torch.Tensor:
        ctx.save_for_backward(places.tokens)
        return places.sum_by_token(rows, num_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        return grads[0].index_select(0, tokens), None, None


def _keep(ctx: Any, places: Places, *others: torch.Tensor) -> None:
    ctx.kernels = places.kernels
    ctx.save_for_backward(places.pairs, places.tokens, places.back, places.begins, *others)


def _kept(ctx: Any) -> Places:
    pairs, tokens, back, begins = ctx.saved_tensors[:4]
    return Places(tokens, pairs, tokens, back, begins, ctx.kernels)  # nothing asks for the counts


class _Leave(torch.autograd.Function):
    """Tokens, their gates and the numbers of their experts ``[T, ...]`` to one message of rows
    ``[P, H + ...]``, ordered by destination."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gates: torch.Tensor, chosen: torch.Tensor, places: Places
    ) -> torch.Tensor:
        _keep(ctx, places)
        ctx.ends, ctx.num_tokens = (x.shape[1], gates.shape[1]), len(x)
        of_tokens = (one.index_select(0, places.tokens) for one in (x, gates, chosen.int()))
        return _packed(*of_tokens)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        places = _kept(ctx)
        grad_x, grad_gates, _ = _unpacked(grads[0], *ctx.ends)
        found = (places.sum_by_token(grad, ctx.num_tokens) for grad in (grad_x, grad_gates))
        return *found, None, None


class _Arrive(torch.autograd.Function):
    """The inverse of `_Leave` for the rows that arrived."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, hidden: int, most: int) -> tuple[torch.Tensor, ...]:
        x, gates, chosen = _unpacked(rows, hidden, most)
        found = x, gates, chosen.long()
        ctx.mark_non_differentiable(found[2])
        return found

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _packed(grads[0], grads[1], torch.zeros_like(grads[1], dtype=torch.int32)), None, None


def _packed(x: torch.Tensor, gates: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return rows ``[n, H]`` with float32 and int32 values ``[n, k]`` behind them, whose bits stay."""
    behind = torch.cat((gates, chosen.view(torch.float32)), 1)
    return torch.cat((x, behind.view(x.dtype)), 1)


def _unpacked(rows: torch.Tensor, hidden: int, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    behind = rows[:, hidden:].contiguous().view(torch.float32)
    return rows[:, :hidden], behind[:, :most].contiguous(), behind[:, most:].contiguous().view(torch.int32)


class Reordered(torch.autograd.Function):
    """Rows in another order, whose inverse the backward uses."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(back)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None
