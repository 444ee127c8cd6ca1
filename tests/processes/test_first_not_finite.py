"""If these fail, a person is sent to the wrong machine: a NaN is on all ranks once one has made it."""

import os
from typing import Any

import pytest
import torch
from parity_case import Case, make_engine, train_steps
from ranks import reuse_ranks

from myriad.comm.groups import close_world
from myriad.errors import RunFailedError
from myriad.parallel.engine import Engine

SMALL = {"layers": 2}


def poison_gradient(engine: Engine, *, partial: bool) -> None:
    """Of this rank, just before it is reduced: of a matrix, or (``partial``) of a vector that
    tensor-parallel ranks add up."""
    chunk = engine.model.chunks[0]
    reduce = chunk.start_reduce
    partials = [
        a for entry, (a, _) in zip(chunk.entries, chunk.spans, strict=True) if entry.is_partial_over_tp
    ]
    place = partials[-1] + 1 if partial else 3

    def reducing() -> None:
        chunk.start_gradients()
        chunk.grad_buffer[place] = torch.inf
        reduce()

    chunk.start_reduce = reducing  # type: ignore[method-assign]


def trains(case: Case, culprit: int, partial: bool = False) -> tuple[str, bool]:
    """What a rank says, and whether its parameters are as they were before the step."""
    engine = make_engine(case)
    train_steps(case, engine, 0, 1)
    engine.gather()
    before = [chunk.master.clone() for chunk in engine.model.chunks]
    if int(os.environ["RANK"]) == culprit:
        poison_gradient(engine, partial=partial)
    try:
        train_steps(case, engine, 1, 2)
        said = "nothing"
    except RunFailedError as error:
        said = str(error)
    same = all(torch.equal(old, chunk.master) for old, chunk in zip(before, engine.model.chunks, strict=True))
    close_world()
    return said, same


@pytest.mark.parametrize(
    ("layout", "culprit"),
    [
        ({"dp": 3, "zero": 0}, 2),
        ({"dp": 3, "zero": 1}, 0),  # the slice that it keeps itself
        ({"dp": 3, "zero": 1}, 2),  # another rank's slice
        ({"dp": 3, "zero": 2}, 0),
        ({"dp": 3, "zero": 3}, 2),
        ({"dp": 2, "pp": 2, "zero": 1}, 0),
        ({"dp": 2, "pp": 2, "zero": 1}, 2),
        ({"dp": 2, "tp": 2, "micro_batch": 2}, 2),
        ({"dp": 2, "tp": 2, "micro_batch": 2, "zero": 1}, 0),
        ({"pp": 3, "micro_batch": 4}, 0),
        ({"pp": 3, "micro_batch": 4}, 2),
    ],
    ids=str,
)
def test_the_rank_that_made_it_is_named_by_all_and_nothing_has_moved(
    layout: dict[str, Any], culprit: int
) -> None:
    batch = 2 * layout.get("dp", 1) * layout.get("micro_batch", 1)
    case = Case(layout=layout, model=SMALL, steps=2, global_batch=batch)
    told = reuse_ranks(case.world, trains, case, culprit)
    assert {said for said, _ in told} == {told[0][0]}, "all say the same"
    assert told[0][0].startswith("step 2: loss is ")
    assert told[0][0].endswith(f", on rank {culprit}") and "gradient of" in told[0][0]
    assert all(same for _, same in told)


@pytest.mark.parametrize("culprit", [1, 2])
@pytest.mark.parametrize("zero", [0, 1])
def test_a_gradient_that_tensor_parallel_ranks_add_up_is_its_makers(zero: int, culprit: int) -> None:
    """After the sum both have it."""
    layout = {"dp": 2, "tp": 2, "zero": zero, "micro_batch": 2}
    case = Case(layout=layout, model=SMALL, steps=2, global_batch=8)
    told = reuse_ranks(case.world, trains, case, culprit, True)
    assert {said for said, _ in told} == {told[0][0]}
    assert told[0][0].endswith(f", on rank {culprit}") and "gradient of" in told[0][0]


def test_levels_of_a_hierarchy_which_leave_partial_sums_name_the_rank() -> None:
    levels = {"hierarchy": "node", "node_size": 2}
    case = Case(layout={"dp": 4, "zero": 1}, model=SMALL, steps=2, global_batch=8, comm=levels)
    told = reuse_ranks(case.world, trains, case, 3)
    assert {said.partition(", on ")[2] for said, _ in told} == {"rank 3"}
