"""Convert model configurations to Hugging Face's ``config.json`` and back. Without torch.

| `ModelConfig`                                              | Hugging Face           |
|------------------------------------------------------------|------------------------|
| RMSNorm, rotary, no bias, SwiGLU                            | LlamaForCausalLM       |
| the same, a window in every layer                           | MistralForCausalLM     |
| the same without a window, MLP without a gate (gelu, relu2) | ArceeForCausalLM       |
| LayerNorm, learned positions, biases, gelu                  | GPT2LMHeadModel        |

Every other model is refused, because it has no counterpart. Values that matter only in training (dropout) are
written if there is a field for them, and not read back. A field of a ``config.json`` is accepted in three
cases: it is read, it is known not to affect what the model computes (`_NOT_COMPUTED`), or its value enables
nothing (null, false, 0, empty). Every other field is refused.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

__all__ = ["Kind", "config_of", "kind_of", "model_of"]

Kind = Literal["llama", "mistral", "arcee", "gpt2"]
"""``model_type`` of a ``config.json``."""

_CLASSES: dict[Kind, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "arcee": "ArceeForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_new"}
_ACTIVATIONS: dict[Kind, dict[str, str]] = {
    "llama": {"swiglu": "silu"},
    "mistral": {"swiglu": "silu"},
    "arcee": {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu2": "relu2"},
    "gpt2": _GELUS,
}
"""Myriad's activation names to Hugging Face's."""
_READ = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu2": "relu2",
}
"""Hugging Face's activation names to Myriad's. Several are the same function with different rounding."""


def _need(condition: bool, key: str, value: object, allowed: str) -> None:
    if not condition:
        raise BadInputError(key, value, f"{allowed}: Hugging Face has no model class for it")


def kind_of(model: ModelConfig) -> Kind:
    """Return the Hugging Face model type. Raises `BadInputError` if there is no counterpart."""
    _need(model.block == "serial", "model.block", model.block, "serial")
    positions = {"rms": "rotary", "layer": "learned"}[model.norm]
    _need(
        model.position == positions, "model.position", model.position, f"{positions} with norm = {model.norm}"
    )
    _need(
        model.bias == (model.norm == "layer"),
        "model.bias",
        model.bias,
        "false with norm = rms, true with layer",
    )
    return _gpt2(model) if model.norm == "layer" else _rotary(model)


def _gpt2(model: ModelConfig) -> Kind:
    activations = f"{' or '.join(_GELUS)} with norm = layer"
    _need(model.activation in _GELUS, "model.activation", model.activation, activations)
    _need(_window(model) is None, "model.window", model.window, "off with norm = layer")
    heads = model.heads
    _need(
        model.num_kv_heads == heads, "model.kv_heads", model.kv_heads, f"{heads}, as heads, with norm = layer"
    )
    width = model.hidden // heads
    _need(
        model.head_width == width,
        "model.head_dim",
        model.head_dim,
        f"{width}, hidden / heads, with norm = layer",
    )
    return "gpt2"


def _rotary(model: ModelConfig) -> Kind:
    gated = model.activation == "swiglu"
    if _window(model) is None:
        return "llama" if gated else "arcee"
    _need(gated, "model.activation", model.activation, "swiglu with a window")
    return "mistral"


def _window(model: ModelConfig) -> int | None:
    """Return the window of every layer. Raises `BadInputError` if layers differ."""
    windows = {model.layer_window(layer) for layer in range(model.layers)}
    pattern = list(model.window_pattern)
    _need(len(windows) == 1, "model.window_pattern", pattern, "the same in every layer")
    return windows.pop()


def config_of(model: ModelConfig, dtype: str, end_of_document: int | None) -> dict[str, Any]:
    """Return the content of ``config.json`` for versions 4 and 5 of transformers.

    ``dtype``: name of the weights' dtype. ``end_of_document``: token, if known. Raises `BadInputError` if the
    model has no counterpart."""
    kind = kind_of(model)
    own = _write_gpt2(model) if kind == "gpt2" else _write_rotary(model, kind)
    return {
        "architectures": [_CLASSES[kind]],
        "model_type": kind,
        "vocab_size": model.vocabulary,
        "tie_word_embeddings": model.tied,
        "initializer_range": model.initial_deviation,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "dtype": dtype,
        "torch_dtype": dtype,
        "use_cache": True,
        **own,
    }


def _write_gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.hidden,
        "n_layer": model.layers,
        "n_head": model.heads,
        "n_inner": model.ffn_width,
        "n_positions": model.sequence,
        "activation_function": _GELUS[model.activation],
        "layer_norm_epsilon": model.norm_epsilon,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    }


def _write_rotary(model: ModelConfig, kind: Kind) -> dict[str, Any]:
    window = {"sliding_window": _window(model)} if kind == "mistral" else {}
    biases = {} if kind == "mistral" else {"attention_bias": False, "mlp_bias": False}
    return {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "hidden_act": _ACTIVATIONS[kind][model.activation],
        "max_position_embeddings": model.sequence,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rotary_base},
        "attention_dropout": 0.0,
        **biases,
        **window,
    }


@dataclass(frozen=True)
class _Theirs:
    """A ``config.json``, with transformers' defaults for missing fields."""

    values: Mapping[str, Any]
    defaults: Mapping[str, Any]

    def get(self, key: str) -> Any:
        return self.values.get(key, self.defaults.get(key))

    def size(self, key: str) -> int:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise BadInputError(key, value, "a whole number of at least 1 in config.json")
        return value

    def size_or_none(self, key: str) -> int | None:
        return None if self.get(key) is None else self.size(key)

    def number(self, key: str) -> float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadInputError(key, value, "a number in config.json")
        return value

    def must_be(self, key: str, *allowed: object) -> None:
        value = self.get(key)
        if value not in allowed:
            choices = " or ".join(map(str, allowed))
            raise BadInputError(key, value, f"{choices} in config.json; nothing else can be read")


