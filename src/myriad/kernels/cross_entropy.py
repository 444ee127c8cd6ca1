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

_CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**28}
"""Logits that exist at a time, unless that is fewer tokens than make an efficient product."""
_FEWEST_TOKENS = 512
"""Measured on a CPU at H = 384, V = 4,096 and 50,304: 256 take 5 to 10 % longer, 1,024 gain 3 %."""
_TILE_BYTES = 2**20
"""Logits that the passes of the softmax go over together, so that they stay in a core's cache."""


class VocabularyPeers(Protocol):
    """The ranks that share the vocabulary; `myriad.model.boundary.Boundary` is one."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, x: torch.Tensor) -> torch.Tensor: ...

    def max(self, x: torch.Tensor) -> torch.Tensor: ...


class _Part(NamedTuple):
    """What one rank has of the vocabulary."""

    weight: torch.Tensor  # [V/tp, H]
    first_row: int
    num_valid: int
    """Rows that are not padding."""
    peers: VocabularyPeers

    def logits(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Float32 ``[C, V/tp]``, -inf at padded rows; in ``out`` where possible."""
        if x.dtype == torch.float32:
            logits = torch.mm(x, self.weight.t(), out=out)
        elif x.is_cuda:
            logits = torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
        else:
            logits = out.copy_(x @ self.weight.t())
        if self.num_valid < len(self.weight):
            logits[:, self.num_valid :] = -torch.inf
        return logits

    def losses(self, logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool) -> torch.Tensor:
        """Sum of the losses; ``logits`` are overwritten with its gradient, or with nothing of use."""
        top = self.peers.max(logits.amax(1, keepdim=True))
        rows = targets[:, None] - self.first_row
        mine = (rows >= 0) & (rows < logits.shape[1])
        rows = rows.clamp(0, logits.shape[1] - 1)
        at_target = (logits.gather(1, rows) - top).masked_fill_(~mine, 0.0)
        exponentials = logits.sub_(top).exp_()
        sums = torch.cat([exponentials.sum(1, keepdim=True), at_target], 1)
        total, at_target = self.peers.sum(sums).split_with_sizes([1, 1], 1)
        if gradient:
            exponentials.div_(total).scatter_add_(1, rows, -mine.to(logits.dtype))
        return (total.log() - at_target).sum()

    def losses_by_tiles(self, logits: torch.Tensor, targets: torch.Tensor, *, gradient: bool) -> torch.Tensor:
        """`losses`, on a CPU a tile at a time; not where each would be two all-reduces."""
        num_tokens = len(logits)
        if logits.device.type == "cpu" and self.peers.size == 1:
            num_tokens = max(1, _TILE_BYTES // (4 * logits.shape[1]))
        tiles = zip(logits.split(num_tokens), targets.split(num_tokens), strict=True)
        sums = [self.losses(*tile, gradient=gradient) for tile in tiles]
        return torch.stack(sums).sum()


def _chunk_tokens(weight: torch.Tensor) -> int:
    limit = _CHUNK_BYTES["cuda" if weight.is_cuda else "cpu"]
    return max(_FEWEST_TOKENS, limit // (4 * len(weight)))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, part: _Part, chunk: int
    ) -> torch.Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x) if needs_x else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        loss = x.new_zeros((), dtype=torch.float32)
        buffer = x.new_empty(min(chunk, len(x)), len(weight), dtype=torch.float32)
        for start in range(0, len(x), chunk):
            tokens = x[start : start + chunk]
            logits = part.logits(tokens, buffer[: len(tokens)])
            end = start + len(tokens)
            loss += part.losses_by_tiles(logits, targets[start:end], gradient=needs_x or needs_weight)
            grad_logits = logits.to(x.dtype)
            if grad_x is not None:
                torch.mm(grad_logits, weight, out=grad_x[start:end])
            if grad_weight is not None:
                accumulate_product(grad_weight, grad_logits, tokens)
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
        return grad_x, grad_weight, None, None, None


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
    first_row = peers.rank * len(weight)
    part = _Part(weight, first_row, min(max(vocabulary - first_row, 0), len(weight)), peers)
    chunk = chunk or _chunk_tokens(weight)
    loss: torch.Tensor = _LinearCrossEntropy.apply(x, weight, targets, part, chunk)
    return loss


def linear_cross_entropy_reference(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, vocabulary: int
) -> torch.Tensor:
    """The same on one device, with all logits."""
    return F.cross_entropy((x @ weight[:vocabulary].t()).float(), targets, reduction="sum")
