"""The families whose blocks may compute attention and MLP from the same input: GPT-NeoX and Pythia, StableLM,
Falcon. Their norms subtract the mean. GPT-NeoX and StableLM rotate a part of each head.
"""

from myriad.checkpoint.foreign.hugging_face_family import TensorNames, Values
from myriad.checkpoint.foreign.hugging_face_values import (
    ConfigValues,
    read_partial_rotary,
    read_whole_rotary,
    written_rotary,
)
from myriad.model.config import ModelConfig

__all__ = [
    "falcon_names",
    "neox_names",
    "read_falcon",
    "read_neox",
    "read_stablelm",
    "stablelm_names",
    "write_falcon",
    "write_neox",
    "write_stablelm",
]


def read_neox(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: GPT-NeoX and Pythia."""
    rotary = read_partial_rotary(theirs, 0.25, "rotary_emb_base", "rotary_pct")
    theirs.must_be("rope_theta", None, rotary["rotary_base"])
    block = {"block": "parallel", "parallel_norms": 2} if theirs.flag("use_parallel_residual") else {}
    return rotary | block


def write_neox(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: GPT-NeoX and Pythia."""
    rotary = written_rotary(model.rotary_base, model.rotary_scaling, model.rotary_fraction)
    return {
        "rope_parameters": rotary,
        "rotary_emb_base": model.rotary_base,
        "rotary_pct": model.rotary_fraction,
        "use_parallel_residual": model.block == "parallel",
        "attention_bias": True,
        "hidden_dropout": model.dropout,
        "attention_dropout": 0.0,
    }


def neox_names(model: ModelConfig) -> TensorNames:
    """Return the names of the tensors of GPT-NeoX and Pythia."""
    return TensorNames(
        base="gpt_neox",
        tokens="embed_in",
        final_norm="final_layer_norm",
        head="embed_out",
        attention="attention",
        qkv=("query_key_value",),
        qkv_order="groups",
        output="dense",
        up=("dense_h_to_4h",),
        down="dense_4h_to_h",
    )


def read_stablelm(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: StableLM."""
    found = read_partial_rotary(theirs, 0.25)
    found |= {"attention_bias": "qkv" if theirs.flag("use_qkv_bias") else "default"}
    found |= {"qk_norm": "heads", "qk_norm_kind": "layer"} if theirs.flag("qk_layernorm") else {}
    return found | ({"block": "parallel"} if theirs.flag("use_parallel_residual") else {})


def write_stablelm(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: StableLM."""
    return {
        "rope_theta": model.rotary_base,
        "rope_parameters": written_rotary(model.rotary_base, model.rotary_scaling, model.rotary_fraction),
        "partial_rotary_factor": model.rotary_fraction,
        "use_parallel_residual": model.block == "parallel",
        "use_qkv_bias": model.attention_bias == "qkv",
        "qk_layernorm": model.qk_norm == "heads",
    }


def stablelm_names(model: ModelConfig) -> TensorNames:
    """Return the names of the tensors of StableLM."""
    by_head = ("q_layernorm.norms", "k_layernorm.norms")
    if model.block == "parallel":
        return TensorNames(norms={"norm1": "input_layernorm"}, qk_norms=by_head)
    return TensorNames(qk_norms=by_head)


def read_falcon(theirs: ConfigValues, values: Values) -> Values:
    """Return the values of a ``config.json`` beyond the copied fields: Falcon."""
    new = theirs.flag("new_decoder_architecture")
    theirs.must_be("parallel_attn", True)
    norms = theirs.size_or_none("num_ln_in_parallel_attn") or 2
    if not new:
        theirs.must_be("multi_query", True)
        norms = 1
    heads = (theirs.size_or_none("num_kv_heads") or values["heads"]) if new else 1
    inner = theirs.size_or_none("ffn_hidden_size") or 4 * values["hidden"]
    return read_whole_rotary(theirs) | {"parallel_norms": norms, "kv_heads": heads, "ffn_hidden": inner}


def write_falcon(model: ModelConfig) -> Values:
    """Return the fields beyond the copied ones: Falcon."""
    new = model.parallel_norms == 2 or model.num_kv_heads > 1
    return {
        "rope_theta": model.rotary_base,
        "rope_parameters": written_rotary(model.rotary_base, model.rotary_scaling),
        "new_decoder_architecture": new,
        "num_ln_in_parallel_attn": model.parallel_norms if new else None,
        "multi_query": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
        "num_kv_heads": model.num_kv_heads,
        "ffn_hidden_size": model.ffn_width,
        "hidden_dropout": model.dropout,
        "attention_dropout": 0.0,
    }


def falcon_names(model: ModelConfig) -> TensorNames:
    """Return the names of the tensors of Falcon."""
    two = {"norm1": "ln_attn", "norm2": "ln_mlp"}
    return TensorNames(
        base="transformer",
        tokens="word_embeddings",
        layers="h",
        final_norm="ln_f",
        norms=two if model.parallel_norms == 2 else {"norm1": "input_layernorm"},
        attention="self_attention",
        qkv=("query_key_value",),
        qkv_order="groups",
        output="dense",
        up=("dense_h_to_4h",),
        down="dense_4h_to_h",
    )
