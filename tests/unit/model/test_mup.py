"""If these break: with `model.mup_base_width`, values of a wider model move farther or less far in a step, so
the best learning rate depends on the width again."""

import torch

from myriad.model.config import ModelConfig
from myriad.model.definition import Context, rate_of
from myriad.model.gpt import GPT, build_full

SMALL = ModelConfig(layers=2, heads=4, vocabulary=64, sequence=16, mup_base_width=64)


def sizes_after(config: ModelConfig, steps: int = 4) -> dict[str, float]:
    """Mean absolute change, in a few steps of Adam, of the residual stream and the logits."""
    definition, layers = GPT(config, seed=0), build_full(config, seed=0)
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(0))
    context = Context(targets=tokens[:, 1:], samples=torch.arange(4))
    groups = [
        {"params": [parameter], "lr": 0.01 * rate_of(definition, f"{prefix}.{name}", parameter.shape)}
        for prefix, layer in zip(definition.names, layers, strict=True)
        for name, parameter in layer.named_parameters()
        if f"{prefix}.{name}" not in definition.tied
    ]
    optimizer = torch.optim.Adam(groups)

    def coordinates() -> dict[str, torch.Tensor]:
        with torch.no_grad():
            x, found = tokens[:, :-1], {}
            for name, layer in zip(definition.names[:-1], layers, strict=False):
                x = layer(x, context)
                found[name] = x
            return found | {"logits": layers[-1].logits(x)}

    before = coordinates()
    for _ in range(steps):
        x = tokens[:, :-1]
        for layer in layers:
            x = layer(x, context)
        optimizer.zero_grad()
        (x / 64).backward()
        optimizer.step()
    return {name: float((x - before[name]).abs().mean()) for name, x in coordinates().items()}


def grown(base: int | None) -> dict[str, float]:
    """How much farther the values move at width 256 than at 64."""
    narrow, wide = (
        sizes_after(SMALL.model_copy(update={"hidden": width, "mup_base_width": base})) for width in (64, 256)
    )
    return {name: wide[name] / narrow[name] for name in narrow}


def test_coordinates_move_equally_far_at_every_width() -> None:
    assert all(0.6 < ratio < 1.4 for ratio in grown(64).values())


def test_without_it_they_move_farther_the_wider_the_model() -> None:
    ratios = grown(None)
    assert min(ratios["blocks.0"], ratios["blocks.1"]) > 8
    assert ratios["logits"] > 2


def test_at_the_base_width_only_the_scale_of_attention_differs() -> None:
    base, plain = (GPT(SMALL.model_copy(update={"mup_base_width": w, "hidden": 64}), 0) for w in (64, None))
    for index in range(len(plain.names)):
        for name, values in plain.initial(index).items():
            assert torch.equal(base.initial(index)[name], values)
            assert base.rate_of(f"{base.names[index]}.{name}") == 1
    assert (base.config.logit_factor, base.config.score_scale) == (1, 1 / 16)
