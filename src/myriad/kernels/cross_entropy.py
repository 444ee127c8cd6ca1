"""Output projection and cross-entropy in one operator, over chunks of tokens: the logits of all tokens never
exist.

    for each chunk:   logits = x W^T          [C, V/tp]   stays in cache
                      p = softmax(logits)                 over all ranks' parts
                      loss += -log p[target]
                      dx = (p - onehot) W     [C, H]      this rank's part of the sum over the vocabulary
                      dW += (p - onehot)^T x  [V/tp, H]

Gradients are computed in the forward, while the logits exist (as in Liger Kernel, arXiv 2410.10989). The
backward only scales them, so the result is the gradient for any scale of the loss. Without autograd only the
loss is computed. Rows of the weight from ``vocabulary`` on are padding and get no probability.

Ranks that share the vocabulary exchange, for each token, the maximum of their logits, the sum of exponentials
relative to it, and the target's logit. Meanwhile the next chunk's logits are computed, and the caller of the
steps may run other work. With Triton's kernels (`myriad.kernels.triton.cross_entropy_kernels`) a single rank
uses the same code with nothing to wait for: the logits are read twice and nothing is written in between.

With ``skips``, targets may be negative: these tokens have no loss, and their gradient is 0.

With ``z_loss`` ``z``, each token adds ``z lse^2`` to the loss, where ``lse`` is the logarithm of the sum of
its exponentials (PaLM, arXiv 2204.02311, section 5): ``p`` above becomes ``p (1 + 2 z lse)``.

Legend: T tokens, C tokens of a chunk, H hidden, V vocabulary.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from myriad.kernels.choice import runs_triton
from myriad.kernels.config import Kernels
from myriad.kernels.gradient import accumulate_product, sink_of

__all__ = [
    "Shared",
    "TensorPeers",
    "VocabularyPart",
    "chunk_tokens",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "linear_cross_entropy_steps",
]

_CHUNK_BYTES = {"cpu": 2**24, "cuda": 2**30}
"""Bytes of logits that exist at a time, unless that is too few tokens for an efficient product. Each chunk
reads and writes the weight's whole gradient, so a GPU uses few large chunks."""
_FEWEST_TOKENS = 512
"""Smallest chunk. Measured on a CPU at H = 384, V = 4,096 and 50,304: 256 tokens take 5 to 10 % longer, 1,024
gain 3 %."""
_GPU_TILE_TOKENS = 256
"""Chunks on a GPU are multiples of this, so that the products' tiles are full."""
_TILE_BYTES = 2**20
"""Bytes of logits that the passes of the softmax process together, so that they stay in a core's cache."""
_FLOAT16_GAIN = 256.0
"""Factor of gradients on their way through float16: without it, probabilities below 6e-8 would be lost."""


class Shared(Protocol):
    """The values of all ranks, in flight."""

    def wait(self) -> torch.Tensor: ...


class TensorPeers(Protocol):
    """The tensor-parallel ranks, which share the vocabulary and the heads; a `myriad.model.boundary.Boundary`
    is one implementation."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def start_stack(self, x: torch.Tensor) -> Shared:
        """Stack every rank's ``x``: ``[...]`` to ``[size, ...]``."""
        ...


