"""If these fail, updates inside the backward (`overlap.optimizer_in_backward`) learn something else than
those behind the gradients' norm, or a run goes on with weights that a NaN has been in."""

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import Case, make_engine, run_case, train_steps
from ranks import reuse_ranks, run_ranks

from myriad.comm.groups import close_world
from myriad.errors import RunFailedError

OFF: dict[str, Any] = {"clip_norm": None}
EARLY = {"optimizer_in_backward": True}
MOVED = [False, False, True, False]


def train(case: Case) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
    ranks: list[tuple[list[tuple[float, float]], dict[str, np.ndarray]]]
    ranks = reuse_ranks(case.world, run_case, case)
    return ranks[0]


@pytest.mark.parametrize(
    ("layout", "global_batch", "dtype"),
    [
        ({}, 1, torch.bfloat16),
        ({"dp": 2, "zero": 1}, 2, torch.float32),
        ({"dp": 2, "zero": 2, "shares": (3, 1), "reduce": "each"}, 4, torch.float32),
        ({"pp": 2, "dp": 2, "zero": 3, "virtual_stages": 2, "schedule": "zero-bubble-v"}, 4, torch.float32),
        ({"tp": 4, "micro_batch": 2}, 2, torch.float32),
    ],
    ids=str,
)
def test_updates_inside_the_backward_give_the_bits_of_updates_behind_the_norm(
    layout: dict[str, Any], global_batch: int, dtype: torch.dtype
) -> None:
    late = Case(layout=layout, optimizer=OFF, steps=2, global_batch=global_batch, dtype=dtype)
    expected, found = train(late), train(replace(late, overlap=EARLY))
    assert [loss for loss, _ in found[0]] == [loss for loss, _ in expected[0]]
    norms = [norm for _, norm in expected[0]]  # rounded otherwise where chunks are other ones
    assert [norm for _, norm in found[0]] == pytest.approx(norms, rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, values in expected[1].items():
        assert np.array_equal(found[1][name], values), name


def poisoned(case: Case, culprit: int) -> tuple[str, list[bool], bool]:
    """A rank whose second chunk gets an infinite gradient: what it says, which chunks have moved, and whether
    everything is finite."""
    engine = make_engine(case)
    train_steps(case, engine, 0, 1)
    engine.gather()
    chunks = engine.model.chunks
    before = [chunk.master.clone() for chunk in chunks]
    reduce = chunks[1].start_reduce

    def reducing() -> None:
        chunks[1].start_gradients()
        chunks[1].grad_buffer[3] = torch.inf
        reduce()

    if int(os.environ["RANK"]) == culprit:
        chunks[1].start_reduce = reducing  # type: ignore[method-assign]
    try:
        train_steps(case, engine, 1, 2)
        said = "nothing"
    except RunFailedError as error:
        said = str(error)
    states = [chunk.master for chunk in chunks]
    states += [tensor for state in engine.optimizer.state().values() for tensor in state]
    close_world()
    moved = [not torch.equal(old, chunk.master) for old, chunk in zip(before, chunks, strict=True)]
    return said, moved, all(bool(torch.isfinite(state).all()) for state in states)


@pytest.mark.parametrize("layout", [{}, {"dp": 2, "zero": 0}], ids=str)
def test_an_infinite_gradient_stops_the_run_and_gets_into_no_weight(layout: dict[str, Any]) -> None:
    """What was updated before it came has moved: the run goes on from its last checkpoint in any case."""
    case = Case(layout=layout, optimizer=OFF, overlap=EARLY | {"chunks": 3}, steps=2, global_batch=2)
    for said, moved, finite in run_ranks(case.world, poisoned, case, case.world - 1):
        assert said.startswith("step 2: loss is ") and said.endswith(f", on rank {case.world - 1}")
        assert "gradient of" in said and finite
        assert moved == MOVED, "the last chunks move first, the tied one at the end"


def held(case: Case) -> list[int]:
    """Bytes of gradient sums between two steps."""
    engine = make_engine(case)
    train_steps(case, engine, 0, 1)
    close_world()
    return [chunk.grad_buffer.untyped_storage().size() for chunk in engine.model.chunks]


def test_with_one_micro_batch_gradients_give_their_memory_back() -> None:
    early = Case(optimizer=OFF, overlap=EARLY, global_batch=1)
    assert not any(run_ranks(1, held, early)[0])
    assert all(run_ranks(1, held, replace(early, global_batch=2))[0])
