"""If these break, a GPU's AdamW or LAMB moves parameters differently from the CPU's, or differently on each
sharding. Triton's interpreter."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "optim"))

import sharding
from sharding import Parameter, Ranks

from myriad.kernels.config import Kernels
from myriad.optim.config import OptimizerConfig
from myriad.optim.optimizer import build_optimizer
from myriad.optim.region import ParameterSlice, Region


def moved(config, parameters, cuts, gradients, kernels: str) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "build_optimizer", partial(build_optimizer, kernels=kernels))
        ranks = Ranks(config, parameters, cuts)
    for rate, gradient in zip((1e-2, 2e-2, 5e-3), gradients, strict=False):
        for optimizer in ranks.optimizers:
            assert optimizer.in_triton == (kernels == "triton")
        ranks.step(gradient, rate, 0.25)
    return ranks.values()


@settings(max_examples=8, deadline=None)
@given(st.data(), st.sampled_from(["adamw", "lamb"]))
def test_any_parameters_move_as_on_a_cpu(data, name: str) -> None:
    sizes = data.draw(st.lists(st.integers(1, 5000), min_size=1, max_size=4))
    decayed = data.draw(st.integers(0, len(sizes)))
    generator = torch.Generator().manual_seed(sum(sizes))
    parameters = [
        Parameter(torch.randn(size, generator=generator), index < decayed) for index, size in enumerate(sizes)
    ]
    gradients = [torch.randn(sum(sizes), generator=generator) for _ in range(3)]
    config = OptimizerConfig(name=name, weight_decay=0.1)
    expected = moved(config, parameters, [], gradients, "plain")
    torch.testing.assert_close(
        moved(config, parameters, [], gradients, "triton"), expected, rtol=2e-6, atol=2e-6
    )


def test_lamb_moves_a_zero_parameter_and_leaves_one_without_gradient() -> None:
    """A trust ratio of 0 would keep a zero-initialised matrix at zero for ever; 0 / 0 would make it NaN."""
    config = OptimizerConfig(name="lamb", weight_decay=0.0)
    parameters = [Parameter(torch.zeros(8), True), Parameter(torch.ones(8), True)]
    gradients = [torch.cat([torch.ones(8), torch.zeros(8)])]
    values = moved(config, parameters, [], gradients, "triton")
    torch.testing.assert_close(values, torch.cat([torch.full((8,), -0.01), torch.ones(8)]))


@pytest.mark.parametrize("kernels", ["plain", "triton"])
def test_nothing_is_updated_where_the_device_found_a_non_finite_value(kernels: Kernels) -> None:
    """Updates inside the backward begin before anybody knows whether the gradients are numbers."""

    def states(stays: torch.Tensor | None) -> list[torch.Tensor]:
        region = Region(torch.ones(3000), torch.full((3000,), 0.5), True, (ParameterSlice(0, 0, 3000),))
        optimizer = build_optimizer(OptimizerConfig(), [region], 1, lambda table: table, kernels)
        optimizer.begin(1e-2, 1.0)
        optimizer.update([0], stays)
        return [region.values, *(tensor for (tensor,) in optimizer.state().values())]

    for held, moved, told in zip(*map(states, (torch.ones(()), torch.zeros(()), None)), strict=True):
        assert held.unique().tolist() in ([0.0], [1.0])
        assert torch.equal(moved, told) and not torch.equal(moved, held)
