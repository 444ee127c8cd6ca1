"""If these fail, a sharded run learns something else than one process, or the optimizer is not the one it is
named after."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sharding import Parameter, Ranks

from myriad.optim.config import OptimizerConfig
from myriad.optim.moments import AdamW
from myriad.optim.region import Region

RATES = (1e-2, 2e-2, 5e-3)


def make_parameters(sizes: Sequence[int], num_decayed: int) -> list[Parameter]:
    generator = torch.Generator().manual_seed(sum(sizes))
    return [
        Parameter(torch.randn(size, generator=generator), index < num_decayed)
        for index, size in enumerate(sizes)
    ]


def make_gradients(parameters: Sequence[Parameter]) -> list[torch.Tensor]:
    total = sum(p.values.numel() for p in parameters)
    generator = torch.Generator().manual_seed(total)
    return [torch.randn(total, generator=generator) for _ in RATES]


def lamb_by_the_paper(
    config: OptimizerConfig, parameters: Sequence[Parameter], gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Algorithm 2 of arXiv 1904.00962 in float64, a parameter at a time; without trust ratio where nothing
    decays."""
    sizes = [p.values.numel() for p in parameters]
    results = []
    for index, parameter in enumerate(parameters):
        x = parameter.values.double()
        m, v = torch.zeros_like(x), torch.zeros_like(x)
        for t, (rate, gradient) in enumerate(zip(RATES, gradients, strict=True), 1):
            g = gradient.split(sizes)[index].double()
            m = config.beta1 * m + (1 - config.beta1) * g
            v = config.beta2 * v + (1 - config.beta2) * g**2
            r = (m / (1 - config.beta1**t)) / ((v / (1 - config.beta2**t)).sqrt() + config.epsilon)
            if parameter.decays:
                u = r + config.weight_decay * x
                ratio = x.norm() / u.norm() if x.norm() > 0 and u.norm() > 0 else 1.0
                x = x - rate * ratio * u
            else:
                x = x - rate * r
        results.append(x)
    return torch.cat(results)


def run(ranks: Ranks, gradients: Sequence[torch.Tensor], scale: float = 1.0) -> torch.Tensor:
    for rate, gradient in zip(RATES, gradients, strict=True):
        ranks.step(gradient, rate, scale)
    return ranks.values()


@pytest.mark.parametrize("sizes", [(3,), (1024, 5, 3000), (300_000, 2048, 64, 64)])
def test_lamb_is_the_paper_s(sizes: tuple[int, ...]) -> None:
    config = OptimizerConfig(name="lamb", weight_decay=0.1)
    parameters = make_parameters(sizes, max(1, len(sizes) - 1))
    gradients = make_gradients(parameters)
    expected = lamb_by_the_paper(config, parameters, gradients)
    torch.testing.assert_close(
        run(Ranks(config, parameters, []), gradients).double(), expected, rtol=2e-6, atol=2e-6
    )


def test_lamb_moves_a_zero_parameter_and_leaves_one_without_gradient() -> None:
    """A trust ratio of 0 would keep a zero-initialised matrix at zero for ever; 0 / 0 would make it NaN."""
    config = OptimizerConfig(name="lamb", weight_decay=0.0)
    parameters = [Parameter(torch.zeros(8), True), Parameter(torch.ones(8), True)]
    ranks = Ranks(config, parameters, [])
    ranks.step(torch.cat([torch.ones(8), torch.zeros(8)]), 0.1)
    torch.testing.assert_close(ranks.values(), torch.cat([torch.full((8,), -0.1), torch.ones(8)]))


def test_adamw_is_torch_s() -> None:
    config = OptimizerConfig(weight_decay=0.1, beta1=0.8, beta2=0.99, epsilon=1e-6)
    parameters = make_parameters((1024, 5, 3000), 2)
    gradients = make_gradients(parameters)
    values = run(Ranks(config, parameters, []), gradients)
    tensors = [p.values.clone() for p in parameters]
    groups = [
        {"params": [t], "weight_decay": 0.1 if p.decays else 0.0}
        for t, p in zip(tensors, parameters, strict=True)
    ]
    reference = torch.optim.AdamW(groups, betas=(0.8, 0.99), eps=1e-6, foreach=False)
    for rate, gradient in zip(RATES, gradients, strict=True):
        for group in reference.param_groups:
            group["lr"] = rate
        for tensor, part in zip(tensors, gradient.split([t.numel() for t in tensors]), strict=True):
            tensor.grad = part.clone()
        reference.step()
    torch.testing.assert_close(values, torch.cat(tensors), rtol=1e-6, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.sampled_from(["adamw", "lamb"]))
