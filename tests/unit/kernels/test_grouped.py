"""If this fails, experts compute something else where their weights lie side by side, as in training."""

import pytest
import torch

from myriad.kernels.gradient import GradientSink, set_sink
from myriad.kernels.grouped import RowGroups, _stacked, grouped_linear


@pytest.mark.parametrize(("inputs", "outputs", "gap"), [(8, 12, 96), (8, 12, 100), (7, 12, 84), (8, 12, 95)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_side_by_side_give_what_each_gives_alone(
    inputs: int, outputs: int, gap: int, dtype: torch.dtype
) -> None:
    counts, size = [5, 0, 2, 9], inputs * outputs
    memory = torch.randn(4 * max(gap, size) + 1).to(dtype)
    step = max(gap, size)
    side_by_side = [memory[n * step : n * step + size].view(outputs, inputs) for n in range(4)]
    x, wave, results = torch.randn(16, inputs).to(dtype), torch.randn(16, outputs).to(dtype), []
    for weights in (side_by_side, [weight.clone() for weight in side_by_side]):
        parameters = [torch.nn.Parameter(weight) for weight in weights]
        totals = torch.zeros(4, outputs, inputs)
        for parameter, total in zip(parameters, totals, strict=True):
            set_sink(parameter, GradientSink(total))
        leaf = x.clone().requires_grad_()
        y = grouped_linear(leaf, RowGroups(torch.tensor(counts)), parameters)
        y.backward(wave)
        results.append((y.detach(), leaf.grad, totals))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)
    aligned = (
        inputs % 8 == 0
        and step * memory.element_size() % 16 == 0
        and outputs * memory.element_size() % 16 == 0
    )
    found = _stacked(x, side_by_side)
    assert (found is not None) == aligned
    if found is not None:
        assert all(torch.equal(one, other) for one, other in zip(found, side_by_side, strict=True))
