"""Fields of ``config.json`` of the families with latent attention: DeepSeek-V2 and V3, with experts in all
layers but the first ones or in none, and MiniCPM 3, which scales embedding, residuals and logits as MiniCPM 1
and 2 do. Prediction layers (``num_nextn_predict_layers``) are read, and not written.

    V2    softmax of all scores; groups, if any, by their best expert; gates as they are
    V3    sigmoids; groups by their two best experts, biases included; gates divided by their sum

DeepSeek's rotary pairs are adjacent rows, as in Myriad, so that no rows are permuted; MiniCPM 3's are half of
the rotated rows apart.
"""

from myriad.checkpoint.foreign.hugging_face_family import Values
from myriad.checkpoint.foreign.hugging_face_fields import minicpm_scales, written_minicpm_scales
from myriad.checkpoint.foreign.hugging_face_values import (
    ConfigValues,
    read_mscales,
    read_whole_rotary,
    written_rotary,
)
from myriad.errors import BadInputError
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.config import ModelConfig

__all__ = [
    "DEEPSEEK_EXPERTS",
    "LATENT_SIZES",
    "read_deepseek2",
    "read_deepseek3",
    "read_minicpm3",
    "write_deepseek2",
    "write_deepseek3",
    "write_minicpm3",
]

LATENT_SIZES = {
    key: key for key in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
}
"""Fields of latent attention, by the name in `ModelConfig`."""
DEEPSEEK_EXPERTS = (
    *("first_k_dense_replace", "n_routed_experts", "n_shared_experts", "moe_intermediate_size", "n_group"),
    *("topk_group", "topk_method", "num_experts_per_tok", "num_experts", "num_local_experts"),
    *("routed_scaling_factor", "norm_topk_prob", "scoring_func", "moe_layer_freq", "ep_size", "seq_aux"),
    *("aux_loss_alpha", "output_router_logits", "router_aux_loss_coef"),
)
"""Fields of layers with experts, which matter only if there is such a layer."""


def read_deepseek2(theirs: ConfigValues, values: Values) -> Values:
    """Read what DeepSeek-V2 has beyond the copied fields."""
    found = _read_latent(theirs, values)
    if (experts := _read_experts(theirs, values)) is None:
        return found
    theirs.must_be("scoring_func", None, "softmax")
    theirs.must_be("norm_topk_prob", None, False)  # transformers ignores it
    theirs.must_be("topk_method", "greedy", "group_limited_greedy")
    groups = {} if theirs.get("topk_method") == "greedy" else _read_groups(theirs)
    return found | experts | groups | {"router_normalized": False}


def read_deepseek3(theirs: ConfigValues, values: Values) -> Values:
    """Read what DeepSeek-V3 has beyond the copied fields."""
    found = _read_latent(theirs, values)
    if (experts := _read_experts(theirs, values)) is None:
        return found
    theirs.must_be("scoring_func", None, "sigmoid")
    theirs.must_be("topk_method", None, "noaux_tc")
    experts |= {"router_scores": "sigmoid", "router_normalized": theirs.flag("norm_topk_prob")}
    experts |= {"router_group_score": "two_largest", "balance_bias_rate": _BIAS_RATE}
    return found | experts | _read_groups(theirs)


_BIAS_RATE = 0.001
"""Rate of the biases in most of the training of DeepSeek-V3 (arXiv 2412.19437, section 4.2). No field has
it."""


def _read_experts(theirs: ConfigValues, values: Values) -> Values | None:
    """Return the values that DeepSeek-V2 and V3 read alike; ``None``: no layer has experts."""
    layers, dense = values["layers"], theirs.get("first_k_dense_replace")
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < 0:
        raise BadInputError("first_k_dense_replace", dense, "a whole number of at least 0 in config.json")
    if dense >= layers:
        return None
    experts, width = theirs.size("n_routed_experts"), theirs.size("moe_intermediate_size")
    for other in ("num_experts", "num_local_experts"):
        theirs.must_be(other, None, experts)
    theirs.must_be("moe_layer_freq", None, 1)
    return {
        "experts": experts,
        "experts_per_token": theirs.size("num_experts_per_tok"),
        "shared_experts": theirs.size("n_shared_experts"),
        "router_scale": theirs.number("routed_scaling_factor"),
        **({"expert_hidden": width, "dense_layers": dense} if dense else {"ffn_hidden": width}),
    }


