"""If these break: a model that leaves for Hugging Face, or comes from there, computes something else than it
did."""

import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import pytest
import torch
import transformers
from hugging_face_case import GPT2, LLAMA, TINY, Kept, exported, loaded, our_logits, random_weights, tokens_of
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from tiny_corpora import make_corpus
from typer.testing import CliRunner, Result

from myriad.checkpoint.checkpoint_files import load_model, save
from myriad.checkpoint.foreign.hugging_face import HuggingFaceWeights, write_folder
from myriad.checkpoint.foreign.hugging_face_config import kind_of, model_of
from myriad.checkpoint.foreign.hugging_face_names import tensor_mappings
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.cli.main import build_app
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.data.tokenizer import Tokenizer
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.generate import generate
from myriad.model.gpt import GPT
from myriad.model.tensor_shard import TensorShard
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.planner.cost.stage_layers import stage_layers
from myriad.planner.workload import Workload
from myriad.run import Run
from myriad.telemetry.spans import Recorder
from myriad.train.checkpoint_tools.foreign_checkpoints import export_hugging_face, import_hugging_face
from myriad.train.checkpoint_tools.initial_weights import fill_parameters
from myriad.train.checkpoint_tools.text_sampler import open_run

LLAMA3_SCALING = {"kind": "llama3", "factor": 8.0, "original_sequence": 8}
YARN = {"kind": "yarn", "factor": 4.0, "original_sequence": 6}
LONGROPE = {
    "kind": "longrope", "factor": 3.0, "original_sequence": 8,
    "short_factors": (1.0, 1.1, 1.3), "long_factors": (1.0, 2.0, 3.0),
}  # fmt: skip
GEMMA = TINY | {
    "activation": "geglu_tanh", "kv_heads": 2, "head_dim": 16, "norm_placement": "both",
    "norm_zero_centered": True, "embedding_scale": 32**0.5, "attention_scale": 0.125, "ffn_hidden": 48,
}  # fmt: skip
DEEPSEEK = TINY | {
    "activation": "swiglu", "ffn_hidden": 48, "tied": False, "q_lora_rank": 12, "kv_lora_rank": 10,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8, "norm_epsilon": 1e-5,
}  # fmt: skip
OURS = {
    "deepseek 3": DEEPSEEK | {"rotary_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    "deepseek 2 lite": DEEPSEEK | {"q_lora_rank": None, "tied": True},
    "deepseek 3, experts": DEEPSEEK | {
        "layers": 3, "dense_layers": 1, "experts": 8, "experts_per_token": 3, "expert_hidden": 16,
        "shared_experts": 2, "router_scores": "sigmoid", "router_scale": 2.5, "balance_bias_rate": 0.001,
        "router_groups": 4, "router_group_limit": 2, "router_group_score": "two_largest",
    },
    "deepseek 2, experts": DEEPSEEK | {
        "experts": 6, "experts_per_token": 2, "shared_experts": 1, "router_normalized": False,
        "router_groups": 3, "router_group_limit": 2, "router_scale": 16.0,
    },
    "qwen 2 moe": LLAMA | {
        "attention_bias": "qkv", "experts": 6, "experts_per_token": 3, "expert_hidden": 16, "ffn_hidden": 48,
        "expert_every": 2, "shared_experts": 2, "shared_expert_gate": True, "router_normalized": False,
    },
    "minicpm 3": DEEPSEEK | {"embedding_scale": 12.0, "residual_scale": 0.3, "logit_scale": 0.75},
    "llama, shared heads": LLAMA,
    "llama, untied": LLAMA | {"tied": False},
    "llama, wide heads": LLAMA | {"head_dim": 16, "tied": False},
    "llama, window in no layer": LLAMA | {"window": 4, "window_pattern": (False,)},
    "mistral": LLAMA | {"window": 5, "rotary_base": 1e4},
    "arcee": TINY,
    "arcee, relu2": TINY | {"activation": "relu2", "kv_heads": 1},
    "arcee, tanh": TINY | {"activation": "gelu_tanh"},
    "gpt2": GPT2,
    "gpt2, tanh": GPT2 | {"activation": "gelu_tanh", "ffn_hidden": 40},
    "gpt2, untied": GPT2 | {"tied": False, "norm_epsilon": 1e-3},
    "llama 3.1": LLAMA | {"rotary_scaling": LLAMA3_SCALING, "attention_bias": "all"},
    "qwen 2": LLAMA | {"attention_bias": "qkv", "window": 5, "window_pattern": (False, True)},
    "qwen 3": LLAMA | {"qk_norm": "head", "head_dim": 16, "rotary_scaling": YARN},
    "mixtral": LLAMA | {"experts": 4, "tied": False},
    "qwen 3 moe": LLAMA | {
        "qk_norm": "head", "head_dim": 16, "experts": 6, "experts_per_token": 3, "expert_hidden": 40,
        "ffn_hidden": 48, "dense_layers": 1, "router_normalized": False,
    },
    "olmoe": LLAMA | {"qk_norm": "all", "experts": 5, "experts_per_token": 1, "router_normalized": False},
    "gpt-oss": LLAMA | {
        "activation": "clamped_swiglu", "experts": 6, "experts_per_token": 3, "router_logit_bias": True,
        "bias": True, "attention_bias": "all", "attention_sinks": True, "window": 5, "tied": False,
        "window_pattern": (True, False), "rotary_scaling": YARN | {"truncate": False}, "head_dim": 16,
    },
    "gemma 2": GEMMA | {"attention_softcap": 5.0, "logit_softcap": 3.0, "window": 5},
    "gemma 3": GEMMA | {
        "qk_norm": "head", "window": 5, "window_pattern": (True, False), "window_rotary_base": 1e3,
        "rotary_scaling": {"kind": "linear", "factor": 8.0},
    },
    "olmo 2": LLAMA | {"qk_norm": "all", "norm_placement": "after", "tied": False},
    "olmo 3": LLAMA | {
        "qk_norm": "all", "norm_placement": "after", "window": 5, "window_pattern": (True, False),
        "window_rotary_base": 5e5, "rotary_scaling": YARN,
    },
    "phi 4": LLAMA | {"rotary_fraction": 0.75, "rotary_scaling": LONGROPE},
    "granite": LLAMA | {
        "embedding_scale": 12.0, "residual_scale": 0.22, "attention_scale": 0.05, "logit_scale": 0.8,
    },
    "smollm 3": LLAMA | {"rotary_pattern": (True, False)},
    "stablelm": LLAMA | {
        "norm": "layer", "norm_bias": True, "rotary_fraction": 0.25, "attention_bias": "qkv",
    },
    "stablelm, parallel": LLAMA | {
        "norm": "layer", "norm_bias": True, "block": "parallel", "qk_norm": "heads", "qk_norm_kind": "layer",
    },
    "pythia": TINY | {
        "norm": "layer", "bias": True, "attention_bias": "all", "block": "parallel", "parallel_norms": 2,
        "rotary_fraction": 0.25, "tied": False,
    },
    "falcon": TINY | {"norm": "layer", "norm_bias": True, "block": "parallel", "kv_heads": 1},
    "falcon 2": TINY | {
        "norm": "layer", "norm_bias": True, "block": "parallel", "kv_heads": 2, "parallel_norms": 2,
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def load_theirs(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@torch.no_grad()
def their_logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).logits.float()


@pytest.mark.parametrize("keys", OURS.values(), ids=OURS.keys())
def test_a_model_that_leaves_gives_the_logits_it_gave_here(keys: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights(**keys)
    theirs = load_theirs(exported(weights, tmp_path / "out"))
    tokens = tokens_of(weights.model)
    assert theirs.dtype == torch.float32 and theirs.config.model_type == kind_of(weights.model)
    expected = our_logits(weights, tokens)
    assert expected.std() > 0.5, "logits that could differ"
    torch.testing.assert_close(their_logits(theirs, tokens), expected, atol=2e-5, rtol=1e-5)


def test_a_deepseek_2_is_written_if_it_is_asked_for(tmp_path: Path) -> None:
    weights = random_weights(**OURS["deepseek 3"])
    theirs = load_theirs(exported(weights, tmp_path / "out", model_type="deepseek_v2"))
    tokens = tokens_of(weights.model)
    assert type(theirs).__name__ == "DeepseekV2ForCausalLM"
    expected = our_logits(weights, tokens)
    torch.testing.assert_close(their_logits(theirs, tokens), expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("keys", OURS.values(), ids=OURS.keys())
def test_a_model_that_left_comes_back_with_its_bits(keys: dict[str, Any], tmp_path: Path) -> None:
    weights = random_weights(**keys)
    back = HuggingFaceWeights(exported(weights, tmp_path / "out"))
    assert back.shapes == weights.shapes
    for name in weights.shapes:
        assert torch.equal(back.read(name), weights.read(name)), name
    kept = {"num_kv_heads", "head_width", "mlp_width", "norm_epsilon", "activation", "sequence", "vocabulary"}
    for key in kept | {"tied"} | ({"rotary_base"} if weights.model.position == "rotary" else set()):
        assert getattr(back.model, key) == getattr(weights.model, key), key
    windows = [[model.layer_window(layer) for layer in range(2)] for model in (back.model, weights.model)]
    assert windows[0] == windows[1]


SMALL = {"vocab_size": 90, "bos_token_id": None, "eos_token_id": None}
ROTARY = SMALL | {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 24, "head_dim": 8,
}  # fmt: skip
NEOX = SMALL | {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 24,
}  # fmt: skip
FALCON = SMALL | {
    "hidden_size": 32, "ffn_hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 24,
}  # fmt: skip


def without_head_dim(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "head_dim"}


LATENT = SMALL | {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 24, "first_k_dense_replace": 2,
    "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 6,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.9,
    },
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 2, "moe_intermediate_size": 20,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
MINICPM3 = {key: value for key, value in LATENT.items() if key != "first_k_dense_replace"} | {
    "max_position_embeddings": 48, "scale_emb": 3, "scale_depth": 0.9, "dim_model_base": 8,
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
        "short_factor": [1.0, 1.3], "long_factor": [1.5, 3.0],
    },
}  # fmt: skip
GPT_OSS = ROTARY | {
    "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 5, "pad_token_id": None,
    "attn_implementation": "eager",
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 6, "truncate": False,
    },
}  # fmt: skip
SHORT = SMALL | {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
THEIRS: dict[str, Callable[[], Any]] = {
    "deepseek 3": lambda: transformers.DeepseekV3Config(**LATENT),
    "deepseek 2 lite": lambda: transformers.DeepseekV2Config(**LATENT | {"q_lora_rank": None}),
    "deepseek 3, experts": lambda: transformers.DeepseekV3Config(
        **LATENT | EXPERTS | {"first_k_dense_replace": 1}, n_group=3, topk_group=2
    ),
    "deepseek 2, experts": lambda: transformers.DeepseekV2Config(
        **LATENT | EXPERTS | {"first_k_dense_replace": 0},
        topk_method="group_limited_greedy",
        n_group=3,
        topk_group=1,
    ),
    "deepseek 2, greedy": lambda: transformers.DeepseekV2Config(
        **LATENT | EXPERTS | {"first_k_dense_replace": 1}
    ),
    "minicpm 3": lambda: transformers.MiniCPM3Config(**MINICPM3),
    "minicpm 3, whole queries": lambda: transformers.MiniCPM3Config(
        **MINICPM3 | {"q_lora_rank": None, "v_head_dim": None, "scale_depth": None}, tie_word_embeddings=False
    ),
    "llama": lambda: transformers.LlamaConfig(
        **ROTARY, rope_theta=3e4, rope_parameters={"rope_type": "default", "rope_theta": 3e4}
    ),
    "llama, tied, wide": lambda: transformers.LlamaConfig(
        **(ROTARY | {"head_dim": 12}), tie_word_embeddings=True
    ),
    "mistral": lambda: transformers.MistralConfig(**ROTARY, sliding_window=6),
    "mistral without a window": lambda: transformers.MistralConfig(**ROTARY, sliding_window=None),
    "arcee": lambda: transformers.ArceeConfig(**ROTARY),
    "llama 3.1": lambda: transformers.LlamaConfig(
        **ROTARY,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    ),
    "llama, dynamic": lambda: transformers.LlamaConfig(
        **ROTARY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "qwen 2.5": lambda: transformers.Qwen2Config(**without_head_dim(ROTARY), tie_word_embeddings=True),
    "qwen 2, window": lambda: transformers.Qwen2Config(
        **without_head_dim(ROTARY), use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen 2 moe": lambda: transformers.Qwen2MoeConfig(
        **without_head_dim(ROTARY),
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[0],
    ),
    "qwen 3": lambda: transformers.Qwen3Config(**(ROTARY | {"head_dim": 12})),
    "mixtral": lambda: transformers.MixtralConfig(**ROTARY, num_local_experts=4, sliding_window=None),
    "qwen 3 moe": lambda: transformers.Qwen3MoeConfig(
        **ROTARY,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=20,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "olmoe": lambda: transformers.OlmoeConfig(
        **without_head_dim(ROTARY), num_experts=5, num_experts_per_tok=2, pad_token_id=None
    ),
    "gpt-oss": lambda: transformers.GptOssConfig(**GPT_OSS),
    "gpt-oss, other layers": lambda: transformers.GptOssConfig(
        **GPT_OSS | {"rope_parameters": None},
        layer_types=["full_attention", "sliding_attention"],
        tie_word_embeddings=True,
    ),
    "gemma 2": lambda: transformers.Gemma2Config(
        **ROTARY, sliding_window=6, query_pre_attn_scalar=16, pad_token_id=None
    ),
    "gemma 3": lambda: transformers.Gemma3TextConfig(
        **(ROTARY | {"num_hidden_layers": 7}), sliding_window=6, query_pre_attn_scalar=16, pad_token_id=None
    ),
    "olmo 2": lambda: transformers.Olmo2Config(**without_head_dim(ROTARY), pad_token_id=None),
    "olmo 3": lambda: transformers.Olmo3Config(
        **(without_head_dim(ROTARY) | {"num_hidden_layers": 4}), sliding_window=6, pad_token_id=None
    ),
    "phi 3": lambda: transformers.Phi3Config(
        **without_head_dim(ROTARY), original_max_position_embeddings=24, sliding_window=6, pad_token_id=None
    ),
    "phi 4 mini": lambda: transformers.Phi3Config(
        **without_head_dim(ROTARY) | {"max_position_embeddings": 48},
        original_max_position_embeddings=12,
        partial_rotary_factor=0.75,
        pad_token_id=None,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0, 1.1, 1.3],
            "long_factor": [1.0, 2.0, 3.0],
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 12,
        },
    ),
    "granite 3": lambda: transformers.GraniteConfig(
        **without_head_dim(ROTARY),
        embedding_multiplier=12.0,
        logits_scaling=4.0,
        residual_multiplier=0.22,
        attention_multiplier=0.05,
    ),
    "smollm 3": lambda: transformers.SmolLM3Config(
        **(without_head_dim(ROTARY) | {"num_hidden_layers": 5}), pad_token_id=None
    ),
    "stablelm 2": lambda: transformers.StableLmConfig(**without_head_dim(ROTARY), use_qkv_bias=True),
    "stablelm, parallel": lambda: transformers.StableLmConfig(
        **without_head_dim(ROTARY), use_parallel_residual=True, qk_layernorm=True
    ),
    "pythia": lambda: transformers.GPTNeoXConfig(**NEOX),
    "pythia, serial": lambda: transformers.GPTNeoXConfig(**NEOX, use_parallel_residual=False),
    "falcon 7b": lambda: transformers.FalconConfig(**FALCON, multi_query=True),
    "falcon 40b": lambda: transformers.FalconConfig(**FALCON, new_decoder_architecture=True, num_kv_heads=2),
    "gpt2": lambda: transformers.GPT2Config(**SHORT),
    "gpt2, exact gelu": lambda: transformers.GPT2Config(**SHORT, activation_function="gelu", n_inner=72),
}


def random_theirs(config: Any) -> Any:
    """With every tensor away from its initial value: biases too, the keys' among them."""
    torch.manual_seed(4)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("config", THEIRS.values(), ids=THEIRS.keys())
def test_a_model_that_comes_gives_the_logits_it_gave_there(config: Any, tmp_path: Path) -> None:
    """GPT-2's keys have a bias there and none here: softmax does not see it."""
    theirs = random_theirs(config())
    theirs.save_pretrained(tmp_path / "theirs")
    weights = HuggingFaceWeights(tmp_path / "theirs")
    assert weights.model is not None
    tokens = tokens_of(weights.model)
    expected = their_logits(theirs, tokens)
    torch.testing.assert_close(our_logits(weights, tokens), expected, atol=3e-5, rtol=1e-5)
    if theirs.config.model_type == "gpt2":
        bias = theirs.transformer.h[0].attn.c_attn.bias
        assert bias[32:64].abs().min() > 1e-4, "the keys' bias is not nothing"
        with torch.no_grad():
            bias[:32] += 1
        assert not torch.allclose(their_logits(theirs, tokens), expected, atol=1e-2), "the queries' counts"


@pytest.mark.parametrize("config", THEIRS.values(), ids=THEIRS.keys())
def test_the_likeliest_tokens_are_generated_here_as_there(config: Any, tmp_path: Path) -> None:
    """With caches of keys and values in both, past the window, where layers have one."""
    theirs = random_theirs(config())
    theirs.save_pretrained(tmp_path / "theirs")
    weights = HuggingFaceWeights(tmp_path / "theirs")
    assert weights.model is not None
    layers = loaded(weights).eval()
    prompt = [3, 1, 4, 1, 5, 9]
    ours = [*generate(layers, prompt, sequence=weights.model.sequence, max_new_tokens=9, temperature=0)]
    ids = torch.tensor([prompt])
    there = theirs.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=9, do_sample=False)
    assert ours == there[0, len(prompt) :].tolist()


MINICPM = SMALL | {
    "model_type": "minicpm", "architectures": ["MiniCPMForCausalLM"], "hidden_size": 32, "hidden_act": "silu",
    "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 24, "rms_norm_eps": 1e-5, "rope_scaling": {"type": "linear", "factor": 2.0},
    "scale_emb": 12, "dim_model_base": 16, "scale_depth": 1.4,
}  # fmt: skip


def minicpm_logits(w: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """What the model's published code computes (github.com/OpenBMB/MiniCPM, ``modeling_minicpm.py``): a Llama
    with scaled embeddings, branches and final values. Transformers has no class for it."""
    F, (batch, length) = torch.nn.functional, tokens.shape
    angles = torch.outer(torch.arange(length) / 2.0, 10000.0 ** -(torch.arange(0, 8, 2) / 8)).repeat(1, 2)

    def heads(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, w[name]).view(batch, length, -1, 8).transpose(1, 2)

    def turned(x: torch.Tensor) -> torch.Tensor:
        return x * angles.cos() + torch.cat([-x[..., 4:], x[..., :4]], -1) * angles.sin()

    x = 12 * w["model.embed_tokens.weight"][tokens]
    for layer in range(2):
        at = f"model.layers.{layer}"
        h = F.rms_norm(x, (32,), w[f"{at}.input_layernorm.weight"], 1e-5)
        q, k = (turned(heads(h, f"{at}.self_attn.{name}_proj.weight")) for name in "qk")
        k, v = (one.repeat_interleave(2, 1) for one in (k, heads(h, f"{at}.self_attn.v_proj.weight")))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + F.linear(h, w[f"{at}.self_attn.o_proj.weight"]) * (1.4 / 2**0.5)
        h = F.rms_norm(x, (32,), w[f"{at}.post_attention_layernorm.weight"], 1e-5)
        h = F.silu(F.linear(h, w[f"{at}.mlp.gate_proj.weight"])) * F.linear(h, w[f"{at}.mlp.up_proj.weight"])
        x = x + F.linear(h, w[f"{at}.mlp.down_proj.weight"]) * (1.4 / 2**0.5)
    x = F.rms_norm(x, (32,), w["model.norm.weight"], 1e-5)
    return F.linear(x / (32 / 16), w["model.embed_tokens.weight"])


def minicpm_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Write a model with random tensors, and return them."""
    generator = torch.Generator().manual_seed(5)
    tensors = {
        name: 0.2 * torch.randn(shape, generator=generator) + (1.0 if len(shape) == 1 else 0.0)
        for mapping in tensor_mappings(model_of(MINICPM), "minicpm")
        for name, shape in mapping.their_shapes().items()
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(MINICPM))
    return tensors


def test_minicpm_gives_its_logits_and_leaves_as_itself_or_as_granite(tmp_path: Path) -> None:
    """Granite computes the same with other fields, and transformers has a class for it."""
    tensors = minicpm_folder(tmp_path / "theirs")
    weights = HuggingFaceWeights(tmp_path / "theirs")
    assert weights.model is not None
    tokens = tokens_of(weights.model)
    expected = minicpm_logits(tensors, tokens)
    assert expected.std() > 0.5
    torch.testing.assert_close(our_logits(weights, tokens), expected, atol=3e-5, rtol=1e-5)
    write_folder(weights, weights.model, tmp_path / "same", None, model_type="minicpm")
    back = load_file(tmp_path / "same" / "model.safetensors")
    assert back.keys() == tensors.keys() and all(torch.equal(back[name], x) for name, x in tensors.items())
    written = json.loads((tmp_path / "same" / "config.json").read_text())
    assert {key: written[key] for key in MINICPM} == MINICPM
    write_folder(weights, weights.model, tmp_path / "granite", None)
    granite = load_theirs(tmp_path / "granite")
    assert granite.config.model_type == "granite"
    torch.testing.assert_close(their_logits(granite, tokens), expected, atol=3e-5, rtol=1e-5)


CASES = (*THEIRS, "minicpm")
"""The models of `THEIRS`, and one without a class in transformers."""


def losses_of_two_ranks(folders: dict[str, str]) -> dict[str, tuple[float, float]]:
    """One rank of ``layout.tp = 2``: the loss of each folder's model, and the share of its bytes read."""
    layout = Layout(tp=2, micro_batch=2)
    groups, found = open_world(layout, torch.device("cpu")), {}
    for name, folder in folders.items():
        weights = HuggingFaceWeights(Path(folder))
        assert weights.model is not None
        tokens = tokens_of(weights.model)
        batch = Batch(tokens, tokens.roll(-1, 1), torch.arange(2))
        engine = Engine(
            GPT(weights.model, seed=1), groups, stage_layers(Workload(weights.model, layout, 2)), batch, 1,
            OptimizerConfig(), seed=1, dtype=torch.float32, device=torch.device("cpu"), recorder=Recorder(),
        )  # fmt: skip
        fill_parameters(weights, engine)
        loss = engine.train_step(lambda batch=batch: batch, 1e-9, tokens.numel()).loss  # type: ignore[misc]
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        found[name] = (loss, weights.bytes_read / size)
        engine.close()
    close_world()
    return found


@pytest.fixture(scope="module")
def tensor_parallel_losses(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[dict[str, float], list[dict[str, tuple[float, float]]]]:
    """The loss of transformers for each case, and what both ranks of one world found."""
    top = tmp_path_factory.mktemp("theirs")
    folders = {name: str(top / str(number)) for number, name in enumerate(CASES)}
    expected = {}
    for name, folder in folders.items():
        if name in THEIRS:
            theirs = random_theirs(THEIRS[name]())
            theirs.save_pretrained(folder)
        else:
            theirs = minicpm_folder(Path(folder))
        model = HuggingFaceWeights(Path(folder)).model
        assert model is not None
        tokens = tokens_of(model)
        logits = their_logits(theirs, tokens) if name in THEIRS else minicpm_logits(theirs, tokens)
        targets = tokens.roll(-1, 1).flatten()
        expected[name] = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets))
    return expected, run_ranks(2, losses_of_two_ranks, folders)


@pytest.mark.parametrize("name", CASES)
def test_two_tensor_parallel_ranks_give_the_loss_and_read_about_half(
    name: str, tensor_parallel_losses: tuple[dict[str, float], list[dict[str, tuple[float, float]]]]
) -> None:
    expected, ranks = tensor_parallel_losses
    for found in ranks:
        loss, share = found[name]
        assert loss == pytest.approx(expected[name], rel=1e-5)
        assert share < 0.6, "its parts, and norms and a single key/value head, which every rank has"


def test_files_as_people_have_them_are_read(tmp_path: Path) -> None:
    """In several files; of the model without its output projection, as the hub's gpt2 is; bfloat16; the
    rotary base where version 4 wrote it."""
    theirs = random_theirs(THEIRS["gpt2"]())
    theirs.save_pretrained(tmp_path / "whole")
    theirs.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    theirs.transformer.save_pretrained(tmp_path / "base")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert any(name.startswith("h.0.") for name in load_file(tmp_path / "base" / "model.safetensors"))
    whole, *others = (HuggingFaceWeights(tmp_path / name) for name in ("whole", "sharded", "base"))
    for other in others:
        assert other.shapes == whole.shapes
        assert all(torch.equal(other.read(name), whole.read(name)) for name in whole.shapes)
    llama = random_theirs(THEIRS["llama"]()).to(torch.bfloat16)
    llama.save_pretrained(tmp_path / "llama")
    path = tmp_path / "llama" / "config.json"
    config = json.loads(path.read_text())
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    path.write_text(json.dumps(config))
    weights = HuggingFaceWeights(tmp_path / "llama")
    assert weights.model is not None and weights.model.rotary_base == 3e4
    kept = llama.model.layers[1].mlp.down_proj.weight
    assert torch.equal(weights.read("blocks.1.mlp.down.weight"), kept)


def test_large_models_leave_in_several_files_and_in_bfloat16(tmp_path: Path) -> None:
    weights = random_weights(**LLAMA)
    out = exported(weights, tmp_path / "out", dtype="bfloat16", shard_bytes=10_000)
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    theirs = load_theirs(out, dtype="auto")
    assert theirs.dtype == torch.bfloat16
    assert index["metadata"]["total_size"] == 2 * theirs.num_parameters()
    whole = load_theirs(exported(weights, tmp_path / "whole"))
    rounded = whole.to(torch.bfloat16).state_dict()
    assert all(torch.equal(rounded[name], tensor) for name, tensor in theirs.state_dict().items())


def test_float16_is_written_and_refused_where_it_would_overflow(tmp_path: Path) -> None:
    weights = random_weights(**LLAMA)
    theirs = load_theirs(exported(weights, tmp_path / "out", dtype="float16"), dtype="auto")
    assert theirs.dtype == torch.float16
    name = "blocks.0.mlp.down.weight"
    weights.read(name).mul_(1e9)
    with pytest.raises(BadInputError, match=rf"--dtype = \"float16\": .*{name} has values beyond 65,504"):
        exported(weights, tmp_path / "other", dtype="float16")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "mamba"}, 'model_type = "mamba": one of llama, mistral, qwen2, '),
        ({"mlp_bias": True}, "mlp_bias = true: null or false"),
        ({"hidden_act": "relu"}, 'hidden_act = "relu": silu or swish'),
        ({"rope_parameters": {"rope_type": "fourier", "factor": 8.0}}, 'rope_type = "fourier": one of def'),
        ({"rope_scaling": {"type": "linear", "factor": "x"}}, 'factor = "x"'),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 3}},
            "twist = 3: a field that rope_type",
        ),
        ({"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"rope_theta": 2e4}}, "one value"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 3},
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            "rope_scaling = .*: the values of rope_parameters",
        ),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: a field .* not understood"),
        ({"logit_scale": 0.1}, "logit_scale = 0.1: a field .* not understood"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* not understood"),
        ({"sliding_window": 4096}, "sliding_window = 4096: a field .* not understood"),
        ({"hidden_size": None}, "hidden_size = none: a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0: a whole number of at least 1"),
    ],
    ids=str,
)
def test_what_would_be_computed_otherwise_here_is_refused(config: dict[str, Any], told: str) -> None:
    whole = transformers.LlamaConfig(**ROTARY).to_dict() | {"rope_parameters": None} | config
    with pytest.raises(BadInputError, match=told) as caught:
        model_of(whole)
    assert "\n" not in str(caught.value)


