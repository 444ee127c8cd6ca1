"""Transformer layers with the shapes of one tensor-parallel rank.

The residual stream, ``[B, S/tp, H]``, passes between layers; a block leaves its last addition to the next
norm (`myriad.model.residual`). Each branch enters (gathers all ranks' parts of the sequence), multiplies
column-parallel, then row-parallel, and leaves (sums the partial results and keeps this rank's part). A layer
computes in the precision of its parameters; norms, softmax and the loss use float32 inside.

Legend: B batch, S sequence, H hidden, N query heads, K key/value heads (both of this rank), D head size.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from myriad.kernels.activation import activate, takes_bias
from myriad.kernels.attention import attention, split_heads
from myriad.kernels.attention_blocks import Heads, runs_in_blocks
from myriad.kernels.cross_entropy import linear_cross_entropy_steps
from myriad.kernels.embedding import embedding
from myriad.kernels.gradient import DeferredProduct
from myriad.kernels.linear import Linear, linear
from myriad.kernels.linear_pair import linear_pair, linear_sum
from myriad.kernels.memory_order import is_sequence_first
from myriad.kernels.norm import LayerNorm, Norm, RMSNorm
from myriad.kernels.random import dropout, key_of
from myriad.kernels.remade import Remade
from myriad.kernels.rotary import rotary_turns
from myriad.model.boundary import Arriving, Boundary, Factors
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.interleave import LayerSteps, SteppedLayer, Steps, Whole, finish
from myriad.model.key_value_cache import KeyValueCache
from myriad.model.residual import Residual

__all__ = ["Block", "Embedding", "Head"]


def _norm(config: ModelConfig, boundary: Boundary) -> Norm:
    if config.norm == "rms":
        return RMSNorm(config.hidden, config.norm_epsilon, kernels=boundary.kernels)
    return LayerNorm(config.hidden, config.norm_epsilon, bias=config.bias, kernels=boundary.kernels)


class _Dropout:
    """Dropout at one place in the model; every layout drops the same values."""

    def __init__(self, config: ModelConfig, boundary: Boundary, place: str) -> None:
        self.ratio, self.rank, self.place = config.dropout, boundary.rank, place

    def __call__(self, x: torch.Tensor, context: Context, *, training: bool) -> torch.Tensor:
        if not training or self.ratio == 0:
            return x
        assert context.samples is not None, "dropout needs the indices of the micro-batch's samples"
        key = key_of(context.seed, self.place)
        return dropout(x, self.ratio, key, context.samples, _first_position(x, context, self.rank))


def _first_position(x: torch.Tensor, context: Context, rank: int) -> int:
    """Return the position in the sequence of ``x[:, 0]``, the start of this rank's share."""
    return rank * x.shape[1] if context.first_position is None else context.first_position


