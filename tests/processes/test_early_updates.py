"""If these fail, updates inside the backward (`overlap.optimizer_in_backward`) learn something else than updates
behind the gradients' norm, or leave weights in which a NaN has been."""

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_case import Case, make_engine, run_case, train_steps
from ranks import run_ranks

from myriad.comm.groups import close_world
from myriad.errors import RunFailedError

OFF: dict[str, Any] = {"clip_norm": None, "weight_decay": 0.3}
EARLY = {"optimizer_in_backward": True}


def train(case: Case) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
    with tempfile.TemporaryDirectory() as folder:
        first: tuple[list[tuple[float, float]], dict[str, np.ndarray]]
        first = run_ranks(case.world, run_case, case, Path(folder))[0]
    return first


def assert_same_bits(case: Case) -> None:
    late, early = train(case), train(replace(case, overlap=case.overlap | EARLY))
    assert [loss for loss, _ in early[0]] == [loss for loss, _ in late[0]]
    assert [norm for _, norm in early[0]] == pytest.approx([norm for _, norm in late[0]], rel=1e-6)
    assert early[1].keys() == late[1].keys()
    for name, values in late[1].items():
        assert np.array_equal(early[1][name], values), name


LAYOUTS: list[tuple[dict[str, Any], dict[str, Any], int]] = [
    ({}, {}, 1),
    ({"micro_batch": 2}, {"tied": False}, 4),
]


@pytest.mark.parametrize(("layout", "model", "global_batch"), LAYOUTS, ids=str)
def test_updates_inside_the_backward_give_the_bits_of_updates_behind_it(
    layout: dict[str, Any], model: dict[str, Any], global_batch: int
) -> None:
    assert_same_bits(Case(layout=layout, model=model, optimizer=OFF, steps=4, global_batch=global_batch))
