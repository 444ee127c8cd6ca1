"""If these fail, computes that are captured once and replayed (`train.cuda_graphs`) learn something else than
those that Python starts one by one, or a model that cannot be captured trains on wrong numbers.

No GPU: what is captured is replayed as `replaying` does, operator by operator on the same memory.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from nccl_like import install
from parity_case import TINY, Case, batch_of_rank, make_engine, train_steps
from ranks import run_ranks
from replaying import Replaying, note_collectives
from torch import nn

from myriad.comm.groups import close_world
from myriad.errors import BadInputError, RunFailedError
from myriad.parallel.engine import Engine
from myriad.program.actions import COMPUTE

pytestmark = pytest.mark.usefixtures("dynamo")

DROPOUT = {"dropout": 0.1}


def capture(case: Case, engine: Engine) -> Replaying:
    capturer = Replaying()
    targets = case.global_batch * TINY["sequence"]
    engine.capture(capturer, lambda: batch_of_rank(case, engine, 0), targets)
    return capturer


def parameters(engine: Engine) -> list[np.ndarray]:
    return [chunk.master.float().numpy().copy() for chunk in engine.model.chunks]


def trained(case: Case, captures: bool, like_nccl: bool = False) -> tuple[Any, list[np.ndarray], list[int]]:
    """Losses and norms, this rank's parameters, and how often something was captured, replayed, and was to be
    replayed."""
    if like_nccl:
        install()
        note_collectives()
    engine = make_engine(case)
    capturer = capture(case, engine) if captures else Replaying()
    found: list[Any] = [*train_steps(case, engine, 0, case.steps)]
    found.append(engine.evaluate(lambda: batch_of_rank(case, engine, 7)))
    found += train_steps(case, engine, case.steps, case.steps + 1)
    computes = sum(action.kind in COMPUTE for action in engine._plans[True].actions)
    expected = computes * (case.steps + 2)
    result = found, parameters(engine), [capturer.captured, capturer.replayed, expected, capturer.collectives]
    engine.close()
    close_world()
    return result


def assert_replayed(case: Case, *, like_nccl: bool = False) -> list[list[int]]:
    """The losses and parameters of a run with captures have the bits of one without. Returns the counts."""
    expected = run_ranks(case.world, trained, case, False, like_nccl)
    found = run_ranks(case.world, trained, replace(case, keeps_addresses=True), True, like_nccl)
    counts = []
    for (losses, own, _), (replayed_losses, replayed, counted) in zip(expected, found, strict=True):
        assert replayed_losses == losses
        for one, other in zip(own, replayed, strict=True):
            assert np.array_equal(one, other)
        captured, starts, computes, _ = counted
        assert captured > 0 and starts >= computes + captured  # each capture is replayed once when it is made
        counts.append(counted)
    return counts


ROTARY = {"position": "rotary", "norm": "rms", "activation": "swiglu", "window": 5}


@pytest.mark.parametrize(
    ("layout", "model", "dtype"),
    [
        ({}, DROPOUT, torch.float32),
        ({"micro_batch": 2, "recompute": "selective"}, DROPOUT | {"block": "parallel"}, torch.bfloat16),
        ({"recompute": "full", "recompute_ratio": 0.6}, DROPOUT, torch.bfloat16),
        ({"micro_batch": 2}, DROPOUT, torch.float16),
        ({"dp": 2}, ROTARY, torch.float32),
    ],
    ids=str,
)
def test_replayed_computes_give_the_bits_of_those_started_one_by_one(
    layout: dict[str, Any], model: dict[str, Any], dtype: torch.dtype
) -> None:
    grows = {"growth_interval": 1} if dtype == torch.float16 else None
    case = Case(
        layout=layout, model={"layers": 2} | model, dtype=dtype, steps=2, global_batch=4, loss_scale=grows
    )
    for captured, starts, computes, _ in assert_replayed(case):
        assert starts == computes + captured


@pytest.mark.parametrize(
    ("layout", "model", "overlap", "dtype"),
    [
        ({"tp": 2}, DROPOUT, {"tensor": "off"}, torch.float32),
        ({"tp": 2}, {"tied": True}, {"tensor": "turns"}, torch.float32),
        (
            {"tp": 2, "recompute": "full"},
            ROTARY | DROPOUT | {"block": "parallel"},
            {"tensor": "turns"},
            torch.bfloat16,
        ),
    ],
    ids=str,
)
def test_collectives_of_tensor_parallel_ranks_are_captured(
    layout: dict[str, Any], model: dict[str, Any], overlap: dict[str, Any], dtype: torch.dtype
) -> None:
    """Over a transport that has NCCL's order; each collective is waited for in its capture, and all ranks
    capture the same ones in the same order (`replaying`)."""
    model, layout = {"layers": 2} | model, {"micro_batch": 1} | layout
    batch = 2 * layout.get("dp", 1) * layout["micro_batch"]
    case = Case(layout=layout, model=model, overlap=overlap, dtype=dtype, steps=1, global_batch=batch)
    counts = assert_replayed(case, like_nccl=True)
    assert all(collectives > 0 for *_, collectives in counts)


V = {"virtual_stages": 2, "schedule": "zero-bubble-v"}


@pytest.mark.parametrize(
    ("layout", "model", "overlap"),
    [
        ({"pp": 2, "schedule": "gpipe"}, ROTARY, {"receive_ahead": 4}),
        ({"pp": 2, "schedule": "zero-bubble", "recompute": "full"}, DROPOUT, {"pipeline": False}),
        ({"pp": 2, **V}, DROPOUT | {"tied": True}, {}),
        ({"pp": 2, **V, "schedule": "dualpipe-v"}, DROPOUT, {}),
    ],
    ids=str,
)
def test_pipelines_have_captures_for_each_micro_batch_in_flight(
    layout: dict[str, Any], model: dict[str, Any], overlap: dict[str, Any]
) -> None:
    """Over a transport whose messages leave later than they are sent."""
    model = model if "virtual_stages" in layout else model | {"layers": 2}
    case = Case(layout=layout, model=model, overlap=overlap, steps=1, global_batch=4)
    assert_replayed(case, like_nccl=True)


def test_pipelines_of_tensor_parallel_ranks_are_captured() -> None:
    case = Case({"tp": 2, "pp": 2, "micro_batch": 2}, DROPOUT | {"layers": 2}, steps=1, global_batch=4)
    counts = assert_replayed(case, like_nccl=True)
    assert all(collectives > 0 for *_, collectives in counts)


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ({"dp": 2, "zero": 3, "reduce": "each", "recompute": "full"}, ROTARY),
        ({"dp": 2, "pp": 2, "zero": 2, "reduce": "each", "shares": (3, 1)}, DROPOUT | {"tied": True}),
        ({"dp": 2, "pp": 2, "virtual_stages": 2, "zero": 3}, DROPOUT | {"tied": True}),
    ],
    ids=str,
)
def test_parameters_and_sums_that_come_and_go_are_always_at_the_same_address(
    layout: dict[str, Any], model: dict[str, Any]
) -> None:
    model = model if "virtual_stages" in layout else model | {"layers": 2}
    case = Case(layout=layout, model=model, steps=1, global_batch=4, overlap={"chunks": 2})
    assert_replayed(case, like_nccl="pp" in layout)


def test_float8_with_tensor_parallelism_is_captured() -> None:
    layout, model = {"tp": 2, "micro_batch": 2}, {"layers": 2}
    case = Case(layout, model, dtype=torch.bfloat16, float8=True, steps=1, global_batch=4)
    assert_replayed(case, like_nccl=True)


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


class Drawing(nn.Module):
    """A layer that draws a number, too small to make the loss differ."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
        return self.inner(x, context) * (1.0 + 1e-7 * torch.rand(()))


