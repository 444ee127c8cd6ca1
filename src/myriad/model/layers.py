"""The layers of the transformer with the shapes of one tensor-parallel rank.

Between layers travels the residual stream, ``[B, S/tp, H]``. Each branch enters (all ranks' parts of the
sequence together), multiplies column-parallel, then row-parallel, and leaves (partial sums added up, each
rank its part). A layer computes in the precision of its parameters; norms, softmax and the loss are float32
inside.

Legend: B batch, S sequence, H hidden, N query heads, K key/value heads (both of this rank), D head size.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from myriad.kernels.activation import ACTIVATIONS
from myriad.kernels.attention import attention, split_heads
from myriad.kernels.attention_blocks import Heads
from myriad.kernels.cross_entropy import linear_cross_entropy
from myriad.kernels.embedding import embedding
from myriad.kernels.linear import Linear, linear
from myriad.kernels.norm import LayerNorm, RMSNorm
from myriad.kernels.random import dropout, key_of
from myriad.kernels.rotary import rotary_turns
from myriad.model.boundary import Boundary
from myriad.model.cache import KeyValueCache
from myriad.model.config import ModelConfig
from myriad.model.definition import Context

__all__ = ["Block", "Embedding", "Head"]


def _norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.hidden, config.norm_epsilon)
    return LayerNorm(config.hidden, config.norm_epsilon, bias=config.bias)


class _Dropout:
    """Dropout of one place in the model, the same in every layout."""

    def __init__(self, config: ModelConfig, boundary: Boundary, place: str) -> None:
        self.ratio, self.rank, self.place = config.dropout, boundary.rank, place

    def __call__(self, x: torch.Tensor, context: Context, *, training: bool) -> torch.Tensor:
        if not training or self.ratio == 0:
            return x
        assert context.samples is not None, "dropout needs the indices of the micro-batch's samples"
        key = key_of(context.seed, self.place)
        return dropout(x, self.ratio, key, context.samples, self.rank * x.shape[1])


class _Table(nn.Module):
    """Rows to look up."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))


class Embedding(nn.Module):
    """Token ids ``[B, S]`` to the residual stream; the vocabulary is cut over the ranks."""

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        rows = config.padded_vocabulary(boundary.size) // boundary.size
        self.boundary, self.first_row = boundary, boundary.rank * rows
        self.vocabulary_size = rows * boundary.size
        self.tokens = _Table(rows, config.hidden)
        self.positions = _Table(config.sequence, config.hidden) if config.position == "learned" else None
        self.dropout = _Dropout(config, boundary, "embedding")

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        stream = self.embed(x, 0)
        return self.dropout(stream, context, training=self.training)

    def embed(self, tokens: torch.Tensor, first_position: int) -> torch.Tensor:
        """Tokens that stand at ``first_position`` and after it."""
        partial_sums = embedding(tokens, self.tokens.weight, self.first_row, self.vocabulary_size)
        stream = self.boundary.leave(partial_sums)
        if self.positions is not None:
            rows = self.positions.weight[first_position : first_position + tokens.shape[1]]
            stream = stream + self.boundary.scatter(rows[None])
        return stream


class Projection(nn.Module):
    """Queries, keys and values by one matrix product; a bias, if any, has no part for the keys."""

    def __init__(self, config: ModelConfig, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.query_rows = num_heads * config.head_width
        self.key_rows = num_kv_heads * config.head_width
        self.weight = nn.Parameter(torch.empty(self.query_rows + 2 * self.key_rows, config.hidden))
        self.bias = nn.Parameter(torch.empty(self.query_rows + self.key_rows)) if config.bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self._bias_of_all_rows())

    def _bias_of_all_rows(self) -> torch.Tensor | None:
        if self.bias is None:
            return None
        queries, values = self.bias.split([self.query_rows, self.key_rows])
        return torch.cat([queries, values.new_zeros(self.key_rows), values])


