"""If these fail, a name that --help offers does not work, or a recipe is not the model it is named after."""

import tomllib
from importlib import resources
from typing import Any

import pytest

from myriad.job import load_job, recipe_names
from myriad.units import parse_bytes


@pytest.mark.parametrize("name", recipe_names("jobs"))
def test_every_job_can_be_planned_as_it_is(name: str) -> None:
    assert load_job(name).name == name


@pytest.mark.parametrize("name", recipe_names("models"))
def test_every_model_fits_the_smallest_job(name: str) -> None:
    load_job("tiny", [f"model={name}"])


@pytest.mark.parametrize(
    ("name", "world", "parameters"),
    [
        ("gpt2-124m", 8, 124e6),
        ("gpt2-1558m", 8, 1558e6),
        ("gpt-13b", 32, 12.8e9),
        ("megascale-175b-256", 256, 175e9),
        ("megascale-175b-12288", 12288, 175e9),
        ("megascale-530b", 2240, 530e9),
        ("llama3-8b", 64, 8.03e9),
        ("llama3-70b", 1024, 70.6e9),
        ("llama3-405b", 8192, 405e9),
        ("tiny-3d", 8, 0.23e6),
    ],
)
def test_published_jobs_have_the_published_size(name: str, world: int, parameters: float) -> None:
    job = load_job(name)
    assert job.layout.world == world
    assert job.model.num_parameters() == pytest.approx(parameters, rel=0.01)


def test_the_window_of_megascale_saves_what_its_mfu_implies() -> None:
    """The comment in the recipe says 1.1 % of FLOPs."""
    windowed = load_job("megascale-175b-256").model.flops_per_token()
    full = load_job("megascale-175b-256", ["model.window=off"]).model.flops_per_token()
    assert 1 - windowed / full == pytest.approx(0.011, abs=0.001)


@pytest.mark.parametrize("name", recipe_names("clusters"))
def test_every_cluster_says_what_a_planner_needs(name: str) -> None:
    text = (resources.files("myriad") / "recipes" / "clusters" / f"{name}.toml").read_text()
    cluster: dict[str, Any] = tomllib.loads(text)
    assert cluster["name"] == name
    accelerator = cluster["accelerator"]
    assert accelerator["peak_flops_per_second"] > 0 and parse_bytes(accelerator["memory_bytes"]) > 2**30
    expected = {"node", "network"} if cluster["nodes"] > 1 else {"node"}
    assert set(cluster["links"]) == expected
    for link in cluster["links"].values():
        assert set(link) == {"bytes_per_second", "latency_seconds"}
    if name[-1].isdigit() and "x" in name:
        assert cluster["nodes"] * cluster["accelerators_per_node"] == int(name.split("-")[-1].split("x")[0])
