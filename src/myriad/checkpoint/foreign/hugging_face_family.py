"""How a model family is exchanged with Hugging Face: its configuration fields and its tensor names."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from myriad.checkpoint.foreign.hugging_face_values import ConfigValues
from myriad.model.config import ModelConfig

__all__ = ["COMMON", "Family", "TensorNames", "Values"]

Values = dict[str, Any]
"""Values of `ModelConfig`, or fields of a ``config.json``, by name."""


@dataclass(frozen=True)
class TensorNames:
    """Names of a family's tensors, without the prefixes of model and layer."""

    base: str = "model"
    """Prefix of all names but the output projection's."""
    tokens: str = "embed_tokens"
    layers: str = "layers"
    final_norm: str = "norm"
    head: str = "lm_head"
    norms: Mapping[str, str] = field(
        default_factory=lambda: {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
    )
    """Norms of a block: the names in Myriad and in the family."""
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """Three tensors, or one that holds queries, keys and values as `qkv_order` says."""
    qkv_order: Literal["rows", "groups"] = "rows"
    """rows: all queries, all keys, all values. groups: for each key/value head its queries, key and value."""
    qk_norms: tuple[str, str] = ("q_norm", "k_norm")
    """Norms of queries and keys; a number follows for each head if the heads have weights of their own."""
    latent_pairs: Literal["adjacent", "halves"] = "adjacent"
    """Rows of a rotary pair in latent attention: beside each other, or half of the rotated rows apart."""
    output: str = "o_proj"
    mlp: str = "mlp"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    """The tensors of the MLP's first product; a single one with a gate holds the gate first."""
    down: str = "down_proj"
    router: str = "gate"
    """The matrix that chooses experts, which are named by their numbers."""
    router_bias: str = "gate.e_score_correction_bias"
    router_logit_bias: str = "router.bias"
    stacked: tuple[str, str] | None = None
    """Names of two tensors that hold the first and the second products of all experts, transposed, gates and
    values in turns, and of their biases with ``_bias``; ``None``: each expert has its own tensors."""
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True)
class Family:
    """How models of one ``model_type`` of Hugging Face are read and written."""

    architecture: str
    """Class of the language model in transformers."""
    fixed: Values = field(default_factory=dict)
    """Values of `ModelConfig` that all models of the family have."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Fields whose values are copied, in addition to `COMMON`: their names in ``config.json``, by the names
    in `ModelConfig`."""
    activations: Mapping[str, str] = field(default_factory=lambda: {"swiglu": "silu"})
    """Activation functions: their name by the name in `ModelConfig`."""
    activation_field: str = "hidden_act"
    defaults: Values = field(default_factory=dict)
    """Values that transformers takes for missing fields."""
    must_be: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Fields with only these values."""
    read: Callable[[ConfigValues, Values], Values] = lambda theirs, values: {}
    """Return further values of `ModelConfig`, given those of the fields that are copied."""
    write: Callable[[ModelConfig], Values] = lambda model: {}
    """Return the fields of ``config.json`` that are not copied."""
    may_have_experts: bool = False
    """Whether models with and without experts are of the family. Otherwise all have them if `sizes` names
    their number, else none."""
    fields: tuple[str, ...] = ()
    """Fields that `read` reads."""
    names: Callable[[ModelConfig], TensorNames] = lambda model: TensorNames()

    def allows(self, *, experts: bool) -> bool:
        """Return whether models with experts, or without, may be of the family."""
        return self.may_have_experts or experts == ("experts" in self.sizes)

    def known_fields(self) -> set[str]:
        """Return all fields that are read, or must have one value."""
        copied = {**COMMON, **self.sizes}.values()
        return {*copied, self.activation_field, *self.fields, *self.must_be}


COMMON = {
    "hidden": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn_hidden": "intermediate_size",
    "vocabulary": "vocab_size",
    "sequence": "max_position_embeddings",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
}
"""Fields of most families, by the name in `ModelConfig`."""