class Attention(nn.Module):
    """``[B, S, H]`` to this rank's partial sum of the output projection, ``[B, S, H]``, without its bias."""

    def __init__(self, config: ModelConfig, layer: int, boundary: Boundary) -> None:
        super().__init__()
        num_heads, num_kv_heads = config.heads // boundary.size, config.num_kv_heads // boundary.size
        self.shape = Heads(num_heads, num_kv_heads, config.head_width)
        self.window = config.layer_window(layer)
        self.rotary_base = config.rotary_base if config.position == "rotary" else None
        self.qkv = Projection(config, num_heads, num_kv_heads)
        self.output = Linear(num_heads * config.head_width, config.hidden, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = attention(self.qkv(x), self.shape, self.window, self._turns(x, 0))
        return linear(out, self.output.weight)

    def step(self, x: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """Positions after those in the cache, which is extended."""
        q, k, v = split_heads(self.qkv(x), self.shape, self._turns(x, cache.next_position))
        return linear(cache.attend(q, k, v).flatten(2), self.output.weight)

    def _turns(self, x: torch.Tensor, first_position: int) -> torch.Tensor | None:
        if self.rotary_base is None:
            return None
        return rotary_turns(self.rotary_base, self.shape.width, x.shape[1], x.device, first_position)


class MLP(nn.Module):
    """``[B, S, H]`` to this rank's partial sum, ``[B, S, H]``, without the last bias."""

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        width = config.ffn_width // boundary.size
        up_rows = 2 * width if config.activation == "swiglu" else width
        self.activation = ACTIVATIONS[config.activation]
        self.up = Linear(config.hidden, up_rows, bias=config.bias)
        self.down = Linear(width, config.hidden, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.activation(self.up(x)), self.down.weight)


_Mix = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Attention and MLP, one after the other or side by side on one norm (one enter, one leave for both)."""

    def __init__(self, config: ModelConfig, layer: int, boundary: Boundary) -> None:
        super().__init__()
        self.boundary, self.parallel = boundary, config.block == "parallel"
        self.norm1 = _norm(config)
        self.attention = Attention(config, layer, boundary)
        self.norm2 = None if self.parallel else _norm(config)
        self.mlp = MLP(config, boundary)
        self.dropout1 = _Dropout(config, boundary, f"blocks.{layer}.attention")
        self.dropout2 = _Dropout(config, boundary, f"blocks.{layer}.mlp")

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        return self._run(x, context, self.attention.forward)

    def step(self, x: torch.Tensor, cache: KeyValueCache) -> torch.Tensor:
        """New positions ``[B, S, H]``, after those in the cache."""
        return self._run(x, Context(), partial(self.attention.step, cache=cache))

    def _run(self, x: torch.Tensor, context: Context, mix: _Mix) -> torch.Tensor:
        first = self.boundary.enter(self.norm1(x))
        if self.norm2 is None:
            out = self.boundary.leave(mix(first) + self.mlp(first))
            out = _add_biases(out, self.attention.output.bias, self.mlp.down.bias)
            return x + self.dropout1(out, context, training=self.training)
        out = _add_biases(self.boundary.leave(mix(first)), self.attention.output.bias)
        x = x + self.dropout1(out, context, training=self.training)
        second = self.boundary.enter(self.norm2(x))
        out = _add_biases(self.boundary.leave(self.mlp(second)), self.mlp.down.bias)
        return x + self.dropout2(out, context, training=self.training)


def _add_biases(x: torch.Tensor, *biases: torch.Tensor | None) -> torch.Tensor:
    """After the partial sums are one: a row-parallel bias must be added once, not by every rank."""
    for bias in biases:
        x = x if bias is None else x + bias
    return x


class Head(nn.Module):
    """The residual stream to the sum of the losses of all targets."""

    def __init__(self, config: ModelConfig, boundary: Boundary) -> None:
        super().__init__()
        self.boundary, self.vocabulary = boundary, config.vocabulary
        self.norm = _norm(config)
        self.output = Linear(config.hidden, config.padded_vocabulary(boundary.size) // boundary.size)

    def forward(self, x: torch.Tensor, context: Context) -> torch.Tensor:
        whole = self.boundary.enter(self.norm(x))
        targets = context.targets.flatten()
        return linear_cross_entropy(
            whole.flatten(0, 1), self.output.weight, targets, self.boundary, self.vocabulary
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Float32 scores of the vocabulary, on one device: ``[..., H]`` to ``[..., V]``."""
        return linear(self.norm(x), self.output.weight)[..., : self.vocabulary].float()
