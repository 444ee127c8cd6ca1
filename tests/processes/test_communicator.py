"""If these break: a program that uses Myriad's collectives gets other sums, waits for ever, or sends more
over slow links than it has to."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks

from myriad import comm
from myriad.errors import BadInputError

EXAMPLE = Path(__file__).parents[2] / "examples" / "collectives.py"
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (3, {"hierarchy": "flat"}),
    (4, {"hierarchy": "node", "node_size": 2}),
    (4, {"hierarchy": "node", "node_size": 4, "island_size": 2}),
    (4, {"hierarchy": "switch", "node_size": 1, "switch_size": 2}),
]


def values(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def every_collective(options: dict[str, Any]) -> int:
    with comm.connect(message_bytes=64, in_flight_bytes=100, **options) as world:
        rank, size = world.rank, world.size
        each = [values(one, 5, 7) for one in range(size)]
        summed, first = each[rank].clone(), torch.full((3,), float(rank))
        slow, urgent = world.all_reduce(summed, priority=9), world.all_reduce(first, priority=0)
        slow.wait()
        urgent.wait()
        torch.testing.assert_close(summed, sum(each))  # 35 elements: no multiple of the ranks
        assert first.tolist() == [size * (size - 1) / 2] * 3

        slices = [values(10 + one, size, 9) for one in range(size)]
        mine = torch.empty(9)
        world.reduce_scatter(mine, slices[rank].clone()).wait()
        torch.testing.assert_close(mine, sum(slices)[rank])
        everybody = torch.empty(size, 9)
        world.all_gather(everybody, slices[rank][0].contiguous()).wait()
        assert torch.equal(everybody, torch.stack([one[0] for one in slices]))

        received = torch.empty(size, 40)
        sent = [values(20 + one, size, 40) for one in range(size)]
        exchange = world.all_to_all(received, sent[rank], priority=2)
        copies = [values(30 + root, 11, 13) if root == rank else torch.zeros(11, 13) for root in range(size)]
        under_way = [world.broadcast(copies[root], root, priority=root) for root in range(size)]
        exchange.wait()
        for transfer in under_way:
            transfer.wait()
        assert torch.equal(received, torch.stack([one[rank] for one in sent]))
        for root in range(size):
            assert torch.equal(copies[root], values(30 + root, 11, 13)), root
        return world.bytes_sent.total()


@pytest.mark.parametrize("world, options", LAYOUTS)
def test_every_collective_gives_what_torch_would(world: int, options: dict[str, Any]) -> None:
    assert all(sent > 0 for sent in run_ranks(world, every_collective, options))


def bytes_over_the_network(options: dict[str, Any]) -> tuple[int, int]:
    """Bytes of this rank to other nodes of two: of a broadcast, of an all-reduce."""
    with comm.connect(**options) as world:
        away = [rank for rank in range(4) if rank // 2 != world.rank // 2]
        world.broadcast(torch.ones(1000)).wait()
        first = sum(world.bytes_sent[rank] for rank in away)
        world.all_reduce(torch.ones(8000)).wait()
        return first, sum(world.bytes_sent[rank] for rank in away) - first


def test_a_broadcast_crosses_to_each_node_once_and_a_sum_less_than_flat() -> None:
    options = {"node_size": 2}
    flat = run_ranks(4, bytes_over_the_network, options | {"hierarchy": "flat"})
    by_node = run_ranks(4, bytes_over_the_network, options | {"hierarchy": "node"})
    assert sum(one[0] for one in flat) == 2 * 4000 and sum(one[0] for one in by_node) == 4000
    assert sum(one[1] for one in by_node) * 2 == sum(one[1] for one in flat)


def test_alone_every_collective_is_the_identity_and_bad_tensors_get_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with comm.connect() as world:
        x, out = torch.arange(4.0), torch.empty(4)
        world.all_reduce(x).wait()
        world.all_to_all(out, x).wait()
        world.broadcast(x).wait()
        assert torch.equal(x, torch.arange(4.0)) and torch.equal(out, x)
        for bad in (torch.ones(2, 3).T, torch.ones(2, requires_grad=True)):
            with pytest.raises(BadInputError, match="contiguous tensor without gradient"):
                world.all_reduce(bad)
        with pytest.raises(BadInputError, match="slices"):
            world.all_gather(torch.empty(3), x)
        with pytest.raises(BadInputError, match=r"torch\.bfloat16.*torch\.float32"):
            world.all_gather(torch.empty(4, dtype=torch.bfloat16), x)
        with pytest.raises(BadInputError, match=r"torch\.int64.*torch\.float32"):
            world.reduce_scatter(torch.empty(4, dtype=torch.int64), x)
        with pytest.raises(BadInputError, match="root"):
            world.broadcast(x, root=1)
    with pytest.raises(BadInputError, match="at least message_bytes"):
        comm.connect(message_bytes=10, in_flight_bytes=5).__enter__()


def test_the_example_runs_by_one_command() -> None:
    done = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = sorted(line.split(",")[0] for line in done.stdout.splitlines())
    assert shown == [f"rank {n} of 4" for n in range(4)]