def _read_groups(theirs: ConfigValues) -> Values:
    return {"router_groups": theirs.size("n_group"), "router_group_limit": theirs.size("topk_group")}


def _read_latent(theirs: ConfigValues, values: Values) -> Values:
    """Read what the families with latent attention have in common."""
    theirs.must_be("num_key_value_heads", None, values["heads"])
    theirs.must_be("head_dim", None, values["qk_rope_head_dim"])
    theirs.must_be("qk_head_dim", None, values["qk_nope_head_dim"] + values["qk_rope_head_dim"])
    if values["v_head_dim"] > values["qk_nope_head_dim"] + values["qk_rope_head_dim"]:
        allowed = "at most qk_nope_head_dim + qk_rope_head_dim in config.json"
        raise BadInputError("v_head_dim", values["v_head_dim"], allowed)
    rotary = read_whole_rotary(theirs)
    scaling = rotary["rotary_scaling"]
    if scaling.kind == "yarn":
        found, given = read_mscales(theirs)
        if given or "mscale_all_dim" not in found:
            found.pop("mscale", None)  # without effect
        derived = {"attention_factor": None} if len(found) == 2 else {}
        scaling = RotaryScaling(**(dict(scaling) | found | derived))
    return {"kv_heads": None, **rotary, "rotary_scaling": scaling}


def write_deepseek2(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: DeepSeek-V2."""
    if model.experts is None:
        return _write_deepseek(model)
    method = "greedy" if model.router_groups == 1 else "group_limited_greedy"
    own: Values = {"topk_method": method, "scoring_func": "softmax", "norm_topk_prob": False}
    return _write_deepseek(model) | _write_experts(model) | own


def write_deepseek3(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: DeepSeek-V3."""
    if model.experts is None:
        return _write_deepseek(model)
    own: Values = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    own |= {"norm_topk_prob": model.router_normalized}
    return _write_deepseek(model) | _write_experts(model) | own


def _write_experts(model: ModelConfig) -> Values:
    return {
        "first_k_dense_replace": model.dense_layers,
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "n_shared_experts": model.shared_experts,
        "moe_intermediate_size": model.expert_width,
        "routed_scaling_factor": model.router_scale,
        "n_group": model.router_groups,
        "topk_group": model.router_group_limit,
        "moe_layer_freq": 1,
    }


def _write_deepseek(model: ModelConfig) -> Values:
    """Return the fields that DeepSeek-V2 and V3 have alike, of a model without experts."""
    return {
        "rope_theta": model.rotary_base,
        "rope_parameters": written_rotary(model.rotary_base, model.rotary_scaling),
        "rope_interleave": True,
        "head_dim": model.qk_rope_head_dim,
        "first_k_dense_replace": model.layers,
        "num_nextn_predict_layers": 0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    }


def read_minicpm3(theirs: ConfigValues, values: Values) -> Values:
    """Read what MiniCPM 3 has beyond the copied fields."""
    value = theirs.size_or_none("v_head_dim") or values["hidden"] // values["heads"]
    found = {"v_head_dim": value} | _read_latent(theirs, values | {"v_head_dim": value})
    return found | minicpm_scales(theirs, values)


def write_minicpm3(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: MiniCPM 3."""
    return {
        "rope_theta": model.rotary_base,
        "rope_parameters": written_rotary(model.rotary_base, model.rotary_scaling),
        "head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        **written_minicpm_scales(model),
    }
