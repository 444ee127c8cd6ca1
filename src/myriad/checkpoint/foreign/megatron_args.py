"""Convert the arguments of Megatron-LM to a model configuration. Without torch.

The arguments come from a checkpoint (the namespace ``args`` that Megatron-LM saves) or from a command line.
Names and defaults are those of ``megatron/training/arguments.py``. An argument that changes what the model
computes and has no counterpart is refused by name; `myriad.job.translation` lists the rest.

| argument                                          | `ModelConfig`                                     |
|---------------------------------------------------|---------------------------------------------------|
| normalization RMSNorm, LayerNorm                  | norm rms, layer                                   |
| swiglu; squared_relu; bias_gelu_fusion, openai_gelu| swiglu; relu2; gelu_tanh (else gelu)              |
| add_bias_linear                                   | bias; attention_bias all if softmax sees a key's  |
| add_qkv_bias                                      | attention_bias qkv                                |
| qk_layernorm                                      | qk_norm head, of the kind of the other norms      |
| padded_vocab_size                                 | vocabulary: the loss there counts padding as well |
| window_size (n, 0)                                | window n + 1                                      |

Positions, windows, latent attention, prediction layers and muP: `myriad.checkpoint.foreign.megatron_layers`.
"""

from collections.abc import Collection, Mapping
from math import gcd
from typing import Any

from pydantic import ValidationError

from myriad.checkpoint.foreign.megatron_layers import (
    LAYER_ARGUMENTS,
    latent_values,
    layer_differences,
    mup_values,
    position_values,
    prediction_values,
    refuse,
    score_values,
    size_of,
    window_values,
)
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

__all__ = ["MODEL_ARGUMENTS", "check_numbers", "model_of_arguments"]

_OFF: dict[str, str] = {
    "num_experts": "experts",
    "qk_l2_norm": "norms of queries and keys",
    "apply_residual_connection_post_layernorm": "a residual after the norm",
    "heterogeneous_layers_config_path": "layers that differ",
    "heterogeneous_layers_config_encoded_json": "layers that differ",
    "quick_geglu": "this activation",
    "glu_linear_offset": "this activation",
    "attention_output_gate": "a gate after attention",
    "is_hybrid_model": "state-space layers",
    "hybrid_override_pattern": "state-space layers",
    "use_kitchen": "this kernel library",
    "scale_embeddings": "scaled embeddings",
    "retro_add_retriever": "retrieval",
    "tokentype_size": "token types",
    "activation_func_clamp_value": "clamped activations",
    "experimental_attention_variant": "this kind of attention",
    "enable_mhc_connections": "several residual streams",
    "qk_clip": "clipping of query and key weights",
    "mtp_use_repeated_layer": "a repeated prediction layer",
    "mtp_detach_heads": "prediction layers without gradients into the model",
    "mtp_hsm": "mixed inputs of prediction layers",
    "hybrid_layer_pattern": "state-space layers",
}
"""Arguments that must be off, because they change the model in ways that this import does not read."""
_OFF_VALUES = (None, False, 0, "", "vanilla", 0.0)

MODEL_ARGUMENTS = LAYER_ARGUMENTS | {
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "group_query_attention", "num_query_groups", "seq_length", "max_position_embeddings",
    "normalization", "norm_epsilon", "layernorm_epsilon", "swiglu", "squared_relu", "openai_gelu",
    "bias_gelu_fusion", "onnx_safe", "add_bias_linear", "untie_embeddings_and_output_weights",
    "padded_vocab_size", "vocab_size", "hidden_dropout", "attention_dropout", "init_method_std",
    "make_vocab_size_divisible_by", "apply_layernorm_1p", "layernorm_zero_centered_gamma",
    "qk_layernorm", "add_qkv_bias", *_OFF,
}  # fmt: skip
"""Arguments that this module reads."""


_MOST = 2**62


def check_numbers(arguments: Mapping[str, Any], names: Collection[str], key: str) -> None:
    """Raise `BadInputError` if one of these arguments holds a number that is not finite or beyond 2**62, so
    that calculations with them cannot overflow."""
    for name in names:
        value = arguments.get(name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, int | float) and not abs(one) <= _MOST:
                shown = f"a number of {one.bit_length()} bits" if isinstance(one, int) else one
                refuse(key, name, shown, "a finite number of at most 2**62")


