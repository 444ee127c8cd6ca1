"""If these break: a ready model is not the published one."""

import pytest

from myriad.job import Job, load_job, recipe_names
from myriad.model.config import ModelConfig

PUBLISHED = {
    "gpt2-124m": 124.4e6,
    "gpt2-355m": 354.8e6,
    "gpt2-774m": 774.0e6,
    "gpt2-1558m": 1557.6e6,
    "gpt-13b": 12.85e9,
    "megascale-175b": 175e9,
    "megascale-530b": 530e9,
    "llama3-8b": 8.03e9,
    "llama3-70b": 70.6e9,
    "llama3-405b": 405.9e9,
}


def model(name: str) -> ModelConfig:
    return load_job("tiny", [f"model={name}"]).model


def test_every_recipe_that_is_not_tiny_has_a_published_size():
    assert {name for name in recipe_names("models") if not name.startswith("tiny")} == set(PUBLISHED)


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_parameters_are_as_published(name):
    assert model(name).num_parameters() == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", recipe_names("models"))
def test_every_recipe_can_be_cut_in_two(name):
    config = model(name)
    tp = 1 if config.heads % 2 else 2
    assert isinstance(load_job("tiny", [f"model={name}", f"layout.tp={tp}", "layout.pp=2"]), Job)


def test_flops_of_a_plain_gpt_are_megascales_formula():
    h, s, layers, v = 12288, 2048, 96, 64000
    formula = 72 * layers * h * h * (1 + s / (6 * h) + v / (12 * layers * h))
    assert model("megascale-175b").flops_per_token() == pytest.approx(formula, rel=1e-9)
