"""A start that hangs, or that costs more with every rank, is what keeps ten thousand ranks from training."""

import os
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import free_port, run_ranks
from torch.distributed import distributed_c10d as c10d

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "links"))

import startup_clients
import startup_wire
from myriad.comm import gloo_setup
from myriad.comm import groups as groups_module
from myriad.comm.config import CommConfig
from myriad.comm.groups import Groups, close_world, open_world
from myriad.comm.layout import Layout
from myriad.errors import RunFailedError

CPU = torch.device("cpu")
CUBE = Layout(dp=2, pp=2, tp=2)


def total(groups: Groups, *axes: str, purpose: str = "") -> float:
    x = torch.tensor([float(groups.grid.rank)])
    dist.all_reduce(x, group=groups.along(*axes, purpose=purpose))
    return x.item()


def sums_along_each_axis() -> list[tuple[float, float]]:
    groups = open_world(CUBE, CPU)
    found = [(total(groups, axis), sum(groups.grid.peers(axis))) for axis in ("tp", "pp", "dp")]
    found.append((total(groups, "dp", "pp"), sum(groups.grid.peers("dp", "pp"))))
    assert dist.get_backend(groups.on_host("saving")) == "gloo"
    world = torch.ones(1)
    dist.all_reduce(world)
    dist.barrier()
    close_world()
    return [*found, (world.item(), CUBE.world)]


def test_every_group_sums_over_its_members():
    for found in run_ranks(CUBE.world, sums_along_each_axis):
        assert all(result == expected for result, expected in found)


def different_groups_first() -> list[float]:
    groups = open_world(Layout(dp=4), CPU)
    rank, found = groups.grid.rank, []
    if rank in (0, 3):
        x = torch.ones(1)
        dist.all_reduce(x, group=groups.of((0, 3), "tied"))
        found.append(x.item())
    found += [total(groups, "dp"), total(groups, "dp", purpose="stream")]
    others = Groups(groups.grid)
    found.append(total(others, "dp"))
    close_world()
    return found


def test_ranks_that_made_different_groups_before_still_meet():
    assert run_ranks(4, different_groups_first, timeout=60)[1:3] == [[6.0, 6.0, 6.0]] * 2


class Counting(gloo_setup.GlooStore):
    """Counts what reaches the real store."""

    def __init__(self, inner):
        super().__init__(inner)
        self.requests = []

    def set(self, key, value):
        self.requests.append(("set", len(value)))
        self._inner.set(key, value)

    def multi_get(self, keys):
        self.requests.append(("multi_get", len(keys)))
        return self._inner.multi_get(keys)

    def get(self, key):
        self.requests.append(("get", 1))
        return self._inner.get(key)


def requests_of_a_start(layout: Layout) -> list[tuple[str, int]]:
    opened, counting = groups_module.open_store, []

    def open_counting(*arguments):
        counting.append(Counting(opened(*arguments)))
        return counting[0]

    groups_module.open_store = open_counting
    groups = open_world(layout, CPU)
    for axis in ("dp", "pp", "tp"):
        total(groups, axis)
    dist.all_reduce(torch.ones(1))
    dist.barrier()
    done = counting[0].requests
    close_world()
    return done


@pytest.mark.parametrize("layout", [CUBE, Layout(dp=3, pp=2, tp=2)], ids=lambda layout: str(layout.world))
def test_a_start_costs_each_rank_two_requests_a_group_as_the_benchmark_simulates(layout):
    for rank, found in enumerate(run_ranks(layout.world, requests_of_a_start, layout)):
        exchanges = startup_clients.exchanges_of(rank, layout)
        reads = [("multi_get", len(members)) for _, _, members, _ in exchanges]
        writes = [("set", size) for *_, size in exchanges]
        assert sorted(found) == sorted(reads + writes)


@pytest.mark.parametrize("libuv", [True, False])
@pytest.mark.parametrize("way", ["myriad", "mesh"])
def test_simulated_ranks_speak_the_language_of_the_store(libuv, way, monkeypatch):
    # torch's server asks for the name of whoever connects: where nobody answers, 5 s are waited for nothing.
    monkeypatch.setenv("RES_OPTIONS", "timeout:1 attempts:1")
    found = startup_clients.measure(startup_wire.TcpStore(libuv=libuv), 64, way)
    assert found["replies_per_rank"] == (2 + 2 * 3 if way == "myriad" else 2 + 3 * 64)


