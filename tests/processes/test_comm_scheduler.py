"""Parameters or gradients that arrive wrong, late or not at all: a run that trains on garbage, or hangs."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity_case import Case, run_case
from ranks import free_port, leave_world, run_ranks

from myriad.comm.comm_scheduler import CommScheduler
from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.hierarchy import make_levels
from myriad.comm.layout import Layout
from myriad.comm.nccl_transport import NcclCollective
from myriad.comm.payload_codec import make_codec
from myriad.errors import BadInputError
from myriad.program.config import OverlapConfig

CPU = torch.device("cpu")
SMALL = OverlapConfig(message_bytes=64, max_in_flight_bytes=100)
"""Many messages, of which one or two may be under way."""


def make_scheduler(world: int, overlap: OverlapConfig = SMALL, **comm: Any) -> CommScheduler:
    groups = open_world(Layout(dp=world), CPU)
    return CommScheduler(groups, "dp", overlap, CommConfig(**comm), CPU)


def numbers(rank: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * seed + rank))


def gather(world: int, count: int, dtype: torch.dtype, comm: dict[str, Any]) -> bool:
    scheduler = make_scheduler(world, **comm)
    exchange, rank = scheduler.bucket_collective(count, dtype), dist.get_rank()
    part = count // world
    expected = torch.cat([numbers(r, part) for r in range(world)]).to(dtype)
    for _ in range(2):
        values = torch.full((count,), float("nan"), dtype=dtype)
        exchange.gather(values, numbers(rank, part), 0).wait()
        assert torch.equal(values, expected)
    values[rank * part : (rank + 1) * part] = numbers(rank, part).to(dtype)
    exchange.gather(values, values[rank * part : (rank + 1) * part], 0).wait()
    scheduler.close()
    close_world()
    return torch.equal(values, expected)


BY_NODE = {"hierarchy": "node", "node_size": 2}
BY_SWITCH = {"hierarchy": "switch", "node_size": 2, "switch_size": 2}


@pytest.mark.parametrize(
    ("world", "count", "dtype", "comm"),
    [
        (2, 2 * 77, torch.bfloat16, {}),
        (3, 3 * 16, torch.float32, {}),
        (4, 4, torch.float32, {}),
        (2, 0, torch.float32, {}),
        (4, 4 * 77, torch.bfloat16, BY_NODE),
        (6, 6 * 20, torch.float32, BY_NODE),
        (8, 8 * 20, torch.float32, BY_SWITCH),
    ],
)
def test_every_rank_gets_every_slice(world, count, dtype, comm):
    assert all(run_ranks(world, gather, world, count, dtype, comm))


def reduce(world: int, count: int, comm: dict[str, Any]) -> list[torch.Tensor]:
    scheduler = make_scheduler(world, **comm)
    exchange, rank = scheduler.bucket_collective(count, torch.float32), dist.get_rank()
    part = slice(rank * (count // world), (rank + 1) * (count // world))
    found = []
    apart = torch.ones(count // world)
    exchange.reduce_scatter(numbers(rank, count), apart, 0, add=True).wait()
    found.append(apart - 1)
    exchange.reduce_scatter(numbers(rank, count), apart, 0, add=False).wait()
    found.append(apart)
    sums = numbers(rank, count)
    exchange.reduce_scatter(sums, sums[part], 0, add=False).wait()
    found.append(sums[part].clone())
    sums = numbers(rank, count)
    exchange.all_reduce(sums, 0).wait()
    found.append(sums)
    scheduler.close()
    close_world()
    return [x.numpy() for x in found]


@pytest.mark.parametrize(
    ("world", "count", "comm"),
    [
        (2, 2 * 77, {}),
        (3, 3 * 16, {}),
        (2, 0, {}),
        (4, 4 * 33, BY_NODE),
        (8, 8 * 20, BY_SWITCH),
    ],
)
def test_every_rank_gets_the_sum_of_its_slice_and_all_the_same_bits(world, count, comm):
    total = torch.stack([numbers(r, count) for r in range(world)]).double().sum(0)
    results = run_ranks(world, reduce, world, count, comm)
    for rank, (added, apart, inside, whole) in enumerate(results):
        part = total[rank * (count // world) : (rank + 1) * (count // world)]
        for found in (added, apart, inside):
            torch.testing.assert_close(torch.tensor(found).double(), part, rtol=1e-5, atol=1e-5)
        assert (apart == inside).all()
        assert (whole == results[0][3]).all()
        assert (whole[rank * (count // world) : (rank + 1) * (count // world)] == apart).all()


def many_at_once(world: int) -> bool:
    """Deliveries of different urgency under way together, most urgent last, as a backward pass makes them."""
    scheduler, count = make_scheduler(world), world * 50
    rank = dist.get_rank()
    exchanges = [scheduler.bucket_collective(count, torch.float32) for _ in range(6)]
    for step in range(3):
        sums = [numbers(rank, count, seed) for seed in range(6)]
        started = [exchanges[i].all_reduce(sums[i], i) for i in reversed(range(6))]
        values = [torch.empty(count) for _ in range(6)]
        gathers = [
            exchanges[i].gather(values[i], numbers(rank, 50, seed=10 + i + step), 5 - i) for i in range(6)
        ]
        for delivery in (*started, *reversed(gathers)):
            delivery.wait()
        for i in range(6):
            expected = torch.stack([numbers(r, count, i) for r in range(world)]).sum(0)
            torch.testing.assert_close(sums[i], expected)
            expected = torch.cat([numbers(r, 50, 10 + i + step) for r in range(world)])
            assert torch.equal(values[i], expected)
    scheduler.close()
    close_world()
    return True


def test_many_deliveries_of_different_urgency_do_not_mix():
    assert all(run_ranks(3, many_at_once, 3))


def bytes_to_peers(comm: dict[str, Any]) -> tuple[str, dict[int, int]]:
    scheduler, count = make_scheduler(4, OverlapConfig(), **comm), 4 * 256
    exchange = scheduler.bucket_collective(count, torch.float32)
    exchange.all_reduce(torch.ones(count), 0).wait()
    sent = dict(scheduler.bytes_sent)
    scheduler.close()
    close_world()
    return scheduler.hierarchy, sent


def leaves_node(sent: dict[int, int], rank: int) -> int:
    return sum(count for peer, count in sent.items() if peer // 2 != rank // 2)


def test_what_leaves_a_node_shrinks_by_the_number_of_its_ranks():
    flat = run_ranks(4, bytes_to_peers, {"hierarchy": "flat", "node_size": 2})
    by_node = run_ranks(4, bytes_to_peers, BY_NODE)
    assert [kind for kind, _ in flat + by_node] == ["flat"] * 4 + ["node"] * 4
    for rank in range(4):
        assert leaves_node(by_node[rank][1], rank) * 2 == leaves_node(flat[rank][1], rank) == 2 * 2 * 1024


def test_the_hierarchy_is_chosen_alike_by_all():
    """Measured, so any choice is right here; but ranks that disagree wait for each other for ever."""
    chosen = {kind for kind, _ in run_ranks(4, bytes_to_peers, {"node_size": 2})}
    assert len(chosen) == 1
    declared = {"node_size": 2, "node_bandwidth": "50 Gbit/s", "network_bandwidth": "1 Gbit/s"}
    assert {kind for kind, _ in run_ranks(4, bytes_to_peers, declared)} == {"node"}


def in_other_orders() -> bool:
    """The ranks that share an expert may be those that share all else, and each reduces when it is ready."""
    groups = open_world(Layout(dp=2), CPU)
    schedulers = [
        CommScheduler(groups, axis, SMALL, CommConfig(), CPU, purpose=purpose)
        for axis, purpose in (("dp", ""), ("expert_dp", "experts"))
    ]
    sizes = (200, 600)
    sums = [numbers(dist.get_rank(), size) for size in sizes]
    turns = (0, 1) if dist.get_rank() == 0 else (1, 0)
    exchanges = [schedulers[turn].bucket_collective(sizes[turn], torch.float32) for turn in turns]
    for pending in [one.all_reduce(sums[turn], 0) for one, turn in zip(exchanges, turns, strict=True)]:
        pending.wait()
    for scheduler in schedulers:
        scheduler.close()
    leave_world()
    wanted = [numbers(0, size) + numbers(1, size) for size in sizes]
    return all(torch.allclose(one, other) for one, other in zip(sums, wanted, strict=True))


def test_schedulers_of_the_same_ranks_do_not_take_each_others_messages() -> None:
    assert run_ranks(2, in_other_orders) == [True, True]


def lossy(world: int, codec: str, digits: tuple[int, ...] | None, comm: dict[str, Any]) -> list[torch.Tensor]:
    """Twenty times the same gradients and parameters that stay: what is lost once must come later."""
    compress = {"compress_gradients": codec, "compress_parameters": codec}
    if digits:
        groups = open_world(Layout(dp=world), CPU)
        members = [groups.of(level.members, "test") for level in make_levels(groups.grid.rank, digits)]
        scatter, whole = (NcclCollective(members, None, make_codec(codec), make_codec(codec)) for _ in "12")
    else:
        scheduler = make_scheduler(
            world, OverlapConfig(message_bytes=1000, max_in_flight_bytes=1500), **comm, **compress
        )
        scatter, whole = (scheduler.bucket_collective(world * 300, torch.float32) for _ in "12")
    rank, values, apart, mean = dist.get_rank(), torch.empty(world * 300), torch.zeros(300), 0.0
    master = numbers(rank, 300)
    for step in range(20):
        scatter.reduce_scatter(numbers(rank, world * 300), apart, 0, add=True).wait()
        sums = numbers(rank, world * 300)
        whole.all_reduce(sums, 0).wait()
        mean = mean + sums / 20
        scatter.gather(values, master, 0).wait()
        if step == 0:
            assert torch.equal(values[rank * 300 : (rank + 1) * 300], master), "the first gather is exact"
            master += 0.01 * numbers(rank, 300, seed=7)
    sent = {} if digits else dict(scheduler.bytes_sent)
    if not digits:
        scheduler.close()
    close_world()
    return [(apart / 20).numpy(), sums.numpy(), mean.numpy(), values.numpy(), sent]


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
@pytest.mark.parametrize(
    ("world", "digits", "comm"), [(3, None, {}), (4, None, BY_NODE), (4, (2, 2), {})], ids=str
)
def test_what_compression_loses_comes_with_the_next_transfers(world, digits, comm, codec):
    results = run_ranks(world, lossy, world, codec, digits, comm)
    total = torch.stack([numbers(r, world * 300) for r in range(world)]).sum(0).numpy()
    masters = [numbers(r, 300) + 0.01 * numbers(r, 300, seed=7) for r in range(world)]
    for rank, (scattered, once, mean, values, _) in enumerate(results):
        assert abs(scattered - total[rank * 300 : (rank + 1) * 300]).max() < 0.005
        assert abs(mean - total).max() < 0.005
        assert 0 < abs(once - total).max() < 0.2
        assert abs(values - torch.cat(masters).numpy()).max() < 1e-6
        assert (once == results[0][1]).all() and (values == results[0][3]).all(), "all have the same"


def test_compressed_gradients_are_a_quarter_of_the_bytes():
    exact = run_ranks(4, bytes_to_peers, {"node_size": 2, "hierarchy": "flat"})
    small = run_ranks(4, bytes_to_peers, {"node_size": 2, "hierarchy": "flat", "compress_gradients": "int8"})
    ratio = sum(small[0][1].values()) / sum(exact[0][1].values())
    assert ratio == pytest.approx((256 + 4) / 1024)


def kind_on_unequal_nodes(hierarchy: str) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = "2" if int(os.environ["RANK"]) < 2 else "1"
    try:
        scheduler = make_scheduler(3, hierarchy=hierarchy)
    except BadInputError as error:
        return str(error)
    scheduler.close()
    leave_world()
    return scheduler.hierarchy


def test_nodes_of_unequal_size_are_flat_or_refused():
    for hierarchy in ("auto", "flat"):
        assert run_ranks(3, kind_on_unequal_nodes, hierarchy) == ["flat"] * 3
    for said in run_ranks(3, kind_on_unequal_nodes, "node"):
        assert said.startswith('comm.hierarchy = "node": nodes hold 1 to 2 ranks')


def by_collectives(digits: tuple[int, ...]) -> bool:
    """What NCCL would do, on gloo."""
    world = math.prod(digits)
    groups = open_world(Layout(dp=world), CPU)
    rank, count = groups.grid.rank, world * 6
    levels = make_levels(rank, digits)
    exchange = NcclCollective([groups.of(level.members, "test") for level in levels], None)
    values, own = torch.empty(count), slice(rank * 6, rank * 6 + 6)
    exchange.gather(values, numbers(rank, 6), 0).wait()
    assert torch.equal(values, torch.cat([numbers(r, 6) for r in range(world)]))
    total = torch.stack([numbers(r, count) for r in range(world)]).sum(0)
    apart, sums = torch.ones(6), numbers(rank, count)
    exchange.reduce_scatter(sums.clone(), apart, 0, add=True).wait()
    torch.testing.assert_close(apart - 1, total[own])
    exchange.reduce_scatter(sums, sums[own], 0, add=False).wait()
    torch.testing.assert_close(sums[own], total[own])
    sums = numbers(rank, count)
    exchange.all_reduce(sums, 0).wait()
    torch.testing.assert_close(sums, total)
    close_world()
    return True


@pytest.mark.parametrize("digits", [(2,), (3, 2)])
def test_whole_collectives_give_the_same(digits):
    assert all(run_ranks(math.prod(digits), by_collectives, digits))


def leave_early(way: str) -> None:
    """Rank 1 ends in the middle of deliveries; rank 0 waits for what rank 1 will never send."""
    scheduler = make_scheduler(2, OverlapConfig())
    exchange, count = scheduler.bucket_collective(2**20, torch.float32), 2**20
    sums = [torch.ones(count) for _ in range(4)]
    if dist.get_rank() == 1:
        exchange.all_reduce(sums[0], 0)
        if way == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("rank 1 gives up")
    deliveries = [exchange.all_reduce(x, 0) for x in sums]
    deliveries.append(exchange.gather(sums[3], torch.ones(count // 2), 0))
    try:
        if way == "both":
            raise RuntimeError("rank 0 gives up")
        for delivery in deliveries:
            delivery.wait()
    finally:
        close_world()


LEAVING = """
import json, os, signal, sys
import test_comm_scheduler as tested

