"""Self-attention with the shapes of one tensor-parallel rank: projection, norms of queries and keys, rotary
positions, attention, output projection.

Legend: B batch, S sequence, H hidden, N query heads, K key/value heads (both of this rank), D head size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from myriad.kernels.attention import attention, split_heads
from myriad.kernels.attention_blocks import Heads, runs_in_blocks
from myriad.kernels.attention_choice import Scores
from myriad.kernels.documents import Documents
from myriad.kernels.gradient import DeferredProduct
from myriad.kernels.linear import Linear, linear
from myriad.kernels.query_key_norm import HeadNorm, query_key_norm
from myriad.kernels.remade import Remade
from myriad.kernels.score_maxima import add_largest_scores
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.context_share import ContextShare, attend_in_context, turns_of
from myriad.model.key_value_cache import KeyValueCache, NewPositions

__all__ = ["Attention", "EnteringProducts", "NormWeight"]


class EnteringProducts(NamedTuple):
    """The column-parallel products of a branch's gathered input, whose results are concatenated."""

    weights: tuple[torch.Tensor, ...]
    biases: tuple[torch.Tensor | None, ...]

    def joined(self, results: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the results as one tensor."""
        return results[0] if len(results) == 1 else torch.cat(list(results), -1)


class NormWeight(nn.Module):
    """The weight of a norm inside attention, and its bias."""

    def __init__(self, width: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None


class Projection(nn.Module):
    """Compute queries, keys and values by one matrix product. The bias is of all rows, or has no part for the
    keys."""

    def __init__(
        self, config: ModelConfig, num_heads: int, num_kv_heads: int, later: list[DeferredProduct] | None
    ) -> None:
        super().__init__()
        self.later = later
        self.query_rows = num_heads * config.head_width
        self.key_rows = num_kv_heads * config.head_width
        self.weight = nn.Parameter(torch.empty(self.query_rows + 2 * self.key_rows, config.hidden))
        rows = self.query_rows + self.key_rows * (2 if config.has_key_bias else 1)
        self.bias = nn.Parameter(torch.empty(rows)) if config.has_qkv_bias else None

    def forward(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        return linear(x, self.weight, self.bias_of_all_rows(), self.later, remade)

    def bias_of_all_rows(self) -> torch.Tensor | None:
        """Return the bias of all rows, with zeros for keys without a bias."""
        if self.bias is None or len(self.bias) == len(self.weight):
            return self.bias
        queries, values = self.bias.split([self.query_rows, self.key_rows])
        return torch.cat([queries, values.new_zeros(self.key_rows), values])


class Attention(nn.Module):
    """Attention branch: ``[B, S, H]`` to this rank's partial sum of the output projection, ``[B, S, H]``,
    without its bias."""

    num_entering = 1
    """Number of products of the gathered input."""

    def __init__(self, config: ModelConfig, layer: int, boundary: Boundary) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.heads // boundary.size, config.kv_heads_of_rank(boundary.size)
        self.shape = Heads(num_heads, num_kv_heads, config.head_width)
        self.window, self.later = config.layer_window(layer), boundary.later
        self.kernels, self._peers = boundary.kernels, boundary.context
        self.rotary = config.layer_rotary(layer)
        self.scores = Scores(config.score_scale, config.attention_softcap)
        self.sinks = nn.Parameter(torch.empty(num_heads)) if config.attention_sinks else None
        self.capped = config.has_capped_scores
        self.largest_scores: torch.Tensor | None = None
        """Where training records the largest score of each head, ``[N]``; ``None``: nowhere."""
        self.head_norm: HeadNorm | None = None
        if config.qk_norm != "none":
            centered, copies = config.qk_norm_kind == "layer", config.kv_copies(boundary.size)
            self.head_norm = HeadNorm(config.qk_norm, config.norm_epsilon, boundary, centered, copies)
            width, shared = config.head_width, config.qk_norm == "head"
            self.q_norm = NormWeight(width * (1 if shared else num_heads), bias=config.qk_norm_bias)
            self.k_norm = NormWeight(width * (1 if shared else num_kv_heads), bias=config.qk_norm_bias)
            self.zero_centered = config.norm_zero_centered
        self.output = Linear(num_heads * config.head_width, config.hidden, bias=config.has_output_bias)
        # last: adjacent to the MLP's first matrix
        self.qkv = Projection(config, num_heads, num_kv_heads, boundary.later)

    @property
    def entering(self) -> EnteringProducts:
        """The product of the gathered input."""
        return EnteringProducts((self.qkv.weight,), (self.qkv.bias_of_all_rows(),))

    def project(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        """Return queries, keys and values ``[B, S, (N + 2 K) D]``."""
        fused: torch.Tensor = self.qkv(x, remade)
        return fused

    def mix(
        self, fused: torch.Tensor, documents: Documents | None = None, share: ContextShare | None = None
    ) -> torch.Tensor:
        """Attend: queries, keys and values of all positions ``[B, S, (N + 2 K) D]`` to ``[B, S, N D]``; with
        a ``share``, of its positions."""
        fused, turns = self._normed(fused), self._turns(fused, share)
        if share is not None:
            assert self._peers is not None, "only ranks of a group have shares"
            heads = split_heads(fused, self.shape, turns, self.kernels)
            largest = self.largest_scores if self.training else None
            how = (self.window, self.scores, self.sinks, documents, largest, self.kernels)
            return attend_in_context(heads, self._peers, share, *how).flatten(2)
        if self.largest_scores is not None and self.training:
            q, k, _ = split_heads(fused.detach(), self.shape, turns, self.kernels)
            scale = self.scores.factor(self.shape.width)
            add_largest_scores(self.largest_scores, q, k, self.window, scale, documents)
        return attention(
            fused, self.shape, self.window, turns, self.kernels, self.scores, self.sinks, documents
        )

    def clip_factors(self, ratios: torch.Tensor) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Return modules and parameters, with a factor for each row: the root of ``ratios`` ``[N]`` for
        queries, of the smallest ratio of its query heads for a key head, 1 for values."""
        queries = ratios.sqrt().repeat_interleave(self.shape.width)
        of_keys = ratios.unflatten(0, (self.shape.num_kv_heads, -1)).amin(1)
        keys = of_keys.sqrt().repeat_interleave(self.shape.width)
        values = torch.ones_like(keys)
        found: list[tuple[nn.Module, str, torch.Tensor]] = [
            (self.qkv, "weight", torch.cat((queries, keys, values)))
        ]
        if self.qkv.bias is not None:
            has_keys = len(self.qkv.bias) == len(self.qkv.weight)
            parts = (queries, keys, values) if has_keys else (queries, values)
            found.append((self.qkv, "bias", torch.cat(parts)))
        return found

    def out(self, mixed: torch.Tensor) -> torch.Tensor:
        """Project ``[B, S, N D]`` to the partial sum."""
        return linear(mixed, self.output.weight, later=self.later)

    def new_cache(self, limit: int) -> KeyValueCache:
        """Return an empty cache of at most ``limit`` positions."""
        return KeyValueCache(limit)

    def mix_cached(self, fused: torch.Tensor, cache: KeyValueCache, at: NewPositions) -> torch.Tensor:
        """Attend as `mix` does, for positions after those in the cache. The cache is extended."""
        turns = None if self.rotary is None else at.turns(self.rotary)
        q, k, v = split_heads(self._normed(fused), self.shape, turns, self.kernels)
        return cache.attend(q, k, v, at, self.scores, self.sinks).flatten(2)

    def runs_in_blocks(self, x: torch.Tensor) -> bool:
        """Whether attention over values like ``x`` reorders them in blocks."""
        return runs_in_blocks(x, self.window, capped=self.capped)

    @property
    def keeps_fused(self) -> bool:
        """Whether the backward keeps the projection's result itself, not a rotated or normalized copy."""
        return self.rotary is None and self.head_norm is None

    def _normed(self, fused: torch.Tensor) -> torch.Tensor:
        """Return queries, keys and values with queries and keys normalized."""
        if self.head_norm is None:
            return fused
        query, key = (
            norm.weight.float() + 1 if self.zero_centered else norm.weight
            for norm in (self.q_norm, self.k_norm)
        )
        biases = (self.q_norm.bias, self.k_norm.bias)
        return query_key_norm(fused, (query, key), self.shape, self.head_norm, biases)

    def _turns(self, x: torch.Tensor, share: ContextShare | None) -> torch.Tensor | None:
        return None if self.rotary is None else turns_of(self.rotary, x, share)
