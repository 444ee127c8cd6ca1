"""If these fail, float16 loses small gradients, skips steps for ever, or resumes with another scale."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.optim.config import LARGEST_LOSS_SCALE, LossScaleConfig
from myriad.optim.loss_scale import LossScaler


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 5), st.integers(0, 60))
def test_the_scale_is_that_of_pytorch_s_grad_scaler_and_continues_from_a_checkpoint(
    overflows: list[bool], interval: int, stored_after: int
) -> None:
    config = LossScaleConfig(initial=2.0**20, growth_interval=interval, minimum=2.0**-100)
    scaler, scale = LossScaler(config, 512), torch.tensor(2.0**20)
    tracker = torch.zeros((), dtype=torch.int32)
    for number, overflow in enumerate(overflows):
        before = scaler.scale
        ratio = scaler.moved() if not overflow else 0.5 if scaler.overflowed() else 0.0
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, interval)
        assert scaler.scale == scale.item() == before * ratio
        assert scaler.finite_steps == tracker.item()
        if number == stored_after:
            state = json.loads(json.dumps(scaler.state()))
            scaler = LossScaler(config, 512)
            scaler.load(state)


def test_at_the_smallest_scale_overflows_in_a_row_become_a_fault() -> None:
    scaler = LossScaler(LossScaleConfig(initial=4, minimum=1, max_skips=2, growth_interval=9), 512)
    assert [scaler.overflowed() for _ in range(4)] == [True] * 4 and scaler.scale == 1
    scaler.moved()
    assert [scaler.overflowed() for _ in range(3)] == [True, True, False]
    assert scaler.fault == "float16 gradients overflow at the smallest loss scale (1), 3 steps in a row"


def test_it_grows_no_further_than_the_largest() -> None:
    scaler = LossScaler(LossScaleConfig(initial=LARGEST_LOSS_SCALE / 2, growth_interval=1), 1)
    assert [scaler.moved() for _ in range(3)] == [2.0, 1.0, 1.0]


@pytest.mark.parametrize(("tokens", "scale"), [(4096, 65536), (512, 8192), (3 * 2**20, 2**25)])
def test_it_begins_as_pytorch_s_at_4096_tokens_and_grows_with_the_batch(tokens: int, scale: float) -> None:
    assert LossScaler(LossScaleConfig(), tokens).scale == scale


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"scale": float("inf"), "finite_steps": 0, "skips_at_minimum": 0},
        {"scale": 3.0, "finite_steps": 0, "skips_at_minimum": 0},
        {"scale": -2.0, "finite_steps": 0, "skips_at_minimum": 0},
        {"scale": 2.0, "finite_steps": -1, "skips_at_minimum": 0},
        {"scale": 2.0, "finite_steps": "1", "skips_at_minimum": 0},
    ],
)
def test_a_checkpoint_with_a_scale_that_no_run_has_is_refused(state: dict[str, object]) -> None:
    with pytest.raises(BadInputError, match="loss_scale"):
        LossScaler(LossScaleConfig(), 512).load(state)