def refused_on_one_rank() -> tuple[str, bool]:
    """Only the second pipeline rank has the layer."""
    case = Case({"pp": 2}, global_batch=2)
    engine = make_engine(case)
    if engine.groups.grid.index("pp"):
        layers = engine._runtime._eager._layers[1]
        layers[0] = Drawing(layers[0])
    state = torch.random.get_rng_state()
    try:
        capture(case, engine)
    except BadInputError as error:
        return str(error), torch.equal(state, torch.random.get_rng_state())
    finally:
        close_world()
    return "nothing", False


def test_a_layer_that_draws_from_torch_s_generators_is_refused_on_every_rank() -> None:
    """Recomputed, it would draw other numbers; and a rank alone would leave the others waiting in step 1."""
    found = run_ranks(2, refused_on_one_rank)
    assert "a capture fails on another rank" in found[0][0]
    assert "a capture fails here: a layer draws from torch's generators" in found[1][0]
    assert all(unchanged for _, unchanged in found), "later steps draw what they would have drawn"


def diverged() -> str:
    case = Case(global_batch=2)
    engine = make_engine(case)
    engine.model.chunks[0].master[-1] = torch.nan  # of the last norm: some gradients stay finite
    capture(case, engine)
    try:
        train_steps(case, engine, 0, 1)
    except RunFailedError as error:
        return str(error)
    finally:
        close_world()
    return "nothing"


def test_numbers_that_are_not_finite_are_reported_by_the_step_and_not_taken_for_a_bad_capture() -> None:
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
