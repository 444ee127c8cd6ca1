"""Transformer layers with the shapes of one tensor-parallel rank.

The residual stream, ``[B, S/tp, H]``, passes between layers; a block leaves its last addition to the next
norm (`myriad.model.residual`). Each branch enters (gathers all ranks' parts of the sequence), multiplies
column-parallel, then row-parallel, and leaves (sums the partial results and keeps this rank's part). A layer
computes in the precision of its parameters; norms, softmax and the loss use float32 inside.

Legend: B batch, S sequence, H hidden, N query heads, K key/value heads (both of this rank), D head size.
"""

from collections.abc import Callable, Generator
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from myriad.kernels.embedding import embedding
from myriad.kernels.linear_pair import linear_pair, linear_sum
from myriad.kernels.norm import LayerNorm, Norm, RMSNorm
from myriad.kernels.random import dropout, key_of
from myriad.kernels.remade import Remade
from myriad.model.boundary import Arriving, Boundary, Factors
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.experts import Experts
from myriad.model.interleave import LayerSteps, SteppedLayer, Steps, Whole, finish
from myriad.model.key_value_cache import KeyValueCache, NewPositions
from myriad.model.latent_attention import LatentAttention
from myriad.model.mlp import MLP
from myriad.model.residual import Residual
from myriad.model.self_attention import Attention

__all__ = ["Block", "Embedding", "Table", "new_norm"]


def new_norm(config: ModelConfig, boundary: Boundary) -> Norm:
    """Return a norm of the stream, of the model's kind."""
    epsilon, kernels = config.norm_epsilon, boundary.kernels
    if config.norm == "rms":
        return RMSNorm(config.hidden, epsilon, zero_centered=config.norm_zero_centered, kernels=kernels)
    return LayerNorm(config.hidden, epsilon, bias=config.has_norm_bias, kernels=kernels)


class _Dropout:
    """Dropout at one place in the model; every layout drops the same values."""

    def __init__(self, config: ModelConfig, boundary: Boundary, place: str) -> None:
        self.ratio, self.rank, self.place = config.dropout, boundary.rank, place

    def __call__(self, x: torch.Tensor, context: Context, *, training: bool) -> torch.Tensor:
        if not training or self.ratio == 0:
            return x
        assert context.samples is not None, "dropout needs the indices of the micro-batch's samples"
        key = key_of(context.seed, self.place)
        first = context.first_of_share(x.shape[1], self.rank)
        positions = context.positions(first, x.shape[1], x.device)
        return dropout(x, self.ratio, key, context.samples, positions)


class Table(nn.Module):
    """A table of rows that are looked up by index."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class Embedding(SteppedLayer):
    """Map token ids ``[B, S]`` to the residual stream. The vocabulary is sharded over the ranks."""

    takes_tokens = True

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        rows = config.vocabulary_rows(boundary.size)
        self.boundary, self.first_row = boundary, boundary.rank * rows
        self.vocabulary_size = rows * boundary.size
        self.tokens = Table(rows, config.hidden)
        self.positions = Table(config.sequence, config.hidden) if config.position == "learned" else None
        self.scale = config.embedding_scale
        self.dropout = _Dropout(config, boundary, "embedding")

    def position_bytes(self, x: torch.Tensor) -> int:
        return self.tokens.weight.shape[1] * self.tokens.weight.element_size()

    def steps(self, x: torch.Tensor, context: Context) -> Steps:
        arriving = self.boundary.start_reduce_scatter(self._partial_sums(x))
        yield None
        stream = self._placed(arriving.wait(), context)
        return self.dropout(stream, context, training=self.training)

    def embed(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Embed tokens ``[B, S]`` at these positions of their texts, as a stream that is whole on this rank
        (`Boundary`)."""
        stream = self.boundary.start_reduce_scatter(self._partial_sums(tokens)).wait() * self.scale
        return stream if self.positions is None else stream + F.embedding(positions, self.positions.weight)

    def _partial_sums(self, tokens: torch.Tensor) -> torch.Tensor:
        return embedding(tokens, self.tokens.weight, self.first_row, self.vocabulary_size)

    def _placed(self, stream: torch.Tensor, context: Context) -> torch.Tensor:
        if self.scale != 1:
            stream = stream * self.scale
        if self.positions is None:
            return stream
        first = context.first_of_share(stream.shape[1], self.boundary.rank)
        own = slice(first, first + stream.shape[1])
        if context.share is None and context.documents is None:
            return stream + self.positions.weight[own]
        at = context.positions(first, stream.shape[1], stream.device)
        if context.documents is not None:
            at = context.documents.positions_at(at)
        return stream + F.embedding(at, self.positions.weight)


