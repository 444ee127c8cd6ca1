"""Convert the arguments of Megatron-LM to a model configuration. Without torch.

The arguments come from a checkpoint (the namespace ``args`` that Megatron-LM saves) or from a command line.
Names and defaults are those of ``megatron/training/arguments.py``. An argument that changes what the model
computes and has no counterpart is refused by name; `myriad.job.translation` lists the rest.

| argument                                          | `ModelConfig`                                     |
|---------------------------------------------------|---------------------------------------------------|
| normalization RMSNorm, LayerNorm                  | norm rms, layer                                   |
| swiglu; squared_relu; bias_gelu_fusion, openai_gelu| swiglu; relu2; gelu_tanh (else gelu)              |
| position_embedding_type rope, learned_absolute    | position rotary, learned                          |
| add_bias_linear                                   | bias; attention_bias all if softmax sees a key's  |
| add_qkv_bias                                      | attention_bias qkv                                |
| qk_layernorm                                      | qk_norm head, of the kind of the other norms      |
| padded_vocab_size                                 | vocabulary: the loss there counts padding as well |
| window_size (n, 0)                                | window n + 1                                      |
"""

from collections.abc import Collection, Mapping
from math import gcd
from typing import Any, NoReturn

from pydantic import ValidationError

from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

__all__ = ["MODEL_ARGUMENTS", "check_numbers", "model_of_arguments"]

_OFF: dict[str, str] = {
    "num_experts": "experts",
    "multi_latent_attention": "latent attention",
    "qk_l2_norm": "norms of queries and keys",
    "use_rope_scaling": "scaling of rotary positions",
    "apply_residual_connection_post_layernorm": "a residual after the norm",
    "mtp_num_layers": "multi-token prediction",
    "heterogeneous_layers_config_path": "layers that differ",
    "heterogeneous_layers_config_encoded_json": "layers that differ",
    "quick_geglu": "this activation",
    "glu_linear_offset": "this activation",
    "attention_output_gate": "a gate after attention",
    "is_hybrid_model": "state-space layers",
    "hybrid_override_pattern": "state-space layers",
    "softmax_type": "a learned offset of softmax",
    "use_kitchen": "this kernel library",
    "scale_embeddings": "scaled embeddings",
    "window_attn_skip_freq": "a window in some layers",
    "retro_add_retriever": "retrieval",
    "tokentype_size": "token types",
}
"""Arguments that must be off, because they change the model in ways that this import does not read."""
_OWN_KEYS = {
    "multi_latent_attention": "model.kv_lora_rank and the widths beside it",
    "mtp_num_layers": "model.prediction_layers",
    "use_rope_scaling": "model.rotary_scaling",
}
"""Keys that do what an argument of `_OFF` does, in a job of one's own."""
_OFF_VALUES = (None, False, 0, "", "vanilla", 0.0)

MODEL_ARGUMENTS = frozenset({
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "kv_channels",
    "group_query_attention", "num_query_groups", "seq_length", "max_position_embeddings",
    "position_embedding_type", "rotary_base", "rotary_percent", "rotary_interleaved",
    "rotary_seq_len_interpolation_factor", "normalization", "norm_epsilon", "layernorm_epsilon", "swiglu",
    "squared_relu", "openai_gelu", "bias_gelu_fusion", "onnx_safe", "add_bias_linear", "window_size",
    "untie_embeddings_and_output_weights", "padded_vocab_size", "vocab_size", "hidden_dropout",
    "attention_dropout", "init_method_std", "make_vocab_size_divisible_by", "apply_layernorm_1p",
    "layernorm_zero_centered_gamma", "use_rotary_position_embeddings", "no_position_embedding",
    "qk_layernorm", "add_qkv_bias", *_OFF,
})  # fmt: skip
"""Arguments that this module reads."""


def _why_off(name: str, what: str) -> str:
    """Return why an argument of `_OFF` cannot be read."""
    if name in _OWN_KEYS:
        return f"{what} is not translated; in a job of your own, set {_OWN_KEYS[name]}"
    return f"Myriad has no counterpart for {what}"


_MOST = 2**62


def _refuse(key: str, name: str, value: object, allowed: str) -> NoReturn:
    raise BadInputError(key, str(value)[:100], f"{name} must be {allowed}")


def check_numbers(arguments: Mapping[str, Any], names: Collection[str], key: str) -> None:
    """Raise `BadInputError` if one of these arguments holds a number that is not finite or beyond 2**62, so
    that calculations with them cannot overflow."""
    for name in names:
        value = arguments.get(name)
        for one in value if isinstance(value, list | tuple) else (value,):
            if isinstance(one, int | float) and not abs(one) <= _MOST:
                shown = f"a number of {one.bit_length()} bits" if isinstance(one, int) else one
                _refuse(key, name, shown, "a finite number of at most 2**62")


