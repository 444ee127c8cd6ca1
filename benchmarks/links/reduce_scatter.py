"""What a reduce-scatter costs on a shaped link: gloo's own, and Myriad's messages between pairs of ranks.

    python benchmarks/links/reduce_scatter.py [--rate 200mbit] [--mebibytes 16] [--hosts 2 4] [--repeats 3]

Bytes are what a host's network card has sent, headers included, over the least possible: every rank must send
(n - 1) / n of the buffer. FSDP2 and DeepSpeed on gloo are built on gloo's.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from myriad.comm.comm_scheduler import CommScheduler
from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.program.config import OverlapConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import Hosts, bits_per_second

# torch 2.13 renamed it; 2.11 has the old name only
GLOO = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
CARD = Path("/sys/class/net/eth0/statistics/tx_bytes")
Cost = tuple[float, float]
"""Seconds, and bytes that this host sent."""


def measure(num_elements: int, repeats: int) -> dict[str, Cost]:
    """One rank's side: each way by turns."""
    size = int(os.environ["WORLD_SIZE"])
    groups = open_world(Layout(dp=size), torch.device("cpu"))
    scheduler = CommScheduler(
        groups, "dp", OverlapConfig(), CommConfig(hierarchy="flat"), torch.device("cpu")
    )
    collective = scheduler.bucket_collective(num_elements, torch.float32)
    whole, part = torch.ones(num_elements), torch.empty(num_elements // size)
    ways: dict[str, Callable[[], None]] = {
        "gloo": lambda: GLOO(part, whole.clone(), group=groups.world),
        "myriad": lambda: collective.reduce_scatter(whole.clone(), part, 0, add=False).wait(),
    }
    costs: dict[str, list[Cost]] = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, reduce in ways.items():
            costs[name].append(_cost(reduce))
            assert bool((part == size).all()), f"{name} does not sum up"
    scheduler.close()
    close_world()
    return {name: _median(found[1:]) for name, found in costs.items()}


def _cost(reduce: Callable[[], None]) -> Cost:
    dist.barrier()
    start, sent = time.perf_counter(), int(CARD.read_text())
    reduce()
    dist.barrier()
    return time.perf_counter() - start, int(CARD.read_text()) - sent


def _median(costs: list[Cost]) -> Cost:
    seconds, num_bytes = (statistics.median(column) for column in zip(*costs, strict=True))
    return seconds, num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="gloo's reduce-scatter against Myriad's on a shaped link.")
    parser.add_argument("--rate", default="200mbit", help="of every link")
    parser.add_argument("--mebibytes", type=int, default=16, help="of the buffer on each rank")
    parser.add_argument("--hosts", type=int, nargs="+", default=[2, 4], help="numbers of ranks, one a host")
    parser.add_argument("--repeats", type=int, default=3, help="timed transfers of each kind")
    options = parser.parse_args()
    print("| ranks | reduce-scatter | ms | bytes sent, of the least | of the link |\n|---|---|---|---|---|")
    for size in options.hosts:
        num_elements = options.mebibytes * 2**18 // size * size
        least = 4 * num_elements * (size - 1) / size
        with Hosts(size, rate=options.rate) as hosts:
            found = hosts.run_ranks(measure, num_elements, options.repeats, world=size)[0]
        for name, (seconds, num_bytes) in found.items():
            share = 8 * least / seconds / bits_per_second(options.rate)
            cells = f"{1e3 * seconds:.0f} | {num_bytes / least:.2f} x | {share:.0%}"
            print(f"| {size} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
