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

    def width(self, part: torch.Tensor) -> int:
        """Return the number of values that are normalized together, of a rank's ``part`` ``[..., n, D]``."""
        if self.over != "all":
            return part.shape[-1]
        return part.shape[-2] * part.shape[-1] * self.peers.size

    def sums(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums over the values that are normalized together, ``[B, S, n or 1, 1]`` each."""
        if self.over != "all":
            return [part.sum(-1, keepdim=True) for part in parts]
        own = torch.stack([part.sum((-2, -1)) for part in parts])
        return [one[..., None, None] for one in self.peers.start_stack(own).wait().sum(0)]

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
        squares = norm.sums([part.square() for part in wide])
        roots = []
        for part, square, weight, bias, output in zip(
            wide, squares, (query_weight, key_weight), (query_bias, key_bias), outputs, strict=True
        ):
            root = square.div_(norm.width(part)).add_(norm.epsilon).rsqrt_()
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
        products = norm.sums([grad * n for grad, n in zip(weighted, normed, strict=True)])
        for index, root in enumerate((query_root, key_root)):
            mean = products[index] / norm.width(normed[index])
            own = weighted[index]
            if norm.centered:
                own = own - own.mean(-1, keepdim=True)
            outputs[index].copy_(own.sub_(normed[index].mul_(mean)).mul_(root))
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