def test_weights_that_are_not_those_of_the_config_are_refused_with_the_tensor(tmp_path: Path) -> None:
    out = exported(random_weights(**LLAMA), tmp_path / "out")
    file = out / "model.safetensors"
    tensors = load_file(file)
    bad = tensors.pop("model.layers.1.mlp.down_proj.weight")
    save_file(tensors, file)
    with pytest.raises(
        BadInputError, match=r"layers\.1\.mlp\.down_proj\.weight should be \(32, 48\), is not there"
    ):
        HuggingFaceWeights(out)
    save_file(tensors | {"model.layers.1.mlp.down_proj.weight": bad[:, :40].contiguous()}, file)
    with pytest.raises(BadInputError, match=r"should be \(32, 48\), is \(32, 40\)"):
        HuggingFaceWeights(out)
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(BadInputError, match="not readable"):
        HuggingFaceWeights(out)


def with_predictions(folder: Path) -> tuple[Any, Any]:
    """Write a DeepSeek-V3 with two prediction layers, and return both models of transformers."""
    from transformers.modeling_layers import MtpModel  # a second, in every process that collects these tests

    config = transformers.DeepseekV3Config(
        **LATENT | EXPERTS | {"first_k_dense_replace": 1}, n_group=3, topk_group=2, num_nextn_predict_layers=2
    )
    main = random_theirs(config)
    main.save_pretrained(folder)
    further = MtpModel(main, 2).eval()
    with torch.no_grad():
        for layer in further.layers:
            for parameter in layer.parameters():
                parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.ndim == 1))
    tensors = load_file(folder / "model.safetensors")
    for number, layer in enumerate(further.layers, 2):
        for name, values in layer.state_dict().items():
            whole = f"model.layers.{number}.{name.removeprefix('mtp_block.')}"
            tensors |= unstacked(whole.replace(".post_norm.", ".shared_head.norm."), values)
        tensors[f"model.layers.{number}.embed_tokens.weight"] = (
            main.model.embed_tokens.weight.detach().clone()
        )
        tensors[f"model.layers.{number}.shared_head.head.weight"] = main.lm_head.weight.detach().clone()
    save_file({name: values.contiguous() for name, values in tensors.items()}, folder / "model.safetensors")
    written = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 2}
    (folder / "config.json").write_text(json.dumps(written))
    return main, further


