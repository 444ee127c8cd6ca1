"""Multi-head latent attention with the shapes of one tensor-parallel rank (DeepSeek-V2, arXiv 2405.04434,
section 2.1; `myriad.model.latent_shape` shows its products).

Training computes every head's keys and values from the latent, and attends as other models do. Sampling
caches the latent and the shared rotated key instead, R + P values of a token for all heads. The up
projections are then absorbed: a score is a product with the latent, and heads mix latents, which become
values afterwards.

    score    (q_plain W_k) . latent + q_rotated . shared       = q . k
    output   (softmax . latents) W_v                           = softmax . v

Every rank holds the down projection and the norms of the latents whole, and computes latents of all
positions; it uses them for its own heads, so their gradients are partial sums over the ranks.

Legend: B batch, S sequence, N heads of this rank, R width of the key/value latent, P rotated width.
"""

from functools import partial

import torch
from torch import nn

from myriad.kernels.attention import attention, split_heads
from myriad.kernels.attention_blocks import Heads, runs_in_blocks
from myriad.kernels.attention_choice import Scores
from myriad.kernels.documents import Documents
from myriad.kernels.latent_heads import join_latent_heads, without_padding
from myriad.kernels.linear import Linear, linear
from myriad.kernels.memory_order import as_rows_lie
from myriad.kernels.norm import rms_norm
from myriad.kernels.remade import Remade
from myriad.kernels.rotary import turned
from myriad.kernels.score_maxima import add_largest_scores
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.context_share import ContextShare, attend_in_context, turns_of
from myriad.model.key_value_cache import KeyValueCache, LatentCache, NewPositions
from myriad.model.self_attention import EnteringProducts, NormWeight

__all__ = ["LatentAttention"]

_EPSILON = 1e-6
"""What the norms of latents add under the square root. DeepSeek's classes in transformers add it whatever
``rms_norm_eps`` says."""


