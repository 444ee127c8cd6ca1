"""If these fail, the planner and the optimizer see different matrices."""

from typing import Any

import pytest
import torch

from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import is_hidden_matrix, shard_of
from myriad.model.gpt import GPT
from myriad.model.matrix_shapes import hidden_matrices

LATENT = {"kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"bias": True, "position": "learned", "norm": "layer"},
    "swiglu": {"activation": "swiglu", "kv_heads": 2, "qk_norm": "heads", "tied": False},
    "predictions": {"prediction_layers": 2},
    "latent": LATENT | {"q_lora_rank": 12},
    "latent-plain-queries": LATENT,
    "experts in some blocks": {
        "experts": 4, "shared_experts": 2, "expert_hidden": 8, "expert_every": 2, "prediction_layers": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("tp", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_they_are_those_of_the_layers_with_fused_ones_apart(name: str, tp: int) -> None:
    config = ModelConfig(layers=2, hidden=32, heads=4, sequence=16, vocabulary=90, **MODELS[name])
    definition, boundary = GPT(config, seed=1), Boundary()
    boundary.size = tp
    for index, prefix in enumerate(definition.names):
        with torch.device("meta"):
            layer = definition.build(index, boundary)
        shapes, local = [], 0
        for path, parameter in layer.named_parameters():
            full = f"{prefix}.{path}"
            if not is_hidden_matrix(definition, index, full, parameter.shape):
                continue
            rows, columns = parameter.shape
            local += rows * columns
            cut = shard_of(definition, full)
            if cut is None:
                shapes.append((rows, columns))
            elif cut.dim == 0:
                shapes += [(part, columns) for part in cut.parts or (cut.full_size(rows, tp),)]
            else:
                shapes.append((rows, cut.full_size(columns, tp)))
        found = hidden_matrices(config, index, tp)
        assert sorted((one.rows, one.columns) for one in found) == sorted(shapes)
        assert sum(one.local for one in found) == local