@pytest.mark.parametrize("way", ["myriad", "mesh"])
def test_simulated_ranks_speak_the_language_of_the_own_store(way):
    found = startup_clients.measure(startup_wire.OwnStore(), 64, way)
    assert found["replies_per_rank"] == (2 + 2 * 3 if way == "myriad" else 3 + 3 * 64)


def all_pairs_in_a_large_group() -> bool:
    groups_module.MESH_RANKS = gloo_setup.MESH_RANKS = 3
    groups = open_world(Layout(pp=8), CPU)
    group, rank = groups.along("pp"), groups.grid.rank
    assert gloo_setup.partners(rank, 8) != tuple(range(8))
    for step in (1, 3, 5):
        got = torch.empty(1)
        receive = dist.irecv(got, (rank - step) % 8, group=group)
        send = dist.isend(torch.tensor([float(rank)]), (rank + step) % 8, group=group)
        receive.wait()
        send.wait()
        assert got.item() == (rank - step) % 8
    everyone: list[int | None] = [None] * 8
    dist.all_gather_object(everyone, rank)
    close_world()
    return everyone == list(range(8))


def test_ranks_of_a_group_too_large_for_a_mesh_reach_each_other_all_the_same():
    assert all(run_ranks(8, all_pairs_in_a_large_group, timeout=60))


def posts_before_its_peer_is_there() -> bool:
    """As a pipeline does: the first stage posts the receive of a gradient before it has sent anything."""
    groups = open_world(Layout(pp=2), CPU)
    up, down = groups.along("pp", purpose="up"), groups.along("pp", purpose="down")
    value = torch.ones(1)
    if groups.grid.rank == 0:
        gradient = torch.empty(1)
        received = dist.irecv(gradient, 1, group=down)
        dist.isend(value, 1, group=up).wait()
        received.wait()
        value = gradient
    else:
        dist.irecv(value, 0, group=up).wait()
        dist.isend(2 * value, 0, group=down).wait()
    close_world()
    return value.item() == (2.0 if groups.grid.rank == 0 else 1.0)


def test_a_receive_posted_early_does_not_wait_for_the_sender():
    assert all(run_ranks(2, posts_before_its_peer_is_there, timeout=60))


def leaves_one_out() -> str:
    groups = open_world(Layout(dp=3), CPU)
    rank, store = groups.grid.rank, c10d._world.pg_map[dist.group.WORLD][1]
    message = ""
    if rank != 1:
        for each in (store, store._inner):
            each.set_timeout(timedelta(seconds=1))
        with pytest.raises(RunFailedError) as error:
            groups.along("dp")
        message = str(error.value)
    store._inner.set(f"seen {rank}", "1")
    with suppress(dist.DistNetworkError):  # rank 0, which has the store, ends as soon as it has seen all
        store._inner.wait([f"seen {other}" for other in range(3)], timedelta(seconds=60))
    return message


def test_a_member_that_does_not_come_is_named():
    for rank, message in enumerate(run_ranks(3, leaves_one_out, timeout=60)):
        assert rank == 1 or message == f"rank {rank} waited 1 s for rank 1 to join group (0, 1, 2)"


def meets_nobody() -> str:
    os.environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": str(free_port())}
    with pytest.raises(RunFailedError) as error:
        open_world(Layout(dp=2), CPU, comm=CommConfig(timeout_seconds=1))
    return str(error.value)


def test_a_store_that_no_process_serves_is_named_with_its_port():
    [message] = run_ranks(1, meets_nobody, timeout=60)
    assert message.startswith("rank 1 waited for the store of rank 0 at 127.0.0.1:") and "\n" not in message


def serves_on_a_taken_port() -> str:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(taken.getsockname()[1])}
        with pytest.raises(RunFailedError) as error:
            open_world(Layout(dp=2), CPU, comm=CommConfig(timeout_seconds=1))
    return str(error.value)


def test_a_port_that_is_taken_is_one_line():
    [message] = run_ranks(1, serves_on_a_taken_port, timeout=60)
    assert message.startswith("rank 0: the store of rank 0 at 127.0.0.1:") and "\n" not in message


def prints_nothing(folder: Path) -> str:
    path = folder / f"log-{os.environ['RANK']}"
    with path.open("w") as log:
        os.dup2(log.fileno(), 1)
        groups = open_world(Layout(dp=2), CPU)
        total(groups, "dp")
        sys.stdout.flush()
        close_world()
    return path.read_text()


def test_the_log_of_a_rank_is_not_filled_with_who_is_connected_to_whom(tmp_path):
    assert run_ranks(2, prints_nothing, tmp_path, timeout=60) == ["", ""]
