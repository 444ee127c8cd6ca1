"""Fields of ``config.json`` of families with experts: Mixtral, Qwen 2 and 3 MoE, OLMoE, and GPT-OSS. Without
torch.

All of them choose a token's experts by a softmax over all experts. GPT-OSS has a softmax over the chosen
ones, which are the same gates as a softmax over all, divided by the sum of the chosen.
``router_aux_loss_coef`` matters in training only: it is written, and not read back. If all blocks have
experts, the inner width of an expert is read as `ModelConfig.ffn_hidden`, whichever field has it.
"""

from myriad.checkpoint.foreign.hugging_face_family import TensorNames, Values
from myriad.checkpoint.foreign.hugging_face_fields import (
    layer_types,
    read_decoder,
    write_decoder,
    write_mistral,
    written_types,
)
from myriad.checkpoint.foreign.hugging_face_values import ConfigValues
from myriad.errors import BadInputError
from myriad.kernels.config import CLAMPED_SWIGLU_ALPHA, CLAMPED_SWIGLU_LIMIT
from myriad.kernels.rotary_scaling import RotaryScaling
from myriad.model.config import ModelConfig

__all__ = [
    "GPT_OSS_NAMES",
    "MIXTRAL_NAMES",
    "QWEN2_MOE_NAMES",
    "ROUTER_FIELDS",
    "read_gpt_oss",
    "read_olmoe",
    "read_qwen2_moe",
    "read_qwen3_moe",
    "write_gpt_oss",
    "write_mixtral",
    "write_olmoe",
    "write_qwen2_moe",
    "write_qwen3_moe",
]

ROUTER_FIELDS = ("router_aux_loss_coef", "output_router_logits")
"""Fields of a router that matter in training only."""
QWEN2_MOE_NAMES = TensorNames(shared="shared_expert")
GPT_OSS_NAMES = TensorNames(router="router", stacked=("gate_up_proj", "down_proj"))
MIXTRAL_NAMES = TensorNames(mlp="block_sparse_moe", up=("w1", "w3"), down="w2")


def _write_router(model: ModelConfig) -> Values:
    return {"router_aux_loss_coef": model.balance_loss, "output_router_logits": False}


def write_mixtral(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Mixtral."""
    return write_mistral(model) | _write_router(model)


def read_olmoe(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: OLMoE."""
    return read_decoder(theirs, values) | {"router_normalized": theirs.flag("norm_topk_prob")}


def write_olmoe(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: OLMoE."""
    return write_decoder(model) | _write_router(model) | {"norm_topk_prob": model.router_normalized}


def read_qwen3_moe(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: Qwen 3 MoE."""
    found = read_olmoe(theirs, values) | _read_blocks(theirs, values)
    experts = theirs.size_or_none("num_local_experts")  # the name that version 5 of transformers writes
    if experts is None:
        return found
    if "num_experts" in theirs.values:
        theirs.must_be("num_experts", experts)
    return found | {"experts": experts}


def _read_blocks(theirs: ConfigValues, values: Values) -> Values:
    """Return which blocks have experts, and the widths of both kinds of MLP."""
    every = theirs.size_or_none("decoder_sparse_step") or 1
    plain = theirs.get("mlp_only_layers") or []
    allowed = "the first layers in config.json, in order: [0, 1, ...]"
    if not isinstance(plain, list) or plain != list(range(min(len(plain), values["layers"]))):
        raise BadInputError("mlp_only_layers", plain, allowed)
    width = theirs.size("moe_intermediate_size")
    if every == 1 and not plain:
        return {"ffn_hidden": width}
    return {"expert_hidden": width, "dense_layers": len(plain), "expert_every": every}


def write_qwen3_moe(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Qwen 3 MoE."""
    sparse: Values = {"moe_intermediate_size": model.mlp_width, "decoder_sparse_step": model.expert_every}
    plain = list(range(model.dense_layers))
    return write_olmoe(model) | sparse | {"mlp_only_layers": plain, "use_sliding_window": False}


def read_qwen2_moe(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: Qwen 2 MoE. Its shared expert is read
    as several, of the width of the others."""
    theirs.names("layer_types", values["layers"], "full_attention")
    width, shared = theirs.size("moe_intermediate_size"), theirs.size("shared_expert_intermediate_size")
    if shared % width:
        allowed = f"a multiple of moe_intermediate_size = {width} in config.json"
        raise BadInputError("shared_expert_intermediate_size", shared, allowed)
    own = {"shared_experts": shared // width, "router_normalized": theirs.flag("norm_topk_prob")}
    return read_decoder(theirs, values) | {"attention_bias": "qkv"} | _read_blocks(theirs, values) | own


def write_qwen2_moe(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Qwen 2 MoE."""
    found = write_qwen3_moe(model) | {"qkv_bias": True}
    del found["attention_bias"]
    return found | {"shared_expert_intermediate_size": model.shared_experts * model.expert_width}


_GPT_OSS_SCALING = RotaryScaling(kind="yarn", factor=32.0, original_sequence=4096, truncate=False)
"""What transformers takes if a ``config.json`` describes no rotary positions."""


def read_gpt_oss(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: GPT-OSS."""
    window = theirs.size_or_none("sliding_window")
    found = read_decoder(theirs, values, 1.5e5)
    if not (theirs.get("rope_parameters") or theirs.get("rope_scaling")):
        found |= {"rotary_scaling": _GPT_OSS_SCALING}
    theirs.must_be("experts_per_token", None, values["experts_per_token"])
    theirs.must_be("initial_context_length", None, found["rotary_scaling"].original_sequence)
    return found | layer_types(theirs, values, lambda layer: layer % 2 == 0, window)


def write_gpt_oss(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: GPT-OSS."""
    bounds = {"swiglu_alpha": CLAMPED_SWIGLU_ALPHA, "swiglu_limit": CLAMPED_SWIGLU_LIMIT}
    windows = {"sliding_window": model.window or model.sequence, "layer_types": written_types(model)}
    return write_decoder(model) | _write_router(model) | bounds | windows