def model_of_arguments(arguments: Mapping[str, Any], key: str) -> tuple[ModelConfig, list[str]]:
    """Return the model, and a sentence for each difference that does not change its logits.

    ``key``: the user's input key, for messages. Raises `BadInputError` for an argument without a
    counterpart."""
    check_numbers(arguments, MODEL_ARGUMENTS, key)
    for name, what in _OFF.items():
        if arguments.get(name) not in _OFF_VALUES:
            refuse(key, name, arguments[name], f"off: Myriad has no counterpart for {what}")
    layers = size_of(arguments, "num_layers", key)
    hidden, heads = size_of(arguments, "hidden_size", key), size_of(arguments, "num_attention_heads", key)
    swiglu = bool(arguments.get("swiglu"))
    groups = (
        size_of(arguments, "num_query_groups", key, heads)
        if _flag(arguments, "group_query_attention")
        else heads
    )
    positions = position_values(arguments, key)
    position, head_width = positions["position"], size_of(arguments, "kv_channels", key, hidden // heads)
    sequence = size_of(arguments, "seq_length", key, size_of(arguments, "max_position_embeddings", key, 1024))
    rows = size_of(arguments, "max_position_embeddings", key, sequence)
    vocabulary = arguments.get("padded_vocab_size") or arguments.get("vocab_size")
    norm, bias = _norm(arguments, key), _flag(arguments, "add_bias_linear", True)
    qk_norm = _flag(arguments, "qk_layernorm")
    values: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": groups if groups != heads else None,
        "head_dim": head_width,
        "ffn_hidden": size_of(arguments, "ffn_hidden_size", key, _default_ffn(hidden, swiglu)),
        "sequence": rows if position == "learned" else sequence,
        "norm": norm,
        "norm_bias": norm == "layer" and not bias,
        "bias": bias,
        "attention_bias": _attention_bias(arguments, position, bias),
        "qk_norm": "head" if qk_norm else "none",
        "qk_norm_kind": norm if qk_norm else "rms",
        "qk_norm_bias": qk_norm and norm == "layer",
        "norm_epsilon": arguments.get("norm_epsilon", arguments.get("layernorm_epsilon", 1e-5)),
        "activation": _activation(arguments),
        "tied": not arguments.get("untie_embeddings_and_output_weights", False),
        "dropout": arguments.get("hidden_dropout", 0.1),
        "initial_deviation": arguments.get("init_method_std", 0.02),
        **positions,
        **window_values(arguments, key),
        **score_values(arguments, key),
        **prediction_values(arguments, key),
    }
    values |= mup_values(arguments, hidden, head_width, key)
    values |= latent_values(arguments, key)
    if vocabulary is not None:
        values["vocabulary"] = vocabulary
        values["vocabulary_multiple"] = gcd(int(vocabulary), 128) if isinstance(vocabulary, int) else 1
    model = _validated(values, key)
    return model, list(_differences(arguments, model, sequence))


def _validated(values: dict[str, Any], key: str) -> ModelConfig:
    try:
        return ModelConfig(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInputError(key, str(first["input"])[:100], f"{first['loc'][0]}: {first['msg']}") from None


def _flag(arguments: Mapping[str, Any], name: str, default: bool = False) -> bool:
    return bool(arguments.get(name, default))


def _attention_bias(arguments: Mapping[str, Any], position: str, bias: bool) -> str:
    """Return where attention has biases: keys have one only if softmax does not cancel it."""
    if bias:
        return "all" if position == "rotary" or _flag(arguments, "qk_layernorm") else "default"
    return "qkv" if _flag(arguments, "add_qkv_bias") else "default"


def _default_ffn(hidden: int, swiglu: bool) -> int:
    """Return ``validate_args``'s default: two thirds of 4 h rounded down to 64 with a gate, else 4 h."""
    return int((4 * hidden * 2 / 3) / 64) * 64 if swiglu else 4 * hidden


def _norm(arguments: Mapping[str, Any], key: str) -> str:
    kind = arguments.get("normalization", "LayerNorm")
    if kind not in ("LayerNorm", "RMSNorm"):
        refuse(key, "normalization", kind, "LayerNorm or RMSNorm")
    return "rms" if kind == "RMSNorm" else "layer"


def _activation(arguments: Mapping[str, Any]) -> str:
    if _flag(arguments, "swiglu"):
        return "swiglu"
    if _flag(arguments, "squared_relu"):
        return "relu2"
    if _flag(arguments, "openai_gelu"):
        return "gelu_tanh"
    fused = arguments.get("bias_gelu_fusion", True) and arguments.get("add_bias_linear", True)
    return "gelu_tanh" if fused else "gelu"


def _differences(arguments: Mapping[str, Any], model: ModelConfig, sequence: int) -> Any:
    if arguments.get("attention_dropout", 0.1):
        yield f"attention_dropout {arguments.get('attention_dropout', 0.1)}: Myriad drops no attention scores"
    if model.position == "learned" and model.sequence != sequence:
        yield f"seq_length {sequence}: model.sequence is the position table's length, {model.sequence}"
    if model.bias and not model.has_key_bias:
        yield "biases of keys are dropped: softmax does not see them"
    yield from layer_differences(arguments)