def start(way, rank, port):
    pid = os.fork()
    if pid == 0:  # its error goes through the top of this program: the interpreter ends as it does in a rank
        os.environ |= {"RANK": str(rank), "MASTER_PORT": port}
        os.dup2(os.open(f"{way}-{rank}", os.O_WRONLY | os.O_CREAT), 2)
        signal.alarm(140)
        tested.leave_early(way)
        sys.exit(0)
    return pid

pids = {f"{way}-{rank}": start(way, rank, port) for way, port in json.loads(sys.argv[1]) for rank in (0, 1)}
codes = {name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}
print(json.dumps(codes))
"""


def test_a_rank_that_ends_ends_the_others_with_an_error_and_no_abort(tmp_path: Path) -> None:
    """Not by SIGABRT and not never: threads that block in gloo while Python ends would do that."""
    environment = os.environ | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo"}
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    worlds = json.dumps([(way, str(free_port())) for way in ("killed", "both")])
    command = [sys.executable, "-c", LEAVING, worlds]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    said = {path.name: path.read_text() for path in tmp_path.iterdir()}
    expected = {"killed-0": 1, "killed-1": -signal.SIGKILL, "both-0": 1, "both-1": 1}
    assert json.loads(done.stdout) == expected, said
    assert "Error" in said["killed-0"] and "Error" in said["both-0"]


LOSSY = {"compress_gradients": "int8", "compress_parameters": "int8"}


def train(layout: dict[str, Any], comm: dict[str, Any]) -> list[float]:
    case = Case(layout=layout, model={"layers": 2}, comm=comm, steps=4)
    losses, _ = run_ranks(case.world, run_case, case)[0]
    return [loss for loss, _ in losses]


def test_a_hierarchy_changes_no_loss_and_compression_little():
    alone = train({"micro_batch": 4}, {})
    assert train({"dp": 4, "zero": 2}, BY_NODE) == pytest.approx(alone, rel=1e-5)
    compressed = train({"dp": 4, "zero": 2}, BY_NODE | LOSSY)
    assert compressed == pytest.approx(alone, rel=1e-3)
    assert compressed != alone
    assert train({"dp": 4, "zero": 2}, BY_NODE | LOSSY) == compressed
