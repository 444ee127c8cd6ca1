"""Convert model configurations to Hugging Face's ``config.json`` and back. Without torch.

The families are those of `myriad.checkpoint.foreign.hugging_face_families`, and GPT-2. A model is written as
the first family whose ``config.json``, read back, computes the same; every other model is refused with the
nearest family. Values that matter only in training (dropout) are written if there is a field for them, and
not read back. A field of a ``config.json`` is accepted in three cases: it is read, it is known not to affect
what the model computes (`_NOT_COMPUTED`), or its value enables nothing (null, false, 0, empty). Every other
field is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from myriad.checkpoint.foreign.hugging_face_deepseek import LATENT_SIZES
from myriad.checkpoint.foreign.hugging_face_families import FAMILIES
from myriad.checkpoint.foreign.hugging_face_family import COMMON, Family
from myriad.checkpoint.foreign.hugging_face_limits import check_model
from myriad.checkpoint.foreign.hugging_face_values import ConfigValues, quantization_of, written_rotary
from myriad.errors import BadInputError, plain_value
from myriad.model.config import ModelConfig
from myriad.system.whole_file import parse_json, read_regular

__all__ = ["MODEL_TYPES", "config_of", "family_of", "kind_of", "model_of", "read_json"]

MODEL_TYPES = (*FAMILIES, "gpt2")
"""Every ``model_type`` that is read and written."""
_MOST_JSON_BYTES = 2**27
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
"""Hugging Face's activation names to Myriad's, without a gate. Several are the same function with different
rounding."""
_GATED = {"gelu": "geglu", "gelu_tanh": "geglu_tanh"}
"""The same activations as the gate of a family whose MLP has one."""
_CLAMPED = "clamped_swiglu"
"""The activation that GPT-OSS names ``silu``."""
_GPT2 = Family(
    architecture="GPT2LMHeadModel",
    fixed={"norm": "layer", "position": "learned", "bias": True},
    sizes={
        "hidden": "n_embd",
        "layers": "n_layer",
        "heads": "n_head",
        "ffn_hidden": "n_inner",
        "sequence": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
    },
    activations={"gelu": "gelu", "gelu_tanh": "gelu_new"},
    activation_field="activation_function",
    defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation_function": "gelu_new"}
    | {"n_positions": 1024, "scale_attn_weights": True},
    must_be={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (None, False),
        "add_cross_attention": (None, False),
    },
    write=lambda model: {
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "attn_pdrop": 0.0,
    },
)


def read_json(path: Path) -> dict[str, Any]:
    """Read an object from a JSON file of bounded size. Raises `BadInputError`."""
    try:
        content = parse_json(read_regular(path, _MOST_JSON_BYTES))
    except (OSError, ValueError) as error:
        raise BadInputError("path", str(path), f"not readable ({error})") from None
    if not isinstance(content, dict):
        raise BadInputError("path", str(path), "must be a JSON object")
    return content


def family_of(kind: str) -> Family:
    """Return the family of a model type, which is one of `MODEL_TYPES`."""
    return _GPT2 if kind == "gpt2" else FAMILIES[kind]


@lru_cache(maxsize=64)
def kind_of(model: ModelConfig, asked: str | None = None) -> str:
    """Return the Hugging Face model type, or check that the model can be written as the type asked for.
    Raises `BadInputError` if it cannot be written."""
    if asked is not None and asked not in MODEL_TYPES:
        raise BadInputError("--model-type", asked, f"one of {', '.join(MODEL_TYPES)}")
    own = _computed(model)
    differences: dict[str, list[str]] = {}
    others: dict[str, ModelConfig] = {}
    refusals: dict[str, BadInputError] = {}
    for kind in _candidates(model) if asked is None else (asked,):
        try:
            others[kind] = model_of(_written(model, kind))
        except BadInputError as error:  # some value has no place in this family
            refusals[kind] = error
        else:
            found = _computed(others[kind])
            differences[kind] = [key for key, value in own.items() if found[key] != value]
    nearest = min(differences, key=lambda kind: _distance(differences[kind]), default=None)
    if nearest is not None and not differences[nearest]:
        return nearest
    has_latent = [kind for kind in MODEL_TYPES if _has_latent(kind)]
    if asked is not None and (model.latent is not None) != (asked in has_latent):
        raise _other_attention(model, asked, has_latent)
    if nearest is None:
        refused, refusal = next(iter(refusals.items()))
        key = f"config.json of {refused}: {refusal.key}"
        raise BadInputError(key, refusal.value, refusal.allowed) from None
    key, value, value_there = _first_other(model, others[nearest], differences[nearest][0])
    where = f"{nearest}, the nearest model type: Hugging Face has no model class for it"
    allowed = f"{plain_value(value_there)} in {where if asked is None else nearest}"
    raise BadInputError(f"model.{key}", "off" if value is None else value, allowed)


_FIELDS = {
    "window": ("window", "window_pattern"),
    "dense_layers": ("dense_layers", "expert_every"),
    "rotary_base": ("rotary_base", "rotary_fraction", "rotary_pattern", "window_rotary_base"),
}
"""Keys that decide an entry of `_computed`, if there are several."""


def _first_other(here: ModelConfig, there: ModelConfig, entry: str) -> tuple[str, Any, Any]:
    """Return the first key that makes an entry of `_computed` differ, with the values of both models."""
    for key in _FIELDS.get(entry, ()):
        if getattr(here, key) != getattr(there, key):
            return key, getattr(here, key), getattr(there, key)
    if entry != "rotary_base":
        return entry, getattr(here, entry), getattr(there, entry)
    own, others = (dict(one.rotary_scaling) for one in (here, there))
    key = next((key for key in own if own[key] != others[key]), "kind")
    return f"rotary_scaling.{key}", own[key], others[key]


def _has_latent(kind: str) -> bool:
    """Whether models of a type have latent attention."""
    return "kv_lora_rank" in family_of(kind).sizes


def _other_attention(model: ModelConfig, asked: str, has_latent: Sequence[str]) -> BadInputError:
    """Return the error for a type that has latent attention where the model has none, or the reverse."""
    kinds = ", ".join(has_latent)
    allowed = f"only {kinds} have latent attention (model.kv_lora_rank), which this model lacks"
    if model.latent is not None:
        allowed = f"one of {kinds}: this model has latent attention (model.kv_lora_rank)"
    return BadInputError("--model-type", asked, allowed)


def _candidates(model: ModelConfig) -> list[str]:
    """Return the model types that a model may be: those with latent attention, or with experts, for a model
    with it."""
    found = [kind for kind in MODEL_TYPES if model.latent is None or _has_latent(kind)]
    return [kind for kind in found if family_of(kind).allows(experts=model.experts is not None)]


def _computed(model: ModelConfig) -> dict[str, Any]:
    """Return everything that decides what a model computes, by job key; equal values mean equal models."""
    layers = range(model.layers)
    return {
        "layers": model.layers,
        "hidden": model.hidden,
        "heads": model.heads,
        "kv_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        **{key: getattr(model, key) for key in LATENT_SIZES},
        "ffn_hidden": model.mlp_widths[-1],
        "experts": model.experts,
        **({} if model.experts is None else _computed_by_experts(model)),
        "vocabulary": model.vocabulary,
        "sequence": model.sequence,
        "block": model.block,
        "parallel_norms": model.parallel_norms if model.block == "parallel" else 1,
        "position": model.position,
        "norm": model.norm,
        "norm_epsilon": model.norm_epsilon,
        "norm_placement": model.norm_placement,
        "norm_zero_centered": model.norm_zero_centered,
        "activation": model.activation,
        "bias": model.bias,
        "norm_bias": model.has_norm_bias,
        "attention_bias": (model.has_qkv_bias, model.has_key_bias, model.has_output_bias),
        "qk_norm": model.qk_norm,
        "qk_norm_kind": model.qk_norm_kind,
        "qk_norm_bias": model.qk_norm_bias,
        "attention_sinks": model.attention_sinks,
        "attention_scale": _rounded(model.score_scale or model.head_width**-0.5),
        "attention_softcap": model.attention_softcap,
        "logit_softcap": model.logit_softcap,
        "logit_scale": _rounded(model.logit_factor),
        "embedding_scale": _rounded(model.embedding_scale),
        "residual_scale": _rounded(model.residual_scale),
        "tied": model.tied,
        "window": [model.layer_window(layer) for layer in layers],
        "rotary_base": [model.layer_rotary(layer) for layer in layers],
    }


def _computed_by_experts(model: ModelConfig) -> dict[str, Any]:
    """Return everything that decides what experts compute, by job key."""
    blocks = [model.has_experts(layer) for layer in range(model.layers)]
    keys = (*_ROUTING, *_GROUPS) if model.router_groups > 1 else _ROUTING
    routing = {key: getattr(model, key) for key in keys}
    routing |= {"balance_bias_rate": model.has_router_bias}
    return {"expert_hidden": model.expert_width, "dense_layers": blocks} | routing


_ROUTING = (
    *("experts_per_token", "shared_experts", "shared_expert_gate", "router_scores", "router_normalized"),
    *("router_scale", "router_groups", "router_logit_bias"),
)
"""Keys of the router, and of the experts that each token takes."""
_GROUPS = ("router_group_limit", "router_group_score")
"""Keys that matter if there are groups of experts."""


def _rounded(value: float) -> float:
    """Round to 12 digits: a scale is written as another value's inverse or root."""
    return float(f"{value:.12g}")


