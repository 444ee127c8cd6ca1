"""Fields of ``config.json`` of the families with latent attention: DeepSeek-V2 and V3 whose layers are all
dense, and MiniCPM 3, which scales embedding, residuals and logits as MiniCPM 1 and 2 do.

DeepSeek's rotary pairs are adjacent rows, as in Myriad, so that no rows are permuted; MiniCPM 3's are half of
the rotated rows apart.
"""

from myriad.checkpoint.foreign.hugging_face_family import Values
from myriad.checkpoint.foreign.hugging_face_fields import minicpm_scales, written_minicpm_scales
from myriad.checkpoint.foreign.hugging_face_values import (
    ConfigValues,
    read_mscales,
    read_rotary,
    written_rotary,
)
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

__all__ = [
    "DEEPSEEK_EXPERTS",
    "LATENT_SIZES",
    "read_deepseek",
    "read_minicpm3",
    "write_deepseek",
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


def read_deepseek(theirs: ConfigValues, values: Values) -> Values:
    """Read what DeepSeek-V2 and V3 have beyond the copied fields. A layer with experts is refused."""
    layers, dense = values["layers"], theirs.get("first_k_dense_replace")
    if isinstance(dense, bool) or not isinstance(dense, int) or dense < layers:
        allowed = f"at least num_hidden_layers = {layers} in config.json: layers with experts cannot be read"
        raise BadInputError("first_k_dense_replace", dense, allowed)
    return _read_latent(theirs, values)


def _read_latent(theirs: ConfigValues, values: Values) -> Values:
    """Read what the families with latent attention have in common."""
    theirs.must_be("num_key_value_heads", None, values["heads"])
    theirs.must_be("head_dim", None, values["qk_rope_head_dim"])
    theirs.must_be("qk_head_dim", None, values["qk_nope_head_dim"] + values["qk_rope_head_dim"])
    if values["v_head_dim"] > values["qk_nope_head_dim"] + values["qk_rope_head_dim"]:
        allowed = "at most qk_nope_head_dim + qk_rope_head_dim in config.json"
        raise BadInputError("v_head_dim", values["v_head_dim"], allowed)
    base, scaling, fraction = read_rotary(theirs, "rope_theta", 1e4)
    if fraction not in (None, 1.0):
        raise BadInputError("partial_rotary_factor", fraction, "1 in config.json of this model type")
    if scaling.kind == "yarn":
        found, given = read_mscales(theirs)
        if given or "mscale_all_dim" not in found:
            found.pop("mscale", None)  # without effect
        derived = {"attention_factor": None} if len(found) == 2 else {}
        scaling = scaling.model_copy(update=found | derived)
    return {"kv_heads": None, "rotary_base": base, "rotary_scaling": scaling}


def write_deepseek(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: DeepSeek-V2 and V3 with dense layers only."""
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
