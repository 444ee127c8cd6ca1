"""Fields of ``config.json`` that only some families of Hugging Face have: readers and writers.

A reader gets the file and the values that are copied from it, and returns further values of `ModelConfig`. A
writer returns further fields. A written file that is read back gives the same model.
"""

from collections.abc import Callable

from myriad.checkpoint.foreign.hugging_face_family import Values
from myriad.checkpoint.foreign.hugging_face_values import (
    ConfigValues,
    read_partial_rotary,
    read_rotary,
    read_whole_rotary,
    written_rotary,
)
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

__all__ = [
    "layer_types",
    "minicpm_scales",
    "read_decoder",
    "read_gemma2",
    "read_gemma3",
    "read_granite",
    "read_minicpm",
    "read_mistral",
    "read_olmo3",
    "read_phi3",
    "read_qwen",
    "read_smollm3",
    "write_decoder",
    "write_gemma",
    "write_gemma3",
    "write_granite",
    "write_minicpm",
    "write_mistral",
    "write_olmo3",
    "write_phi3",
    "write_qwen",
    "write_qwen2",
    "write_smollm3",
    "written_minicpm_scales",
    "written_types",
]

_SLIDING, _FULL = "sliding_attention", "full_attention"


def _attention_bias(theirs: ConfigValues) -> Values:
    return {"attention_bias": "all" if theirs.flag("attention_bias") else "default"}


def read_decoder(theirs: ConfigValues, values: Values, default_base: float = 1e4) -> Values:
    """Read what Llama and its descendants have in common."""
    return read_whole_rotary(theirs, default_base) | _attention_bias(theirs)


