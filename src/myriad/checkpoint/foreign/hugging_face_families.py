"""The model families that are exchanged with Hugging Face, as a table, without torch.

To add one, add an entry to `FAMILIES`, and a reader and a writer of its own fields to
`myriad.checkpoint.foreign.hugging_face_fields` or a module beside it. The tests compare its logits with those
of transformers.
"""

from typing import Any

from myriad.checkpoint.foreign.hugging_face_deepseek import (
    DEEPSEEK_EXPERTS,
    LATENT_SIZES,
    read_deepseek2,
    read_deepseek3,
    read_minicpm3,
    write_deepseek2,
    write_deepseek3,
    write_minicpm3,
)
from myriad.checkpoint.foreign.hugging_face_experts import (
    GPT_OSS_NAMES,
    MIXTRAL_NAMES,
    QWEN2_MOE_NAMES,
    ROUTER_FIELDS,
    read_gpt_oss,
    read_olmoe,
    read_qwen2_moe,
    read_qwen3_moe,
    write_gpt_oss,
    write_mixtral,
    write_olmoe,
    write_qwen2_moe,
    write_qwen3_moe,
)
from myriad.checkpoint.foreign.hugging_face_family import Family, TensorNames
from myriad.checkpoint.foreign.hugging_face_fields import (
    read_decoder,
    read_gemma2,
    read_gemma3,
    read_granite,
    read_minicpm,
    read_mistral,
    read_olmo3,
    read_phi3,
    read_qwen,
    read_smollm3,
    write_decoder,
    write_gemma,
    write_gemma3,
    write_granite,
    write_minicpm,
    write_mistral,
    write_olmo3,
    write_phi3,
    write_qwen,
    write_qwen2,
    write_smollm3,
)
from myriad.checkpoint.foreign.hugging_face_parallel import (
    falcon_names,
    neox_names,
    read_falcon,
    read_neox,
    read_stablelm,
    stablelm_names,
    write_falcon,
    write_neox,
    write_stablelm,
)
from myriad.kernels.config import CLAMPED_SWIGLU_ALPHA, CLAMPED_SWIGLU_LIMIT

__all__ = ["FAMILIES"]

