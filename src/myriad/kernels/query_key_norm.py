"""Norm of queries and keys before attention, over each head or over all heads (Dehghani et al., arXiv
2302.05442, section 2). RMSNorm: Qwen 3 and Gemma 3 by head, OLMo 2 over all heads. LayerNorm by head:
StableLM, whose heads have weights of their own, and Megatron-LM, with biases.

The heads of all ranks are normalized together if tensor parallelism shards them: the ranks exchange one sum
of squares for each token in the forward, and one product in the backward.

Legend: B batch, S sequence, N query heads, K key/value heads, D head size.
"""

from typing import Any, Literal, NamedTuple

import torch

from myriad.kernels.attention_blocks import Heads
from myriad.kernels.cross_entropy import TensorPeers

__all__ = ["HeadNorm", "query_key_norm"]


class HeadNorm(NamedTuple):
    """What is normalized together."""

    over: Literal["head", "heads", "all"]
    """Each head with weights that all share, each head with its own, or all heads together."""
    epsilon: float
    peers: TensorPeers
    """The ranks that share the heads."""
    centered: bool = False
    """Whether the mean of each head is subtracted first: LayerNorm. Not over all heads together."""
    key_copies: int = 1
    """Number of ranks that hold each key head. Each of them has the head's values, and a part of their
    gradient."""

    def means(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the means over the values that are normalized together, of queries and of keys
        ``[B, S, n, D]``: ``[B, S, n or 1, 1]`` each. Of the ranks that hold a key head one counts it."""
        return self._means(queries, keys, slice(None, None, self.key_copies))

    def gradient_means(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `means` of products with gradients. For keys it is this rank's part of the mean: the parts
        of the ranks that hold a key head add up to it."""
        of_queries, of_keys = self._means(queries, keys, slice(None))
        return of_queries, of_keys if self.over != "all" else of_keys / self.key_copies

    def _means(
        self, queries: torch.Tensor, keys: torch.Tensor, counted: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `means`, adding up the keys of the ranks in ``counted`` only."""
        if self.over != "all":
            of_queries, of_keys = (part.sum(-1, keepdim=True) for part in (queries, keys))
            return of_queries / queries.shape[-1], of_keys / keys.shape[-1]
        own = torch.stack([part.sum((-2, -1)) for part in (queries, keys)])
        every = self.peers.start_stack(own).wait()
        sums = every[:, 0].sum(0), every[counted, 1].sum(0)
        of_queries, of_keys = (one[..., None, None] for one in sums)
        num_queries, num_keys = (
            part.shape[-2] * part.shape[-1] * self.peers.size for part in (queries, keys)
        )
        return of_queries / num_queries, of_keys / (num_keys // self.key_copies)

    def wide(self, part: torch.Tensor) -> torch.Tensor:
        """Return ``part`` in float32, centered if the norm does so."""
        wide = part.float()
        return wide - wide.mean(-1, keepdim=True) if self.centered else wide


def _parts(fused: torch.Tensor, heads: Heads) -> list[torch.Tensor]:
    """View ``[B, S, (N + 2 K) D]`` as queries, keys and values ``[B, S, n, D]``."""
    sizes = [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads]
    return [*fused.unflatten(-1, (-1, heads.width)).split_with_sizes(sizes, 2)]


class _QueryKeyNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fused: torch.Tensor,
        query_weight: torch.Tensor,
        key_weight: torch.Tensor,
        query_bias: torch.Tensor | None,
        key_bias: torch.Tensor | None,
        heads: Heads,
        norm: HeadNorm,
    ) -> torch.Tensor:
        normed = torch.empty_like(fused)
        *parts, values = _parts(fused, heads)
        *outputs, own_values = _parts(normed, heads)
        own_values.copy_(values)
        wide = [norm.wide(part) for part in parts]
        squares = norm.means(*(part.square() for part in wide))
        roots = []
        for part, square, weight, bias, output in zip(
            wide, squares, (query_weight, key_weight), (query_bias, key_bias), outputs, strict=True
        ):
            root = square.add_(norm.epsilon).rsqrt_()
            scaled = (part * root).mul_(weight.view(-1, heads.width))
            output.copy_(scaled if bias is None else scaled.add_(bias.view(-1, heads.width)))
            roots.append(root)
        ctx.save_for_backward(fused, query_weight, key_weight, *roots)
        ctx.heads, ctx.norm, ctx.has_bias = heads, norm, query_bias is not None
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        fused, *weights, query_root, key_root = ctx.saved_tensors
        heads: Heads = ctx.heads
        norm: HeadNorm = ctx.norm
        grad_fused = torch.empty_like(grads[0])
        *parts, _ = _parts(fused, heads)
        *grad_parts, grad_values = _parts(grads[0], heads)
        *outputs, own_values = _parts(grad_fused, heads)
        own_values.copy_(grad_values)
        normed = [norm.wide(part) * root for part, root in zip(parts, (query_root, key_root), strict=True)]
        wide = [grad.float() for grad in grad_parts]
        over = (0, 1, 2) if norm.over == "head" else (0, 1)
        grad_weights = [
            (grad * n).sum(over).flatten().to(weight.dtype)
            for grad, n, weight in zip(wide, normed, weights, strict=True)
        ]
        grad_biases = [
            grad.sum(over).flatten().to(weight.dtype) if ctx.has_bias else None
            for grad, weight in zip(wide, weights, strict=True)
        ]
        weighted = [grad * weight.view(-1, heads.width) for grad, weight in zip(wide, weights, strict=True)]
        means = norm.gradient_means(*(grad * n for grad, n in zip(weighted, normed, strict=True)))
        for index, root in enumerate((query_root, key_root)):
            own = weighted[index]
            if norm.centered:
                own = own - own.mean(-1, keepdim=True)
            outputs[index].copy_(own.sub_(normed[index].mul_(means[index])).mul_(root))
        return grad_fused, *grad_weights, *grad_biases, None, None


def query_key_norm(
    fused: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    heads: Heads,
    norm: HeadNorm,
    biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Return queries, keys and values ``[B, S, (N + 2 K) D]`` with queries and keys normalized, in float32.
    Weights and biases of queries and of keys: ``[D]`` each, or ``[N D]`` and ``[K D]``."""
    normed: torch.Tensor = _QueryKeyNorm.apply(fused, *weights, *biases, heads, norm)
    return normed
