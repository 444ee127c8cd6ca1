"""If these fail, a pipeline rank holds the tensors that it sent for all micro-batches of a step, or drops one
that its peer has not received."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from parity_case import Case, make_engine, run_case, train_steps
from ranks import run_ranks

from myriad.comm.groups import close_world
from myriad.parallel import runtime
from myriad.parallel.pipeline_transfers import PipelineTransfers, TransferTables

SCHEDULES: list[dict[str, Any]] = [
    {"pp": 3},
    {"pp": 2, "virtual_stages": 2},
    {"pp": 3, "schedule": "eager-zero-bubble"},
    {"pp": 2, "virtual_stages": 2, "schedule": "zero-bubble-v", "recompute": "full"},
]


def case_of(layout: dict[str, Any], micro_batches: int) -> Case:
    return Case(layout, steps=2, global_batch=micro_batches)


def most_sent(case: Case) -> int:
    """The largest number of sends that this rank holds at once in a step."""
    most, post = 0, PipelineTransfers.post

    def counted(self: PipelineTransfers, transfers: Any, tables: TransferTables) -> None:
        nonlocal most
        post(self, transfers, tables)
        most = max(most, len(tables.sent))

    engine = make_engine(case)
    with mock.patch.object(PipelineTransfers, "post", counted):
        train_steps(case, engine, 0, 1)
    engine.close()
    close_world()
    return most


def without_proofs(case: Case, run: Callable[[Case], Any]) -> Any:
    """What a rank finds if every send is held to the iteration's end."""
    with mock.patch.object(runtime, "proved_sends", lambda program, rank: {}):
        return run(case)


@pytest.mark.parametrize("layout", SCHEDULES, ids=str)
def test_sends_of_more_micro_batches_are_not_held_longer(layout: dict[str, Any]) -> None:
    few, many = (run_ranks(layout["pp"], most_sent, case_of(layout, count)) for count in (12, 24))
    assert few == many and max(many) < 12


@pytest.mark.parametrize("layout", SCHEDULES[1:3], ids=str)
def test_losses_and_parameters_are_the_same_to_the_bit(layout: dict[str, Any]) -> None:
    case = case_of(layout, 12)
    (losses, tensors), *_ = run_ranks(layout["pp"], run_case, case)
    (expected, expected_tensors), *_ = run_ranks(layout["pp"], without_proofs, case, run_case)
    assert losses == expected and tensors.keys() == expected_tensors.keys()
    assert all(np.array_equal(tensors[name], values) for name, values in expected_tensors.items())
    assert min(run_ranks(layout["pp"], without_proofs, case, most_sent)) >= case.global_batch