def _distance(differences: Sequence[str]) -> int:
    """Return how far two models are apart. Another norm or position makes another family."""
    return len(differences) + 3 * len({"norm", "position"}.intersection(differences))


def config_of(
    model: ModelConfig, dtype: str, end_of_document: int | None, asked: str | None = None
) -> dict[str, Any]:
    """Return the content of ``config.json`` for versions 4 and 5 of transformers.

    ``dtype``: name of the weights' dtype. ``end_of_document``: token, if known. ``asked``: model type. Raises
    `BadInputError` if the model has no counterpart."""
    kind = kind_of(model, asked)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id"), end_of_document) | {"pad_token_id": None}
    return (
        {"architectures": [family_of(kind).architecture]}
        | _written(model, kind)
        | _scaling_of_version4(model, kind)
        | ends
        | {
            "initializer_range": model.initial_deviation,
            "dtype": dtype,
            "torch_dtype": dtype,
            "use_cache": True,
        }
    )


def _scaling_of_version4(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Return the field in which version 4 reads the scaling of rotary positions: it ignores
    ``rope_parameters``. Its class of Phi 3 takes three fields only, and derives the factor. MiniCPM's own
    code reads the field alone, which its writer has written."""
    scaling = model.rotary_scaling
    if model.position != "rotary" or scaling.kind == "none" or kind == "minicpm":
        return {}
    written = written_rotary(model.rotary_base, scaling)
    del written["rope_theta"]
    derived = scaling.factor == model.sequence / (scaling.original_sequence or model.sequence)
    if kind == "phi3" and derived and scaling.attention_factor is None:
        lists = {key: value for key, value in written.items() if key in ("short_factor", "long_factor")}
        written = {"type": scaling.kind} | lists
    # beside it, as version 4 looks for longrope's only there
    outer = (
        {"original_max_position_embeddings": scaling.original_sequence} if scaling.kind == "longrope" else {}
    )
    return {"rope_scaling": written} | outer


def _written(model: ModelConfig, kind: str) -> dict[str, Any]:
    """Return the fields of a model type that describe the model, as far as it can."""
    family = family_of(kind)
    values = _computed(model)
    fields, first = _fields(family), next(iter(family.activations.values()))
    return {
        "model_type": kind,
        family.activation_field: family.activations.get(model.activation, first),
        **{name: values[key] for key, name in fields.items()},
        **family.write(model),
    }


def _fields(family: Family) -> dict[str, str]:
    """Return the fields that a family copies, by their name in `ModelConfig`."""
    fields = {**COMMON, **family.sizes}
    if family is _GPT2:
        del fields["kv_heads"]
    return fields


_NOT_COMPUTED = {
    # names, versions, dtype of the file
    *("model_type", "architectures", "transformers_version", "dtype", "torch_dtype", "tokenizer_class"),
    *("finetuning_task", "problem_type", "task_specific_params", "id2label", "label2id", "prefix"),
    # notes of other programs; the code that auto_map names is transformers' class of this model_type
    *("auto_map", "custom_pipelines", "transformers.js_config", "is_llama_config", "unsloth_fixed"),
    "unsloth_version",
    # special tokens, and options of text generation
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "top_k"),
    *("top_p", "typical_p", "temperature", "diversity_penalty", "repetition_penalty", "length_penalty"),
    *("classifier_dropout", "hidden_dropout", "cache_implementation", "n_embed"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "output_scores"),
    *("return_dict_in_generate", "remove_invalid_values"),
    # training, memory, return values; pretraining_tp and reorder_and_upcast_attn change only rounding
    *("initializer_range", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "use_cache"),
    *("attention_probs_dropout_prob", "hidden_dropout_prob"),
    *("gradient_checkpointing", "output_attentions", "output_hidden_states", "return_dict", "torchscript"),
    *("chunk_size_feed_forward", "pretraining_tp", "reorder_and_upcast_attn", "is_decoder", "n_ctx"),
    # heads that a language model lacks: their tensors would be refused
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    "summary_first_dropout",
}


def _refuse_unknown(config: Mapping[str, Any], family: Family) -> None:
    known = family.known_fields() | _NOT_COMPUTED | {"head_dim", "quantization_config"}
    for key, value in config.items():
        if key in known or key.startswith("_") or not value:
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
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise BadInputError("model_type", kind, f"one of {', '.join(MODEL_TYPES)} in config.json")
    family = family_of(kind)
    _refuse_unknown(config, family)
    quantization_of(config)  # raises for a kind that cannot be read
    theirs = ConfigValues(config, family.defaults)
    for key, allowed in family.must_be.items():
        theirs.must_be(key, *allowed)
    try:
        values = _copied(theirs, family)
        ModelConfig(**values)  # refuses sizes for which a reader would make too long lists
        if "head_dim" not in values and "kv_lora_rank" not in values:
            theirs.must_be("head_dim", None, values["hidden"] // values["heads"])
        values |= family.read(theirs, values)
        model = ModelConfig(**family.fixed | values)
        check_model(model)
    except ValidationError as error:
        first = error.errors()[0]
        key = _fields(family).get(str(first["loc"][0]), str(first["loc"][0]))
        raise BadInputError(key, first["input"], f"{first['msg']} (config.json)") from None
    return model.model_copy(update={"vocabulary_multiple": vocabulary_multiple})


_READERS: dict[str, Callable[[ConfigValues, str], Any]] = {
    "kv_heads": ConfigValues.size_or_none,
    "head_dim": ConfigValues.size_or_none,
    "ffn_hidden": ConfigValues.size_or_none,
    "q_lora_rank": ConfigValues.size_or_none,
    "norm_epsilon": ConfigValues.number,
    "tied": ConfigValues.flag,
}


def _copied(theirs: ConfigValues, family: Family) -> dict[str, Any]:
    """Return the values of the fields that a family copies."""
    values = {
        key: _READERS.get(key, ConfigValues.size)(theirs, name) for key, name in _fields(family).items()
    }
    return values | {"activation": _activation(theirs, family)}


def _activation(theirs: ConfigValues, family: Family) -> str:
    """Return Myriad's name of the activation function."""
    if _CLAMPED in family.activations:
        theirs.must_be(family.activation_field, "silu")
        return _CLAMPED
    gates = {ours for ours in family.activations if ours in ("swiglu", *_GATED.values())}
    names = {name: _GATED.get(ours, ours) if gates else ours for name, ours in _READ.items()}
    allowed = [name for name, ours in names.items() if ours in family.activations]
    theirs.must_be(family.activation_field, *allowed)
    return names[theirs.get(family.activation_field)]