def model_of_arguments(arguments: Mapping[str, Any], key: str) -> tuple[ModelConfig, list[str]]:
    """Return the model, and a sentence for each difference that does not change its logits.

    ``key``: the user's input key, for messages. Raises `BadInputError` for an argument without a
    counterpart."""
    check_numbers(arguments, MODEL_ARGUMENTS, key)
    for name, what in _OFF.items():
        if arguments.get(name) not in _OFF_VALUES:
            _refuse(key, name, arguments[name], f"off: {_why_off(name, what)}")
    layers = _size(arguments, "num_layers", key)
    hidden, heads = _size(arguments, "hidden_size", key), _size(arguments, "num_attention_heads", key)
    swiglu = bool(arguments.get("swiglu"))
    groups = (
        _size(arguments, "num_query_groups", key, heads)
        if _flag(arguments, "group_query_attention")
        else heads
    )
    position = _position(arguments, key)
    sequence = _size(arguments, "seq_length", key, _size(arguments, "max_position_embeddings", key, 1024))
    rows = _size(arguments, "max_position_embeddings", key, sequence)
    vocabulary = arguments.get("padded_vocab_size") or arguments.get("vocab_size")
    norm, bias = _norm(arguments, key), _flag(arguments, "add_bias_linear", True)
    qk_norm = _flag(arguments, "qk_layernorm")
    values: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": groups if groups != heads else None,
        "head_dim": _size(arguments, "kv_channels", key, hidden // heads),
        "ffn_hidden": _size(arguments, "ffn_hidden_size", key, _default_ffn(hidden, swiglu)),
        "sequence": rows if position == "learned" else sequence,
        "position": position,
        "rotary_base": arguments.get("rotary_base") or 10000.0,
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
        "window": _window(arguments, key),
    }
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


def _size(arguments: Mapping[str, Any], name: str, key: str, default: int | None = None) -> int:
    value = arguments.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**30:
        _refuse(key, name, value, "a whole number of at least 1")
    assert isinstance(value, int)
    return value


def _default_ffn(hidden: int, swiglu: bool) -> int:
    """Return ``validate_args``'s default: two thirds of 4 h rounded down to 64 with a gate, else 4 h."""
    return int((4 * hidden * 2 / 3) / 64) * 64 if swiglu else 4 * hidden


def _position(arguments: Mapping[str, Any], key: str) -> str:
    kind = arguments.get("position_embedding_type", "learned_absolute")
    if _flag(arguments, "use_rotary_position_embeddings"):
        kind = "rope"
    if kind not in ("rope", "learned_absolute", "none"):
        _refuse(key, "position_embedding_type", kind, "rope, learned_absolute or none")
    if kind == "rope":
        if arguments.get("rotary_percent", 1.0) != 1.0:
            _refuse(key, "rotary_percent", arguments["rotary_percent"], "1.0: whole heads are turned")
        if arguments.get("rotary_seq_len_interpolation_factor") not in (None, 1):
            name = "rotary_seq_len_interpolation_factor"
            _refuse(key, name, arguments[name], "off: Myriad does not interpolate positions")
    return {"rope": "rotary", "learned_absolute": "learned", "none": "none"}[kind]


def _norm(arguments: Mapping[str, Any], key: str) -> str:
    kind = arguments.get("normalization", "LayerNorm")
    if kind not in ("LayerNorm", "RMSNorm"):
        _refuse(key, "normalization", kind, "LayerNorm or RMSNorm")
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


def _window(arguments: Mapping[str, Any], key: str) -> int | None:
    window = arguments.get("window_size")
    if window is None:
        return None
    left, right = window if isinstance(window, list | tuple) and len(window) == 2 else (None, None)
    if right != 0 or not isinstance(left, int) or left < 0:
        _refuse(key, "window_size", window, "(n, 0) with n of at least 0")
    assert isinstance(left, int)
    return left + 1


def _differences(arguments: Mapping[str, Any], model: ModelConfig, sequence: int) -> Any:
    if arguments.get("attention_dropout", 0.1):
        yield f"attention_dropout {arguments.get('attention_dropout', 0.1)}: Myriad drops no attention scores"
    if model.position == "learned" and model.sequence != sequence:
        yield f"seq_length {sequence}: model.sequence is the position table's length, {model.sequence}"
    if model.bias and not model.has_key_bias:
        yield "biases of keys are dropped: softmax does not see them"