def test_any_sharding_moves_parameters_alike(data: st.DataObject, name: str) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3000), min_size=1, max_size=6))
    parameters = make_parameters(sizes, data.draw(st.integers(0, len(sizes))))
    cuts = sorted(data.draw(st.lists(st.integers(0, sum(sizes)), max_size=3)))
    scale = data.draw(st.sampled_from([1.0, 0.25, 3.0]))
    config, gradients = OptimizerConfig(name=name), make_gradients(parameters)
    whole = run(Ranks(config, parameters, []), gradients, scale)
    torch.testing.assert_close(
        run(Ranks(config, parameters, cuts), gradients, scale), whole, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_gradient_scale_counts_as_scaled_gradients(name: str) -> None:
    """Clipping is folded into the step: it must do what scaling the gradients before would."""
    config = OptimizerConfig(name=name, epsilon=1e-2)  # large, so that Adam is not blind to scale
    parameters = make_parameters((2000, 30), 1)
    gradients = make_gradients(parameters)
    folded = run(Ranks(config, parameters, []), gradients, 0.3)
    scaled = run(Ranks(config, parameters, []), [gradient * 0.3 for gradient in gradients])
    torch.testing.assert_close(folded, scaled, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_state_loaded_in_place_continues_bit_for_bit(name: str) -> None:
    config, parameters = OptimizerConfig(name=name), make_parameters((2000, 30), 1)
    gradients = make_gradients(parameters)
    first = Ranks(config, parameters, [])
    first.step(gradients[0], RATES[0])
    second = Ranks(config, parameters, [])
    _copy(first, second)
    for ranks in (first, second):
        ranks.step(gradients[1], RATES[1], 0.5)
    assert torch.equal(first.values(), second.values())


def _copy(source: Ranks, target: Ranks) -> None:
    for mine, theirs in zip(source.optimizers, target.optimizers, strict=True):
        theirs.steps_done = mine.steps_done
        for name, tensors in theirs.state().items():
            for tensor, value in zip(tensors, mine.state()[name], strict=True):
                tensor.copy_(value)
        for to, region in zip(theirs.regions, mine.regions, strict=True):
            to.values.copy_(region.values)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_state_is_named_for_a_checkpoint(name: str) -> None:
    ranks = Ranks(OptimizerConfig(name=name), make_parameters((70, 30), 1), [50])
    for optimizer in ranks.optimizers:
        state = optimizer.state()
        assert sorted(state) == ["exp_avg", "exp_avg_sq"]
        for tensors in state.values():
            assert [t.shape for t in tensors] == [r.values.shape for r in optimizer.regions]
            assert all(t.dtype == torch.float32 for t in tensors)


def test_a_rank_without_parameters_takes_part() -> None:
    """More data-parallel ranks than elements: the empty rank must still join the sum of norms."""
    parameters = make_parameters((2,), 1)
    gradients = make_gradients(parameters)
    whole = run(Ranks(OptimizerConfig(name="lamb"), parameters, []), gradients)
    ranks = Ranks(OptimizerConfig(name="lamb"), parameters, [0, 1, 2])
    torch.testing.assert_close(run(ranks, gradients), whole)
    assert isinstance(ranks.regions[0][0], Region) and ranks.regions[0][0].values.numel() == 0


def test_a_region_has_its_own_rate_and_decays_by_that_of_the_schedule() -> None:
    config = OptimizerConfig(weight_decay=0.5, epsilon=1e-30)
    regions = [Region(torch.ones(4), torch.full((4,), 3.0), True, (), rate) for rate in (1.0, 0.25)]
    optimizer = AdamW(config, regions)
    optimizer.begin(0.1, 1.0)
    optimizer.update([0, 1])
    for region in regions:
        moved = 1 - 0.1 * 0.5 - 0.1 * region.rate
        assert torch.allclose(region.values, torch.full((4,), moved))
