"""If these fail, computes that are captured once and replayed (`train.cuda_graphs`) learn something else than
those that Python starts one by one, or a model that cannot be captured trains on wrong numbers.

No GPU: what is captured is replayed as `replaying` does, operator by operator on the same memory.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import TINY, Case, batch_of_rank, make_engine, train_steps
from ranks import run_ranks
from replaying import Replaying
from torch import nn

from myriad.comm.groups import close_world
from myriad.errors import BadInputError, RunFailedError
from myriad.parallel.engine import Engine

DROPOUT = {"dropout": 0.1}


def capture(case: Case, engine: Engine) -> Replaying:
    capturer = Replaying()
    targets = case.global_batch * TINY["sequence"]
    engine.capture(capturer, lambda: batch_of_rank(case, engine, 0), targets)
    return capturer


def parameters(engine: Engine) -> list[np.ndarray]:
    return [chunk.master.float().numpy().copy() for chunk in engine.pieces.chunks]


def trained(case: Case, captures: bool) -> tuple[list[tuple[float, float]], list[np.ndarray], list[int]]:
    """Losses and norms, this rank's parameters, and how often something was captured and replayed."""
    engine = make_engine(case)
    capturer = capture(case, engine) if captures else Replaying()
    found = train_steps(case, engine, 0, case.steps)
    result = found, parameters(engine), [capturer.captured, capturer.replayed]
    engine.close()
    close_world()
    return result


@pytest.mark.parametrize(
    ("layout", "model", "dtype"),
    [
        ({}, DROPOUT, torch.float32),
        ({"micro_batch": 2, "recompute": "selective"}, DROPOUT | {"block": "parallel"}, torch.bfloat16),
        ({"dp": 2, "zero": 1}, DROPOUT | {"tied": True}, torch.float32),
        ({"micro_batch": 2}, DROPOUT, torch.float16),
        (
            {"dp": 2},
            {"position": "rotary", "norm": "rms", "activation": "swiglu", "window": 5},
            torch.float32,
        ),
    ],
    ids=str,
)
def test_replayed_computes_give_the_bits_of_those_started_one_by_one(
    layout: dict[str, Any], model: dict[str, Any], dtype: torch.dtype
) -> None:
    grows = {"growth_interval": 1} if dtype == torch.float16 else None
    case = Case(layout=layout, model=model, dtype=dtype, steps=3, global_batch=4, loss_scale=grows)
    expected = run_ranks(case.world, trained, case, False)
    found = run_ranks(case.world, trained, case, True)
    for (losses, own, _), (replayed_losses, replayed, (captured, starts)) in zip(
        expected, found, strict=True
    ):
        assert replayed_losses == losses
        for one, other in zip(own, replayed, strict=True):
            assert np.array_equal(one, other)
        micro_batches = case.global_batch // case.world // case.layout.get("micro_batch", 1)
        assert captured > 0
        assert starts == captured * micro_batches * (case.steps + 1)


class Counting(nn.Module):
    """A layer whose output depends on how often Python ran it, or that asks for a number."""

    def __init__(self, inner: nn.Module, asks: bool) -> None:
        super().__init__()
        self.inner, self.asks, self.runs = inner, asks, 0

    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
        self.runs += 1
        if self.asks:
            return self.inner(x, context) * min(1.0, float(x.detach().abs().max()) + 1.0)
        return self.inner(x, context) * (1.0 + 0.1 * self.runs)


def refused(asks: bool) -> str:
    case = Case(global_batch=2)
    engine = make_engine(case)
    layers = engine._runtime._eager._layers[0]
    layers[2] = Counting(layers[2], asks)
    try:
        capture(case, engine)
    except BadInputError as error:
        return str(error)
    finally:
        close_world()
    return "nothing"


def test_a_layer_that_counts_its_runs_is_refused() -> None:
    (said,) = run_ranks(1, refused, False)
    assert said.startswith("train.cuda_graphs")
    assert "it gives other" in said


def test_a_layer_that_asks_the_device_for_a_number_is_refused() -> None:
    (said,) = run_ranks(1, refused, True)
    assert "not permitted when stream is capturing" in said


def diverged() -> str:
    case = Case(global_batch=2)
    engine = make_engine(case)
    engine.pieces.chunks[0].master[-1] = torch.nan  # of the last norm: some gradients stay finite
    capture(case, engine)
    try:
        train_steps(case, engine, 0, 1)
    except RunFailedError as error:
        return str(error)
    finally:
        close_world()
    return "nothing"


def test_numbers_that_are_not_finite_are_told_by_the_step_and_not_taken_for_a_bad_capture() -> None:
    (said,) = run_ranks(1, diverged)
    assert said.startswith("step 1: loss is nan")


def test_one_that_is_captured_moves_nothing() -> None:
    """The two iterations that are compared, and what they capture, leave the state as it was."""
    case = replace(Case(global_batch=2), model=DROPOUT)
    assert run_ranks(1, untouched, case) == [True]


def untouched(case: Case) -> bool:
    engine = make_engine(case)
    before = parameters(engine)
    capture(case, engine)
    same = all(np.array_equal(a, b) for a, b in zip(before, parameters(engine), strict=True))
    close_world()
    return same and engine.optimizer.steps_done == 0
