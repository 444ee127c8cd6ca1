"""If these fail, a run follows another learning rate than its job file says, or a resumed run than an
unbroken one."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from myriad.optim.config import OptimizerConfig
from myriad.optim.schedule import learning_rate

DECAYS = ["cosine", "linear", "wsd", "constant"]


def curve(steps: int, **values: object) -> list[float]:
    config = OptimizerConfig.model_validate({"learning_rate": 1.0, "final_learning_rate_ratio": 0.0} | values)
    return [learning_rate(config, step, steps) for step in range(steps)]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"decay": "linear"}, [1.0, 0.75, 0.5, 0.25, 0.0]),
        ({"decay": "linear", "warmup_steps": 2}, [0.5, 1.0, 2 / 3, 1 / 3, 0.0]),
        ({"decay": "linear", "final_learning_rate_ratio": 0.5}, [1.0, 0.875, 0.75, 0.625, 0.5]),
        ({"decay": "cosine"}, [1.0, 0.8535534, 0.5, 0.1464466, 0.0]),
        ({"decay": "wsd", "decay_ratio": 0.4}, [1.0, 1.0, 1.0, 0.5, 0.0]),
        ({"decay": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"decay": "wsd", "warmup_steps": 5}, [0.2, 0.4, 0.6, 0.8, 1.0]),
    ],
)
def test_known_curves(values: dict[str, object], expected: list[float]) -> None:
    assert curve(5, **values) == pytest.approx(expected)


@pytest.mark.parametrize("decay", DECAYS)
def test_a_single_step_uses_the_peak(decay: str) -> None:
    assert curve(1, decay=decay) == [1.0]


@given(st.sampled_from(DECAYS), st.integers(1, 60), st.integers(0, 60), st.floats(0, 1), st.floats(0.01, 1))
def test_rises_to_the_peak_then_never_rises(
    decay: str, steps: int, warmup: int, final: float, decay_ratio: float
) -> None:
    warmup = min(warmup, steps)
    rates = curve(
        steps, decay=decay, warmup_steps=warmup, final_learning_rate_ratio=final, decay_ratio=decay_ratio
    )
    peak = max(warmup - 1, 0)
    assert rates[peak] == pytest.approx(1.0)
    assert all(a < b for a, b in pairwise(rates[: peak + 1]))
    assert all(a >= b - 1e-12 for a, b in pairwise(rates[peak:]))
    if decay != "constant" and steps > peak + 1:
        assert rates[-1] == pytest.approx(final)


@pytest.mark.parametrize("decay", ["cosine", "linear", "wsd"])
def test_stays_at_the_end_when_a_run_continues_past_it(decay: str) -> None:
    config = OptimizerConfig(learning_rate=1.0, final_learning_rate_ratio=0.1, decay=decay)
    assert learning_rate(config, 500, 100) == pytest.approx(0.1)
