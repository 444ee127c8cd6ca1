"""If these break: ranks that torchrun, Slurm or a person started do not find each other, or train in a world
of the wrong size."""

import os
from types import SimpleNamespace

import pytest
import torch

from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.parallel.forward_engine import check_on_device
from myriad.program.config import OverlapConfig
from myriad.program.device_needs import DeviceJob
from myriad.train import device_setup
from myriad.train.device_setup import RankEnvironment, pick_device, prepare_cuda, read_rank_environment

NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_MODULE_LOADING",
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


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    assert read_rank_environment(1) == RankEnvironment(rank=0, world=1, local_rank=0, local_world=1)


def test_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, RANK=5, WORLD_SIZE=8, LOCAL_RANK=1, LOCAL_WORLD_SIZE=4)
    assert read_rank_environment(8) == RankEnvironment(rank=5, world=8, local_rank=1, local_world=4)


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
    read_rank_environment(2)
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
    assert read_rank_environment(8) == RankEnvironment(rank=7, world=8, local_rank=0, local_world=expected)


def test_slurm_does_not_overrule_a_launcher_of_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """`myriad train` inside an allocation starts its own ranks."""
    setenv(
        monkeypatch, SLURM_PROCID=0, SLURM_NTASKS=1, RANK=1, WORLD_SIZE=2, LOCAL_RANK=1, LOCAL_WORLD_SIZE=2
    )
    assert read_rank_environment(2).rank == 1


@pytest.mark.parametrize("started", [None, 3])
def test_a_world_of_another_size_is_refused_in_one_line(
    started: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if started is not None:
        setenv(monkeypatch, RANK=0, WORLD_SIZE=started)
    with pytest.raises(
        BadInputError, match=rf"^WORLD_SIZE = {started or 1}: the layout needs 4 ranks"
    ) as caught:
        read_rank_environment(4)
    assert "\n" not in str(caught.value)


def test_threads_are_the_key_else_the_environment_else_a_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.get_num_threads()
    place, found = RankEnvironment(0, 2, 0, 2), []
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


def with_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: monkeypatch.setattr(
        torch.cuda, "current_device", lambda: index))  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(
        pci_domain_id=0, pci_bus_id=0x1A + device.index, pci_device_id=0))  # fmt: skip
    for name in ("MYRIAD_EPOCH", "MYRIAD_MACHINE", "CUDA_VISIBLE_DEVICES", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("ranks", "gpus"), [(2, 1), (8, 3)])
def test_ranks_that_would_share_a_gpu_compute_on_the_cpu_and_report_it_once(
    ranks: int, gpus: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL would refuse the second rank of a GPU: `myriad train two --layout.pp 2` on a machine with one."""
    with_gpus(monkeypatch, gpus)
    devices = {
        pick_device("auto", 1, RankEnvironment(rank, ranks, rank, ranks)).type for rank in range(ranks)
    }
    assert devices == {"cpu"}
    assert caplog.messages == [f"on the CPU: {ranks} ranks on this machine, and GPUs for {gpus} of them"]


@pytest.mark.parametrize(("kind", "world"), [("cuda", 2), ("cuda", 4), ("auto", 4)])
def test_gpus_that_are_asked_for_or_that_other_nodes_may_have_are_not_given_up_silently(
    kind: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpus(monkeypatch, 1)
    with pytest.raises(
        BadInputError, match=rf"train\.device = \"{kind}\": cpu: 2 ranks .* GPUs for 1 of"
    ) as caught:
        pick_device(kind, 1, RankEnvironment(1, world, 1, 2))
    assert "\n" not in str(caught.value)


def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_its_launcher_shows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with_gpus(monkeypatch, 8)
    assert pick_device("auto", 1, RankEnvironment(11, 16, 3, 8)) == torch.device("cuda", 3)
    with_gpus(monkeypatch, 1)
    setenv(monkeypatch, CUDA_VISIBLE_DEVICES=3)
    assert pick_device("auto", 1, RankEnvironment(11, 16, 3, 8)) == torch.device("cuda", 0)
    setenv(monkeypatch, MYRIAD_EPOCH=1)
    with pytest.raises(BadInputError, match="GPUs for 1 of them"):
        pick_device("auto", 1, RankEnvironment(11, 16, 3, 8))


def test_parts_of_a_product_are_added_in_float32_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch lets cuBLAS add them in bfloat16: sums over many tokens would lose bits."""
    with_gpus(monkeypatch, 1)
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = products.allow_fp16_reduced_precision_reduction = True
    pick_device("auto", 1, RankEnvironment(0, 1, 0, 1))
    assert not products.allow_bf16_reduced_precision_reduction
    assert not products.allow_fp16_reduced_precision_reduction


def test_a_rank_stays_on_the_cores_near_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its batches and snapshots cross the processors' link."""
    bound: list[object] = []
    near = {"0000:1b:00.0": (4, 5)}
    monkeypatch.setattr(device_setup, "cores_near_device", lambda address: near.get(address, ()))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    with_gpus(monkeypatch, 2)
    for rank in range(2):
        pick_device("cuda", 1, RankEnvironment(rank, 2, rank, 2))
    assert bound == [(4, 5)]


def test_nodes_that_are_one_machine_share_its_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--resilience.nodes 2` on one machine: each node counts its ranks from 0."""
    with_gpus(monkeypatch, 4)
    setenv(monkeypatch, MYRIAD_MACHINE="", MYRIAD_EPOCH=1, RANK=3)
    assert pick_device("auto", 1, RankEnvironment(3, 4, 1, 2)) == torch.device("cuda", 3)
    with_gpus(monkeypatch, 1)
    setenv(monkeypatch, MYRIAD_MACHINE="", MYRIAD_EPOCH=1, RANK=1)
    assert pick_device("auto", 1, RankEnvironment(1, 2, 0, 1)).type == "cpu"


def test_processes_that_tests_start_see_no_gpu() -> None:
    """Else they would train on it, where the machine has one, and tests about CPUs would fail there."""
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_cuda_where_there_is_none_is_refused() -> None:
    with pytest.raises(BadInputError, match=r"train\.device = \"cuda\": no CUDA device here"):
        pick_device("cuda", 0, RankEnvironment(0, 1, 0, 1))


def test_pipeline_ranks_set_what_cuda_reads_at_its_start_unless_the_user_did(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare_cuda(Layout(dp=2), OverlapConfig())
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    setenv(monkeypatch, CUDA_MODULE_LOADING="LAZY")
    prepare_cuda(Layout(pp=2), OverlapConfig())
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


def test_a_rank_refuses_too_few_hardware_queues_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    setenv(monkeypatch, CUDA_DEVICE_MAX_CONNECTIONS=1)
    job = DeviceJob(Layout(pp=2), OverlapConfig(), CommConfig(), (4,), tied=False)
    check_on_device(torch.device("cpu"), job)
    with pytest.raises(BadInputError, match=r"^CUDA_DEVICE_MAX_CONNECTIONS = \"1\": unset, or at least 5"):
        check_on_device(torch.device("cuda", 0), job)
