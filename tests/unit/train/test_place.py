"""If these break: ranks that torchrun, Slurm or a person started do not find each other, or train in a world
of the wrong size."""

import os

import pytest
import torch

from myriad.errors import BadInputError
from myriad.train.build import Place, find_place, pick_device

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher's variables; what a test or the library sets is gone afterwards."""
    for name in [*NAMES, *(name for name in os.environ if name.startswith("SLURM_"))]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def setenv(monkeypatch: pytest.MonkeyPatch, **values: object) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


def test_started_by_nobody_it_is_a_world_of_one() -> None:
    assert find_place(1) == Place(rank=0, world=1, local_rank=0, local_world=1)


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    assert find_place(8) == Place(rank=5, world=8, local_rank=1, local_world=4)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("gpu[07-09,12]", "gpu07"),
        ("login", "login"),
        ("a1,b[2-3]", "a1"),
        ("rack[2-3]n[04,07-09],x", "rack2n04"),
        ("n[1,3].cluster.org", "n1.cluster.org"),
    ],
)
def test_slurm_first_node_is_where_they_meet(nodes: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, SLURM_PROCID=0, SLURM_NTASKS=2, SLURM_JOB_NODELIST=nodes, SLURM_JOB_ID=4711)
    find_place(2)
    assert os.environ["MASTER_ADDR"] == host
    assert 20000 <= int(os.environ["MASTER_PORT"]) < 40000


@pytest.mark.parametrize(
    ("tasks", "node", "expected"), [("4(x2)", 1, 4), ("2(x3),1", 0, 2), ("2(x3),1", 3, 1), ("3,5", 1, 5)]
)
def test_slurm_node_knows_how_many_ranks_it_has(
    tasks: str, node: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's ranks share one data loader, and the cores."""
    setenv(monkeypatch, SLURM_PROCID=7, SLURM_NTASKS=8, SLURM_LOCALID=0, SLURM_NODEID=node)
    setenv(monkeypatch, SLURM_STEP_TASKS_PER_NODE=tasks)
    assert find_place(8) == Place(rank=7, world=8, local_rank=0, local_world=expected)


def test_slurm_does_not_overrule_a_launcher_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`myriad train` inside an allocation starts its own ranks."""
    setenv(
        monkeypatch, SLURM_PROCID=0, SLURM_NTASKS=1, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2
    )
    assert find_place(2).rank == 1


@pytest.mark.parametrize("started", [None, 3])
def test_a_world_of_another_size_is_refused_in_one_line(
    started: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if started is not None:
        setenv(monkeypatch, RANK=0, WORLD_SIZE=started)
    with pytest.raises(
        BadInputError, match=rf"^WORLD_SIZE = {started or 1}: the layout needs 4 ranks"
    ) as caught:
        find_place(4)
    assert "\n" not in str(caught.value)


def test_threads_are_the_key_else_the_environment_else_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    place, found = Place(0, 2, 0, 2), []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(6))
    try:
        pick_device("cpu", 0, place)
        found.append(torch.get_num_threads())
        setenv(monkeypatch, OMP_NUM_THREADS=2)
        pick_device("cpu", 0, place)
        found.append(torch.get_num_threads())
        pick_device("cpu", 5, place)
        found.append(torch.get_num_threads())
    finally:
        torch.set_num_threads(before)
    assert found == [3, 2, 5]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_cuda_where_there_is_none_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"train\.device = 'cuda': no CUDA device here"):
        pick_device("cuda", 0, Place(0, 1, 0, 1))
