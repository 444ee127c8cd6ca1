"""What follows from the keys of a model: shapes of its layers, and numbers of parameters and FLOPs. No torch.

`ModelConfig.layer_window`, `ModelConfig.layer_rotary` and `ModelConfig.of_block` say how one block differs
from the others.

Parameter and FLOP counts are defined here so that the planner, the progress line and the tests share one
formula. Model FLOPs follow MegaScale (arXiv 2402.15627) and Megatron-LM (arXiv 2104.04473, section 3):
forward + backward, no recomputation; of experts, those that compute a token. For a plain GPT with full
attention they are ``72 B s L h^2 (1 + s/6h + V/12Lh)``; with windows only attended pairs count.
"""

import math
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

from myriad.kernels.config import GATED
from myriad.kernels.rotary_scaling import Rotary
from myriad.model.latent_shape import LatentShape
from myriad.model.model_keys import ModelKeys

__all__ = ["ModelConfig"]


class ModelConfig(ModelKeys):
    """The architecture of a decoder transformer: its keys, and what follows from them."""

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """Kind of each layer, in order, as ``layout.partition = "type:REGEX"`` matches it."""
        return ("Embedding", *(("Block",) * self.layers), "Head")

    def has_experts(self, layer: int) -> bool:
        """Return whether block ``layer`` has experts. Prediction layers are numbered on after the blocks."""
        if self.experts is None or layer < self.dense_layers:
            return False
        return (layer + 1) % self.expert_every == 0

    @property
    def has_dense_blocks(self) -> bool:
        """Whether a model with experts also has blocks without them."""
        return self.experts is not None and (self.dense_layers > 0 or self.expert_every > 1)

    def of_block(self, layer: int) -> "ModelConfig":
        """Return the model all of whose blocks are like block ``layer``, with experts or without, for the
        properties below that are of one block."""
        if not self.has_dense_blocks:
            return self
        return _every_block_with(self) if self.has_experts(layer) else _every_block_without(self)

    def block_counts(self, layers: range) -> list[tuple["ModelConfig", int]]:
        """Return each distinct `of_block` of these blocks, with their number."""
        if not self.has_dense_blocks:
            return [(self, len(layers))]
        counts = Counter(map(self.has_experts, layers))
        blocks = {True: _every_block_with(self), False: _every_block_without(self)}
        return [(blocks[kind], number) for kind, number in counts.items()]

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self.kv_heads or self.heads

    @property
    def head_degrees(self) -> list[int]:
        """Tensor-parallel degrees that give each rank whole heads, and all its query heads their key/value
        heads."""
        heads, kv_heads = self.heads, self.num_kv_heads
        divisors = [n for n in range(1, heads + 1) if heads % n == 0]
        return [n for n in divisors if kv_heads % n == 0 or n % kv_heads == 0]

    def kv_copies(self, tp: int) -> int:
        """Return the number of tensor-parallel ranks that hold each key/value head."""
        return max(1, tp // self.num_kv_heads)

    def kv_heads_of_rank(self, tp: int) -> int:
        """Return the number of key/value heads that each tensor-parallel rank holds."""
        return max(1, self.num_kv_heads // tp)

    @property
    def latent(self) -> LatentShape | None:
        """Widths of multi-head latent attention; ``None`` with another kind of attention."""
        if self.kv_lora_rank is None:
            return None
        key = self.qk_nope_head_dim, self.qk_rope_head_dim
        return LatentShape(self.q_lora_rank, self.kv_lora_rank, *key, self.v_head_dim)

    @property
    def head_width(self) -> int:
        """Width of one head's query and key."""
        if self.latent is not None:
            return self.latent.head
        return self.head_dim or self.hidden // self.heads

    @property
    def width_ratio(self) -> float:
        """Width in units of ``mup_base_width``; 1 without it."""
        return 1.0 if self.mup_base_width is None else self.hidden / self.mup_base_width

    @property
    def mixed_width(self) -> int:
        """Width of the input of attention's output projection: the values of all heads."""
        return self.heads * (self.head_width if self.latent is None else self.latent.value)

    @property
    def score_scale(self) -> float | None:
        """Factor of the products of queries and keys; ``None``: 1 / sqrt(head size)."""
        scale = self.attention_scale
        if scale is None and self.mup_base_width is not None:
            scale = 1 / self.head_width
        if self.latent is not None:
            return (scale or self.head_width**-0.5) * self.rotary_scaling.score_factor
        return scale

    @property
    def logit_factor(self) -> float:
        """Factor of the logits, that of the width included."""
        return self.logit_scale / self.width_ratio

    @property
    def kernel_widths(self) -> dict[str, int]:
        """Widths that decide whether a kernel can run, by the kernel's name (`myriad.kernels.choice`)."""
        rotary = {} if self.latent is not None else {"rotary": self.head_width}
        return {"norm": self.hidden} | rotary

    @property
    def ffn_width(self) -> int:
        """Inner width of the MLP."""
        return self.ffn_hidden or 4 * self.hidden

    @property
    def expert_width(self) -> int:
        """Inner width of each expert."""
        return self.expert_hidden or self.ffn_width

    @property
    def mlp_width(self) -> int:
        """Inner width of each MLP: of an expert, if a block has any."""
        return self.ffn_width if self.experts is None else self.expert_width

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """Inner widths that tensor-parallel ranks share: of each expert, and of the MLP of other blocks."""
        return (self.mlp_width, self.ffn_width) if self.has_dense_blocks else (self.mlp_width,)

    @property
    def active_width(self) -> int:
        """Inner width of the MLPs that compute a token."""
        if self.experts is None:
            return self.ffn_width
        return (self.experts_per_token + self.shared_experts) * self.expert_width

    @property
    def stored_width(self) -> int:
        """Inner width of all MLPs of a block."""
        if self.experts is None:
            return self.ffn_width
        return (self.experts + self.shared_experts) * self.expert_width

    @property
    def has_router_bias(self) -> bool:
        """Whether each expert has a bias, which only the choice of experts sees."""
        return self.experts is not None and self.balance_bias_rate is not None

    @property
    def has_batch_loads(self) -> bool:
        """Whether each router keeps the loads of the last batch, for its balance loss."""
        return self.experts is not None and self.balance_scope == "batch"

    def expert_room(self, length: int) -> int:
        """Return the tokens of a sequence of this length that training lets an expert compute at most."""
        if self.expert_capacity is None or self.experts is None:
            return length
        share = self.expert_capacity * length * self.experts_per_token / self.experts
        return min(length, math.ceil(round(share, 6)))

    @property
    def largest_expert_load(self) -> float:
        """Tokens that an expert computes of a sequence at most, over those of the mean expert if none is
        dropped."""
        return (
            self.expert_room(self.sequence) * (self.experts or 1) / (self.experts_per_token * self.sequence)
        )

    @property
    def lossy(self) -> tuple[str, ...]:
        """Descriptions of the keys that leave out a part of the model's function; empty if there are none."""
        if self.experts is None or self.expert_capacity is None:
            return ()
        return (f"experts drop tokens beyond {self.expert_capacity:g} times their even share",)

    @property
    def mixture_blocks(self) -> list[int]:
        """Blocks with experts, prediction layers included."""
        return [n for n in range(self.layers + self.prediction_layers) if self.has_experts(n)]

    @property
    def router_elements(self) -> int:
        """Elements of a block's router, which every tensor-parallel rank has."""
        return self.hidden * self.router_rows

    @property
    def router_rows(self) -> int:
        """Products of each token with a router: a score of each expert, and the gate of the shared ones."""
        return 0 if self.experts is None else self.experts + self.shared_expert_gate

    def padded_vocabulary(self) -> int:
        """Return the rows of the embedding in memory without tensor parallelism."""
        return -(-self.vocabulary // self.vocabulary_multiple) * self.vocabulary_multiple

    def vocabulary_rows(self, tp: int) -> int:
        """Return the rows of the embedding in each tensor-parallel rank's memory; those of the last ranks may
        be padding (`myriad.model.definition.Shard`)."""
        return -(-self.padded_vocabulary() // tp)

    def layer_window(self, layer: int) -> int | None:
        """Return the window of block ``layer``; ``None`` if it attends to all tokens before."""
        uses = self.window is not None and self.window_pattern[layer % len(self.window_pattern)]
        return self.window if uses else None

    def layer_rotary(self, layer: int) -> Rotary | None:
        """Return the rotary positions of block ``layer``; ``None`` if it has none."""
        if self.position != "rotary" or not self.rotary_pattern[layer % len(self.rotary_pattern)]:
            return None
        if self.latent is not None:
            return Rotary(self.rotary_base, self.latent.rotated, None, self.rotary_scaling)
        rotated = self.rotary_width if self.rotary_fraction < 1 else None
        if self.window_rotary_base is not None and self.layer_window(layer) is not None:
            return Rotary(self.window_rotary_base, self.head_width, rotated)
        return Rotary(self.rotary_base, self.head_width, rotated, self.rotary_scaling)

    @property
    def rotary_width(self) -> int:
        """Number of values of each head that are rotated."""
        return self.latent.rotated if self.latent is not None else int(self.head_width * self.rotary_fraction)

    @property
    def up_matrices(self) -> int:
        """Number of matrices that the MLP's first product consists of: 2 with a gate."""
        return 2 if self.activation in GATED else 1

    @property
    def has_capped_scores(self) -> bool:
        """Whether attention scores have a bound or heads have sinks, which few kernels support."""
        return self.attention_softcap is not None or self.attention_sinks

    @property
    def num_gathers(self) -> int:
        """Times that tensor-parallel ranks gather the sequence in a block's forward."""
        return self.parallel_norms if self.block == "parallel" else 2

    @property
    def num_scatters(self) -> int:
        """Times that tensor-parallel ranks sum and scatter a product in a block's forward."""
        return 1 if self.block == "parallel" else 2

    @property
    def num_branch_norms(self) -> int:
        """Norms of a block over the residual stream, before and after its branches."""
        if self.block == "parallel":
            return self.parallel_norms
        return 4 if self.norm_placement == "both" else 2

    @property
    def has_norm_bias(self) -> bool:
        """Whether norms have a bias."""
        return self.norm == "layer" and (self.bias or self.norm_bias)

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries and values have a bias."""
        return self.bias or self.attention_bias != "default"

    @property
    def has_key_bias(self) -> bool:
        """Whether keys have a bias too."""
        return self.attention_bias != "default"

    @property
    def has_output_bias(self) -> bool:
        """Whether attention's output projection has a bias."""
        return self.bias or self.attention_bias == "all"

    @property
    def qkv_width(self) -> int:
        """Width of queries, keys and values together, as attention takes them."""
        return (self.heads + 2 * self.num_kv_heads) * self.head_width

    def _block_matrices(self, mlp_width: int) -> int:
        """Return the number of elements in a block's matrices, with MLPs of this inner width."""
        attention = self.hidden * (self.qkv_width + self.mixed_width)
        if self.latent is not None:
            attention = self.latent.down_rows * self.hidden
            attention += self.heads * self.latent.head_elements(self.hidden) + self.hidden * self.mixed_width
        return attention + self.router_elements + (self.up_matrices + 1) * self.hidden * mlp_width

    @property
    def _shared_matrices(self) -> int:
        """Number of elements in the matrices of a block that every tensor-parallel rank has."""
        latent = 0 if self.latent is None else self.latent.down_rows * self.hidden
        return latent + self.router_elements

    @property
    def shares_embedding(self) -> bool:
        """Whether the head uses the token embedding: as the output projection, or to embed the tokens whose
        successors its prediction layers predict."""
        return self.tied or self.prediction_layers > 0

    @property
    def prediction_parameters(self) -> int:
        """Parameters of one prediction layer: a block, three norms and a projection. Those with and without
        experts differ, as for `block_parameters`."""
        return self.block_parameters + 3 * self.norm_size + 2 * self.hidden**2

    def without_predictions(self) -> "ModelConfig":
        """Return the model that validation and sampling run."""
        return self.model_copy(update={"prediction_layers": 0})

    def prediction_loss(self, terms: Sequence[float]) -> float:
        """Return the mean loss of the prediction layers, given the terms that they add to the loss. The last
        tokens of a sequence have nothing to predict."""
        share = self.prediction_weight / self.prediction_layers
        counted = [(self.sequence - number) / self.sequence for number in range(1, len(terms) + 1)]
        return sum(term / share / own for term, own in zip(terms, counted, strict=True)) / len(terms)

    @property
    def norm_size(self) -> int:
        """Parameters of one norm over the residual stream."""
        return self.hidden * (2 if self.has_norm_bias else 1)

    @property
    def block_shared_parameters(self) -> int:
        """Parameters of a block that every tensor-parallel rank has: norms, biases of the products whose
        results are summed over the ranks (each expert's too), the projection to latents, and the router."""
        shared = self.norm_size * self.num_branch_norms + self._shared_matrices
        shared += 0 if self.latent is None else self.latent.normed
        num_mlps = 1 if self.experts is None else self.experts + (self.shared_experts > 0)
        shared += self.hidden * (self.has_output_bias + self.bias * num_mlps)
        shared += (self.experts or 0) * (self.has_router_bias + self.has_batch_loads + self.router_logit_bias)
        return shared + (2 * self.head_width * (1 + self.qk_norm_bias) if self.qk_norm == "head" else 0)

    @property
    def kv_parameters(self) -> int:
        """Parameters of a block's keys and values. `kv_copies` ranks hold each of them."""
        vectors = 2 if self.has_key_bias else 1 if self.has_qkv_bias else 0
        if self.qk_norm in ("heads", "all"):
            vectors += 1 + self.qk_norm_bias
        return self.num_kv_heads * self.head_width * (2 * self.hidden + vectors)

    def copied_parameters(self, tp: int) -> int:
        """Return the parameters of a block that tensor-parallel ranks hold in addition to the whole model,
        as copies of key/value heads."""
        return (self.kv_copies(tp) - 1) * self.kv_parameters

    @property
    def block_parameters(self) -> int:
        """Parameters of one block. Those with and without experts differ: `of_block` says which."""
        queries, keys = self.heads * self.head_width, self.num_kv_heads * self.head_width
        cut = self._block_matrices(self.stored_width) - self._shared_matrices
        if self.has_qkv_bias:
            cut += queries + keys * (2 if self.has_key_bias else 1)
        if self.bias:
            cut += self.stored_width * self.up_matrices
        if self.qk_norm in ("heads", "all"):
            cut += (queries + keys) * (1 + self.qk_norm_bias)
        return cut + self.block_shared_parameters + (self.heads if self.attention_sinks else 0)

    def num_parameters(self, *, embeddings: bool = True) -> int:
        """Return the number of parameters of the whole model, without padding of the vocabulary."""
        h = self.hidden
        further = range(self.layers, self.layers + self.prediction_layers)
        blocks = self.block_counts(range(self.layers))
        total = sum(count * block.block_parameters for block, count in blocks) + self.norm_size
        total += sum(count * block.prediction_parameters for block, count in self.block_counts(further))
        if embeddings:
            total += self.vocabulary * h * (1 if self.tied else 2)
            total += self.sequence * h if self.position == "learned" else 0
        return total

    def attended_pairs(self, layer: int) -> float:
        """Return the query-key pairs per sequence counted for MFU: all s^2 without a window (the convention),
        else only the attended pairs."""
        s, window = self.sequence, self.layer_window(layer)
        if window is None or window >= s:
            return float(s * s)
        return window * s - window * (window - 1) / 2

    def _active_matrices(self, layer: int) -> int:
        """Return the number of elements in the matrices of block ``layer`` that compute a token."""
        block = self.of_block(layer)
        return block._block_matrices(block.active_width)

    def layer_flops_per_token(self) -> list[float]:
        """Return the FLOPs per token of the embedding (0: rows are looked up), the blocks and the head with
        its prediction layers, counted as in `flops_per_token`."""
        width = (self.heads * self.head_width + self.mixed_width) / self.sequence
        alike = self.layers if self.has_dense_blocks else min(self.layers, len(self.window_pattern))
        each = [self._active_matrices(n) + width * self.attended_pairs(n) for n in range(alike)]
        blocks = [each[layer % len(each)] for layer in range(self.layers)]
        head = float(self.hidden * self.vocabulary)
        for layer in range(self.layers, self.layers + self.prediction_layers):
            head += self._active_matrices(layer) + width * self.attended_pairs(layer)
            head += self.hidden * (2 * self.hidden + self.vocabulary)
        return [6.0 * one for one in (0.0, *blocks, head)]

    def flops_per_token(self) -> float:
        """Return the model FLOPs (forward and backward, no recomputation) for one token of a full
        sequence."""
        return sum(self.layer_flops_per_token())

    def flops_of_documents(self, tokens: int, pairs: int, window_pairs: int) -> float:
        """Return the model FLOPs of ``tokens`` tokens of documents, whose attention has ``pairs`` pairs of
        queries and keys in a layer without a window, and ``window_pairs`` in one with it."""
        layers = range(self.layers + self.prediction_layers)
        each = 6.0 * (self.heads * self.head_width + self.mixed_width)
        joined = each / self.sequence * sum(self.attended_pairs(layer) for layer in layers)
        attended = sum(pairs if self.layer_window(layer) is None else window_pairs for layer in layers)
        return (self.flops_per_token() - joined) * tokens + each * attended


@lru_cache(maxsize=64)
def _every_block_with(model: ModelConfig) -> ModelConfig:
    """Return a model with experts in every block."""
    return model.model_copy(update={"dense_layers": 0, "expert_every": 1})


@lru_cache(maxsize=64)
def _every_block_without(model: ModelConfig) -> ModelConfig:
    """Return a model with an MLP in every block."""
    return model.model_copy(update={"experts": None})