class VocabularyPart(NamedTuple):
    """One rank's part of the vocabulary."""

    weight: torch.Tensor  # [V/tp, H]
    first_row: int
    num_valid: int
    """Number of rows that are not padding."""
    softcap: float | None
    """Bound ``c`` of the logits, which become ``c tanh(logit / c)``; ``None``: no bound."""

    @classmethod
    def of_rank(
        cls, weight: torch.Tensor, rank: int, vocabulary: int, softcap: float | None
    ) -> "VocabularyPart":
        """Return the part of a rank; rows from ``vocabulary`` on are padding."""
        first_row = rank * len(weight)
        return cls(weight, first_row, min(max(vocabulary - first_row, 0), len(weight)), softcap)

    def logits(
        self, x: torch.Tensor, out: torch.Tensor, *, masks: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return float32 logits ``[C, V/tp]``, with -inf at padded rows if ``masks``, and the slopes of their
        bound, if they have one. Logits are in ``out`` if possible."""
        if x.dtype == torch.float32:
            logits = torch.mm(x, self.weight.t(), out=out)
        elif x.is_cuda:
            logits = torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
        else:
            logits = out.copy_(x @ self.weight.t())
        slopes = None
        if self.softcap is not None:
            shares = logits.div_(self.softcap).tanh_()
            slopes = shares.square().neg_().add_(1)
            logits = shares.mul_(self.softcap)
        if masks and self.num_valid < len(self.weight):
            logits[:, self.num_valid :].fill_(-torch.inf)
        return logits, slopes

    def rows(self, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of each target ``[C, 1]``, and whether it is one of this rank's rows."""
        rows = targets[:, None] - self.first_row
        mine = (rows >= 0) & (rows < len(self.weight))
        return rows.clamp_(0, len(self.weight) - 1), mine


def _losses_alone(
    logits: torch.Tensor, targets: torch.Tensor, z_loss: float, *, gradient: bool, skips: bool
) -> torch.Tensor:
    """Return the sum of the losses, if one rank has the whole vocabulary. ``logits`` are overwritten with
    their gradient, or without ``gradient`` with intermediate values. A CPU processes one tile at a time."""
    num_tokens = len(logits)
    if logits.device.type == "cpu":
        num_tokens = max(1, _TILE_BYTES // (4 * logits.shape[1]))
    tiles = zip(logits.split(num_tokens), targets.split(num_tokens), strict=True)
    return torch.stack([_loss_of_tile(*tile, z_loss, gradient=gradient, skips=skips) for tile in tiles]).sum()


def _loss_of_tile(
    logits: torch.Tensor, targets: torch.Tensor, z_loss: float, *, gradient: bool, skips: bool
) -> torch.Tensor:
    top = logits.amax(1, keepdim=True)
    rows = targets[:, None].clamp(min=0) if skips else targets[:, None]
    counted = (targets >= 0)[:, None] if skips else None
    at_target = logits.gather(1, rows) - top
    exponentials = logits.sub_(top).exp_()
    total = exponentials.sum(1, keepdim=True)
    sums = (total.log() + top) if z_loss else None
    if gradient:
        exponentials.div_(total if sums is None else total / (1 + 2 * z_loss * sums))
        exponentials.scatter_add_(1, rows, exponentials.new_full((1, 1), -1.0).expand_as(rows))
        if counted is not None:
            exponentials.mul_(counted)
    losses = total.log() - at_target
    losses = losses if sums is None else losses + z_loss * sums.square()
    return losses.sum() if counted is None else losses.mul_(counted).sum()


@dataclass
class _Chunk:
    """Some tokens, between the two halves of their softmax."""

    start: int
    stop: int
    values: torch.Tensor
    """``[C, V/tp]``: exponentials of the logits (with Triton the logits), later their gradient."""
    shared: Shared | None = None
    """``[tp, C, 3]``: maximum, sum, and logit of the target."""
    slopes: torch.Tensor | None = None
    """``[C, V/tp]``: slopes of the logits' bound."""


class _Job:
    """One call of the operator: its inputs, and its results so far."""

    def __init__(
        self,
        x: torch.Tensor,
        targets: torch.Tensor,
        part: VocabularyPart,
        peers: TensorPeers,
        kernels: Kernels,
        z_loss: float,
        *,
        skips: bool,
    ) -> None:
        self.x, self.targets, self.part, self.peers, self.z_loss = x, targets, part, peers, z_loss
        self._skips = skips
        self._in_triton = part.softcap is None and runs_triton("cross_entropy", x, kernels)
        differentiable = torch.is_grad_enabled()
        needs_x, needs_weight = (differentiable and t.requires_grad for t in (x, part.weight))
        self.grad_x = torch.empty_like(x.detach()) if needs_x else None
        self.grad_weight = torch.empty_like(part.weight, dtype=torch.float32) if needs_weight else None
        self.loss = x.new_zeros((), dtype=torch.float32)
        self._gradient = needs_x or needs_weight
        self.gain = _FLOAT16_GAIN if x.dtype == torch.float16 else 1.0

    @torch.no_grad()
    def begin(self, start: int, stop: int, buffer: torch.Tensor) -> _Chunk:
        targets = self.targets[start:stop]
        masks = not self._in_triton
        logits, slopes = self.part.logits(self.x[start:stop], buffer[: stop - start], masks=masks)
        if self._in_triton:
            from myriad.kernels.triton.cross_entropy_kernels import row_facts

            facts = row_facts(logits, targets, self.part.first_row, self.part.num_valid)
            return _Chunk(start, stop, logits, self.peers.start_stack(facts))
        if self.peers.size == 1:
            flags = {"gradient": self._gradient, "skips": self._skips}
            self.loss += _losses_alone(logits, targets, self.z_loss, **flags)
            return _Chunk(start, stop, logits, slopes=slopes)
        # a rank's part may be all padding
        top = logits.amax(1, keepdim=True).clamp_(min=torch.finfo(torch.float32).min)
        rows, mine = self.part.rows(targets)
        at_target = logits.gather(1, rows).masked_fill_(~mine, 0.0)
        values = logits.sub_(top).exp_()
        facts = torch.cat([top, values.sum(1, keepdim=True), at_target], 1)
        return _Chunk(start, stop, values, self.peers.start_stack(facts), slopes)

    @torch.no_grad()
    def finish(self, chunk: _Chunk) -> None:
        if chunk.shared is not None:
            self._join(chunk, chunk.shared)
        if not self._gradient:
            return
        if chunk.slopes is not None:
            chunk.values *= chunk.slopes
        x, grad_logits = self.x[chunk.start : chunk.stop], self._rounded(chunk.values)
        if self.grad_x is not None:
            torch.mm(grad_logits, self.part.weight, out=self.grad_x[chunk.start : chunk.stop])
        if self.grad_weight is not None:
            accumulate_product(self.grad_weight, grad_logits, x, first=chunk.start == 0)

    def _rounded(self, values: torch.Tensor) -> torch.Tensor:
        """Return the logits' gradient times `gain`, in the type of the products, as Triton's kernel does.
        ``values`` are overwritten."""
        if self.gain != 1.0 and values.dtype != self.x.dtype:
            values *= self.gain
        return values.to(self.x.dtype)

    def _join(self, chunk: _Chunk, shared: Shared) -> None:
        tops, sums, at_target = shared.wait().unbind(2)  # each [tp, C]
        top = tops.amax(0)
        scales = (tops - top).exp_()
        total = (sums * scales).sum(0)
        targets = self.targets[chunk.start : chunk.stop]
        sums = total.log() + top
        losses = sums - at_target.sum(0)
        if self.z_loss:
            losses += self.z_loss * sums.square()
            total = total / (1 + 2 * self.z_loss * sums)  # so that the gradient has the factor
        if self._skips:  # an infinite total gives probabilities of 0; no row is the target's
            losses *= targets >= 0
            total = total.masked_fill(targets < 0, torch.inf)
        self.loss += losses.sum()
        if self._gradient and self._in_triton:
            from myriad.kernels.triton.cross_entropy_kernels import write_gradient

            part, values = self.part, chunk.values
            out = values if self.x.dtype == values.dtype else torch.empty_like(values, dtype=self.x.dtype)
            rows_of = part.first_row, part.num_valid
            chunk.values = write_gradient(values, targets, top, total, *rows_of, out, self.gain)
        elif self._gradient:
            rows, mine = self.part.rows(targets)
            chunk.values.mul_((scales[self.peers.rank] / total)[:, None])
            chunk.values.scatter_add_(1, rows, -mine.to(chunk.values.dtype))


class _Loss(torch.autograd.Function):
    """The loss with gradients that the forward has computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, job: _Job) -> torch.Tensor:
        ctx.save_for_backward(job.grad_x, job.grad_weight)
        ctx.weight, ctx.gain = weight, job.gain
        return job.loss

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (scale,) = grads
        grad_x, grad_weight = ctx.saved_tensors
        scale = scale / ctx.gain
        grad_x = None if grad_x is None else _times(grad_x, scale)
        sink = sink_of(ctx.weight)
        if grad_weight is not None and sink is not None:
            sink.add_scaled(grad_weight, scale)
            grad_weight = None
        elif grad_weight is not None:
            grad_weight = (grad_weight * scale).to(ctx.weight.dtype)
        return grad_x, grad_weight, None


def _times(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x`` times a float32 number, rounded once; in the type of ``x`` the number may be inexact."""
    if x.is_cuda:  # a scalar on the device would be rounded to that type first, a vector is not
        return torch.mul(x, scale.view(1), out=torch.empty_like(x))
    return x * scale


def chunk_tokens(num_rows: int, num_tokens: int, num_ranks: int, *, on_gpu: bool) -> int:
    """Return the number of tokens whose logits ``[C, num_rows]`` exist at a time. If ranks wait for each
    other there are at least two chunks, so that communication can overlap with one of them."""
    limit = _CHUNK_BYTES["cuda" if on_gpu else "cpu"] // (4 * num_rows)
    if on_gpu:
        limit -= limit % _GPU_TILE_TOKENS
    if num_ranks > 1:
        limit = min(limit, -(-num_tokens // 2))
    return max(_FEWEST_TOKENS, limit)


def linear_cross_entropy_steps(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    peers: TensorPeers,
    vocabulary: int,
    chunk: int | None = None,
    kernels: Kernels = "auto",
    softcap: float | None = None,
    z_loss: float = 0.0,
    *,
    skips: bool = False,
) -> Generator[None, None, torch.Tensor]:
    """Run `linear_cross_entropy` in steps; yield while a message between the ranks is in flight."""
    part = VocabularyPart.of_rank(weight, peers.rank, vocabulary, softcap)
    job = _Job(x, targets, part, peers, kernels, z_loss, skips=skips)
    chunk = min(chunk or chunk_tokens(len(weight), len(x), peers.size, on_gpu=weight.is_cuda), len(x))
    shape = (1 if peers.size == 1 else 2, chunk, len(weight))
    buffers = x.new_empty(shape, dtype=torch.float32).unbind()
    begun: _Chunk | None = None
    for index, start in enumerate(range(0, len(x), chunk)):
        if begun is not None and peers.size == 1:
            job.finish(begun)
        latest = job.begin(start, min(start + chunk, len(x)), buffers[index % len(buffers)])
        if begun is not None and peers.size > 1:
            job.finish(begun)
        begun = latest
        if peers.size > 1:
            yield None
    if begun is not None:
        job.finish(begun)
    loss: torch.Tensor = _Loss.apply(x, weight, job)
    return loss


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    peers: TensorPeers,
    vocabulary: int,
    chunk: int | None = None,
    kernels: Kernels = "auto",
    softcap: float | None = None,
    z_loss: float = 0.0,
    *,
    skips: bool = False,
) -> torch.Tensor:
    """Return the sum over tokens of ``-log softmax(x weight^T)[target]``, a float32 scalar.

    With ``softcap`` ``c``, each logit is bounded to ``c tanh(logit / c)`` first (Gemma 2, arXiv 2408.00118).
    ``x``: ``[T, H]``, whole on every rank. ``weight``: this rank's rows ``[V/tp, H]``. ``targets``: ``[T]``,
    below ``vocabulary``; with ``skips``, tokens with a negative one have no loss. The gradient of ``x`` is
    this rank's part of the sum: the operator that gathered ``x`` sums the parts.
    """
    how = (chunk, kernels, softcap, z_loss)
    steps = linear_cross_entropy_steps(x, weight, targets, peers, vocabulary, *how, skips=skips)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            loss: torch.Tensor = end.value
            return loss


def linear_cross_entropy_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    vocabulary: int,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """Compute the loss on one device, with all logits in memory."""
    logits = (x @ weight[:vocabulary].t()).float()
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = F.cross_entropy(logits, targets, reduction="sum")
    return loss + z_loss * logits.logsumexp(-1).square().sum() if z_loss else loss
