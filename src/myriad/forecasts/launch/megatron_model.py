"""A model as Megatron-LM's arguments, those of experts included, without torch.

The arguments are read back as `myriad translate` reads them (`myriad.checkpoint.foreign.megatron_args`), and
refused if they would make another model. Arguments of experts, which it does not read, are not compared.
"""

from collections.abc import Sequence
from typing import Any

from myriad.checkpoint.foreign.megatron_args import model_of_arguments
from myriad.errors import BadInputError
from myriad.forecasts.launch.launch_options import KEY, Value, option_line
from myriad.job.translation.megatron_arguments import read_command_line
from myriad.model.config import ModelConfig

__all__ = ["model_arguments"]

_POSITIONS = {"learned": "learned_absolute", "none": "none", "rotary": "rope"}
_ACTIVATIONS = {"swiglu": "swiglu", "relu2": "squared_relu", "gelu_tanh": "openai_gelu"}


def model_arguments(model: ModelConfig) -> dict[str, Value]:
    """Return a model as Megatron-LM's arguments. Raises `BadInputError` if they would make another one."""
    arguments = {
        **_block_arguments(model),
        **_attention_arguments(model),
        **(_expert_arguments(model) if model.experts is not None else {}),
    }
    lines = [option_line(name, value, " ") for name, value in arguments.items() if name not in _EXPERTS]
    read, _ = model_of_arguments(read_command_line("\n".join(lines)), KEY)
    wanted, got = _plain(model), _plain(read)
    for key, value in wanted.items():
        if got[key] != value:
            allowed = f"only {got[key]}: Megatron-LM has no arguments for others"
            raise BadInputError(KEY, f"model.{key} = {value}", allowed)
    return arguments


def _plain(model: ModelConfig) -> dict[str, Any]:
    """Return the keys of a model that determine what its dense blocks compute, with defaults resolved."""
    left_out = _LEFT_OUT | {key for key in type(model).model_fields if _is_of_experts(key)}
    values = model.model_dump(mode="json", exclude=left_out)
    values["window_pattern"] = [model.layer_window(layer) for layer in range(model.layers)]
    values["rotary_pattern"] = [model.layer_rotary(layer) is not None for layer in range(model.layers)]
    latent = model.latent is not None
    values["head_dim"] = None if latent else model.head_width
    values["kv_heads"] = None if latent else model.num_kv_heads
    values["ffn_hidden"] = model.ffn_width
    return values


_LEFT_OUT = {"window", "vocabulary_multiple", "initial_deviation", "dropout", "z_loss", "prediction_input"}
"""Keys that are compared layer by layer, or that change the training and not the model."""


def _is_of_experts(key: str) -> bool:
    return "expert" in key or key.startswith(("router_", "balance_")) or key == "dense_layers"


def _block_arguments(model: ModelConfig) -> dict[str, Value]:
    found: dict[str, Value] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn_width,
        "num_attention_heads": model.heads,
        "seq_length": model.sequence,
        "max_position_embeddings": model.sequence,
        "vocab_size": model.vocabulary,
        "normalization": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "norm_epsilon": model.norm_epsilon,
        "disable_bias_linear": not model.bias,
        "untie_embeddings_and_output_weights": not model.tied,
        "hidden_dropout": model.dropout,
        "attention_dropout": 0.0,
        "init_method_std": model.initial_deviation,
        "apply_layernorm_1p": model.norm_zero_centered,
    }
    if model.activation in _ACTIVATIONS:
        found[_ACTIVATIONS[model.activation]] = True
    elif model.bias:
        found["no_bias_gelu_fusion"] = True
    if model.prediction_layers:
        found |= {
            "mtp_num_layers": model.prediction_layers,
            "mtp_loss_scaling_factor": model.prediction_weight,
        }
    return found


