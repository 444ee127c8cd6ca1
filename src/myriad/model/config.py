"""Description of a model: its dimensions, without torch.

Parameter and FLOP counts are defined here so that the planner, the progress line and the tests share one
formula. Model FLOPs follow MegaScale (arXiv 2402.15627) and Megatron-LM (arXiv 2104.04473, section 3):
forward + backward, no recomputation. For a plain GPT with full attention they are
``72 B s L h^2 (1 + s/6h + V/12Lh)``; with windows only attended pairs count.
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
    """Attention (query) heads."""
    kv_heads: int | None = Field(None, ge=1, le=2**16)
    """Key/value heads (grouped-query attention); off: as many as query heads."""
    head_dim: int | None = Field(None, ge=2, le=2**16)
    """Width of one head; off: hidden / heads."""
    ffn_hidden: int | None = Field(None, ge=8, le=2**24)
    """Inner width of the MLP; off: 4 x hidden."""
    vocabulary: int = Field(4096, ge=2, le=2**26)
    """Tokens in the vocabulary, before padding."""
    vocabulary_multiple: int = Field(64, ge=1, le=2**20)
    """The embedding is padded to a multiple of this number, and of layout.tp."""
    sequence: int = Field(256, ge=2, le=2**30)
    """Tokens per sequence."""
    block: Literal["serial", "parallel"] = "serial"
    """serial: attention, then MLP; parallel: y = x + MLP(LN(x)) + Attention(LN(x)), one norm."""
    window: int | None = Field(None, ge=1, le=2**30)
    """Attention window: a token attends to itself and the window - 1 tokens before it. off: to all tokens
    before it."""
    window_pattern: tuple[bool, ...] = (True,)
    """Layers that use model.window, repeated over the layers: [true, false] means every other layer."""
    position: Literal["rotary", "learned", "none"] = "rotary"
    """Position encoding: rotary, learned embeddings, or none."""
    rotary_base: float = Field(10000.0, gt=1)
    """Base of the rotary frequencies."""
    norm: Literal["rms", "layer"] = "rms"
    """RMSNorm or LayerNorm."""
    norm_epsilon: float = Field(1e-5, gt=0)
    """Added under the square root of each norm."""
    activation: Literal["gelu", "gelu_tanh", "swiglu", "relu2"] = "gelu"
    """Activation function of the MLP (gelu_tanh: GPT-2's approximation; relu2: max(x, 0)^2)."""
    bias: bool = False
    """Add biases to linear layers and LayerNorms. Key projections have none: softmax cancels it, so its
    gradient would be rounding noise."""
    tied: bool = True
    """Share the token embedding with the output projection."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Fraction of embedding and residual-branch outputs set to zero in training. Every layout drops the
    same values."""
    initial_deviation: float = Field(0.02, gt=0)
    """Standard deviation of the initial weights; divided by sqrt(2 layers) for projections into the
    residual stream."""

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each layer, in order, as ``layout.partition = "type:REGEX"`` matches it."""
        return ("Embedding", *(("Block",) * self.layers), "Head")

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def kernel_widths(self) -> dict[str, int]:
        """Widths that decide whether a kernel can run, by the kernel's name (`myriad.kernels.choice`)."""
        return {"norm": self.hidden, "rotary": self.head_width}

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        return self.ffn_hidden or 4 * self.hidden

    def padded_vocabulary(self, tp: int = 1) -> int:
        """Return the rows of the embedding: the vocabulary rounded up to a multiple that ``tp`` ranks can
        share.

        The number is the same for every tp that divides ``vocabulary_multiple``, so that all layouts have the
        same model.
        """
        multiple = self.vocabulary_multiple
        if multiple % tp:
            raise BadInputError(
                "model.vocabulary_multiple", multiple, f"must be divisible by layout.tp = {tp}"
            )
        return -(-self.vocabulary // multiple) * multiple

    def layer_window(self, layer: int) -> int | None:
        """Return the window of block ``layer``; ``None`` if it attends to all tokens before."""
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
        """Number of elements in one block's matrices."""
        attention = self.hidden * (self._qkv_width + self.heads * self.head_width)
        return attention + self._mlp_matrices * self.hidden * self.ffn_width

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Return the number of parameters of the whole model, with the padded vocabulary. It equals that of
        the built model."""
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
        """Return the query-key pairs per sequence counted for MFU: all s^2 without a window (the convention),
        else only the attended pairs."""
        s, window = self.sequence, self.layer_window(layer)
        if window is None or window >= s:
            return float(s * s)
        return window * s - window * (window - 1) / 2

    def layer_flops_per_token(self) -> list[float]:
        """Return the FLOPs per token of the embedding (0: rows are looked up), the blocks and the head,
        counted as in `flops_per_token`."""
        width = 2 * self.heads * self.head_width / self.sequence
        period = range(min(self.layers, len(self.window_pattern)))
        each = [self._block_matrices + width * self.attended_pairs(layer) for layer in period]
        blocks = [each[layer % len(each)] for layer in range(self.layers)]
        return [6.0 * one for one in (0.0, *blocks, self.hidden * self.vocabulary)]

    def flops_per_token(self) -> float:
        """Return the model FLOPs (forward and backward, no recomputation) for one token of a full
        sequence."""
        return sum(self.layer_flops_per_token())
