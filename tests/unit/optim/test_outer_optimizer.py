"""If these break: replicas that train alone do not agree on what the paper says they agree on, or a resumed
run of them is another run."""

from collections.abc import Callable, Sequence
from threading import Barrier, Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.optim.region import Region
from myriad.parallel.diloco import OuterNesterov

SIZES = (5, 1, 0, 64)


class Replicas:
    """Threads, each with all parameters in regions of the given sizes, that average tensors with each
    other."""

    def __init__(self, number: int, *, learning_rate: float, momentum: float, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        start = [torch.randn(size, generator=generator) for size in SIZES]
        self.regions = [
            [Region(values.clone(), torch.zeros_like(values), True, ()) for values in start]
            for _ in range(number)
        ]
        self.outers = [
            OuterNesterov(regions, learning_rate=learning_rate, momentum=momentum) for regions in self.regions
        ]
        self._barrier, self._tensors = Barrier(number), [torch.empty(0)] * number

    def _averager(self, replica: int) -> Callable[[torch.Tensor], None]:
        def average(tensor: torch.Tensor) -> None:
            self._tensors[replica] = tensor.clone()
            self._barrier.wait(10)
            tensor.copy_(torch.stack(self._tensors).mean(0))
            self._barrier.wait(10)

        return average

    def train_alone(self, seed: int) -> None:
        """Every replica moves another way."""
        generator = torch.Generator().manual_seed(seed)
        for regions in self.regions:
            for region in regions:
                region.values.sub_(torch.randn(region.values.shape, generator=generator), alpha=0.1)

    def synchronise(self) -> None:
        threads = [
            Thread(target=outer.step, args=(self._averager(replica),))
            for replica, outer in enumerate(self.outers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def values(self, replica: int) -> torch.Tensor:
        return torch.cat([region.values for region in self.regions[replica]])

    def mean(self) -> torch.Tensor:
        return torch.stack([self.values(replica) for replica in range(len(self.regions))]).mean(0)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_with_rate_one_and_no_momentum_the_replicas_meet_in_their_middle(number: int) -> None:
    replicas = Replicas(number, learning_rate=1.0, momentum=0.0)
    for seed in range(5):
        replicas.train_alone(seed)
        expected = replicas.mean()
        replicas.synchronise()
        torch.testing.assert_close(replicas.values(0), expected, rtol=1e-6, atol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.floats(0.01, 2.0), st.floats(0.0, 0.99), st.integers(0, 1000))
def test_replicas_have_the_same_bits_after_every_synchronisation(
    number: int, rate: float, momentum: float, seed: int
) -> None:
    """Otherwise they drift apart for good: nothing else ever brings them together."""
    replicas = Replicas(number, learning_rate=rate, momentum=momentum, seed=seed)
    for step in range(4):
        replicas.train_alone(seed + step)
        assert not torch.equal(replicas.values(0), replicas.values(1))
        replicas.synchronise()
        for replica in range(1, number):
            assert same_bits(replicas.values(0), replicas.values(replica))
            for name, tensors in replicas.outers[0].state().items():
                others = replicas.outers[replica].state()[name]
                assert all(same_bits(a, b) for a, b in zip(tensors, others, strict=True)), name


@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.1, 0.99)])
def test_the_momentum_is_torch_s_nesterov(rate: float, momentum: float) -> None:
    replicas = Replicas(3, learning_rate=rate, momentum=momentum)
    reference = torch.nn.Parameter(replicas.values(0).clone())
    optimizer = torch.optim.SGD([reference], lr=rate, momentum=momentum, nesterov=True)
    for seed in range(8):
        replicas.train_alone(seed)
        reference.grad = reference.detach() - replicas.mean()
        optimizer.step()
        replicas.synchronise()
        torch.testing.assert_close(replicas.values(0), reference.detach(), rtol=1e-5, atol=1e-5)


def copy_state(source: Sequence[torch.Tensor], target: Sequence[torch.Tensor]) -> None:
    for a, b in zip(source, target, strict=True):
        b.copy_(a)


def test_loaded_state_continues_with_the_same_bits() -> None:
    """A run killed between two synchronisations must agree on what the undisturbed one agrees on."""
    undisturbed = Replicas(2, learning_rate=0.7, momentum=0.9)
    for seed in range(3):
        undisturbed.train_alone(seed)
        undisturbed.synchronise()
    undisturbed.train_alone(3)
    resumed = Replicas(2, learning_rate=0.7, momentum=0.9, seed=99)
    for replica in range(2):
        state, loaded = undisturbed.outers[replica].state(), resumed.outers[replica].state()
        for name, tensors in state.items():
            copy_state(tensors, loaded[name])
        values = [[region.values for region in each.regions[replica]] for each in (undisturbed, resumed)]
        copy_state(*values)
    for replicas in (undisturbed, resumed):
        replicas.synchronise()
        replicas.train_alone(4)
        replicas.synchronise()
    assert same_bits(undisturbed.values(0), resumed.values(1))


def test_a_rank_without_parameters_takes_part() -> None:
    empty = Region(torch.zeros(0), torch.zeros(0), False, ())
    asked: list[int] = []
    outer = OuterNesterov([empty], learning_rate=0.7, momentum=0.9)
    outer.step(lambda tensor: asked.append(tensor.numel()))
    assert asked == [0]