_ROTARY_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_DEFAULTS: dict[Kind, dict[str, Any]] = {
    "llama": _ROTARY_DEFAULTS | {"max_position_embeddings": 2048},
    "mistral": _ROTARY_DEFAULTS | {"max_position_embeddings": 131072, "sliding_window": 4096},
    "arcee": _ROTARY_DEFAULTS
    | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    "gpt2": {
        "tie_word_embeddings": True,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "n_positions": 1024,
        "scale_attn_weights": True,
    },
}


_FIELDS: dict[Kind, set[str]] = {
    kind: {
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps"),
        *(
            "rope_theta",
            "rope_parameters",
            "rope_scaling",
            "attention_bias",
            "mlp_bias",
            "tie_word_embeddings",
        ),
        *(("sliding_window",) if kind == "mistral" else ()),
    }
    for kind in ("llama", "mistral", "arcee")
}
_FIELDS["gpt2"] = {
    *("vocab_size", "n_embd", "n_layer", "n_head", "n_inner", "n_positions", "activation_function"),
    *("layer_norm_epsilon", "tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"),
    "add_cross_attention",
}
"""Fields that are read, or must have one particular value."""

_NOT_COMPUTED = {
    # names, versions, dtype of the file
    *("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "tokenizer_class"),
    *("finetuning_task", "problem_type", "task_specific_params", "id2label", "label2id", "prefix"),
    # special tokens, and options of text generation
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "top_k"),
    *("top_p", "typical_p", "temperature", "diversity_penalty", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores"),
    *("return_dict_in_generate", "remove_invalid_values"),
    # training, memory, return values; pretraining_tp and reorder_and_upcast_attn change only rounding
    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "use_cache"),
    *("gradient_checkpointing", "output_attentions", "output_hidden_states", "return_dict", "torchscript"),
    *("chunk_size_feed_forward", "pretraining_tp", "reorder_and_upcast_attn", "is_decoder", "n_ctx"),
    # heads that a language model lacks: their tensors would be refused
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    "summary_first_dropout",
}


def _refuse_unknown(config: Mapping[str, Any], kind: Kind) -> None:
    for key, value in config.items():
        if key in _FIELDS[kind] | _NOT_COMPUTED or key.startswith("_") or not value:
            continue
        allowed = (
            "a field of config.json that is not understood: what the model computes may depend on it; "
            "take it out of the file if it does not"
        )
        raise BadInputError(key, value, allowed)


