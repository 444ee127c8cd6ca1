"""Output projection and the loss of each token, without gradients, for evaluation.

Like `myriad.kernels.cross_entropy`, this operator works on chunks of tokens, and ranks that share the
vocabulary exchange for each token the maximum of their logits, the sum of exponentials relative to it, and
the target's logit. The same values, and the token of each maximum, decide which token is the likeliest.

Legend: T tokens, H hidden, V vocabulary.
"""

from collections.abc import Generator
from typing import NamedTuple

import torch

from myriad.kernels.cross_entropy import TensorPeers, VocabularyPart, chunk_tokens

__all__ = ["TokenLosses", "token_losses_steps"]


class TokenLosses(NamedTuple):
    """The loss of each token."""

    losses: torch.Tensor
    """Negative log-likelihoods in nats, ``[T]`` float32."""
    is_likeliest: torch.Tensor
    """Whether no other token has a higher score, ``[T]`` bool."""
    likeliest: torch.Tensor
    """The token with the highest score, the smallest of several, ``[T]`` int64."""


def token_losses_steps(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    peers: TensorPeers,
    vocabulary: int,
    softcap: float | None = None,
) -> Generator[None, None, TokenLosses]:
    """Compute the losses of ``targets`` ``[T]``, given ``x`` ``[T, H]``; yield while a message between the
    ranks is in flight. Other arguments: see `myriad.kernels.cross_entropy.linear_cross_entropy`. Autograd
    must be off."""
    part = VocabularyPart.of_rank(weight, peers.rank, vocabulary, softcap)
    chunk = max(1, min(chunk_tokens(len(weight), len(x), peers.size, on_gpu=weight.is_cuda), len(x)))
    buffer = x.new_empty((chunk, len(weight)), dtype=torch.float32)
    losses = x.new_empty((len(x),), dtype=torch.float32)
    is_likeliest = torch.empty_like(losses, dtype=torch.bool)
    likeliest = torch.empty_like(losses, dtype=torch.int64)
    for start in range(0, len(x), chunk):
        here = slice(start, min(start + chunk, len(x)))
        shared = peers.start_stack(_facts(part, x[here], targets[here], buffer[: here.stop - start]))
        if peers.size > 1:
            yield None
        tops, sums, at_target, tokens = shared.wait().unbind(2)  # each [tp, C]
        (top, rank), own = tops.max(0), at_target.sum(0)
        losses[here] = (sums * (tops - top).exp()).sum(0).log() + top - own
        is_likeliest[here] = own >= top
        likeliest[here] = tokens.gather(0, rank[None])[0].long()
    return TokenLosses(losses, is_likeliest, likeliest)


def _facts(
    part: VocabularyPart, x: torch.Tensor, targets: torch.Tensor, buffer: torch.Tensor
) -> torch.Tensor:
    """Return the maximum, the sum of exponentials, the target's logit and the token of the maximum in one
    rank's part, ``[C, 4]``. Numbers of tokens are exact in float32."""
    logits, _ = part.logits(x, buffer, masks=True)
    top, place = logits.max(1, keepdim=True)
    # a rank's part may be all padding
    top = top.clamp_(min=torch.finfo(torch.float32).min)
    rows, mine = part.rows(targets)
    at_target = logits.gather(1, rows).masked_fill_(~mine, 0.0)
    sums = logits.sub_(top).exp_().sum(1, keepdim=True)
    return torch.cat([top, sums, at_target, (place + part.first_row).to(top.dtype)], 1)
