"""If these fail, a checkpoint process that dies takes the training with it, or what was to be stored."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "checkpoint"))

from fault_kills import Life
from fault_state import State, open_session
from myriad.checkpoint.checkpoint_files import load
from myriad.checkpoint.config import CheckpointConfig
from myriad.checkpoint.storage.checkpoint_folder import CheckpointFolder
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.system.jsonl import JsonlTail

LAST, BOTH = 20, -1


def train_on(path: Path, two_nodes: bool, deaths: dict[int, int]) -> str | None:
    """One rank's side; ``deaths``: the node whose snapshot server dies by the step after whose snapshot it
    does."""
    groups = open_world(Layout(dp=2), torch.device("cpu"))
    rank, group = groups.grid.rank, groups.on_host("checkpoints")
    config = CheckpointConfig(every=5, copies_every=2, timeout_seconds=60, linger_seconds=0)
    session = open_session(path, config, rank, 2, 0 if two_nodes else rank, group)
    session.acquire(0)
    state = State()
    session.begin(state.shards(rank, 2))
    for step in range(1, LAST + 1):
        session.settle()
        torch.distributed.all_reduce(torch.zeros(1), group=group)
        state.become(step)
        session.take(step, {"step": step}, session.purpose(step, is_last=step == LAST, due=False))
        if rank == 0 and step in deaths:
            kill_snapshot_server(Life(path, 5, two_nodes), deaths[step])
    problem = session.finish(LAST)
    session.close()
    close_world()
    return problem


def kill_snapshot_server(life: Life, node: int) -> None:
    for pid in (
        pid for of, pid in life.snapshot_servers() if node in (of, BOTH)
    ):  # none: nobody has missed the last one yet
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("deaths", [{8: 0}, {LAST: 0}, {4: 0, 11: 0, LAST - 1: 0}], ids=str)
def test_training_continues_with_a_new_snapshot_server_and_stores_its_last_step(
    deaths: dict, tmp_path: Path
) -> None:
    assert run_ranks(2, train_on, tmp_path, False, deaths) == [None, None]
    check(tmp_path)


@pytest.mark.parametrize("node", [0, 1, BOTH])
def test_of_two_nodes_one_gets_a_new_snapshot_server_and_the_other_finds_it(
    node: int, tmp_path: Path
) -> None:
    assert run_ranks(2, train_on, tmp_path, True, {8: node}) == [None, None]
    check(tmp_path)


def check(path: Path) -> None:
    folder, state = CheckpointFolder(path / "checkpoints"), State()
    assert folder.newest() == (LAST, [])
    load(folder.of_step(LAST), state.all_shards())
    assert state.wrong(LAST) == []
    told = [event for event in JsonlTail(path / "events.jsonl").poll() if "died" in event.get("problem", "")]
    assert told, "the user is told"
