"""If these fail, the micro-batch of zeros that ranks on GPUs compute before their first step, to load
kernels, changes what they learn, or waits for another pipeline rank.

No GPU: the same lists are run on gloo, where nothing is loaded late and nothing may change either.
"""

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import Case, batch_of_rank, make_engine, train_steps
from ranks import run_ranks
from torch import nn

from myriad.comm.groups import close_world
from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.model.gpt import GPT
from myriad.optim.config import OptimizerConfig
from myriad.parallel.batch import Batch
from myriad.parallel.engine import Engine
from myriad.train.fit import fit

_STEPS = 2


def parameters(engine: Engine) -> list[np.ndarray]:
    return [chunk.master.float().numpy().copy() for chunk in engine.model.chunks]


class Drawing(nn.Module):
    """A layer of a user's that draws from torch's generator."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, context: Any) -> torch.Tensor:
        return self.inner(torch.nn.functional.dropout(x, 0.1, self.training), context)


def trained(case: Case, warms_up: bool) -> tuple[list[tuple[float, float]], list[np.ndarray], float, int]:
    """Losses and norms, parameters, a validation's loss, and the optimizer's steps."""
    engine = make_engine(case)
    layers = next(iter(engine._runtime._eager._layers.values()))
    if isinstance(layers, list) and len(layers) > 1:
        layers[1] = Drawing(layers[1])
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    if warms_up:
        engine.warm_up()
        assert torch.equal(before, torch.random.get_rng_state())
        assert engine.recorder.take_totals() == {}
    losses = train_steps(case, engine, 0, _STEPS)
    loss, _ = engine.evaluate(lambda: batch_of_rank(case, engine, _STEPS))
    found = losses, parameters(engine), loss, engine.optimizer.steps_done
    engine.close()
    close_world()
    return found


@pytest.mark.parametrize(
    "case",
    [
        Case({"pp": 2}, {"tied": True, "dropout": 0.1}),
        Case({"pp": 2, "dp": 2, "zero": 3, "schedule": "zero-bubble"}, dtype=torch.bfloat16),
        Case({"pp": 2, "virtual_stages": 2, "recompute": "full"}, {"dropout": 0.1}),
        Case(
            {"pp": 2, "virtual_stages": 2, "schedule": "zero-bubble-v"}, {"tied": True}, dtype=torch.float16
        ),
        Case({"pp": 2, "tp": 2}, {"dropout": 0.1}),
        Case(
            {"pp": 2, "dp": 2, "zero": 1, "shares": (3, 1)},
            comm={"compress_gradients": "int8", "compress_parameters": "int8"},
        ),
        Case(
            {"pp": 2, "dp": 2, "zero": 2, "reduce": "each"},
            optimizer={"clip_norm": None},
            overlap={"optimizer_in_backward": True},
        ),
    ],
    ids=lambda case: " ".join(f"{key}={value}" for key, value in case.layout.items()),
)
def test_a_run_that_was_warmed_up_learns_the_same_bits(case: Case) -> None:
    few = {} if "virtual_stages" in case.layout else {"layers": 2}
    case = replace(case, model=case.model | few, steps=_STEPS, global_batch=4)
    expected = run_ranks(case.world, trained, case, False)
    found = run_ranks(case.world, trained, case, True)
    for (losses, own, loss, steps), (warmed_losses, warmed, warmed_loss, warmed_steps) in zip(
        expected, found, strict=True
    ):
        assert (warmed_losses, warmed_loss, warmed_steps) == (losses, loss, steps)
        for one, other in zip(own, warmed, strict=True):
            assert np.array_equal(one, other)


def test_a_warm_up_computes_every_stage_and_exchanges_nothing() -> None:
    found = run_ranks(2, spied, Case({"pp": 2, "virtual_stages": 2}, global_batch=4))
    assert found == [(0, {0, 2}, {0, 2}), (0, {1, 3}, {1, 3})]


def spied(case: Case) -> tuple[int, set[int], set[int]]:
    """Messages, and stages that were computed forward and backward."""
    engine = make_engine(case)
    eager, messages = engine._runtime._eager, []
    forward, forwards, backwards = eager.forward, set(), set()
    for channel in engine._runtime.transfers.channels.values():
        channel.send = channel.receive = lambda *_: messages.append(1)  # type: ignore[method-assign]

    def spy(stage: int, *given: Any, **more: Any) -> Any:
        output, backward = forward(stage, *given, **more)
        forwards.add(stage)
        whole = backward.whole
        return output, SimpleNamespace(whole=lambda gradient: (backwards.add(stage), whole(gradient))[1])

    eager.forward = spy  # type: ignore[method-assign]
    engine.warm_up()
    close_world()
    return len(messages), forwards, backwards


def seen_by_cuda() -> tuple[str | None, str | None]:
    """The environment when this rank first asks for a GPU."""
    found: list[tuple[str | None, str | None]] = []

    def is_available() -> bool:
        names = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_MODULE_LOADING")
        found.append((os.environ.get(names[0]), os.environ.get(names[1])))
        return False

    torch.cuda.is_available = is_available
    config = ModelConfig(layers=2, hidden=16, heads=2, vocabulary=32, sequence=8)
    tokens = torch.zeros(4, 8, dtype=torch.int64)

    def batch(step: int, rows: range) -> Batch:
        return Batch(tokens[: len(rows)], tokens[: len(rows)], torch.arange(rows.start, rows.stop))

    layout, optimizer = Layout(pp=2), OptimizerConfig()
    for _ in fit(GPT(config, seed=1), batch, layout, optimizer, steps=1, global_batch=4):
        pass
    return found[0]


def test_queues_and_loading_are_set_before_cuda_is_asked_for() -> None:
    assert run_ranks(2, seen_by_cuda) == [("32", "EAGER")] * 2
