"""Replicas that compute with different kernels drift apart: one rank's wrong kernel is every rank's."""

import pytest
import torch
from ranks import run_ranks

from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.train.device_setup import agree_on_kernels


def agree(doubting: tuple[int, ...]) -> tuple[str, str]:
    device = torch.device("cpu")
    groups = open_world(Layout(dp=2), device, comm=CommConfig(timeout_seconds=30))
    doubts = groups.grid.rank in doubting
    found = agree_on_kernels("plain" if doubts else "auto", "wrong" if doubts else "", groups, device)
    close_world()
    return found


@pytest.mark.parametrize(
    ("doubting", "expected"),
    [
        ((), [("auto", ""), ("auto", "")]),
        ((1,), [("plain", "without Triton's kernels: rank 1 found some to be wrong"), ("plain", "wrong")]),
        ((0, 1), [("plain", "wrong"), ("plain", "wrong")]),
    ],
)
def test_a_wrong_kernel_on_one_rank_is_used_by_none(
    doubting: tuple[int, ...], expected: list[tuple[str, str]]
) -> None:
    assert run_ranks(2, agree, doubting) == expected