def unstacked(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the tensors of each expert, as DeepSeek's files have them."""
    if name.endswith("experts.down_proj"):
        base = name.removesuffix("down_proj")
        return {f"{base}{expert}.down_proj.weight": one for expert, one in enumerate(values)}
    if name.endswith("experts.gate_up_proj"):
        base = name.removesuffix("gate_up_proj")
        halves = {"gate_proj": 0, "up_proj": 1}
        return {
            f"{base}{expert}.{own}.weight": one.chunk(2)[half].clone()
            for expert, one in enumerate(values)
            for own, half in halves.items()
        }
    return {name: values}


@torch.no_grad()
def test_prediction_layers_of_a_deepseek_predict_what_they_predict_in_transformers(tmp_path: Path) -> None:
    main, further = with_predictions(tmp_path / "theirs")
    weights = HuggingFaceWeights(tmp_path / "theirs")
    model = weights.model
    assert model is not None and (model.prediction_layers, model.prediction_input) == (2, "normed")
    tokens = torch.randint(90, (1, model.sequence + 1), generator=torch.Generator().manual_seed(6))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    hidden, expected = main.model(inputs).last_hidden_state, []
    for number in range(2):
        ahead = torch.nn.functional.pad(targets[:, number:], (0, number))  # token i + 1 + number
        places = torch.arange(model.sequence)[None]
        hidden = further.forward_layer(number, hidden, places, None, input_ids=ahead)
        logits, count = main.lm_head(hidden)[:, : model.sequence - 1 - number], 1 + number
        expected.append(
            float(torch.nn.functional.cross_entropy(logits[0], targets[0, count:], reduction="sum"))
        )
    layers = loaded(weights)
    x = inputs
    for layer in layers[:-1]:
        x = layer(x, Context())
    layers[-1].train()
    _, *found = layers[-1](x, Context(targets=targets)).tolist()
    share = model.prediction_weight / 2
    assert found == pytest.approx([share * one for one in expected], rel=1e-5)
    assert weights.read("head.predictions.0.projection.weight").shape == (32, 64)
    whole = weights.read("head.predictions.0.projection.weight")
    boxes = [(slice(3, 9), slice(5, 50)), (slice(0, 32), slice(40, 64))]
    for part, box in zip(
        weights.read_parts("head.predictions.0.projection.weight", boxes), boxes, strict=True
    ):
        assert torch.equal(part, whole[box])


def test_prediction_layers_that_do_not_fit_are_left_out_with_a_line(tmp_path: Path) -> None:
    with_predictions(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(32, 60)
    save_file(tensors, file)
    weights = HuggingFaceWeights(tmp_path / "theirs")
    assert weights.model is not None and weights.model.prediction_layers == 0 and weights.num_left_out == 2
    assert not any(name.startswith("head.predictions.") for name in weights.shapes)
    done = CliRunner().invoke(
        build_app(), ["checkpoint", "import", str(tmp_path / "theirs"), str(tmp_path / "run")]
    )
    assert done.exit_code == 0, done.output
    told = "left out: the prediction layers of num_nextn_predict_layers = 2: model.layers.3.eh_proj.weight"
    assert f"{told} should be (32, 64), is (32, 60)" in done.output


def test_tensors_after_the_prediction_layers_are_refused(tmp_path: Path) -> None:
    out = exported(random_weights(**OURS["deepseek 3"]), tmp_path / "out")
    file, config = out / "model.safetensors", out / "config.json"
    table = torch.ones(90, 32)
    save_file(load_file(file) | {"model.layers.2.embed_tokens.weight": table}, file)
    with pytest.raises(BadInputError, match=r"does not name: model\.layers\.2\.embed_tokens\.weight"):
        HuggingFaceWeights(out)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    assert HuggingFaceWeights(out).num_left_out == 1
    save_file(load_file(file) | {"model.layers.3.embed_tokens.weight": table}, file)
    with pytest.raises(BadInputError, match=r"does not name: model\.layers\.3\.embed_tokens\.weight"):
        HuggingFaceWeights(out)


def test_biases_of_a_router_keep_float32_in_an_export_in_half_precision(tmp_path: Path) -> None:
    out = exported(random_weights(**OURS["deepseek 3, experts"]), tmp_path / "out", dtype="bfloat16")
    dtypes = {name: tensor.dtype for name, tensor in load_file(out / "model.safetensors").items()}
    biases = {name for name in dtypes if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2 and {name for name in dtypes if dtypes[name] == torch.float32} == biases


def test_tensors_that_would_be_dropped_are_refused_by_name(tmp_path: Path) -> None:
    """A Llama with biases whose config.json is silent about them computed something else here."""
    out = exported(random_weights(**LLAMA), tmp_path / "out")
    file = out / "model.safetensors"
    tensors = load_file(file)
    table = tensors["model.embed_tokens.weight"]
    derived = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(tensors | derived | {"lm_head.weight": table.clone()}, file)
    assert HuggingFaceWeights(out).shapes, "a copy of the tied embedding, and what follows from config.json"
    for more, says in (
        ({"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}, r"q_proj\.bias"),
        ({"lm_head.weight": table + 1}, r"does not name: lm_head\.weight"),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int8)}, r"norm\.weight is stored as I8"),
        ({f"score.{number}.weight": torch.ones(1) for number in range(5)}, "and 2 more"),
    ):
        save_file(tensors | more, file)
        with pytest.raises(BadInputError, match=says) as caught:
            HuggingFaceWeights(out)
        assert "\n" not in str(caught.value)


def test_a_tokenizer_that_does_not_fit_its_model_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["one two three"], 400)
    small, large = (
        exported(random_weights(**LLAMA | {"vocabulary": size}), tmp_path / f"{size}")
        for size in (90, tokenizer.vocabulary)
    )
    for folder in (small, large):
        tokenizer.save(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": [5, 7]}))
    with pytest.raises(BadInputError, match=f"has {tokenizer.vocabulary} tokens"):
        import_hugging_face(small, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    done = import_hugging_face(large, tmp_path / "run")
    assert done["other_end"].startswith("documents end with token 0") and "[5, 7]" in done["other_end"]


def test_an_import_holds_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that prepares a large model has less memory than the model needs."""
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0
    read = HuggingFaceWeights.read

    def counted(self: HuggingFaceWeights, name: str) -> torch.Tensor:
        nonlocal most
        values = read(self, name)
        alive.append(weakref.ref(values))
        most = max(most, sum(one() is not None for one in alive))
        return values

    weights = random_weights(**LLAMA)
    folder = exported(weights, tmp_path / "theirs")
    monkeypatch.setattr(HuggingFaceWeights, "read", counted)
    import_hugging_face(folder, tmp_path / "run")
    assert len(alive) == len(weights.shapes) and most <= 2
    found = load_model(Run(tmp_path / "run").checkpoints_path / "step-0")
    assert all(torch.equal(found[name], weights.read(name)) for name in weights.shapes)


def test_the_chat_template_and_generation_config_travel_along(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["one two three"], 400)
    weights = random_weights(**LLAMA | {"vocabulary": tokenizer.vocabulary})
    write_folder(weights, weights.model, tmp_path / "theirs", tokenizer)
    (tmp_path / "theirs" / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    generation = json.dumps({"eos_token_id": [3, 5], "temperature": 0.6})
    (tmp_path / "theirs" / "generation_config.json").write_text(generation)
    import_hugging_face(tmp_path / "theirs", tmp_path / "run")
    export_hugging_face(str(tmp_path / "run"), tmp_path / "again", "float32")
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    said = back.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert said == "Hello!"
    assert (tmp_path / "again" / "generation_config.json").read_text() == generation


# From the command line


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


def make_run(path: Path, corpus: Path, **keys: Any) -> Run:
    """With a checkpoint after 7 steps."""
    run = Run(path)
    model = keys | {"vocabulary": 320}
    overrides = [f"model.{key}={json.dumps(value)}" for key, value in model.items()]
    job = load_job("tiny", [f"data.corpus={corpus}", *overrides])
    run.create_or_resume(job)
    weights = random_weights(**job.model.model_dump())
    values = {f"model.{name}": weights.read(name) for name in weights.shapes}
    values["optimizer.first.embedding.tokens.weight"] = torch.ones(3)
    parts = [TensorShard(name, tuple(x.shape), (0,) * x.dim(), x) for name, x in values.items()]
    save(CheckpointFolder(run.checkpoints_path), 7, parts, {"step": 7})
    return run


def command(*arguments: object) -> Result:
    return CliRunner().invoke(build_app(), ["checkpoint", *map(str, arguments)])


@pytest.mark.parametrize("whole_run", [True, False], ids=["run", "checkpoint"])
def test_a_run_is_exported_with_its_tokenizer_and_generates_the_same_text_after_import(
    whole_run: bool, tmp_path: Path, corpus: Path
) -> None:
    run = make_run(tmp_path / "run", corpus, **LLAMA)
    done = command(
        "export", run.path if whole_run else run.checkpoints_path / "step-7", tmp_path / "hf", "--json"
    )
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["model_type"] == "llama" and json.loads(done.stdout)["tokenizer"]
    theirs, tokenizer = (
        load_theirs(tmp_path / "hf"),
        transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"),
    )
    text = "alpha épsilon 漢字 eta[3];"
    own = open_run(run)._tokenizer
    assert tokenizer.encode(text) == own.encode(text) and tokenizer.decode(own.encode(text)) == text
    assert tokenizer.eos_token_id == theirs.config.eos_token_id == own.end_of_document
    assert theirs.generation_config.eos_token_id == own.end_of_document
    ids = torch.tensor([own.encode("alpha")])
    said = theirs.generate(ids, attention_mask=ids * 0 + 1, max_new_tokens=8, do_sample=False)[
        0, ids.shape[1] :
    ]
    ours = "".join(open_run(run).generate("alpha", 8, temperature=0))
    assert own.decode(said.tolist(), skip_special=True).startswith(ours) and ours

    made = command("import", tmp_path / "hf", tmp_path / "back")
    assert made.exit_code == 0 and "with its tokenizer" in made.stdout, made.output
    back = Run(tmp_path / "back")
    assert "".join(open_run(back).generate("alpha", 8, temperature=0)) == ours
    assert command("export", back.path, tmp_path / "again").exit_code == 0
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert first.keys() == second.keys() and all(torch.equal(second[name], x) for name, x in first.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again", "back", "hf", "run"]


def test_an_export_leaves_prediction_layers_out_and_says_so(tmp_path: Path, corpus: Path) -> None:
    """transformers has no class that computes them, and its logits are the main model's."""
    run = make_run(tmp_path / "run", corpus, **(LLAMA | {"prediction_layers": 2}))
    done = command("export", run.path, tmp_path / "hf")
    assert done.exit_code == 0 and "model.prediction_layers = 2" in done.output, done.output
    weights = HuggingFaceWeights(tmp_path / "hf")
    assert weights.model is not None and weights.model.prediction_layers == 0
    kept = load_model(CheckpointFolder(run.checkpoints_path).of_step(7))
    assert {name for name in kept if name not in weights.shapes} == {
        name for name in kept if name.startswith("head.predictions.")
    }
    tokens = tokens_of(weights.model)
    ours = our_logits(Kept(run.job().model, kept), tokens)
    torch.testing.assert_close(ours, their_logits(load_theirs(tmp_path / "hf"), tokens), atol=3e-5, rtol=1e-5)


NO_COUNTERPART = [
    ({"block": "parallel"}, 'model.block = "parallel": serial in '),
    ({"position": "none"}, 'model.position = "none": rotary in'),
    ({"position": "learned"}, 'model.position = "learned": rotary in'),
    ({"bias": True}, "model.bias = true: false in"),
    ({"window": 4}, 'model.activation = "gelu": swiglu in mistral'),
    (GPT2 | {"bias": False}, "model.bias = false: true in gpt2"),
    (GPT2 | {"activation": "relu2"}, 'model.activation = "relu2": '),
    (GPT2 | {"window": 4}, "model.window = 4: .* in gpt2, the nearest model type"),
    (GPT2 | {"kv_heads": 2}, "model.kv_heads = 2: off in gpt2"),
    (GPT2 | {"head_dim": 16}, "model.head_dim = 16: off in gpt2"),
    (LLAMA | {"attention_sinks": True}, "model.attention_sinks = true: false in llama"),
]


@pytest.mark.parametrize(("keys", "told"), NO_COUNTERPART, ids=str)
def test_a_model_without_a_counterpart_is_refused_and_nothing_is_written(
    keys: dict[str, Any], told: str, tmp_path: Path, corpus: Path
) -> None:
    run = make_run(tmp_path / "run", corpus, **(TINY | keys))
    done = command("export", run.path, tmp_path / "hf")
    assert isinstance(done.exception, BadInputError)
    with pytest.raises(BadInputError, match=told) as caught:
        raise done.exception
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_is_there_already_stays_as_it_is(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, **LLAMA)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    for arguments in [("export", run.path), ("import", exported(random_weights(**LLAMA), tmp_path / "hf"))]:
        refused = command(*arguments, tmp_path / "full")
        assert isinstance(refused.exception, BadInputError)
        assert "must be new or an empty folder" in str(refused.exception)
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine.txt"]


def test_what_a_kill_left_halfway_is_replaced(tmp_path: Path) -> None:
    weights = random_weights(**LLAMA)
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "model-00001-of-00009.safetensors").write_bytes(b"half")
    (tmp_path / "out").mkdir()
    out = exported(weights, tmp_path / "out")
    assert len({path.stat().st_mode for path in out.iterdir()}) == 1, "who reads one file may read all"
    assert not (tmp_path / ".out.partial").exists()
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


def test_a_damaged_checkpoint_does_not_leave(tmp_path: Path, corpus: Path) -> None:
    run = make_run(tmp_path / "run", corpus, **LLAMA)
    (path,) = (run.checkpoints_path / "step-7").glob("*.distcp")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    done = command("export", run.path, tmp_path / "hf")
    assert isinstance(done.exception, BadInputError) and "its bytes changed" in str(done.exception)
    assert not (tmp_path / "hf").exists()


def test_a_run_whose_corpus_is_missing_is_exported_without_tokenizer_and_reports_it(
    tmp_path: Path, corpus: Path
) -> None:
    run = make_run(tmp_path / "run", corpus, **LLAMA)
    text = run.job_path.read_text().replace(str(corpus), str(tmp_path / "gone"))
    run.job_path.write_text(text)
    done = command("export", run.path, tmp_path / "hf")
    assert done.exit_code == 0 and "no tokenizer: data.corpus" in done.stdout
    assert not (tmp_path / "hf" / "tokenizer.json").exists()
    assert load_theirs(tmp_path / "hf").config.eos_token_id is None


def test_recipes_of_known_models_have_a_counterpart() -> None:
    kinds = {name: kind_of(load_job(name).model) for name in ("embedded", "tiny", "llama3-8b", "gpt2-124m")}
    assert kinds == {"embedded": "gemma3_text", "tiny": "arcee", "llama3-8b": "llama", "gpt2-124m": "gpt2"}
    assert kind_of(ModelConfig(**(LLAMA | {"window": 5}))) == "mistral"
