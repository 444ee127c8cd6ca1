"""If these break: the noise scale is biased, or a resumed run reports another one."""

import math
import random

import pytest

from myriad.optim.gradient_noise import GradientNoise


def test_unequal_replicas_give_the_known_scale_of_gaussian_gradients() -> None:
    """Gradients of 5 numbers with mean 2 and variance 9 a token: |G|^2 = 20, S = 45."""
    draw, noise, tokens = random.Random(1), GradientNoise(0.999), (30, 10)
    for _ in range(3000):
        parts = [[draw.gauss(2 * own / 40, 3 * math.sqrt(own) / 40) for _ in range(5)] for own in tokens]
        small = sum(value**2 for part in parts for value in part)
        big = sum(sum(pair) ** 2 for pair in zip(*parts, strict=True))
        found = noise.add(small, big, 0.75**2 + 0.25**2, 40)
    assert found.gradient == pytest.approx(20, rel=0.03)
    assert found.variance == pytest.approx(45, rel=0.1)
    assert found.scale == found.variance / found.gradient


def test_a_resumed_average_goes_on() -> None:
    first, second = GradientNoise(0.9), GradientNoise(0.9)
    first.add(1.0, 1.5, 0.5, 64)
    second.load(first.state())
    assert second.add(2.0, 1.75, 0.5, 64) == first.add(2.0, 1.75, 0.5, 64)
    assert math.isnan(GradientNoise(0.9).add(2.0, 1.0, 0.5, 64).scale), "a negative square"
