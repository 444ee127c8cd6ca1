"""If these break: a plan counts on other activations than a device keeps, or the table in
docs/benchmarks/activations.md is wrong."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from activations import DTYPES, MODES, formula, measure
from myriad.model.activation_memory import Recompute, kept_bytes_per_micro_batch, kept_bytes_per_token
from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig

SMALL: dict[str, Any] = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 640, "vocabulary": 300}
SHAPES: list[dict[str, Any]] = [
    {},
    {"activation": "swiglu", "ffn_hidden": 176, "dropout": 0.1},
    {"activation": "gelu_tanh", "head_dim": 8},
    {"block": "parallel", "kv_heads": 2, "activation": "relu2", "dropout": 0.1},
    {"norm": "layer", "bias": True, "position": "learned"},
    {"position": "none", "kv_heads": 2},
    {"window": 64, "window_pattern": (True, False)},
    {"window": 100, "kv_heads": 2},
    {"sequence": 256, "kv_heads": 2, "position": "none"},
    {"sequence": 48},
    {"sequence": 1024, "window": 100, "block": "parallel"},
    {"qk_norm": "head", "kv_heads": 2},
    {"qk_norm": "all", "norm_placement": "after", "dropout": 0.1},
    {"norm_placement": "both", "activation": "geglu_tanh", "norm_zero_centered": True, "ffn_hidden": 176},
    {"block": "parallel", "parallel_norms": 2, "norm": "layer", "bias": True, "attention_bias": "all"},
    {"attention_softcap": 5.0, "kv_heads": 1, "qk_norm": "heads", "qk_norm_kind": "layer"},
    {"attention_sinks": True, "attention_scale": 0.2},
    {"rotary_pattern": (True, False), "rotary_fraction": 0.5, "residual_scale": 0.5},
    {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16, "sequence": 256},
    {"embedding_scale": 8.0, "logit_scale": 0.5, "logit_softcap": 30.0},
    {"prediction_layers": 2, "kv_heads": 2, "dropout": 0.1, "tied": False},
    {"prediction_layers": 2, "prediction_input": "normed", "kv_heads": 2},
    {"prediction_layers": 1, "norm": "layer", "window": 64, "block": "parallel"},
    {"experts": 4, "expert_hidden": 32, "norm_placement": "after"},
    {"experts": 4, "expert_hidden": 96, "dense_layers": 1, "prediction_layers": 1},
    {"experts": 8, "experts_per_token": 3, "shared_experts": 2, "router_scores": "sigmoid", "dropout": 0.1},
    {"experts": 8, "router_scores": "sigmoid", "balance_bias_rate": 0.1, "router_normalized": False},
    {"experts": 8, "experts_per_token": 3, "router_groups": 4, "router_group_limit": 2},
    {"experts": 4, "shared_experts": 1, "shared_expert_gate": True, "activation": "swiglu"},
    {
        "experts": 4,
        "expert_hidden": 32,
        "bias": True,
        "router_logit_bias": True,
        "activation": "clamped_swiglu",
        "attention_bias": "all",
        "attention_sinks": True,
        "window": 64,
        "window_pattern": (True, False),
        "kv_heads": 2,
    },
    {
        "experts": 4,
        "experts_per_token": 1,
        "router_normalized": False,
        "router_z_loss": 0.1,
        "balance_loss": 0,
    },
]

KINDS: tuple[tuple[torch.dtype, Recompute], ...] = (
    (torch.bfloat16, "none"),
    (torch.bfloat16, "selective"),
    (torch.float32, "full"),
)
"""Types of values and kinds of recomputation that are measured."""


@pytest.mark.parametrize("keys", SHAPES, ids=str)
def test_every_layer_keeps_to_the_byte_what_the_formula_predicts(keys: dict[str, Any]) -> None:
    model = ModelConfig(**(SMALL | keys))
    for index in range(4):
        for dtype, mode in KINDS:
            found = measure(model, index, Boundary(), dtype, mode)
            assert found == formula(model, index, 1, dtype, mode), f"layer {index}, {dtype}, {mode}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_mode_that_saves_nothing_is_not_offered(dtype: torch.dtype) -> None:
    """16 widths of the stream in a plain block, of which 6 need not be kept, and 1 must."""
    model = ModelConfig(**SMALL)
    stream = 2 * 640 * 64 * dtype.itemsize
    none, selective, full = (measure(model, 1, Boundary(), dtype, mode) for mode in MODES)
    assert none == pytest.approx(16 * stream, rel=0.05)
    assert none - selective == 6 * stream
    assert full == stream


def test_the_formula_of_a_large_model() -> None:
    """GPT of 175 billion parameters, tensor-parallel 8, bfloat16: 2 h of 2 bytes for the gathered inputs, and
    14 h / 8; with a float32 for each head's softmax and each norm."""
    model = ModelConfig(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
    per_token = kept_bytes_per_token(model, "block", 5, tp=8, bytes_per_value=2)
    assert per_token == 2 * (2 * 12288 + 14 * 12288 / 8) + 4 * 96 / 8 + 2 * 4 / 8
    selective = kept_bytes_per_token(model, "block", 5, tp=8, bytes_per_value=2, recompute="selective")
    assert per_token - selective == 2 * (2 * 12288 + 4 * 12288 / 8)
    assert kept_bytes_per_token(model, "block", tp=8, recompute="full") == 2 * 12288 / 8
    assert kept_bytes_per_micro_batch(model, "head", tp=8) == 4 * 12288 * 51200 // 8
    assert kept_bytes_per_micro_batch(model, "head", tp=8, recompute="full") == 0


def test_more_ranks_or_more_recomputation_never_keep_more() -> None:
    for keys in SHAPES:
        model = ModelConfig(**(SMALL | keys))
        kept = [
            [kept_bytes_per_token(model, "block", tp=tp, recompute=mode) for mode in MODES]
            for tp in (1, 2, 4)
        ]
        for row in kept:
            assert row == sorted(row, reverse=True)
        for column in zip(*kept, strict=True):
            assert list(column) == sorted(column, reverse=True)


def test_ranks_that_cannot_share_a_vocabulary_evenly_have_equal_rows() -> None:
    model = ModelConfig(vocabulary=50257, vocabulary_multiple=1)
    assert kept_bytes_per_micro_batch(model, "head", tp=4) == 4 * model.hidden * 12565


def test_the_formula_needs_no_torch() -> None:
    code = "import sys, myriad.model.activation_memory; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