def _new_mlp(config: ModelConfig, layer: int, boundary: Boundary) -> MLP | Experts:
    if config.has_experts(layer):
        return Experts(config, boundary)
    return MLP(config, boundary, config.ffn_width)


_Mix = Callable[[torch.Tensor], torch.Tensor]


class Block(SteppedLayer):
    """Attention and MLP, one after the other or in parallel (one enter and one leave for both, if they share
    a norm)."""

    def __init__(self, config: ModelConfig, layer: int, boundary: Boundary) -> None:
        super().__init__()
        self.boundary = boundary
        self.in_parallel, self.scale = config.block == "parallel", config.residual_scale
        before = self.in_parallel or config.norm_placement != "after"
        after = not self.in_parallel and config.norm_placement != "before"
        shares_norm = self.in_parallel and config.parallel_norms == 1
        self.norm1 = new_norm(config, boundary) if before else None
        kind = Attention if config.latent is None else LatentAttention
        self.attention = kind(config, layer, boundary)
        self.norm2 = new_norm(config, boundary) if before and not shares_norm else None
        self.mlp = _new_mlp(config, layer, boundary)
        self.post_norm1 = new_norm(config, boundary) if after else None
        self.post_norm2 = new_norm(config, boundary) if after else None
        self.dropout1 = _Dropout(config, boundary, f"blocks.{layer}.attention")
        self.dropout2 = _Dropout(config, boundary, f"blocks.{layer}.mlp")

    def steps(self, x: torch.Tensor, context: Context) -> LayerSteps:
        return self._steps(x, None, context, self._mix(context))

    def steps_after(self, x: Residual, context: Context) -> LayerSteps:
        return self._steps(x.stream, x.branch, context, self._mix(context))

    def _mix(self, context: Context) -> _Mix:
        return partial(self.attention.mix, documents=context.documents, share=context.share)

    def step(self, x: torch.Tensor, cache: KeyValueCache, at: NewPositions) -> torch.Tensor:
        """Run the block for new positions ``[B, S, H]``, after those in the cache. The stream is whole on
        this rank."""
        mix = partial(self.attention.mix_cached, cache=cache, at=at)
        return finish(self._steps(x, None, Context(), mix))

    def _steps(self, x: torch.Tensor, branch: torch.Tensor | None, context: Context, mix: _Mix) -> LayerSteps:
        """Yield where this layer communicates. The work between two yields should take about equally long: a
        gather or a reduce-scatter of another part overlaps with it."""
        if self.boundary.in_slices:
            return self._in_slices(x, branch, context, mix)
        if self.in_parallel:
            x, out = yield from self._side_by_side(x, branch, mix)
            return Residual(x, self._branch(out, 1, context, *self._biases))
        attention_bias, mlp_bias = self._biases
        x, arriving, remade = self._start_gather(self.norm1, x, branch, self.attention.num_entering)
        del branch
        yield None
        out = yield from self._attend(arriving.wait(), remade, mix)
        out = self._branch(out, 1, context, attention_bias)
        peers = self.boundary.of_width if isinstance(self.mlp, Experts) else self.boundary
        x, arriving, remade = self._start_gather(self.norm2, x, out, peers=peers)
        del out
        if peers.size > 1:
            yield None
        out = yield from self._mlp_sum(arriving.wait(), remade, context)
        arriving = peers.start_reduce_scatter(out)
        del out
        if peers.size > 1:
            yield None
        return Residual(x, self._branch(arriving.wait(), 2, context, mlp_bias))

    def _mlp_sum(self, x: torch.Tensor, remade: Remade | None, context: Context) -> Steps:
        """Return this rank's partial sum of the MLP, or of the experts."""
        if isinstance(self.mlp, MLP):
            inner = self.mlp.inner(x, remade)
            del x
            yield None
            return self.mlp.out(*inner)
        return (yield from self._routed(x, context))

    def _routed(self, x: torch.Tensor, context: Context) -> Steps:
        """Return what the experts of this block compute."""
        assert isinstance(self.mlp, Experts)
        logits = yield from self.mlp.route(x, context)
        yield None
        return (yield from self.mlp.steps(x, logits, context))

    def _in_slices(
        self, x: torch.Tensor, branch: torch.Tensor | None, context: Context, mix: _Mix
    ) -> Residual:
        """Run the block without turns: each gather and scatter overlaps with the product that it belongs
        to."""
        if self.in_parallel:
            x, out = self._side_by_side_in_slices(x, branch, mix)
            return Residual(x, self._branch(out, 1, context, *self._biases))
        boundary, attention, mlp = self.boundary, self.attention, self._dense
        attention_bias, mlp_bias = self._biases
        x, normed, remade = self._normed(self.norm1, x, branch, attention.num_entering)
        del branch
        entering = attention.entering
        fused = entering.joined(boundary.gather_products(normed, *entering, remade))
        out = boundary.scatter_products((Factors(mix(fused), attention.output.weight),))
        out = self._branch(out, 1, context, attention_bias)
        x, normed, remade = self._normed(self.norm2, x, out)
        del out
        up_bias = mlp.bias_of_product(normed)
        (up,) = boundary.gather_products(normed, (mlp.up.weight,), (up_bias,), remade)
        out = boundary.scatter_products((self._down(up),))
        return Residual(x, self._branch(out, 2, context, mlp_bias))

    @property
    def _dense(self) -> MLP:
        """The MLP of a block without experts."""
        assert isinstance(self.mlp, MLP), "a job's rule"
        return self.mlp

    @property
    def _biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Biases of the two row-parallel products. They are added to the sum over ranks, so that each is
        added once, not by every rank."""
        return self.attention.output.bias, self.mlp.down.bias if isinstance(self.mlp, MLP) else None

    def _branch(
        self, out: torch.Tensor, number: Literal[1, 2], context: Context, *biases: torch.Tensor | None
    ) -> torch.Tensor:
        """Return what is added to the residual stream, given the sum over ranks of a branch's product."""
        for bias in biases:
            out = out if bias is None else out + bias
        norm = self.post_norm1 if number == 1 else self.post_norm2
        out = out if norm is None else norm(out)
        dropout = self.dropout1 if number == 1 else self.dropout2
        out = dropout(out, context, training=self.training)
        return out if self.scale == 1 else out * self.scale

    def _down(self, up: torch.Tensor) -> Factors:
        """Return the factors of the MLP's second product, given the result of the first."""
        inner, remade = self._dense.activate(up)
        return Factors(inner, self._dense.down.weight, remade)

    def _normed(
        self, norm: Norm | None, x: torch.Tensor, branch: torch.Tensor | None, num_takers: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, Remade | None]:
        """Return the stream with its branch added, its norm, and how the backward recomputes the norm if it
        is not kept. Without a norm, it is the stream."""
        if norm is None:
            x = x if branch is None else x + branch
            return x, x, None
        x, normed = norm.add(x, branch)
        return x, normed, Remade(norm, x, num_takers) if self.boundary.remakes else None

    def _start_gather(
        self,
        norm: Norm | None,
        x: torch.Tensor,
        branch: torch.Tensor | None,
        num_takers: int = 1,
        peers: Boundary | None = None,
    ) -> tuple[torch.Tensor, Arriving, Remade | None]:
        """Return the stream with its branch added, its norm in flight, and how the backward recomputes the
        norm if it is not kept. To recompute it, tensor-parallel ranks gather it once more. ``peers``: the
        boundary that gathers; default: that of the block."""
        x, normed, remade = self._normed(norm, x, branch, num_takers)
        boundary = self.boundary if peers is None else peers
        arriving = boundary.start_all_gather(normed)
        if remade is None or norm is None:
            return x, arriving, None
        remade = Remade(lambda source: boundary.start_all_gather(norm(source)).wait(), x, num_takers)
        return x, arriving, remade

    def _attend(self, x: torch.Tensor, remade: Remade | None, mix: _Mix) -> Steps:
        whole = Whole(mix, self.attention.project(x, remade))
        yield None
        yield whole
        arriving = self.boundary.start_reduce_scatter(self.attention.out(whole.result))
        yield None
        return arriving.wait()

    def _side_by_side(
        self, x: torch.Tensor, branch: torch.Tensor | None, mix: _Mix
    ) -> Generator[Whole | None, None, tuple[torch.Tensor, torch.Tensor]]:
        """Run both branches. Return the stream, and the sum of their products over the ranks."""
        x, arriving, remade = self._start_gather(self.norm1, x, branch, 1 if self.norm2 else 2)
        del branch
        if self.norm2 is None:
            yield None
            fused, up = self._both(arriving.wait(), remade)
        else:
            _, own_arriving, own_remade = self._start_gather(self.norm2, x, None)
            yield None
            fused = self.attention.project(arriving.wait(), remade)
            up = self._dense.first(own_arriving.wait(), own_remade)
        whole = Whole(mix, fused)
        yield whole
        inner, inner_remade = self._dense.activate(up)
        yield None
        weights = self.attention.output.weight, self._dense.down.weight
        out = linear_sum(whole.result, inner, weights, self.boundary.later, inner_remade)
        leaving = self.boundary.start_reduce_scatter(out)
        yield None
        return x, leaving.wait()

    def _side_by_side_in_slices(
        self, x: torch.Tensor, branch: torch.Tensor | None, mix: _Mix
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run both branches as `_side_by_side` does, in slices."""
        boundary, attention, mlp = self.boundary, self.attention, self._dense
        x, normed, remade = self._normed(self.norm1, x, branch, 1 if self.norm2 else 2)
        (qkv,), (qkv_bias,) = attention.entering
        up_weight, up_bias = mlp.up.weight, mlp.bias_of_product(normed)
        if self.norm2 is None:
            fused, up = boundary.gather_products(normed, (qkv, up_weight), (qkv_bias, up_bias), remade)
        else:
            (fused,) = boundary.gather_products(normed, (qkv,), (qkv_bias,), remade)
            _, own_normed, own_remade = self._normed(self.norm2, x, None)
            (up,) = boundary.gather_products(own_normed, (up_weight,), (up_bias,), own_remade)
        return x, boundary.scatter_products((Factors(mix(fused), attention.output.weight), self._down(up)))

    def _both(self, x: torch.Tensor, remade: Remade | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, and the input of the activation. Both share one piece of memory if
        attention keeps its whole part as well: not if values are rotated, or reordered for blocks."""
        attention, mlp = self.attention, self._dense
        (qkv,), (qkv_bias,) = attention.entering
        return linear_pair(
            x,
            (qkv, mlp.up.weight),
            (qkv_bias, mlp.bias_of_product(x)),
            self.boundary.later,
            remade,
            as_one=attention.keeps_fused and not attention.runs_in_blocks(x),
        )