class LatentAttention(nn.Module):
    """Attention branch: ``[B, S, H]`` to this rank's partial sum of the output projection, ``[B, S, H]``."""

    window = None
    keeps_fused = False

    def __init__(self, config: ModelConfig, layer: int, boundary: Boundary) -> None:
        super().__init__()
        assert config.latent is not None, "the model has another kind of attention"
        self.sizes, num_heads = config.latent, config.heads // boundary.size
        self.num_heads, self.shape = num_heads, Heads(num_heads, num_heads, self.sizes.head)
        self.rotary = config.layer_rotary(layer)
        assert self.rotary is not None, "latent attention has rotary positions in every layer"
        self.later, self.remakes, self.kernels = boundary.later, boundary.remakes, boundary.kernels
        self._peers = boundary.context
        self.scores = Scores(config.score_scale)
        self.largest_scores: torch.Tensor | None = None
        """Largest score of each head, as `myriad.model.self_attention.Attention` records it."""
        self.num_entering, rows = 3 - self.sizes.num_latents, num_heads * self.sizes.head
        self.q_norm = self.q_up = self.query = None
        if self.sizes.query_rank is None:
            self.query = Linear(config.hidden, rows)
        else:
            self.q_norm = NormWeight(self.sizes.query_rank)
            self.q_up = Linear(self.sizes.query_rank, rows)
        self.kv_norm = NormWeight(self.sizes.key_value_rank)
        self.kv_up = Linear(self.sizes.key_value_rank, num_heads * (self.sizes.plain + self.sizes.value))
        self.output = Linear(num_heads * self.sizes.value, config.hidden)
        self.down = Linear(config.hidden, self.sizes.down_rows)

    @property
    def entering(self) -> EnteringProducts:
        """The products of the gathered input."""
        matrices = [self.down] if self.query is None else [self.query, self.down]
        return EnteringProducts(tuple(one.weight for one in matrices), (None,) * len(matrices))

    def project(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        """Return the queries, if they have no latent, the latents, and the shared part of the keys."""
        entering = self.entering
        return entering.joined([linear(x, one, None, self.later, remade) for one in entering.weights])

    def mix(
        self, fused: torch.Tensor, documents: Documents | None = None, share: ContextShare | None = None
    ) -> torch.Tensor:
        """Attend: the result of `project` for all positions to ``[B, S, N V]``; with a ``share``, for its
        positions."""
        assert self.rotary is not None
        q, kv_latent, shared = self._parts(fused)
        q = q if self.q_up is None or self.q_norm is None else self._up(q, self.q_norm, self.q_up)
        kv = self._up(kv_latent, self.kv_norm, self.kv_up)
        joined = join_latent_heads(q, kv, shared, turns_of(self.rotary, fused, share), self.num_heads)
        if share is not None:
            assert self._peers is not None, "only ranks of a group have shares"
            heads = split_heads(joined, self.shape, None, self.kernels)
            largest = self.largest_scores if self.training else None
            how = (None, self.scores, None, documents, largest, self.kernels)
            mixed = attend_in_context(heads, self._peers, share, *how).flatten(2)
            return without_padding(mixed, self.num_heads, self.sizes.value)
        if self.largest_scores is not None and self.training:
            queries, keys, _ = split_heads(joined.detach(), self.shape, None, self.kernels)
            scale = self.scores.factor(self.shape.width)
            add_largest_scores(self.largest_scores, queries, keys, None, scale, documents)
        mixed = attention(joined, self.shape, None, None, self.kernels, self.scores, None, documents)
        return without_padding(mixed, self.num_heads, self.sizes.value)

    def clip_factors(self, ratios: torch.Tensor) -> list[tuple[nn.Module, str, torch.Tensor]]:
        """Return modules and parameters, with a factor for each row, from ``ratios`` ``[N]``: their roots for
        what heads have of their own, the ratio for the rotated part of the queries, whose keys all heads
        share."""
        sizes, plain = self.sizes, ratios.sqrt()[:, None].expand(-1, self.sizes.plain)
        of_queries = torch.cat((plain, ratios[:, None].expand(-1, sizes.rotated)), 1).flatten()
        of_keys = torch.cat((plain, torch.ones_like(ratios)[:, None].expand(-1, sizes.value)), 1).flatten()
        queries = self.q_up if self.query is None else self.query
        assert queries is not None
        return [(queries, "weight", of_queries), (self.kv_up, "weight", of_keys)]

    def out(self, mixed: torch.Tensor) -> torch.Tensor:
        """Project ``[B, S, N V]`` to the partial sum."""
        return linear(mixed, self.output.weight, later=self.later)

    def new_cache(self, limit: int) -> KeyValueCache:
        """Return an empty cache of at most ``limit`` positions."""
        return LatentCache(limit, self.sizes.key_value_rank)

    def mix_cached(self, fused: torch.Tensor, cache: KeyValueCache, at: NewPositions) -> torch.Tensor:
        """Attend as `mix` does, for positions after those in the cache. The cache is extended."""
        assert isinstance(cache, LatentCache) and self.rotary is not None
        sizes, turns = self.sizes, at.turns(self.rotary)
        q, kv_latent, shared = self._parts(fused)
        q = q if self.q_up is None or self.q_norm is None else self._up(q, self.q_norm, self.q_up)
        plain, rotated = q.unflatten(-1, (self.num_heads, -1)).split([sizes.plain, sizes.rotated], -1)
        of_heads = self.kv_up.weight.unflatten(0, (self.num_heads, -1))
        of_keys, of_values = of_heads.split([sizes.plain, sizes.value], 1)
        absorbed = torch.einsum("bsnd,ndr->bsnr", plain, of_keys)
        queries = torch.cat([absorbed, turned(rotated, turns)], -1)
        latents = self._normed(self.kv_norm, kv_latent).unsqueeze(2)
        keys = torch.cat([latents, turned(shared.unsqueeze(2), turns)], -1)
        mixed = cache.attend_latents(queries, keys, at, self.scores)
        return torch.einsum("bsnr,nvr->bsnv", mixed, of_values).flatten(2)

    def runs_in_blocks(self, x: torch.Tensor) -> bool:
        """Whether attention over values like ``x`` reorders them in blocks."""
        return runs_in_blocks(x, None)

    def _parts(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split the result of `project` into queries or their latent, the other latent, and the shared part
        of the keys."""
        sizes = self.sizes
        q, kv_latent, shared = fused.split_with_sizes(
            [fused.shape[-1] - sizes.key_value_rank - sizes.rotated, sizes.key_value_rank, sizes.rotated], -1
        )
        # The norm's backward keeps its input: a view would keep the queries beside it as well.
        return q, kv_latent if self.query is None else as_rows_lie(torch.clone, kv_latent), shared

    def _normed(self, norm: NormWeight, latent: torch.Tensor) -> torch.Tensor:
        return as_rows_lie(lambda rows: rms_norm(rows, norm.weight, _EPSILON), latent)

    def _up(self, latent: torch.Tensor, norm: NormWeight, up: Linear) -> torch.Tensor:
        """Return the product of the normalized latent."""
        remade = Remade(partial(self._normed, norm), latent) if self.remakes else None
        return linear(self._normed(norm, latent), up.weight, None, self.later, remade)
