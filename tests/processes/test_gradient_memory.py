"""If these fail, gradients of an earlier step are part of this one's: their memory is not zeroed, what is
written first replaces it."""

from typing import Any

import pytest
import torch
from parity_case import Case, make_engine, train_steps
from ranks import reuse_ranks

from myriad.comm.groups import close_world
from myriad.parallel.chunk import Chunk

GPT = {"tied": True, "bias": True, "norm": "layer", "position": "learned", "activation": "gelu"}
CASES = {
    "one": Case({"micro_batch": 2}, steps=3),
    "tied-with-biases": Case({"micro_batch": 2}, model=GPT, steps=3),
    "zero-0": Case({"dp": 2, "micro_batch": 2}, steps=3),
    "zero-1-early": Case(
        {"dp": 2, "zero": 1},
        optimizer={"clip_norm": None},
        overlap={"optimizer_in_backward": True},
        steps=3,
    ),
    "zero-2-each": Case({"dp": 2, "zero": 2, "reduce": "each", "micro_batch": 2}, steps=3),
    "zero-3": Case({"dp": 2, "zero": 3, "recompute": "full"}, dtype=torch.bfloat16, steps=3),
    "zero-bubble-tied": Case({"pp": 2, "schedule": "zero-bubble", "micro_batch": 2}, model=GPT, steps=3),
    "tensor": Case({"tp": 2, "micro_batch": 2}, dtype=torch.bfloat16, steps=3),
}


def train(case: Case, way: str) -> tuple[list[Any], list[bytes]]:
    """Losses and norms, and this rank's parameters: with sums that start from zeros (``zeros``), or in memory
    full of NaN before anything is written."""
    engine = make_engine(case)
    for chunk in engine.model.chunks:
        chunk.overwrites = way != "zeros"
    begin = Chunk._begin_accumulation

    def poisoned(self: Chunk) -> None:
        self.grad_buffer.fill_(torch.nan)
        begin(self)

    if way == "poisoned":
        Chunk._begin_accumulation = poisoned  # type: ignore[method-assign]
    losses = train_steps(case, engine, 0, case.steps)
    masters = [chunk.master.numpy().tobytes() for chunk in engine.model.chunks]
    engine.close()
    close_world()
    return losses, masters


@pytest.mark.parametrize("name", CASES)
def test_first_gradients_replace_what_memory_has_and_change_no_bit(name: str) -> None:
    case = CASES[name]
    zeros, poisoned = (reuse_ranks(case.world, train, case, way) for way in ("zeros", "poisoned"))
    assert poisoned == zeros
