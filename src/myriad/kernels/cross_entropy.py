"""Output projection and cross-entropy in one, over chunks of tokens: the logits of all tokens never exist.

    for each chunk:   logits = x W^T          [C, V/tp]   stays in cache
                      p = softmax(logits)                 over all ranks' parts: two small all-reduces
                      loss += -log p[target]
                      dx = (p - onehot) W     [C, H]      this rank's part of the sum over the vocabulary
                      dW += (p - onehot)^T x  [V/tp, H]

Gradients are computed in the forward, while the logits are there (as Liger Kernel does, arXiv 2410.10989);
the backward only scales them, so that the result is the gradient for any scale of the loss. Without autograd
nothing but the loss is computed. Rows of the weight from ``vocabulary`` on are padding and get no
probability.

Legend: T tokens, C tokens of a chunk, H hidden, V vocabulary.
"""

from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from myriad.kernels.gradient import accumulate_product, sink_of

__all__ = ["VocabularyPeers", "linear_cross_entropy", "linear_cross_entropy_reference"]

_CHUNK_BYTES_CPU = 2**23
_CHUNK_BYTES_CUDA = 2**28


class VocabularyPeers(Protocol):
    """The ranks that share the vocabulary; `myriad.model.boundary.Boundary` is one."""

    @property
    def rank(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...

    def max(self, x: torch.Tensor) -> torch.Tensor: ...


class _Chunk(NamedTuple):
    losses: torch.Tensor  # [C]
    grad_logits: torch.Tensor  # [C, V/tp], of the sum of losses


def _logits(x: torch.Tensor, weight: torch.Tensor, num_valid: int) -> torch.Tensor:
    """Float32 ``[C, V/tp]``, -inf at padded rows."""
    if x.is_cuda and x.dtype != torch.float32:
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        logits = (x @ weight.t()).float()
    if num_valid < weight.shape[0]:
        logits[:, num_valid:] = -torch.inf
    return logits


def _chunk(
    logits: torch.Tensor, targets: torch.Tensor, peers: VocabularyPeers, first_row: int, *, gradient: bool
) -> _Chunk:
    """Losses of a chunk; ``logits`` is overwritten with their gradient."""
    top = peers.max(logits.amax(1, keepdim=True))
    rows = targets[:, None] - first_row
    mine = (rows >= 0) & (rows < logits.shape[1])
    rows = rows.clamp(0, logits.shape[1] - 1)
    at_target = (logits.gather(1, rows) - top).masked_fill_(~mine, 0.0)
    exponentials = logits.sub_(top).exp_()
    sums = torch.cat([exponentials.sum(1, keepdim=True), at_target], 1)
    total, at_target = peers.sum(sums).split(1, 1)
    losses = (total.log() - at_target).squeeze(1)
    if gradient:
        exponentials.div_(total).scatter_add_(1, rows, -mine.to(logits.dtype))
    return _Chunk(losses, exponentials)


def _chunk_tokens(x: torch.Tensor, weight: torch.Tensor) -> int:
    limit = _CHUNK_BYTES_CUDA if x.is_cuda else _CHUNK_BYTES_CPU
    return max(256, limit // (4 * weight.shape[0]))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        peers: VocabularyPeers,
        vocabulary: int,
        chunk: int,
    ) -> torch.Tensor:
        first_row = peers.rank * weight.shape[0]
        num_valid = min(max(vocabulary - first_row, 0), weight.shape[0])
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = (
            torch.zeros(weight.shape, dtype=torch.float32, device=x.device) if needs_weight else None
        )
        loss = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = _logits(x[part], weight, num_valid)
            result = _chunk(logits, targets[part], peers, first_row, gradient=needs_x or needs_weight)
            loss += result.losses.sum()
            grad_logits = result.grad_logits.to(x.dtype)
            if grad_x is not None:
                torch.mm(grad_logits, weight, out=grad_x[part])
            if grad_weight is not None:
                accumulate_product(grad_weight, grad_logits, x[part])
        ctx.grad_x, ctx.grad_weight, ctx.weight = grad_x, grad_weight, weight
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = grads
        grad_x = ctx.grad_x * scale.to(ctx.grad_x.dtype) if ctx.grad_x is not None else None
        grad_weight, sink = ctx.grad_weight, sink_of(ctx.weight)
        if grad_weight is not None and sink is not None:
            sink.total.addcmul_(grad_weight, scale)
            grad_weight = None
        elif grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.weight.dtype)
        return grad_x, grad_weight, None, None, None, None


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    peers: VocabularyPeers,
    vocabulary: int,
    chunk: int | None = None,
) -> torch.Tensor:
    """Sum over tokens of ``-log softmax(x weight^T)[target]``, a float32 scalar.

    ``x`` is ``[T, H]``, whole on every rank; ``weight`` this rank's rows ``[V/tp, H]``; ``targets`` ``[T]``
    below ``vocabulary``. The gradient of ``x`` is this rank's part of the sum: `Boundary.enter` adds them up.
    """
    chunk = chunk or _chunk_tokens(x, weight)
    loss: torch.Tensor = _LinearCrossEntropy.apply(x, weight, targets, peers, vocabulary, chunk)
    return loss


def linear_cross_entropy_reference(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """The same on one device, with all logits."""
    return F.cross_entropy((x @ weight[:vocabulary].t()).float(), targets, reduction="sum")
