"""If these fail, a resumed run may add gradients up in another order and give other bits."""

import json
from pathlib import Path

import pytest
import torch
from ranks import leave_world, run_ranks

from myriad.comm.groups import open_world
from myriad.job import load_job
from myriad.train.engine_setup import choose_links

CPU = torch.device("cpu")
FOUR = ["layout.dp=4", "comm.node_size=2", "train.global_batch=4"]
FAST_NODES = ["comm.node_bandwidth=50 Gbit/s", "comm.network_bandwidth=1 Gbit/s"]


def settle(overrides: list[str], kept: Path) -> str:
    job = load_job("tiny", overrides)
    chosen = choose_links(job, open_world(job.layout, CPU), CPU, kept).hierarchy
    leave_world()
    return chosen


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    return tmp_path / "hierarchy.json"


def test_what_was_measured_once_is_not_measured_again(kept):
    (chosen,) = set(run_ranks(4, settle, FOUR, kept))
    (choice,) = json.loads(kept.read_text())
    assert choice["hierarchy"] == chosen
    other = "flat" if chosen == "node" else "node"
    kept.write_text(json.dumps([choice | {"hierarchy": other}]))
    assert run_ranks(4, settle, FOUR, kept) == [other] * 4


def test_rates_are_measured_again_in_another_placement_and_kept_for_each(kept):
    assert run_ranks(4, settle, [*FOUR, *FAST_NODES], kept) == ["node"] * 4
    assert run_ranks(2, settle, ["layout.dp=2"], kept) == ["flat"] * 2
    assert [choice["hierarchy"] for choice in json.loads(kept.read_text())] == ["node", "flat"]


def test_rates_given_in_the_job_are_not_stored(kept):
    assert run_ranks(4, settle, [*FOUR, "comm.hierarchy=node"], kept) == ["node"] * 4
    assert not kept.exists()
