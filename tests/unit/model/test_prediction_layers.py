"""If these break: prediction layers learn other tokens than those after the next one, or validation and
sampling count them."""

import pytest
import torch
from torch.nn import functional as F

from myriad.model.boundary import Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import GPT, build_full
from myriad.model.residual import Residual
from myriad.planner.cost.stage_layers import layer_parameters
from myriad.planner.memory.layer_memory import layer_elements

MODEL = ModelConfig(
    layers=2, hidden=32, heads=4, vocabulary=100, vocabulary_multiple=8, sequence=12, prediction_layers=2
)


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + MODEL.norm_epsilon).rsqrt()


@pytest.mark.parametrize("keys", [{}, {"tied": False, "embedding_scale": 3.0, "logit_scale": 0.5}], ids=str)
def test_each_layer_predicts_one_token_farther(keys: dict[str, object]) -> None:
    """Against section 2.2 of DeepSeek-V3's report, written plainly; all norms have weights of 1."""
    model = MODEL.model_copy(update=keys)
    layers = build_full(model, seed=1)
    text = torch.randint(100, (3, 13), generator=torch.Generator().manual_seed(2))
    tokens, targets = text[:, :-1], text[:, 1:]
    context = Context(targets=targets, samples=torch.arange(3))
    stream = tokens
    for layer in layers[:-1]:
        stream = layer(stream, context)
    head = layers[-1]
    found = head(stream, context)
    table, output = layers[0].tokens.weight, head.output.weight
    assert head.tokens.weight is table
    assert (output is table) == model.tied

    def loss(x: torch.Tensor, distance: int) -> torch.Tensor:
        logits = model.logit_scale * (root_mean_square(x) @ output.t())[:, : 12 - distance, :100]
        return F.cross_entropy(logits.flatten(0, 1), targets[:, distance:].flatten(), reduction="sum")

    expected = [loss(stream, 0)]
    for k, module in enumerate(head.predictions, 1):
        # the token k positions ahead is the target k - 1 ahead; the last ones do not matter
        ahead = torch.cat([targets[:, k - 1 :], torch.zeros(3, k - 1, dtype=torch.int64)], 1)
        both = [root_mean_square(stream), root_mean_square(model.embedding_scale * table[ahead])]
        stream = module.block(torch.cat(both, -1) @ module.projection.weight.t(), context)
        stream = stream.total() if isinstance(stream, Residual) else stream
        expected.append(loss(stream, k) * model.prediction_weight / 2)
    assert torch.allclose(found, torch.stack(expected), rtol=1e-5)

    head.eval()
    assert torch.equal(head(layers[1](layers[0](tokens, context), context), context)[1:], torch.zeros(2))


def test_the_sizes_are_those_of_the_built_model() -> None:
    for keys in (
        {},
        {"tied": False},
        {"norm": "layer", "bias": True, "activation": "swiglu", "qk_norm": "head"},
    ):
        model = MODEL.model_copy(update=keys)
        parameters = {id(parameter): parameter for parameter in build_full(model, 0).parameters()}
        padding = 4 * model.hidden * (1 if model.tied else 2)
        assert sum(one.numel() for one in parameters.values()) == model.num_parameters() + padding
        for tp in (1, 2):
            boundary = Boundary()
            boundary.size = tp
            with torch.device("meta"):
                head = GPT(model, 0).build(3, boundary)
            own = sum(parameter.numel() for parameter in head.parameters())
            shared = head.tokens.weight.numel() if model.tied else 0  # one table in two places
            assert layer_elements(model, "head", float(tp)) == own - shared
        assert layer_parameters(model)[-1] == layer_elements(model, "head", 1.0)
    further = (
        MODEL.layer_flops_per_token()[-1]
        - MODEL.model_copy(update={"prediction_layers": 0}).layer_flops_per_token()[-1]
    )
    block = MODEL.layer_flops_per_token()[1]
    assert further == 2 * (block + 6 * 32 * (2 * 32 + 100))
