"""Gradient sums between two hosts of several ranks: flat among all, and by node.

    python benchmarks/links/hierarchy.py [--rates 1gbit 200mbit 50mbit] [--ranks-per-host 2] [--size "4 MiB"]

All-reduces a buffer between ranks in two hosts whose link is shaped, as `comm.hierarchy` flat and node; they
take turns, the figure is the median. The bound is what a host must send at the link's rate: half of the
buffer for the way there (its ranks add up first) and half for the way back. Also says what auto chooses.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from myriad.comm.comm_scheduler import CommScheduler
from myriad.comm.config import CommConfig
from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.program.config import OverlapConfig
from myriad.units import parse_bytes

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import Hosts, bits_per_second

KINDS = ("flat", "node")
CPU = torch.device("cpu")


def measure(world: int, num_bytes: int, repeats: int) -> tuple[dict[str, float], str, dict[str, int]]:
    """A rank's side: seconds by kind, what auto chose, and the bytes that left its host by kind."""
    groups = open_world(Layout(dp=world), CPU)
    chosen = CommScheduler(groups, "dp", OverlapConfig(), CommConfig(), CPU)
    schedulers = {
        kind: CommScheduler(groups, "dp", OverlapConfig(), CommConfig(hierarchy=kind), CPU) for kind in KINDS
    }
    sums = torch.zeros(num_bytes // 4)
    collectives = {
        kind: scheduler.bucket_collective(len(sums), sums.dtype) for kind, scheduler in schedulers.items()
    }
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(repeats + 1):
        for kind, collective in collectives.items():
            dist.barrier()
            start = time.perf_counter()
            collective.all_reduce(sums, 0).wait()
            dist.barrier()
            seconds[kind].append(time.perf_counter() - start)
    left = {kind: _left_host(scheduler, groups.grid.rank, world) for kind, scheduler in schedulers.items()}
    for scheduler in (chosen, *schedulers.values()):
        scheduler.close()
    close_world()
    medians = {kind: statistics.median(found[1:]) for kind, found in seconds.items()}
    return medians, chosen.hierarchy, {kind: count // (repeats + 1) for kind, count in left.items()}


def _left_host(scheduler: CommScheduler, rank: int, world: int) -> int:
    per_host = world // 2
    return sum(count for peer, count in scheduler.bytes_sent.items() if peer // per_host != rank // per_host)


def main() -> None:
    parser = argparse.ArgumentParser(description="Flat and hierarchical gradient sums on shaped links.")
    parser.add_argument("--rates", nargs="+", default=["1gbit", "200mbit", "50mbit"])
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--size", type=parse_bytes, default="4 MiB", help="of the gradients")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one rate, one repeat")
    options = parser.parse_args()
    rates, repeats = (options.rates[-1:], 1) if options.quick else (options.rates, options.repeats)
    world = 2 * options.ranks_per_host
    num_bytes = options.size // (4 * world) * 4 * world
    print("| link | flat, ms | by node, ms | ratio | bound, ms | MiB from a host: flat | by node | auto |")
    print("|---|---|---|---|---|---|---|---|")
    for rate in rates:
        with Hosts(2, rate=rate) as hosts:
            found = hosts.run_ranks(measure, world, num_bytes, repeats, ranks_per_host=options.ranks_per_host)
        flat, node = (1e3 * max(seconds[kind] for seconds, _, _ in found) for kind in KINDS)
        first_host = found[: options.ranks_per_host]
        left = [f"{sum(count[kind] for _, _, count in first_host) / 2**20:.2f}" for kind in KINDS]
        bound = 8e3 * num_bytes / bits_per_second(rate)
        cells = [rate, f"{flat:.0f}", f"{node:.0f}", f"{flat / node:.2f}", f"{bound:.0f}", *left, found[0][1]]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
