"""If these fail, `replaying` forgives what a CUDA graph does not, and `test_captured` proves nothing."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from nccl_like import install
from ranks import run_ranks
from replaying import Replaying, StaleMemoryError, note_collectives

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.parallel.cuda_graphs import CudaGraphs

pytestmark = pytest.mark.usefixtures("dynamo")


def test_a_replay_reads_what_is_there_now_and_computes_nothing_in_python() -> None:
    x, runs, made = torch.ones(3), [], []

    def work() -> None:
        runs.append(1)
        made.append(x * 2)

    start = Replaying().capture(work, 0)
    x.fill_(5.0)
    start()
    assert made[0].tolist() == [10.0] * 3 and len(runs) == 1


def test_memory_that_moved_since_the_capture_is_reported() -> None:
    x = torch.ones(3)
    start = Replaying().capture(lambda: x.mul_(2), 0)
    x.untyped_storage().resize_(0)
    with pytest.raises(StaleMemoryError, match="moved"):
        start()
    x.untyped_storage().resize_(12)
    kept = torch.ones(3)
    if x.data_ptr() != kept.data_ptr():
        x.untyped_storage().resize_(4096)
    with pytest.raises(StaleMemoryError, match="moved"):
        start()


def test_memory_that_was_freed_since_the_capture_is_reported() -> None:
    x, constants = torch.ones(3), [torch.ones(3)]
    start = Replaying().capture(lambda: x.add_(constants[0]), 0)
    start()
    constants.clear()
    with pytest.raises(StaleMemoryError, match="freed"):
        start()


def captures(
    capturer: Replaying, x: torch.Tensor
) -> tuple[torch.Tensor, Callable[[], None], Callable[[], None]]:
    """Something for the backward that is kept in the first capture, and read and given up in the second."""
    total, kept = torch.zeros(4), []
    forward = capturer.capture(lambda: kept.append(x * x), 0)
    backward = capturer.capture(lambda: total.add_(kept.pop()), 0)
    return total, forward, backward


def test_captures_of_a_pool_are_replayed_in_their_order() -> None:
    capturer, x = Replaying(), torch.full((4,), 3.0)
    total, forward, backward = captures(capturer, x)
    other = capturer.capture(lambda: torch.ones(4).neg(), 0)
    for start in (forward, backward, other, forward, backward, other):
        start()
    assert total.tolist() == [18.0] * 4
    for start in (forward, other, backward):
        start()
    assert total.isnan().all()


def test_captures_of_another_pool_leave_it_alone() -> None:
    capturer, x = Replaying(), torch.full((4,), 3.0)
    total, forward, backward = captures(capturer, x)
    other = capturer.capture(lambda: torch.ones(4).neg(), 1)
    for start in (forward, other, backward):
        start()
    assert total.tolist() == [9.0] * 4


def test_an_output_is_gone_when_its_capture_is_replayed_again() -> None:
    capturer, x, total, kept = Replaying(), torch.ones(4), torch.zeros(4), []
    forward = capturer.capture(lambda: kept.append(x * x), 0)
    backward = capturer.capture(lambda: total.add_(kept.pop()), 0)
    forward()
    backward()
    backward()  # what the forward left is spent
    assert total.isnan().all()


def captured_on_rank(fault: str) -> str:
    install()
    note_collectives()
    groups = open_world(Layout(tp=2), torch.device("cpu"))
    group, own, whole = groups.along("tp"), torch.ones(2), torch.zeros(4)

    def work() -> None:
        collectives = [
            lambda: dist.all_reduce(own, group=group, async_op=True),
            lambda: dist.all_gather_into_tensor(whole, own, group=group, async_op=True),
        ]
        if fault == "order" and groups.grid.rank == 1:
            collectives.reverse()
        for post in collectives:
            pending = post()
            if fault != "wait":
                pending.wait()

    try:
        Replaying().capture(work, 0)()
    except RuntimeError as error:
        return str(error)
    finally:
        close_world()
    return f"{whole.tolist()}"


@pytest.mark.parametrize(
    ("fault", "said"),
    [("none", "[2.0, 2.0, 2.0, 2.0]"), ("order", "in another order"), ("wait", "not waited for")],
)
def test_collectives_are_replayed_where_all_ranks_capture_the_same_and_wait_for_it(
    fault: str, said: str
) -> None:
    for found in run_ranks(2, captured_on_rank, fault):
        assert said in found


@pytest.mark.parametrize("name", ["TORCH_NCCL_BLOCKING_WAIT", "NCCL_BLOCKING_WAIT"])
def test_waits_that_block_the_host_are_refused_where_collectives_are_captured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(BadInputError, match=f'{name} = "1": unset'):
        CudaGraphs(torch.device("cuda", 0), tp=2)


def test_a_communicator_that_graphs_alone_may_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL would mix captured collectives and those of the gradients' sum without keeping their order."""
    monkeypatch.setenv("NCCL_GRAPH_MIXING_SUPPORT", "0")
    with pytest.raises(BadInputError, match='NCCL_GRAPH_MIXING_SUPPORT = "0": unset'):
        CudaGraphs(torch.device("cuda", 0), tp=2)