def write_decoder(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Llama and its descendants."""
    return {
        "rope_theta": model.rotary_base,
        "rope_parameters": written_rotary(model.rotary_base, model.rotary_scaling),
        "attention_bias": model.has_output_bias,
        "attention_dropout": 0.0,
    }


def _repeated(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
    """Return the shortest pattern that gives this one when it is repeated."""
    for period in range(1, len(pattern)):
        if all(one == pattern[index % period] for index, one in enumerate(pattern)):
            return pattern[:period]
    return pattern


def _windowed(window: int | None, values: Values, slides: tuple[bool, ...]) -> Values:
    """Return the window of the layers that have one; a window of the whole sequence is none."""
    if window is None or window > values["sequence"] or not any(slides):
        return {}
    return {"window": window, "window_pattern": _repeated(slides)}


def _window_in(theirs: ConfigValues, values: Values) -> int:
    """Return the window, cut to the sequence: its layers have rotary positions of their own, even if they see
    all tokens."""
    return min(theirs.size_or_none("sliding_window") or values["sequence"], values["sequence"])


def layer_types(
    theirs: ConfigValues, values: Values, slides: Callable[[int], bool], window: int | None
) -> Values:
    """Read which layers have a window: those of ``layer_types``, or those by the family's rule."""
    named = theirs.names("layer_types", values["layers"], _SLIDING, _FULL)
    found = [slides(layer) for layer in range(values["layers"])]
    if named is not None:
        found = [one == _SLIDING for one in named]
    return _windowed(window, values, tuple(found))


def written_types(model: ModelConfig) -> list[str]:
    """Return the field ``layer_types``."""
    return [_SLIDING if model.layer_window(layer) else _FULL for layer in range(model.layers)]


def read_mistral(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: Mistral."""
    window = _windowed(theirs.size_or_none("sliding_window"), values, (True,))
    return read_whole_rotary(theirs) | window


def _without_attention_bias(written: Values) -> Values:
    return {key: value for key, value in written.items() if key != "attention_bias"}


def write_mistral(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Mistral."""
    return _without_attention_bias(write_decoder(model)) | {"sliding_window": model.window}


def read_qwen(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: Qwen 2 and 3."""
    window = theirs.size_or_none("sliding_window") if theirs.flag("use_sliding_window") else None
    no_full = theirs.get("max_window_layers") == 0
    first = 0 if no_full else theirs.size_or_none("max_window_layers") or values["layers"]
    types = layer_types(theirs, values, lambda layer: layer >= first, window)
    bias = _attention_bias(theirs) if "attention_bias" in theirs.defaults else {}
    return read_whole_rotary(theirs) | types | bias


def write_qwen(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Qwen 2 and 3."""
    slides = any(model.layer_window(layer) for layer in range(model.layers))
    return write_decoder(model) | {
        "use_sliding_window": slides,
        "sliding_window": model.window if slides else None,
        "layer_types": written_types(model),
    }


def write_qwen2(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Qwen 2."""
    return _without_attention_bias(write_qwen(model))


def _read_gemma(theirs: ConfigValues, values: Values) -> Values:
    """Read what Gemma 2 and 3 have in common."""
    return {
        "embedding_scale": values["hidden"] ** 0.5,
        "attention_scale": theirs.size("query_pre_attn_scalar") ** -0.5,
        "attention_softcap": theirs.number_or_none("attn_logit_softcapping"),
        "logit_softcap": theirs.number_or_none("final_logit_softcapping"),
    } | _attention_bias(theirs)


def read_gemma2(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: Gemma 2."""
    window = theirs.size_or_none("sliding_window")
    theirs.must_be("sliding_window_size", None, window)
    types = layer_types(theirs, values, lambda layer: layer % 2 == 0, window)
    return read_whole_rotary(theirs) | _read_gemma(theirs, values) | types


def read_gemma3(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: Gemma 3."""
    every = theirs.size_or_none("sliding_window_pattern") or 6
    window = _window_in(theirs, values)
    types = layer_types(theirs, values, lambda layer: (layer + 1) % every != 0, window)
    return (
        _by_layer_type(theirs, types, 1e6, "rope_local_base_freq", 1e4) | _read_gemma(theirs, values) | types
    )


def _by_layer_type(
    theirs: ConfigValues, types: Values, full_base: float, local_field: str, local_base: float
) -> Values:
    """Read rotary positions that differ between layers with and without a window."""
    base, scaling, _ = read_rotary(theirs, "rope_theta", full_base, _FULL)
    local, local_scaling, _ = read_rotary(theirs, local_field, local_base, _SLIDING)
    if local_scaling.kind != "none":
        raise BadInputError("rope_type", local_scaling.kind, f"default for {_SLIDING} in config.json")
    found: Values = {"rotary_base": base, "rotary_scaling": scaling}
    return found | ({"window_rotary_base": local} if types else {})


_LEAST_SCALE = 1e-9
"""A smaller scale of attention scores has no whole number as its inverse square: no family is written."""


def write_gemma(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Gemma 2."""
    scale = model.score_scale or model.head_width**-0.5
    return write_decoder(model) | {
        "query_pre_attn_scalar": round(max(scale, _LEAST_SCALE) ** -2),
        "attn_logit_softcapping": model.attention_softcap,
        "final_logit_softcapping": model.logit_softcap,
        "sliding_window": model.window or model.sequence,
        "layer_types": written_types(model),
    }


def _write_by_layer_type(model: ModelConfig, written: Values) -> Values:
    local = model.window_rotary_base or model.rotary_base
    full = written_rotary(model.rotary_base, model.rotary_scaling)
    return written | {
        "rope_parameters": {_FULL: full, _SLIDING: {"rope_type": "default", "rope_theta": local}}
    }


def write_gemma3(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Gemma 3."""
    written = _write_by_layer_type(model, write_gemma(model))
    return written | {"rope_local_base_freq": model.window_rotary_base or 1e4}


def read_olmo3(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: OLMo 3."""
    window = _window_in(theirs, values)
    types = layer_types(theirs, values, lambda layer: (layer + 1) % 4 != 0, window)
    base = theirs.number_or_none("rope_theta") or 5e5
    return _by_layer_type(theirs, types, base, "rope_theta", base) | types | _attention_bias(theirs)


def write_olmo3(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: OLMo 3."""
    written = _write_by_layer_type(model, write_decoder(model))
    bases = {model.rotary_base, model.window_rotary_base or model.rotary_base}
    written = (
        written if len(bases) == 1 else {key: one for key, one in written.items() if key != "rope_theta"}
    )
    return written | {"sliding_window": model.window or model.sequence, "layer_types": written_types(model)}


def read_phi3(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: Phi 3 and 4."""
    window = _windowed(theirs.size_or_none("sliding_window"), values, (True,))
    return read_partial_rotary(theirs, 1.0) | window


def write_phi3(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Phi 3 and 4."""
    scaling, fraction = model.rotary_scaling, model.rotary_fraction
    return {
        "rope_theta": model.rotary_base,
        "rope_parameters": written_rotary(model.rotary_base, scaling, fraction),
        "original_max_position_embeddings": scaling.original_sequence or model.sequence,
        "partial_rotary_factor": fraction,
        "sliding_window": model.window,
        "attention_dropout": 0.0,
    }


def read_granite(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: Granite 3."""
    if theirs.number("logits_scaling") <= 0:
        raise BadInputError("logits_scaling", theirs.get("logits_scaling"), "above 0 in config.json")
    return read_decoder(theirs, values) | {
        "embedding_scale": theirs.number("embedding_multiplier"),
        "residual_scale": theirs.number("residual_multiplier"),
        "attention_scale": theirs.number("attention_multiplier"),
        "logit_scale": 1 / theirs.number("logits_scaling"),
    }


def write_granite(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Granite 3."""
    return write_decoder(model) | {
        "embedding_multiplier": model.embedding_scale,
        "residual_multiplier": model.residual_scale,
        "attention_multiplier": model.score_scale or model.head_width**-0.5,
        "logits_scaling": 1 / model.logit_factor,
        "mlp_bias": False,
    }


def read_minicpm(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: MiniCPM 1 and 2."""
    found = read_decoder(theirs, values)
    if found["rotary_scaling"].kind not in ("none", "linear", "dynamic"):
        raise BadInputError("rope_scaling", theirs.get("rope_scaling"), "linear or dynamic in config.json")
    return found | minicpm_scales(theirs, values)


def minicpm_scales(theirs: ConfigValues, values: Values) -> Values:
    """Return the scales of embedding, residuals and logits; null for a depth or a base means no scale."""
    none = {"scale_emb": 1.0, "scale_depth": values["layers"] ** 0.5, "dim_model_base": values["hidden"]}
    found = {key: theirs.number(key) if theirs.get(key) is not None else one for key, one in none.items()}
    for key, value in found.items():
        if value <= 0:
            raise BadInputError(key, value, "above 0 in config.json")
    return {
        "embedding_scale": found["scale_emb"],
        "residual_scale": found["scale_depth"] / values["layers"] ** 0.5,
        "logit_scale": found["dim_model_base"] / values["hidden"],
    }


def written_minicpm_scales(model: ModelConfig) -> Values:
    """Return the fields that `minicpm_scales` reads."""
    base = model.logit_factor * model.hidden
    return {
        "scale_emb": model.embedding_scale,
        "scale_depth": round(model.residual_scale * model.layers**0.5, 12),
        "dim_model_base": round(base) if abs(base - round(base)) < 1e-9 else base,
    }


def write_minicpm(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: MiniCPM 1 and 2."""
    scaling = model.rotary_scaling
    return {
        "rope_theta": model.rotary_base,
        "rope_scaling": None if scaling.kind == "none" else {"type": scaling.kind, "factor": scaling.factor},
        "attention_bias": model.has_output_bias,
        "attention_dropout": 0.0,
        **written_minicpm_scales(model),
    }


def read_smollm3(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: SmolLM 3."""
    layers = values["layers"]
    every = theirs.size("no_rope_layer_interval")
    listed = theirs.names("no_rope_layers", layers, 0, 1)
    rotates = tuple(map(bool, listed or [(layer + 1) % every for layer in range(layers)]))
    window = theirs.size_or_none("sliding_window") if theirs.flag("use_sliding_window") else None
    types = layer_types(theirs, values, lambda layer: not rotates[layer], window)
    found = read_whole_rotary(theirs, 2e6) | _attention_bias(theirs) | types
    return found | {"rotary_pattern": _repeated(rotates)}


def write_smollm3(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: SmolLM 3."""
    rotates = [int(model.layer_rotary(layer) is not None) for layer in range(model.layers)]
    return write_qwen(model) | {"no_rope_layers": rotates, "mlp_bias": False}
