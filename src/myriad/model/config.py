"""What a model *is*: its dimensions, without torch.

Parameter and FLOP counts live here so that the planner, the progress line and the tests share one formula.
Model FLOPs follow MegaScale (arXiv 2402.15627) and Megatron-LM (arXiv 2104.04473, section 3): forward +
backward, no recomputation; for a plain GPT with full attention ``72 B s L h^2 (1 + s/6h + V/12Lh)``; with
windows only attended pairs.
"""

from typing import Literal

from pydantic import Field

from myriad.config import Config
from myriad.errors import BadInputError

__all__ = ["ModelConfig"]


class ModelConfig(Config):
    """A decoder transformer.

    The upper bounds are far above any model, and low enough that a mistyped dimension is refused at once."""

    layers: int = Field(4, ge=1, le=10_000)
    """Number of transformer blocks."""
    hidden: int = Field(128, ge=8, le=2**20)
    """Width of the residual stream."""
    heads: int = Field(4, ge=1, le=2**16)
    """Attention heads."""
    kv_heads: int | None = Field(None, ge=1, le=2**16)
    """Key/value heads (grouped-query attention); off: as many as heads."""
    head_dim: int | None = Field(None, ge=2, le=2**16)
    """Width of one head; off: hidden / heads."""
    ffn_hidden: int | None = Field(None, ge=8, le=2**24)
    """Inner width of the MLP; off: 4 x hidden."""
    vocabulary: int = Field(4096, ge=2, le=2**26)
    """Tokens in the vocabulary, before padding."""
    vocabulary_multiple: int = Field(64, ge=1, le=2**20)
    """The embedding is padded to a multiple of this (and of tp)."""
    sequence: int = Field(256, ge=2, le=2**30)
    """Tokens in one sequence."""
    block: Literal["serial", "parallel"] = "serial"
    """serial: attention, then MLP; parallel: y = x + MLP(LN(x)) + Attention(LN(x)), one norm."""
    window: int | None = Field(None, ge=1, le=2**30)
    """A token sees itself and the window - 1 before it; off: all before it."""
    window_pattern: tuple[bool, ...] = (True,)
    """Which layers use the window, repeated over the layers: [true, false] is every other one."""
    position: Literal["rotary", "learned", "none"] = "rotary"
    """How a token knows where it stands."""
    rotary_base: float = Field(10000.0, gt=1)
    """Base of the rotary frequencies."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_epsilon: float = Field(1e-5, gt=0)
    """Added under the root in each norm."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "relu2"] = "gelu"
    """Non-linearity of the MLP (gelu_tanh is GPT-2's approximation, relu2 is max(x, 0)^2)."""
    bias: bool = False
    """Biases in linears and LayerNorms. Keys never have one: softmax cannot see it, so its gradient is
    rounding noise."""
    tied: bool = True
    """Output projection shares the token embedding."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of embedding and residual-branch outputs set to zero in training; the same values in every
    layout."""
    initial_deviation: float = Field(0.02, gt=0)
    """Standard deviation of initial weights; projections into the residual stream get it / sqrt(2 layers)."""

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def kernel_widths(self) -> dict[str, int]:
        """What decides whether a kernel of that name can run: `myriad.kernels.choice`."""
        return {"norm": self.hidden, "rotary": self.head_width}

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        return self.ffn_hidden or 4 * self.hidden

    def padded_vocabulary(self, tp: int = 1) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple that ``tp`` ranks can share.

        The same for every tp that divides ``vocabulary_multiple``, so that layouts agree on the model.
        """
        multiple = self.vocabulary_multiple
        if multiple % tp:
            raise BadInputError(
                "model.vocabulary_multiple", multiple, f"must be divisible by layout.tp = {tp}"
            )
        return -(-self.vocabulary // multiple) * multiple

    def layer_window(self, layer: int) -> int | None:
        """Window of block ``layer``; ``None`` when it sees everything."""
        uses = self.window is not None and self.window_pattern[layer % len(self.window_pattern)]
        return self.window if uses else None

    @property
    def _qkv_width(self) -> int:
        return (self.heads + 2 * self.num_kv_heads) * self.head_width

    @property
    def _mlp_matrices(self) -> int:
        return 3 if self.activation == "swiglu" else 2

    @property
    def _block_matrices(self) -> int:
        """Elements of one block's matrices."""
        attention = self.hidden * (self._qkv_width + self.heads * self.head_width)
        return attention + self._mlp_matrices * self.hidden * self.ffn_width

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Parameters of the whole model, with the padded vocabulary; matches the built model exactly."""
        h, norm_size = self.hidden, self.hidden * (2 if self.norm == "layer" and self.bias else 1)
        block = self._block_matrices + norm_size * (1 if self.block == "parallel" else 2)
        if self.bias:
            block += (self.heads + self.num_kv_heads) * self.head_width + h
            block += self.ffn_width * (self._mlp_matrices - 1) + h
        total = self.layers * block + norm_size
        if embeddings:
            total += self.padded_vocabulary() * h * (1 if self.tied else 2)
            total += self.sequence * h if self.position == "learned" else 0
        return total

    def attended_pairs(self, layer: int) -> float:
        """Query-key pairs per sequence counted for MFU: all s^2 without a window (the convention), else only
        the attended."""
        s, window = self.sequence, self.layer_window(layer)
        if window is None or window >= s:
            return float(s * s)
        return window * s - window * (window - 1) / 2

    def layer_flops_per_token(self) -> list[float]:
        """Of embedding (rows are looked up), blocks and head, as `flops_per_token` counts them."""
        width = 2 * self.heads * self.head_width / self.sequence
        period = range(min(self.layers, len(self.window_pattern)))
        each = [self._block_matrices + width * self.attended_pairs(layer) for layer in period]
        blocks = [each[layer % len(each)] for layer in range(self.layers)]
        return [6.0 * one for one in (0.0, *blocks, self.hidden * self.vocabulary)]

    def flops_per_token(self) -> float:
        """Model FLOPs (forward and backward, no recomputation) for one token of a full sequence."""
        return sum(self.layer_flops_per_token())