def _attention_arguments(model: ModelConfig) -> dict[str, Value]:
    scaling = model.rotary_scaling
    found: dict[str, Value] = {"position_embedding_type": _POSITIONS[model.position]}
    if model.position == "rotary":
        found |= {"rotary_base": int(model.rotary_base), "rotary_percent": model.rotary_fraction}
    if scaling.kind == "llama3":
        found |= {"use_rope_scaling": True, "rope_scaling_factor": scaling.factor}
    if scaling.kind == "yarn" and model.latent is None:
        found |= {"position_embedding_type": "yarn", **_yarn(model, "yarn_")}
    if scaling.kind == "linear":
        found["rotary_seq_len_interpolation_factor"] = scaling.factor
    if (latent := model.latent) is not None:
        found |= {"multi_latent_attention": True, "qk_layernorm": True, "kv_lora_rank": latent.key_value_rank}
        found |= {} if latent.query_rank is None else {"q_lora_rank": latent.query_rank}
        found |= {"qk_head_dim": latent.plain, "qk_pos_emb_head_dim": latent.rotated}
        found |= {"v_head_dim": latent.value, **_latent_scaling(model)}
    else:
        found |= {"kv_channels": model.head_width, "qk_layernorm": model.qk_norm == "head"}
        found["add_qkv_bias"] = model.attention_bias == "qkv" and not model.bias
        if model.num_kv_heads != model.heads:
            found |= {"group_query_attention": True, "num_query_groups": model.num_kv_heads}
    if model.window is not None:
        found["window_size"] = f"({model.window - 1},0)"
        found["window_attn_skip_freq"] = _marks([model.layer_window(n) for n in range(model.layers)])
    if model.position == "rotary" and not all(model.rotary_pattern):
        found["no_rope_freq"] = _marks([model.layer_rotary(n) is None for n in range(model.layers)])
    if model.attention_sinks:
        found["softmax_type"] = "learnable"
    return found


def _marks(layers: Sequence[object]) -> str:
    """Return a list with 1 for each layer for which something holds, 0 for the others."""
    return f"[{','.join(str(int(bool(one))) for one in layers)}]"


def _latent_scaling(model: ModelConfig) -> dict[str, Value]:
    """Return the scaling of rotary positions with latent attention, which is yarn by default."""
    return _yarn(model, "") if model.rotary_scaling.kind == "yarn" else {"rope_type": "rope"}


def _yarn(model: ModelConfig, prefix: str) -> dict[str, Value]:
    """Return yarn's arguments. ``prefix`` of those about its ramp."""
    scaling = model.rotary_scaling
    found: dict[str, Value] = {
        "rotary_scaling_factor": scaling.factor,
        f"{prefix}original_max_position_embeddings": scaling.original_sequence or model.sequence,
        f"{prefix}beta_fast": scaling.beta_fast,
        f"{prefix}beta_slow": scaling.beta_slow,
    }
    if scaling.mscale is not None and scaling.mscale_all_dim is not None:
        found |= {"mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim}
    return found


_EXPERTS = (
    "num_experts",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_layer_freq",
    "moe_router_score_function",
    "moe_router_pre_softmax",
    "moe_router_topk_scaling_factor",
    "moe_router_num_groups",
    "moe_router_group_topk",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_enable_expert_bias",
    "moe_router_bias_update_rate",
    "moe_grouped_gemm",
    "moe_token_dispatcher_type",
)
"""Arguments of experts, which the translation of arguments does not read."""


def _expert_arguments(model: ModelConfig) -> dict[str, Value]:
    """Return the arguments of experts. Raises `BadInputError` for a router that Megatron-LM does not have."""
    sigmoid = model.router_scores == "sigmoid"
    for key, wrong in (
        ("shared_expert_gate", model.shared_expert_gate),
        ("router_logit_bias", model.router_logit_bias),
        ("router_normalized", sigmoid and not model.router_normalized),
        ("expert_capacity", model.expert_capacity is not None),
        ("balance_scope", model.has_batch_loads),
    ):
        if wrong:
            value = str(getattr(model, key)).lower()
            raise BadInputError(KEY, f"model.{key} = {value}", "another: Megatron-LM has no argument for it")
    values: tuple[Value, ...] = (
        model.experts or 0,
        model.experts_per_token,
        model.expert_width,
        model.shared_experts * model.expert_width,
        _expert_layers(model),
        model.router_scores,
        not sigmoid and not model.router_normalized,
        model.router_scale,
        model.router_groups,
        model.router_group_limit,
        "aux_loss" if model.balance_loss else "none",
        model.balance_loss,
        model.router_z_loss,
        model.balance_bias_rate is not None,
        model.balance_bias_rate or 0.0,
        True,
        "alltoall",
    )
    found = dict(zip(_EXPERTS, values, strict=True))
    for name, plain in (
        ("moe_shared_expert_intermediate_size", 0),
        ("moe_router_topk_scaling_factor", 1.0),
        ("moe_router_num_groups", 1),
        ("moe_z_loss_coeff", 0.0),
        ("moe_router_bias_update_rate", 0.0),
    ):
        if found[name] == plain:
            del found[name]
    if model.router_groups == 1:
        del found["moe_router_group_topk"]
    return found


def _expert_layers(model: ModelConfig) -> Value:
    """Return the distance between blocks with experts, or a list of 0 and 1."""
    if not model.dense_layers:
        return model.expert_every
    return _marks([model.has_experts(layer) for layer in range(model.layers)])