class _Table(nn.Module):
    """A table of rows that are looked up by index."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class Embedding(SteppedLayer):
    """Map token ids ``[B, S]`` to the residual stream. The vocabulary is sharded over the ranks."""

    takes_tokens = True

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        rows = config.padded_vocabulary(boundary.size) // boundary.size
        self.boundary, self.first_row = boundary, boundary.rank * rows
        self.vocabulary_size = rows * boundary.size
        self.tokens = _Table(rows, config.hidden)
        self.positions = _Table(config.sequence, config.hidden) if config.position == "learned" else None
        self.dropout = _Dropout(config, boundary, "embedding")

    def position_bytes(self, x: torch.Tensor) -> int:
        return self.tokens.weight.shape[1] * self.tokens.weight.element_size()

    def steps(self, x: torch.Tensor, context: Context) -> Steps:
        arriving = self.boundary.start_reduce_scatter(self._partial_sums(x))
        yield None
        stream = arriving.wait()
        stream = self._placed(stream, _first_position(stream, context, self.boundary.rank))
        return self.dropout(stream, context, training=self.training)

    def embed(self, tokens: torch.Tensor, first_position: int) -> torch.Tensor:
        """Embed tokens on one device, the first of them at ``first_position``."""
        return self._placed(self._partial_sums(tokens), first_position)

    def _partial_sums(self, tokens: torch.Tensor) -> torch.Tensor:
        return embedding(tokens, self.tokens.weight, self.first_row, self.vocabulary_size)

    def _placed(self, stream: torch.Tensor, first_position: int) -> torch.Tensor:
        if self.positions is None:
            return stream
        return stream + self.positions.weight[first_position : first_position + stream.shape[1]]


class Projection(nn.Module):
    """Compute queries, keys and values by one matrix product. The optional bias has no part for the keys."""

    def __init__(
        self, config: ModelConfig, num_heads: int, num_kv_heads: int, later: list[DeferredProduct] | None
    ) -> None:
        super().__init__()
        self.later = later
        self.query_rows = num_heads * config.head_width
        self.key_rows = num_kv_heads * config.head_width
        self.weight = nn.Parameter(torch.empty(self.query_rows + 2 * self.key_rows, config.hidden))
        self.bias = nn.Parameter(torch.empty(self.query_rows + self.key_rows)) if config.bias else None

    def forward(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        return linear(x, self.weight, self.bias_of_all_rows(), self.later, remade)

    def bias_of_all_rows(self) -> torch.Tensor | None:
        """Return the bias of all rows, with zeros for the keys."""
        if self.bias is None:
            return None
        queries, values = self.bias.split([self.query_rows, self.key_rows])
        return torch.cat([queries, values.new_zeros(self.key_rows), values])


class Attention(nn.Module):
    """Attention branch: ``[B, S, H]`` to this rank's partial sum of the output projection, ``[B, S, H]``,
    without its bias."""

    def __init__(self, config: ModelConfig, layer: int, boundary: Boundary) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.heads // boundary.size, config.num_kv_heads // boundary.size
        self.shape = Heads(num_heads, num_kv_heads, config.head_width)
        self.window, self.later = config.layer_window(layer), boundary.later
        self.kernels = boundary.kernels
        self.rotary_base = config.rotary_base if config.position == "rotary" else None
        self.output = Linear(num_heads * config.head_width, config.hidden, bias=config.bias)
        # last: adjacent to the MLP's first matrix
        self.qkv = Projection(config, num_heads, num_kv_heads, boundary.later)

    def mix(self, fused: torch.Tensor) -> torch.Tensor:
        """Attend: queries, keys and values of all positions ``[B, S, (N + 2 K) D]`` to ``[B, S, N D]``."""
        return attention(fused, self.shape, self.window, self._turns(fused, 0), self.kernels)

    def out(self, mixed: torch.Tensor) -> torch.Tensor:
        """Project ``[B, S, N D]`` to the partial sum."""
        return linear(mixed, self.output.weight, later=self.later)

    def mix_cached(self, fused: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """Attend as `mix` does, for positions after those in the cache. The cache is extended."""
        turns = self._turns(fused, cache.next_position)
        q, k, v = split_heads(fused, self.shape, turns, self.kernels)
        return cache.attend(q, k, v).flatten(2)

    def _turns(self, x: torch.Tensor, first_position: int) -> torch.Tensor | None:
        if self.rotary_base is None:
            return None
        return rotary_turns(self.rotary_base, self.shape.width, x.shape[1], x.device, first_position)


class MLP(nn.Module):
    """MLP branch: ``[B, S, H]`` to this rank's partial sum, ``[B, S, H]``, without the last bias."""

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        width = config.ffn_width // boundary.size
        up_rows = 2 * width if config.activation == "swiglu" else width
        self.activation, self.kernels = config.activation, boundary.kernels
        self.later, self.remakes, self.boundary = boundary.later, boundary.remakes, boundary
        self.up = Linear(config.hidden, up_rows, bias=config.bias, later=boundary.later)
        self.down = Linear(width, config.hidden, bias=config.bias)

    def forward(self, x: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        return self.out(*self.inner(x, remade))

    def inner(self, x: torch.Tensor, remade: Remade | None = None) -> tuple[torch.Tensor, Remade | None]:
        """Map ``[B, S, H]`` to this rank's part of the inner width. The second result recomputes it in the
        backward."""
        return self.activate(linear(x, self.up.weight, self.bias_of_product(x), self.later, remade))

    def bias_of_product(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the bias that the first product adds; None if the activation adds it."""
        return None if takes_bias(x, self.kernels) else self.up.bias

    def activate(self, up: torch.Tensor) -> tuple[torch.Tensor, Remade | None]:
        """Apply the activation to the first product, and return the results of `inner`."""
        bias = self.up.bias if takes_bias(up, self.kernels) else None
        function = partial(activate, self.activation, bias=bias, kernels=self.kernels)
        if self.remakes:
            return function(up), Remade(function, up)
        return function(up, place=self.boundary.place), None

    def out(self, inner: torch.Tensor, remade: Remade | None = None) -> torch.Tensor:
        """Multiply the inner values to this rank's partial sum."""
        return linear(inner, self.down.weight, later=self.later, remade=remade)


_Mix = Callable[[torch.Tensor], torch.Tensor]


class Block(SteppedLayer):
    """Attention and MLP, one after the other or in parallel on one norm (one enter and one leave for
    both)."""

    def __init__(self, config: ModelConfig, layer: int, boundary: Boundary) -> None:
        super().__init__()
        self.boundary = boundary
        self.norm1 = _norm(config, boundary)
        self.attention = Attention(config, layer, boundary)
        self.norm2 = None if config.block == "parallel" else _norm(config, boundary)
        self.mlp = MLP(config, boundary)
        self.dropout1 = _Dropout(config, boundary, f"blocks.{layer}.attention")
        self.dropout2 = _Dropout(config, boundary, f"blocks.{layer}.mlp")

    def steps(self, x: torch.Tensor, context: Context) -> LayerSteps:
        return self._steps(x, None, context, self.attention.mix)

    def steps_after(self, x: Residual, context: Context) -> LayerSteps:
        return self._steps(x.stream, x.branch, context, self.attention.mix)

    def step(self, x: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """Run the block on one device for new positions ``[B, S, H]``, after those in the cache."""
        mix = partial(self.attention.mix_cached, cache=cache)
        return finish(self._steps(x, None, Context(), mix))

    def _steps(self, x: torch.Tensor, branch: torch.Tensor | None, context: Context, mix: _Mix) -> LayerSteps:
        """Yield where this layer communicates. The work between two yields should take about equally long: a
        gather or a reduce-scatter of another part overlaps with it."""
        if self.boundary.in_slices:
            return self._in_slices(x, branch, context, mix)
        x, arriving, remade = self._start_gather(self.norm1, x, branch, 1 if self.norm2 else 2)
        del branch
        yield None
        if self.norm2 is None:
            out = yield from self._side_by_side(arriving.wait(), remade, mix)
            out = _add_biases(out, self.attention.output.bias, self.mlp.down.bias)
            return Residual(x, self.dropout1(out, context, training=self.training))
        out = yield from self._attend(arriving.wait(), remade, mix)
        out = _add_biases(out, self.attention.output.bias)
        out = self.dropout1(out, context, training=self.training)
        x, arriving, remade = self._start_gather(self.norm2, x, out)
        del out
        yield None
        inner = self.mlp.inner(arriving.wait(), remade)
        yield None
        arriving = self.boundary.start_reduce_scatter(self.mlp.out(*inner))
        yield None
        out = _add_biases(arriving.wait(), self.mlp.down.bias)
        return Residual(x, self.dropout2(out, context, training=self.training))

    def _in_slices(
        self, x: torch.Tensor, branch: torch.Tensor | None, context: Context, mix: _Mix
    ) -> Residual:
        """Run the block without turns: each gather and scatter overlaps with the product that it belongs
        to."""
        boundary, attention, mlp = self.boundary, self.attention, self.mlp
        x, normed, remade = self._normed(self.norm1, x, branch, 1 if self.norm2 else 2)
        del branch
        qkv, qkv_bias = attention.qkv.weight, attention.qkv.bias_of_all_rows()
        if self.norm2 is None:
            biases = (qkv_bias, mlp.bias_of_product(normed))
            fused, up = boundary.gather_products(normed, (qkv, mlp.up.weight), biases, remade)
            out = boundary.scatter_products((Factors(mix(fused), attention.output.weight), self._down(up)))
            out = _add_biases(out, attention.output.bias, mlp.down.bias)
            return Residual(x, self.dropout1(out, context, training=self.training))
        (fused,) = boundary.gather_products(normed, (qkv,), (qkv_bias,), remade)
        out = boundary.scatter_products((Factors(mix(fused), attention.output.weight),))
        out = self.dropout1(_add_biases(out, attention.output.bias), context, training=self.training)
        x, normed, remade = self._normed(self.norm2, x, out)
        del out
        mlp_bias = mlp.bias_of_product(normed)
        (up,) = boundary.gather_products(normed, (mlp.up.weight,), (mlp_bias,), remade)
        out = _add_biases(boundary.scatter_products((self._down(up),)), mlp.down.bias)
        return Residual(x, self.dropout2(out, context, training=self.training))

    def _down(self, up: torch.Tensor) -> Factors:
        """Return the factors of the MLP's second product, given the result of the first."""
        inner, remade = self.mlp.activate(up)
        return Factors(inner, self.mlp.down.weight, remade)

    def _normed(
        self, norm: Norm, x: torch.Tensor, branch: torch.Tensor | None, num_takers: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor, Remade | None]:
        """Return the stream with its branch added, its norm, and how the backward recomputes the norm if it
        is not kept."""
        x, normed = norm.add(x, branch)
        return x, normed, Remade(norm, x, num_takers) if self.boundary.remakes else None

    def _start_gather(
        self, norm: Norm, x: torch.Tensor, branch: torch.Tensor | None, num_takers: int = 1
    ) -> tuple[torch.Tensor, Arriving, Remade | None]:
        """Return the stream with its branch added, its norm in flight, and how the backward recomputes the
        norm if it is not kept. To recompute it, tensor-parallel ranks gather it once more."""
        x, normed = norm.add(x, branch)
        arriving = self.boundary.start_all_gather(normed)
        if not self.boundary.remakes:
            return x, arriving, None
        remade = Remade(lambda source: self.boundary.start_all_gather(norm(source)).wait(), x, num_takers)
        return x, arriving, remade

    def _attend(self, x: torch.Tensor, remade: Remade | None, mix: _Mix) -> Steps:
        whole = Whole(mix, self.attention.qkv(x, remade))
        yield None
        yield whole
        arriving = self.boundary.start_reduce_scatter(self.attention.out(whole.result))
        yield None
        return arriving.wait()

    def _side_by_side(self, x: torch.Tensor, remade: Remade | None, mix: _Mix) -> Steps:
        fused, up = self._both(x, remade)
        whole = Whole(mix, fused)
        yield whole
        inner, inner_remade = self.mlp.activate(up)
        yield None
        weights = self.attention.output.weight, self.mlp.down.weight
        out = linear_sum(whole.result, inner, weights, self.boundary.later, inner_remade)
        arriving = self.boundary.start_reduce_scatter(out)
        yield None
        return arriving.wait()

    def _both(self, x: torch.Tensor, remade: Remade | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries, keys and values, and the input of the activation. Both share one piece of memory if
        attention keeps its whole part as well: not if values are rotated, or reordered for blocks."""
        attention, mlp = self.attention, self.mlp
        return linear_pair(
            x,
            (attention.qkv.weight, mlp.up.weight),
            (attention.qkv.bias_of_all_rows(), mlp.bias_of_product(x)),
            self.boundary.later,
            remade,
            as_one=attention.rotary_base is None and not runs_in_blocks(x, attention.window),
        )


def _add_biases(x: torch.Tensor, *biases: torch.Tensor | None) -> torch.Tensor:
    """Add the biases of a row-parallel product. They are added to the sum over ranks, so that each is added
    once, not by every rank."""
    for bias in biases:
        x = x if bias is None else x + bias
    return x


class Head(SteppedLayer):
    """Map the residual stream to the sum of the losses of all targets."""

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        self.boundary, self.vocabulary = boundary, config.vocabulary
        self.norm = _norm(config, boundary)
        self.output = Linear(config.hidden, config.padded_vocabulary(boundary.size) // boundary.size)

    def steps(self, x: torch.Tensor, context: Context) -> Steps:
        return self._steps(x, None, context)

    def steps_after(self, x: Residual, context: Context) -> Steps:
        return self._steps(x.stream, x.branch, context)

    def _steps(self, x: torch.Tensor, branch: torch.Tensor | None, context: Context) -> Steps:
        arriving = self.boundary.start_all_gather(self.norm.add(x, branch)[1])
        del x, branch
        yield None
        whole, targets = arriving.wait(), context.targets
        if is_sequence_first(whole):
            whole, targets = whole.transpose(0, 1), targets.t()
        steps = linear_cross_entropy_steps(
            whole.flatten(0, 1),
            self.output.weight,
            targets.flatten(),
            self.boundary,
            self.vocabulary,
            kernels=self.boundary.kernels,
        )
        return (yield from steps)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return float32 scores of the vocabulary, on one device: ``[..., H]`` to ``[..., V]``."""
        return linear(self.norm(x), self.output.weight)[..., : self.vocabulary].float()