def model_of(config: Mapping[str, Any], vocabulary_multiple: int = 64) -> ModelConfig:
    """Return the model that a ``config.json`` describes.

    The vocabulary is padded to a multiple of ``vocabulary_multiple``. Raises `BadInputError` for any field
    that cannot be read exactly."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise BadInputError("model_type", kind, f"one of {', '.join(_CLASSES)} in config.json")
    _refuse_unknown(config, kind)
    theirs = _Theirs(config, _DEFAULTS[kind])
    read: Callable[[_Theirs, Kind], ModelConfig] = _read_gpt2 if kind == "gpt2" else _read_rotary
    try:
        model = read(theirs, kind)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInputError(str(first["loc"][0]), first["input"], f"{first['msg']} (config.json)") from None
    return model.model_copy(update={"vocabulary_multiple": vocabulary_multiple})


def _read_gpt2(theirs: _Theirs, kind: Kind) -> ModelConfig:
    theirs.must_be("scale_attn_weights", True)
    theirs.must_be("scale_attn_by_inverse_layer_idx", None, False)
    theirs.must_be("add_cross_attention", None, False)
    hidden = theirs.size("n_embd")
    return ModelConfig(
        norm="layer",
        position="learned",
        bias=True,
        hidden=hidden,
        layers=theirs.size("n_layer"),
        heads=theirs.size("n_head"),
        ffn_hidden=theirs.size_or_none("n_inner") or 4 * hidden,
        vocabulary=theirs.size("vocab_size"),
        sequence=theirs.size("n_positions"),
        activation=_activation(theirs, kind, "activation_function"),
        norm_epsilon=theirs.number("layer_norm_epsilon"),
        tied=theirs.get("tie_word_embeddings"),
    )


def _read_rotary(theirs: _Theirs, kind: Kind) -> ModelConfig:
    for bias in ("attention_bias", "mlp_bias"):
        theirs.must_be(bias, None, False)
    heads, sequence = theirs.size("num_attention_heads"), theirs.size("max_position_embeddings")
    window = theirs.size_or_none("sliding_window") if kind == "mistral" else None
    return ModelConfig(
        norm="rms",
        position="rotary",
        bias=False,
        hidden=theirs.size("hidden_size"),
        layers=theirs.size("num_hidden_layers"),
        heads=heads,
        kv_heads=theirs.size_or_none("num_key_value_heads") or heads,
        head_dim=theirs.size_or_none("head_dim"),
        ffn_hidden=theirs.size("intermediate_size"),
        vocabulary=theirs.size("vocab_size"),
        sequence=sequence,
        window=window if window is not None and window <= sequence else None,
        activation=_activation(theirs, kind, "hidden_act"),
        rotary_base=_rotary_base(theirs),
        norm_epsilon=theirs.number("rms_norm_eps"),
        tied=theirs.get("tie_word_embeddings"),
    )


def _rotary_base(theirs: _Theirs) -> float:
    """Read the rotary base from its place in version 5 of transformers, or else in version 4."""
    bases = [theirs.get("rope_theta")]
    for key in ("rope_parameters", "rope_scaling"):
        rope = theirs.get(key) or {}
        if not isinstance(rope, dict):
            raise BadInputError(key, rope, "an object in config.json")
        scaling = _Theirs({"rope_type": rope.get("rope_type", rope.get("type", "default"))} | rope, {})
        scaling.must_be("rope_type", "default")
        scaling.must_be("partial_rotary_factor", None, 1.0)
        bases.append(rope.get("rope_theta"))
    given = [base for base in bases if base is not None]
    for base in given:
        if isinstance(base, bool) or not isinstance(base, int | float):
            raise BadInputError("rope_theta", base, "a number in config.json")
    if len(set(given)) > 1:
        raise BadInputError("rope_theta", sorted(set(given)), "one value in config.json")
    return given[0] if given else 10000.0


def _activation(theirs: _Theirs, kind: Kind, key: str) -> Any:
    theirs.must_be(key, *(name for name, ours in _READ.items() if ours in _ACTIVATIONS[kind]))
    return _READ[theirs.get(key)]
