"""Tiny models of each kind that Hugging Face knows too, with weights in which nothing is zero or one."""

from pathlib import Path
from typing import Any

import torch

from myriad.checkpoint.checkpoint_files import Weights
from myriad.checkpoint.foreign.hugging_face import write_folder
from myriad.model.config import ModelConfig
from myriad.model.definition import Context, values_of_rank
from myriad.model.gpt import GPT, build_full

TINY = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 24, "vocabulary": 90, "vocabulary_multiple": 64}
LLAMA = TINY | {
    "activation": "swiglu",
    "kv_heads": 2,
    "ffn_hidden": 48,
    "rotary_base": 5e5,
    "norm_epsilon": 1e-3,
}
GPT2 = TINY | {"norm": "layer", "position": "learned", "bias": True}

Tensors = dict[str, torch.Tensor]


class Kept:
    """Weights in memory."""

    def __init__(self, model: ModelConfig, values: Tensors) -> None:
        self.path, self.model, self._values = Path("memory"), model, values
        self.shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}

    def read(self, name: str) -> torch.Tensor:
        return self._values[name]


def random_weights(**keys: Any) -> Kept:
    """Every element moved away from where training begins, so that each tensor counts."""
    model = ModelConfig(**keys)
    generator = torch.Generator().manual_seed(5)
    values = {}
    for prefix, layer in zip(GPT(model, 1).names, build_full(model, 1), strict=True):
        for name, parameter in layer.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            values[f"{prefix}.{name}"] = parameter.detach() + 0.2 * noise
    for name in ("embedding.tokens.weight", "head.output.weight"):
        values[name] = values[name][: model.vocabulary]
    return Kept(model, {name: x for name, x in values.items() if name not in GPT(model, 1).tied})


def tokens_of(model: ModelConfig) -> torch.Tensor:
    return torch.randint(model.vocabulary, (2, model.sequence), generator=torch.Generator().manual_seed(6))


@torch.no_grad()
def loaded(weights: Weights) -> torch.nn.ModuleList:
    """The layers with these weights."""
    assert weights.model is not None
    definition, layers = GPT(weights.model, 1), build_full(weights.model, 1).eval()
    for prefix, layer in zip(definition.names, layers, strict=True):
        for name, parameter in layer.named_parameters():
            if f"{prefix}.{name}" in weights.shapes:
                whole = f"{prefix}.{name}"
                parameter.copy_(values_of_rank(definition, whole, weights.read(whole)))
    return layers


@torch.no_grad()
def our_logits(weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
    """``[B, S, V]``."""
    x, layers = tokens, loaded(weights)
    for layer in layers[:-1]:
        x = layer(x, Context())
    return layers[-1].logits(x)


def exported(weights: Kept, out: Path, **options: Any) -> Path:
    write_folder(weights, weights.model, out, None, **options)
    return out
