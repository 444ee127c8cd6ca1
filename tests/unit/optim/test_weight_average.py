"""If these break: the moving average of the parameters is another mean than the documentation says."""

import torch

from myriad.optim.region import Region
from myriad.optim.weight_average import WeightAverage


def region(values: torch.Tensor) -> Region:
    return Region(values, torch.zeros_like(values), decays=True, pieces=())


def test_the_average_weights_each_update_by_its_age_and_the_initial_values_by_nothing() -> None:
    values, seen = torch.randn(1000), []
    average = WeightAverage(0.9, 3, [region(values)])
    average.restart([values])
    assert torch.equal(average.averages[0], values), "before the first update"
    for step in range(1, 31):
        values += 0.1 * torch.randn(1000)
        average.update([0], step)
        if step % 3 == 0:
            seen.append(values.double())
    weights = [0.9**age for age in reversed(range(10))]
    mean = sum(weight * one for weight, one in zip(weights, seen, strict=True)) / sum(weights)
    torch.testing.assert_close(average.averages[0].double(), mean, rtol=1e-5, atol=1e-6)


def test_values_and_averages_are_exchanged_and_restored_bit_for_bit() -> None:
    regions = [region(torch.randn(2**18 + 5)), region(torch.randn(3))]
    average = WeightAverage(0.5, 1, regions)
    average.update([0, 1], 1)
    regions[0].values.add_(1.0)
    before = [one.values.clone() for one in regions], [one.clone() for one in average.averages]
    stored = [one.values for one in regions]
    average.swap(stored)
    assert torch.equal(regions[0].values, before[1][0])
    average.swap(stored)
    assert torch.equal(regions[0].values, before[0][0]) and torch.equal(average.averages[0], before[1][0])