_ROTARY = ("rope_theta", "rope_parameters", "rope_scaling", "original_max_position_embeddings")
_ROTARY_MODEL = {"norm": "rms", "position": "rotary"}
_LAYER_NORM_MODEL = {"norm": "layer", "position": "rotary"}
_HEAD_DIM = {"head_dim": "head_dim"}
_GELUS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_GEMMA_NORMS = {
    "norm1": "input_layernorm",
    "post_norm1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post_norm2": "post_feedforward_layernorm",
}
_OLMO_NORMS = {"post_norm1": "post_attention_layernorm", "post_norm2": "post_feedforward_layernorm"}
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu"}
_GEMMA = _ROTARY_MODEL | {"norm_placement": "both", "norm_zero_centered": True}
_GEMMA_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_OLMO = _ROTARY_MODEL | {"norm_placement": "after", "qk_norm": "all"}
_GEMMA_FIELDS = (
    *(*_ROTARY, "attention_bias", "query_pre_attn_scalar", "attn_logit_softcapping"),
    *("final_logit_softcapping", "sliding_window", "layer_types"),
)
_NO_BIAS = (None, False)
_MINICPM_SCALES = ("scale_emb", "scale_depth", "dim_model_base")
_DEEPSEEK: dict[str, Any] = {
    "fixed": _ROTARY_MODEL,
    "sizes": LATENT_SIZES,
    "must_be": {
        "attention_bias": _NO_BIAS,
        "mlp_bias": _NO_BIAS,
        "rope_interleave": (None, True),
    },
    "may_have_experts": True,
    "fields": (*_ROTARY, *DEEPSEEK_EXPERTS, "qk_head_dim", "num_nextn_predict_layers"),
}
_DEEPSEEK_DEFAULTS = _DEFAULTS | {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(
        architecture="LlamaForCausalLM",
        fixed=_ROTARY_MODEL,
        sizes=_HEAD_DIM,
        defaults=_DEFAULTS | {"max_position_embeddings": 2048},
        must_be={"mlp_bias": _NO_BIAS, "activation": (None, "swiglu")},  # Falcon 3 has both names
        read=read_decoder,
        write=lambda model: write_decoder(model) | {"mlp_bias": False},
        fields=(*_ROTARY, "attention_bias"),
    ),
    "mistral": Family(
        architecture="MistralForCausalLM",
        fixed=_ROTARY_MODEL,
        sizes=_HEAD_DIM,
        defaults=_DEFAULTS | {"max_position_embeddings": 131072, "sliding_window": 4096},
        must_be={"attention_bias": _NO_BIAS, "mlp_bias": _NO_BIAS},
        read=read_mistral,
        write=write_mistral,
        fields=(*_ROTARY, "sliding_window"),
    ),
    "qwen2": Family(
        architecture="Qwen2ForCausalLM",
        fixed=_ROTARY_MODEL | {"attention_bias": "qkv"},
        sizes=_HEAD_DIM,
        defaults=_DEFAULTS
        | {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28},
        read=read_qwen,
        write=write_qwen2,
        fields=(*_ROTARY, "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    ),
    "qwen3": Family(
        architecture="Qwen3ForCausalLM",
        fixed=_ROTARY_MODEL | {"qk_norm": "head"},
        sizes=_HEAD_DIM,
        defaults=_DEFAULTS
        | {"max_position_embeddings": 32768, "sliding_window": 4096, "max_window_layers": 28}
        | {"head_dim": 128, "attention_bias": False},
        read=read_qwen,
        write=write_qwen,
        fields=(
            *(*_ROTARY, "attention_bias", "use_sliding_window", "sliding_window", "max_window_layers"),
            "layer_types",
        ),
    ),
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        fixed=_ROTARY_MODEL | {"shared_expert_gate": True},
        sizes=_HEAD_DIM | {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"},
        defaults=_DEFAULTS
        | {"max_position_embeddings": 32768, "num_key_value_heads": 16, "intermediate_size": 5632}
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632, "norm_topk_prob": False, "qkv_bias": True},
        must_be={"use_sliding_window": _NO_BIAS, "qkv_bias": (True,)},
        read=read_qwen2_moe,
        write=write_qwen2_moe,
        fields=(
            *(*_ROTARY, *ROUTER_FIELDS, "norm_topk_prob", "moe_intermediate_size", "layer_types"),
            *("shared_expert_intermediate_size", "sliding_window", "max_window_layers"),
            *("decoder_sparse_step", "mlp_only_layers"),
        ),
        names=lambda model: QWEN2_MOE_NAMES,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        fixed=_ROTARY_MODEL | {"qk_norm": "head"},
        sizes=_HEAD_DIM | {"experts": "num_experts", "experts_per_token": "num_experts_per_tok"},
        defaults=_DEFAULTS
        | {"max_position_embeddings": 32768, "num_key_value_heads": 4, "attention_bias": False}
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"intermediate_size": 6144, "norm_topk_prob": False},
        must_be={"use_sliding_window": _NO_BIAS},
        read=read_qwen3_moe,
        write=write_qwen3_moe,
        fields=(
            *(*_ROTARY, *ROUTER_FIELDS, "norm_topk_prob", "attention_bias", "moe_intermediate_size"),
            *("sliding_window", "max_window_layers", "num_local_experts", "decoder_sparse_step"),
            "mlp_only_layers",
        ),
    ),
    "mixtral": Family(
        architecture="MixtralForCausalLM",
        fixed=_ROTARY_MODEL,
        sizes=_HEAD_DIM | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        defaults=_DEFAULTS
        | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "rope_theta": 1e6},
        read=read_mistral,
        write=write_mixtral,
        fields=(*_ROTARY, *ROUTER_FIELDS, "sliding_window", "router_jitter_noise"),
        names=lambda model: MIXTRAL_NAMES,
    ),
    "olmoe": Family(
        architecture="OlmoeForCausalLM",
        fixed=_ROTARY_MODEL | {"qk_norm": "all"},
        sizes={"experts": "num_experts", "experts_per_token": "num_experts_per_tok"},
        defaults=_DEFAULTS
        | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8}
        | {"norm_topk_prob": False, "attention_bias": False},
        must_be={"clip_qkv": (None,)},
        read=read_olmoe,
        write=write_olmoe,
        fields=(*_ROTARY, *ROUTER_FIELDS, "norm_topk_prob", "attention_bias"),
    ),
    "gpt_oss": Family(
        architecture="GptOssForCausalLM",
        fixed=_ROTARY_MODEL | {"bias": True, "attention_sinks": True, "router_logit_bias": True},
        sizes=_HEAD_DIM | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        activations={"clamped_swiglu": "silu"},
        defaults=_DEFAULTS
        | {"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "head_dim": 64}
        | {"num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128}
        | {"attention_bias": True},
        must_be={
            "attention_bias": (True,),
            "swiglu_alpha": (None, CLAMPED_SWIGLU_ALPHA),
            "swiglu_limit": (None, CLAMPED_SWIGLU_LIMIT),
        },
        read=read_gpt_oss,
        write=write_gpt_oss,
        fields=(
            *(*_ROTARY, *ROUTER_FIELDS, "sliding_window", "layer_types", "experts_per_token"),
            "initial_context_length",
        ),
        names=lambda model: GPT_OSS_NAMES,
    ),
    "gemma2": Family(
        architecture="Gemma2ForCausalLM",
        fixed=_GEMMA,
        sizes=_HEAD_DIM,
        activations={"geglu_tanh": "gelu_pytorch_tanh"},
        activation_field="hidden_activation",
        defaults=_GEMMA_DEFAULTS
        | {"max_position_embeddings": 8192, "num_key_value_heads": 4}
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        must_be={"use_bidirectional_attention": _NO_BIAS, "hidden_act": (None, "gelu_pytorch_tanh")},
        read=read_gemma2,
        write=write_gemma,
        fields=(*_GEMMA_FIELDS, "sliding_window_size"),
        names=lambda model: TensorNames(norms=_GEMMA_NORMS),
    ),
    "gemma3_text": Family(
        architecture="Gemma3ForCausalLM",
        fixed=_GEMMA | {"qk_norm": "head"},
        sizes=_HEAD_DIM,
        activations={"geglu_tanh": "gelu_pytorch_tanh"},
        activation_field="hidden_activation",
        defaults=_GEMMA_DEFAULTS | {"max_position_embeddings": 131072, "num_key_value_heads": 4},
        must_be={"use_bidirectional_attention": _NO_BIAS, "hidden_act": (None, "gelu_pytorch_tanh")},
        read=read_gemma3,
        write=write_gemma3,
        fields=(*_GEMMA_FIELDS, "rope_local_base_freq", "sliding_window_pattern"),
        names=lambda model: TensorNames(norms=_GEMMA_NORMS),
    ),
    "olmo2": Family(
        architecture="Olmo2ForCausalLM",
        fixed=_OLMO,
        defaults=_DEFAULTS | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        read=read_decoder,
        write=write_decoder,
        fields=(*_ROTARY, "attention_bias"),
        names=lambda model: TensorNames(norms=_OLMO_NORMS),
    ),
    "olmo3": Family(
        architecture="Olmo3ForCausalLM",
        fixed=_OLMO,
        defaults=_DEFAULTS | {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        read=read_olmo3,
        write=write_olmo3,
        fields=(*_ROTARY, "attention_bias", "sliding_window", "layer_types"),
        names=lambda model: TensorNames(norms=_OLMO_NORMS),
    ),
    "phi3": Family(
        architecture="Phi3ForCausalLM",
        fixed=_ROTARY_MODEL,
        defaults=_DEFAULTS | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        must_be={"attention_bias": _NO_BIAS, "full_attn_mod": (None, 1), "interpolate_factor": (None, 1)},
        read=read_phi3,
        write=write_phi3,
        fields=(*_ROTARY, "partial_rotary_factor", "sliding_window"),
        names=lambda model: TensorNames(qkv=("qkv_proj",), up=("gate_up_proj",)),
    ),
    "granite": Family(
        architecture="GraniteForCausalLM",
        fixed=_ROTARY_MODEL,
        defaults=_DEFAULTS
        | {"max_position_embeddings": 2048, "embedding_multiplier": 1.0, "residual_multiplier": 1.0}
        | {"attention_multiplier": 1.0, "logits_scaling": 1.0},
        must_be={"mlp_bias": _NO_BIAS},
        read=read_granite,
        write=write_granite,
        fields=(
            *(*_ROTARY, "attention_bias", "embedding_multiplier", "residual_multiplier"),
            *("attention_multiplier", "logits_scaling"),
        ),
    ),
    "smollm3": Family(
        architecture="SmolLM3ForCausalLM",
        fixed=_ROTARY_MODEL,
        defaults=_DEFAULTS
        | {"max_position_embeddings": 32768, "tie_word_embeddings": True, "num_key_value_heads": 4}
        | {"no_rope_layer_interval": 4},
        must_be={"mlp_bias": _NO_BIAS},
        read=read_smollm3,
        write=write_smollm3,
        fields=(
            *(*_ROTARY, "attention_bias", "use_sliding_window", "sliding_window", "layer_types"),
            *("no_rope_layers", "no_rope_layer_interval", "max_window_layers"),
        ),
    ),
    "stablelm": Family(
        architecture="StableLmForCausalLM",
        fixed=_LAYER_NORM_MODEL | {"norm_bias": True},
        sizes={"norm_epsilon": "layer_norm_eps"},
        defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu"}
        | {"max_position_embeddings": 4096},
        read=read_stablelm,
        write=write_stablelm,
        fields=(*_ROTARY, "partial_rotary_factor", "use_qkv_bias", "use_parallel_residual", "qk_layernorm"),
        names=stablelm_names,
    ),
    "gpt_neox": Family(
        architecture="GPTNeoXForCausalLM",
        fixed=_LAYER_NORM_MODEL | {"bias": True, "attention_bias": "all"},
        sizes={"norm_epsilon": "layer_norm_eps"},
        activations=_GELUS,
        defaults={"layer_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "gelu"}
        | {"max_position_embeddings": 2048, "use_parallel_residual": True, "attention_bias": True},
        must_be={"attention_bias": (True,)},
        read=read_neox,
        write=write_neox,
        fields=(*_ROTARY, "rotary_pct", "rotary_emb_base", "use_parallel_residual"),
        names=neox_names,
    ),
    "falcon": Family(
        architecture="FalconForCausalLM",
        fixed=_LAYER_NORM_MODEL | {"norm_bias": True, "block": "parallel"},
        sizes={"norm_epsilon": "layer_norm_epsilon"},
        activations={"gelu": "gelu"},
        activation_field="activation",
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "activation": "gelu"}
        | {"max_position_embeddings": 2048, "parallel_attn": True, "multi_query": True},
        must_be={"alibi": _NO_BIAS, "bias": _NO_BIAS},
        read=read_falcon,
        write=write_falcon,
        fields=(
            *(*_ROTARY, "new_decoder_architecture", "num_ln_in_parallel_attn", "multi_query"),
            *("parallel_attn", "num_kv_heads", "ffn_hidden_size"),
        ),
        names=falcon_names,
    ),
    "arcee": Family(
        architecture="ArceeForCausalLM",
        fixed=_ROTARY_MODEL,
        sizes=_HEAD_DIM,
        activations=_GELUS | {"relu2": "relu2"},
        defaults=_DEFAULTS | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        must_be={"mlp_bias": _NO_BIAS},
        read=read_decoder,
        write=lambda model: write_decoder(model) | {"mlp_bias": False},
        fields=(*_ROTARY, "attention_bias"),
        names=lambda model: TensorNames(up=("up_proj",)),
    ),
    "deepseek_v3": Family(
        architecture="DeepseekV3ForCausalLM",
        defaults=_DEEPSEEK_DEFAULTS
        | {"max_position_embeddings": 4096, "first_k_dense_replace": 3, "n_routed_experts": 256}
        | {"num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048, "n_group": 8}
        | {"topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
        read=read_deepseek3,
        write=write_deepseek3,
        **_DEEPSEEK,
    ),
    "deepseek_v2": Family(
        architecture="DeepseekV2ForCausalLM",
        defaults=_DEEPSEEK_DEFAULTS
        | {"max_position_embeddings": 2048, "first_k_dense_replace": 0, "n_routed_experts": 64}
        | {"n_shared_experts": 2, "moe_intermediate_size": 1407, "routed_scaling_factor": 1.0}
        | {"topk_method": "greedy"},
        read=read_deepseek2,
        write=write_deepseek2,
        **_DEEPSEEK,
    ),
    "minicpm": Family(
        architecture="MiniCPMForCausalLM",
        fixed=_ROTARY_MODEL,
        defaults=_DEFAULTS
        | {"max_position_embeddings": 2048, "tie_word_embeddings": True}
        | {"scale_emb": 1, "scale_depth": 1, "dim_model_base": 1},
        must_be={"pretraining_tp": (None, 1), "mlp_bias": _NO_BIAS},  # with slices, logits are not scaled
        read=read_minicpm,
        write=write_minicpm,
        fields=(*_ROTARY, "attention_bias", *_MINICPM_SCALES),
    ),
    "minicpm3": Family(
        architecture="MiniCPM3ForCausalLM",
        fixed=_ROTARY_MODEL,
        sizes={key: name for key, name in LATENT_SIZES.items() if key != "v_head_dim"},
        defaults=_DEFAULTS
        | {"max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": True}
        | {"kv_lora_rank": 256, "q_lora_rank": 768, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}
        | {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
        must_be={"pretraining_tp": (None, 1), "attention_bias": _NO_BIAS, "mlp_bias": _NO_BIAS},
        read=read_minicpm3,
        write=write_minicpm3,
        fields=(*_ROTARY, "v_head_dim", "qk_head_dim", *_MINICPM_SCALES),
        names=lambda model: TensorNames(latent_pairs="halves"),
    ),
}
"""The families, by ``model_type``; GPT-2, whose matrices are transposed, is in `hugging_face_config`."""
