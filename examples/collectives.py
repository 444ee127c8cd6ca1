"""Myriad's collectives in a program of its own: every one of them, on four ranks as two nodes of two.

python examples/collectives.py                                  starts four processes on this machine
torchrun --nproc-per-node 8 examples/collectives.py             or as many as a launcher starts
"""

import multiprocessing
import os
import sys
import time

import torch

from myriad import comm
from myriad.comm import communicator  # noqa: F401  (imported once, before the ranks are forked)
from myriad.comm.free_port import free_port
from myriad.comm.groups import local_rank

RANKS, ELEMENTS = 4, 2**20


def main() -> None:
    torch.set_num_threads(1)
    with comm.connect(hierarchy="node", node_size=2, message_bytes=2**18, in_flight_bytes=2**19) as world:
        rank, size = world.rank, world.size

        # gradients of two layers: the first layer's is needed first, although it is ready last
        last, first = torch.full((ELEMENTS,), 1.0), torch.full((ELEMENTS,), float(rank))
        began = time.perf_counter()
        slow = world.all_reduce(last, priority=1)
        urgent = world.all_reduce(first, priority=0)
        urgent.wait()
        seconds = time.perf_counter() - began
        slow.wait()
        assert float(last[0]) == size and float(first[-1]) == size * (size - 1) / 2

        # ZeRO: each rank sums up a slice, updates it, and everybody gets it
        gradients, mine = torch.arange(size * 8.0), torch.empty(8)
        world.reduce_scatter(mine, gradients).wait()
        parameters = torch.empty(size * 8)
        world.all_gather(parameters, mine / size).wait()
        assert torch.equal(parameters, torch.arange(size * 8.0))

        # experts: a row for each other rank
        rows, received = torch.full((size, 4), float(rank)), torch.empty(size, 4)
        world.all_to_all(received, rows).wait()
        assert received[:, 0].tolist() == list(range(size))

        # weights from one rank to all
        weights = torch.full((3, 5), float(rank))
        world.broadcast(weights, root=size - 1).wait()
        assert torch.equal(weights, torch.full((3, 5), size - 1.0))

        sent = sum(world.bytes_sent.values()) / 2**20
        line = f"rank {rank} of {size}, {world.hierarchy}: urgent sum {1e3 * seconds:.0f} ms, {sent:.1f} MiB"
        sys.stdout.write(line + "\n")  # one write: lines of ranks do not mix


def rank_of_four(rank: int, port: int) -> None:
    os.environ |= local_rank(rank, RANKS, port)
    main()


def start() -> int:
    """Run four ranks; the worst exit code."""
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [context.Process(target=rank_of_four, args=(rank, port)) for rank in range(RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    return max(abs(rank.exitcode or 0) for rank in ranks)


if __name__ == "__main__":
    if "RANK" in os.environ:
        main()
    else:
        sys.exit(start())
