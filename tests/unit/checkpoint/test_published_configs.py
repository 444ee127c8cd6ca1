"""If these fail, a published model cannot be imported, or is imported as another model than it is.

Each entry has the fields of the model's published ``config.json``, and the number of its parameters. Fields
that all files have and that nothing depends on are in `PLAIN`. The factors of longrope are made up.
"""

from typing import Any

import pytest

from myriad.checkpoint.foreign.hugging_face_config import config_of, model_of
from myriad.errors import BadInputError
from myriad.model.config import ModelConfig

PLAIN: dict[str, Any] = {
    "bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": 0, "attention_dropout": 0.1, "use_cache": True,
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.45.0",
    "_name_or_path": "/fsx/model", "architectures": ["ForCausalLM"],
}  # fmt: skip
RMS = PLAIN | {"hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False}
LLAMA3 = RMS | {
    "model_type": "llama", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "vocab_size": 128256, "num_key_value_heads": 8,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip
SMOLLM2 = RMS | {
    "model_type": "llama", "attention_bias": False, "is_llama_config": True, "mlp_bias": False,
    "max_position_embeddings": 8192, "pretraining_tp": 1, "rope_interleaved": False, "rope_scaling": None,
    "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
    "transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}  # fmt: skip
MISTRAL = RMS | {
    "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "sliding_window": 4096, "rope_theta": 10000.0, "vocab_size": 32000,
}  # fmt: skip
QWEN25 = RMS | {
    "model_type": "qwen2", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "use_mrope": False,
    "use_sliding_window": False,
}  # fmt: skip
QWEN3 = RMS | {
    "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "use_sliding_window": False, "vocab_size": 151936, "num_key_value_heads": 8,
}  # fmt: skip
DEEPSEEK = RMS | {
    "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_layer_freq": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "seq_aux": True, "v_head_dim": 128,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
GPT_OSS = RMS | {
    "model_type": "gpt_oss", "attention_bias": True, "experts_per_token": 4, "head_dim": 64,
    "initial_context_length": 4096, "max_position_embeddings": 131072, "num_experts_per_tok": 4,
    "num_key_value_heads": 8, "output_router_logits": False, "rope_theta": 150000,
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "vocab_size": 201088,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip
GEMMA2 = PLAIN | {
    "model_type": "gemma2", "attention_bias": False, "attn_logit_softcapping": 50.0,
    "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 256000,
}  # fmt: skip
GEMMA3 = PLAIN | {
    "model_type": "gemma3_text", "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "num_attention_heads": 4,
    "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "vocab_size": 262144,
}  # fmt: skip
OLMO2 = RMS | {
    "model_type": "olmo2", "attention_bias": False, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 500000, "vocab_size": 100352,
}  # fmt: skip
PHI3 = RMS | {
    "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.1,
    "original_max_position_embeddings": 4096, "max_position_embeddings": 4096, "rope_scaling": None,
    "rope_theta": 10000.0, "sliding_window": 2047, "vocab_size": 32064, "hidden_size": 3072,
    "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
}  # fmt: skip
LONG = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0 + pair for pair in range(48)]}
GRANITE3 = RMS | {
    "model_type": "granite", "attention_bias": False, "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0, "logits_scaling": 8.0, "mlp_bias": False, "residual_multiplier": 0.22,
    "max_position_embeddings": 4096, "rope_scaling": None, "rope_theta": 10000, "tie_word_embeddings": True,
    "vocab_size": 49155, "num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip
NEOX = PLAIN | {
    "model_type": "gpt_neox", "hidden_act": "gelu", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
    "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
    "vocab_size": 50304,
}  # fmt: skip
FALCON = PLAIN | {
    "model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False, "bias": False,
    "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5, "multi_query": True, "parallel_attn": True,
    "vocab_size": 65024,
    "auto_map": {
        "AutoConfig": "configuration_falcon.FalconConfig",
        "AutoModel": "modeling_falcon.FalconModel",
    },
}  # fmt: skip


def sized(
    config: dict[str, Any], hidden: int, inner: int | None, heads: int, layers: int, **more: Any
) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": layers}
    return config | sizes | ({} if inner is None else {"intermediate_size": inner}) | more


def slides(layers: int, every: int) -> list[str]:
    return [f"{'full' if layer % every == 0 else 'sliding'}_attention" for layer in range(1, layers + 1)]


PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.1-8B": (sized(LLAMA3, 4096, 14336, 32, 32), 8_030_261_248),
    "Llama-3.2-1B": (
        sized(
            LLAMA3, 2048, 8192, 32, 16, head_dim=64, tie_word_embeddings=True,
            rope_scaling=LLAMA3["rope_scaling"] | {"factor": 32.0},
        ),
        1_235_814_400,
    ),
    "SmolLM2-135M": (sized(SMOLLM2, 576, 1536, 9, 30, num_key_value_heads=3), 134_515_008),
    "SmolLM2-1.7B": (
        sized(SMOLLM2, 2048, 8192, 32, 24, num_key_value_heads=32, rope_theta=130000),
        1_711_376_384,
    ),
    "Falcon3-7B-Base": (
        sized(
            RMS, 3072, 23040, 12, 28, model_type="llama", activation="swiglu", attention_bias=False,
            head_dim=256, max_position_embeddings=32768, mlp_bias=False, num_key_value_heads=4,
            pretraining_tp=1, rms_norm_eps=1e-6, rope_scaling=None, rope_theta=1000042, vocab_size=131072,
        ),
        7_455_550_464,
    ),
    "Mistral-7B-v0.1": (MISTRAL, 7_241_732_096),
    "Mistral-7B-v0.3": (
        MISTRAL | {"sliding_window": None, "rope_theta": 1e6, "vocab_size": 32768},
        7_248_023_552,
    ),
    "Qwen2.5-0.5B": (
        sized(
            QWEN25, 896, 4864, 14, 24, num_key_value_heads=2, max_position_embeddings=32768,
            sliding_window=32768, max_window_layers=24, tie_word_embeddings=True, vocab_size=151936,
        ),
        494_032_768,
    ),
    "Qwen2.5-7B": (
        sized(
            QWEN25, 3584, 18944, 28, 28, num_key_value_heads=4, max_position_embeddings=131072,
            sliding_window=131072, max_window_layers=28, vocab_size=152064,
        ),
        7_615_616_512,
    ),
    "Qwen3-0.6B": (
        sized(QWEN3, 1024, 3072, 16, 28, max_window_layers=28, tie_word_embeddings=True),
        596_049_920,
    ),
    "Qwen3-8B": (sized(QWEN3, 4096, 12288, 32, 36, max_window_layers=36), 8_190_735_360),
    "Mixtral-8x7B-v0.1": (
        MISTRAL
        | {
            "model_type": "mixtral", "sliding_window": None, "rope_theta": 1000000.0, "num_local_experts": 8,
            "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02,
        },
        46_702_792_704,
    ),
    "Qwen3-30B-A3B-Base": (
        sized(
            QWEN3, 2048, 6144, 32, 48, model_type="qwen3_moe", max_window_layers=48, num_key_value_heads=4,
            decoder_sparse_step=1, mlp_only_layers=[], moe_intermediate_size=768, norm_topk_prob=True,
            num_experts=128, num_experts_per_tok=8, output_router_logits=False, router_aux_loss_coef=0.001,
        ),
        30_532_122_624,
    ),
    "Qwen1.5-MoE-A2.7B": (
        sized(
            RMS, 2048, 5632, 16, 24, model_type="qwen2_moe", max_window_layers=21, num_key_value_heads=16,
            decoder_sparse_step=1, moe_intermediate_size=1408, norm_topk_prob=False, num_experts=60,
            num_experts_per_tok=4, output_router_logits=False, router_aux_loss_coef=0.001, rms_norm_eps=1e-6,
            rope_theta=1000000.0, shared_expert_intermediate_size=5632, sliding_window=32768,
            use_sliding_window=False, vocab_size=151936, max_position_embeddings=8192,
        ),
        14_315_784_192,
    ),
    "DeepSeek-V2": (
        sized(
            DEEPSEEK, 5120, 12288, 128, 60, model_type="deepseek_v2", num_key_value_heads=128,
            first_k_dense_replace=1, moe_intermediate_size=1536, n_routed_experts=160, n_shared_experts=2,
            n_group=8, topk_group=3, topk_method="group_limited_greedy", num_experts_per_tok=6,
            scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=16.0, vocab_size=102400,
        ),
        235_741_434_880,
    ),
    "DeepSeek-V3": (
        sized(
            DEEPSEEK, 7168, 18432, 128, 61, model_type="deepseek_v3", num_key_value_heads=128,
            first_k_dense_replace=3, moe_intermediate_size=2048, n_routed_experts=256, n_shared_experts=1,
            n_group=8, topk_group=4, topk_method="noaux_tc", num_experts_per_tok=8, scoring_func="sigmoid",
            norm_topk_prob=True, routed_scaling_factor=2.5, num_nextn_predict_layers=1, vocab_size=129280,
            quantization_config={
                "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                "weight_block_size": [128, 128],
            },
        ),
        671_026_419_200,
    ),
    "OLMoE-1B-7B-0924": (
        sized(
            RMS, 2048, 1024, 16, 16, model_type="olmoe", attention_bias=False, clip_qkv=None,
            max_position_embeddings=4096, norm_topk_prob=False, num_experts=64, num_experts_per_tok=8,
            num_key_value_heads=16, output_router_logits=False, rope_scaling=None, rope_theta=10000.0,
            router_aux_loss_coef=0.01, vocab_size=50304,
        ),
        6_919_161_856,
    ),
    "gpt-oss-20b": (sized(GPT_OSS, 2880, 2880, 64, 24, num_local_experts=32), 20_914_757_184),
    "gpt-oss-120b": (sized(GPT_OSS, 2880, 2880, 64, 36, num_local_experts=128), 116_829_156_672),
    "gemma-2-2b": (sized(GEMMA2, 2304, 9216, 8, 26, num_key_value_heads=4), 2_614_341_888),
    "gemma-2-9b": (
        sized(GEMMA2, 3584, 14336, 16, 42, num_key_value_heads=8, sliding_window_size=4096),
        9_241_705_984,
    ),
    "gemma-2-27b": (
        sized(
            GEMMA2, 4608, 36864, 32, 46, num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=144,
            _attn_implementation="eager",
        ),
        27_227_128_320,
    ),
    "gemma-3-1b-pt": (sized(GEMMA3, 1152, 6912, 4, 26, sliding_window_pattern=6), 999_885_952),
    "gemma-3-270m": (
        sized(
            GEMMA3, 640, 2048, 4, 18, layer_types=slides(18, 6), _sliding_window_pattern=6,
            use_bidirectional_attention=False,
        ),
        268_098_176,
    ),
    "OLMo-2-1124-7B": (sized(OLMO2, 4096, 11008, 32, 32, num_key_value_heads=32), 7_298_617_344),
    "OLMo-2-0325-32B": (sized(OLMO2, 5120, 27648, 40, 64, num_key_value_heads=8), 32_234_279_936),
    "Olmo-3-1025-7B": (
        sized(
            OLMO2, 4096, 11008, 32, 32, model_type="olmo3", num_key_value_heads=32, sliding_window=4096,
            layer_types=slides(32, 4), max_position_embeddings=65536, vocab_size=100278, use_cache=False,
            rope_scaling={
                "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                "original_max_position_embeddings": 8192, "rope_type": "yarn",
            },
        ),
        7_298_011_136,
    ),
    "Phi-3-mini-4k-instruct": (PHI3, 3_821_079_552),
    "Phi-3.5-mini-instruct": (
        PHI3 | {"max_position_embeddings": 131072, "sliding_window": 262144, "rope_scaling": LONG},
        3_821_079_552,
    ),
    "phi-4": (
        sized(
            PHI3, 5120, 17920, 40, 40, num_key_value_heads=10, max_position_embeddings=16384,
            original_max_position_embeddings=16384, rope_theta=250000, sliding_window=None, vocab_size=100352,
        ),
        14_659_507_200,
    ),
    "Phi-4-mini-instruct": (
        sized(
            PHI3, 3072, 8192, 24, 32, num_key_value_heads=8, full_attn_mod=1, interpolate_factor=1,
            lm_head_bias=False, max_position_embeddings=131072, mlp_bias=False, partial_rotary_factor=0.75,
            rope_scaling=LONG, sliding_window=262144, tie_word_embeddings=True, vocab_size=200064,
        ),
        3_836_021_760,
    ),
    "granite-3.0-2b-base": (sized(GRANITE3, 2048, 8192, 32, 40), 2_533_531_648),
    "MiniCPM-2B-sft-bf16": (
        sized(
            {key: value for key, value in RMS.items() if key != "tie_word_embeddings"}, 2304, 5760, 36, 40,
            model_type="minicpm", max_position_embeddings=2048, num_key_value_heads=36, rope_scaling=None,
            scale_emb=12, dim_model_base=256, scale_depth=1.4, vocab_size=122753,
        ),
        2_724_880_896,
    ),
    "SmolLM3-3B-Base": (
        sized(
            {key: value for key, value in RMS.items() if key != "tie_word_embeddings"}, 2048, 11008, 16, 36,
            model_type="smollm3", attention_bias=False, layer_types=["full_attention"] * 36,
            max_position_embeddings=65536, max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4,
            no_rope_layers=[1, 1, 1, 0] * 9, num_key_value_heads=4, pretraining_tp=2, rms_norm_eps=1e-6,
            rope_scaling=None, rope_theta=5000000.0, sliding_window=None, use_sliding_window=False,
            vocab_size=128256,
        ),
        3_075_098_624,
    ),
    "stablelm-2-1_6b": (
        sized(
            PLAIN, 2048, 5632, 32, 24, model_type="stablelm", hidden_act="silu", hidden_dropout=0.0,
            layer_norm_eps=1e-5, max_position_embeddings=4096, num_key_value_heads=32,
            partial_rotary_factor=0.25, rope_theta=10000, tie_word_embeddings=False, use_qkv_bias=True,
            qk_layernorm=False, use_parallel_residual=False, vocab_size=100352,
        ),
        1_644_515_328,
    ),
    "stablelm-2-12b": (
        sized(
            PLAIN, 5120, 13824, 32, 40, model_type="stablelm", hidden_act="silu", hidden_dropout=0.0,
            layer_norm_eps=1e-5, max_position_embeddings=4096, num_key_value_heads=8,
            partial_rotary_factor=0.25, rope_theta=10000, tie_word_embeddings=False, use_qkv_bias=False,
            qk_layernorm=True, use_parallel_residual=True, vocab_size=100352,
        ),
        12_143_185_920,
    ),
    "pythia-160m": (sized(NEOX, 768, 3072, 12, 12), 162_322_944),
    "gpt-neox-20b": (
        sized(
            NEOX, 6144, 24576, 64, 44, hidden_act="gelu_fast", vocab_size=50432,
            attention_probs_dropout_prob=0, hidden_dropout_prob=0,
        ),
        20_554_567_680,
    ),
    "falcon-7b": (sized(FALCON, 4544, None, 71, 32, new_decoder_architecture=False), 6_921_720_704),
    "falcon-40b": (
        sized(FALCON, 8192, None, 128, 60, new_decoder_architecture=True, num_kv_heads=8),
        41_303_293_952,
    ),
    "AFM-4.5B-Base": (
        sized(
            RMS, 2560, 18432, 20, 36, model_type="arcee", attention_bias=False, head_dim=128,
            hidden_act="relu2", max_position_embeddings=65536, mlp_bias=False, num_key_value_heads=4,
            rope_theta=10000.0, vocab_size=128004,
            rope_scaling={
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 20.0, "mscale": 1.0, "rope_type": "yarn",
                "original_max_position_embeddings": 4096, "type": "yarn",
            },
        ),
        4_619_184_640,
    ),
}  # fmt: skip


def published(name: str) -> ModelConfig:
    return model_of(PUBLISHED[name][0], vocabulary_multiple=1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_the_parameters_that_it_was_published_with(name: str) -> None:
    assert published(name).num_parameters() == PUBLISHED[name][1]


def test_layers_of_a_published_model_have_its_windows_and_rotary_positions() -> None:
    gemma3, olmo3, phi4 = published("gemma-3-1b-pt"), published("Olmo-3-1025-7B"), published("phi-4")
    assert [gemma3.layer_window(layer) for layer in range(6)] == [512] * 5 + [None]
    bases = [rotary.base for layer in range(6) if (rotary := gemma3.layer_rotary(layer))]
    assert bases == [1e4] * 5 + [1e6]
    kinds = [rotary.scaling.kind for layer in range(4) if (rotary := olmo3.layer_rotary(layer))]
    assert kinds == ["none"] * 3 + ["yarn"], "only layers without a window are scaled"
    assert phi4.window is None and published("Phi-3-mini-4k-instruct").window == 2047
    assert published("Qwen2.5-7B").window is None, "use_sliding_window is false"
    smollm3 = published("SmolLM3-3B-Base")
    assert [smollm3.layer_rotary(layer) is None for layer in range(4)] == [False, False, False, True]
    mini = published("Phi-4-mini-instruct")
    assert (mini.rotary_width, mini.rotary_scaling.factor) == (96, 32.0)
    assert published("stablelm-2-1_6b").attention_bias == "qkv"


def test_window_beyond_the_sequence_keeps_its_layers_rotary_base() -> None:
    config = PUBLISHED["gemma-3-1b-pt"][0]
    for change in ({"max_position_embeddings": 256}, {"sliding_window": None}):
        model = model_of(config | change)
        rotary = [model.layer_rotary(layer) for layer in range(6)]
        assert [one.base for one in rotary if one] == [1e4] * 5 + [1e6]


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "quantized": ("Llama-3.1-8B", {"quantization_config": {"bits": 4}}, "quantization_config"),
    "block-sparse": ("Phi-4-mini-instruct", {"full_attn_mod": 2}, "full_attn_mod = 2: null or 1"),
    "another gate": ("Falcon3-7B-Base", {"activation": "gelu"}, 'activation = "gelu"'),
    "two windows": ("gemma-2-9b", {"sliding_window_size": 512}, "sliding_window_size = 512: null or 4096"),
    "two bases": ("pythia-160m", {"rope_theta": 5e5}, "rope_theta = 500000.0: null or 10000"),
    "ALiBi": ("falcon-7b", {"alibi": True}, "alibi = true"),
    "wide heads": ("pythia-160m", {"head_dim": 128}, "head_dim = 128: null or 64"),
    "few factors": ("Phi-4-mini-instruct", {"partial_rotary_factor": 0.5}, "short_factor = .*: 32 numbers"),
    "half a pair": ("pythia-160m", {"rotary_pct": 0.02}, "1 values of it are rotated"),
    "many layers": (
        "Qwen3-8B",
        {"num_hidden_layers": 10**9},
        "num_hidden_layers = 1000000000: Input .*10000",
    ),
    "two lengths": (
        "Llama-3.1-8B",
        {"original_max_position_embeddings": 4096},
        r"original_max_position_embeddings = \[8192, 4096\]: one value",
    ),
    "no logits": ("granite-3.0-2b-base", {"logits_scaling": 0}, "logits_scaling = 0: above 0"),
    "no ramp": (
        "Llama-3.1-8B",
        {"rope_scaling": LLAMA3["rope_scaling"] | {"low_freq_factor": 4.0}},
        "high_freq_factor = 4.0: above low_freq_factor = 4.0",
    ),
}


@pytest.mark.parametrize("name, change, message", REFUSED.values(), ids=REFUSED.keys())
def test_a_field_that_changes_the_model_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        model_of(PUBLISHED[name][0] | change)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Olmo-3-1025-7B", "Phi-4-mini-instruct", "AFM-4.5B-Base"])
def test_scaling_is_written_where_version_4_of_transformers_reads_it(name: str) -> None:
    model, config = published(name), PUBLISHED[name][0]
    written = config_of(model, "bfloat16", None, config["model_type"])
    found = written["rope_scaling"]
    if config["model_type"] == "phi3":
        assert found == LONG, "its class refuses other fields"
    else:
        assert found["rope_type"] == config["rope_scaling"]["rope_type"]
        assert found["factor"] == config["rope_scaling"]["factor"] and "rope_theta" not in found
    assert written["rope_theta"] == config["rope_theta"]
    assert model_of(written, vocabulary_multiple=1).rotary_scaling == model.rotary_scaling


def test_longropes_original_length_is_written_where_version_4_looks_for_it() -> None:
    written = config_of(published("Phi-3.5-mini-instruct"), "bfloat16", None)
    assert written["model_type"] == "llama" and written["original_max_position_embeddings"] == 4096


ODD: list[Any] = [
    None, {}, [[]], "8", 10**9, 10**400, {"rope_type": []}, {"rope_type": "longrope", "short_factor": [1.0]},
    {"rope_type": "yarn", "factor": "8", "mscale": 1.0, "mscale_all_dim": 1.0},
]  # fmt: skip
FIRST = {config["model_type"]: config for config, _ in reversed(PUBLISHED.values())}


@pytest.mark.parametrize("config", FIRST.values(), ids=FIRST.keys())
def test_odd_values_of_a_familys_fields_are_read_or_refused_in_a_line(config: dict[str, Any]) -> None:
    for key in {*config, "rope_scaling", "layer_types", "max_window_layers"} - PLAIN.keys():
        for value in ODD:
            try:
                model_of(config | {key: value})
            except BadInputError as error:
                assert "\n" not in str(error) and len(str(error)) < 1000


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("Mixtral-8x7B-v0.1", "norm_topk_prob", True),
        ("Mixtral-8x7B-v0.1", "num_experts_per_tok", 9),
        ("Mixtral-8x7B-v0.1", "num_hidden_layers", 10_000),
        ("Qwen3-30B-A3B-Base", "mlp_only_layers", [1]),
        ("Qwen3-30B-A3B-Base", "mlp_only_layers", list(range(48))),
        ("Qwen3-30B-A3B-Base", "decoder_sparse_step", 49),
        ("Qwen3-30B-A3B-Base", "num_local_experts", 64),
        ("OLMoE-1B-7B-0924", "clip_qkv", 8.0),
        ("Qwen1.5-MoE-A2.7B", "shared_expert_intermediate_size", 5633),
        ("Qwen1.5-MoE-A2.7B", "qkv_bias", False),
        ("gpt-oss-20b", "attention_bias", False),
        ("gpt-oss-20b", "swiglu_limit", 6.0),
        ("gpt-oss-20b", "swiglu_alpha", 1.0),
        ("gpt-oss-20b", "hidden_act", "gelu"),
        ("gpt-oss-20b", "experts_per_token", 3),
        ("gpt-oss-20b", "num_experts_per_tok", 40),
        ("gpt-oss-20b", "initial_context_length", 8192),
        ("DeepSeek-V2", "topk_method", "noaux_tc"),
        ("DeepSeek-V2", "norm_topk_prob", True),
        ("DeepSeek-V3", "scoring_func", "softmax"),
        ("DeepSeek-V3", "n_group", 7),
        ("DeepSeek-V3", "n_group", 256),
        ("DeepSeek-V3", "topk_group", 9),
        ("DeepSeek-V3", "moe_layer_freq", 2),
        ("DeepSeek-V3", "first_k_dense_replace", -1),
        ("DeepSeek-V3", "num_local_experts", 64),
    ],
)
def test_experts_that_would_be_read_as_others_are_refused(name: str, field: str, value: object) -> None:
    config = PUBLISHED[name][0]
    if field == "num_hidden_layers":
        config = config | {"num_local_experts": 4096}
    with pytest.raises(BadInputError):
        model_of(config | {field: value})
