"""The network's flow level, timed: routes and rates of 12,288 flows.

    python benchmarks/network/network_flows.py [--cluster megascale-12288xa100]

A flow from every NIC port to one on the other half of the cluster, hashed; best of twenty, on one core, after
compilation. Drained: all of them carry a gigabyte, and rates are worked out anew whenever one has arrived.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from myriad.network.fabric import Flows
from myriad.network.max_min import finish_seconds, max_min
from myriad.network.routing import Routes, ecmp
from myriad.planner.fabric.cluster_fabric import fabric_of
from myriad.recipes.cluster import load_cluster

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from quiet import others_at_work


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cluster", default="megascale-12288xa100")
    given = parser.parse_args()
    with others_at_work() as others:
        time_rates(given.cluster)
    print(f"others took {others():.0%} of the machine's cores meanwhile")


def time_rates(cluster: str) -> None:
    """Time the rates of one moment."""
    fabric, built = timed(lambda: fabric_of(load_cluster(cluster)))
    routes = Routes(fabric)
    _, measured = timed(lambda: routes.distance)
    count = fabric.num_ports
    port = np.arange(count, dtype=np.int32)
    target = ((port + count // 2) % count).astype(np.int32)
    flows = Flows(port, target, np.ones(count), np.zeros(count), np.zeros(count, dtype=np.uint16))
    paths = ecmp(routes, flows)
    rates = max_min(fabric.bytes_per_second, paths)
    routed = best(lambda: ecmp(routes, flows))
    solved = best(lambda: max_min(fabric.bytes_per_second, paths))
    print(f"{cluster}: {count:,} ports, {fabric.num_links:,} links, built in {1e3 * built:.0f} ms")
    print(f"distances (with compilation)                   {measured:8.2f} s")
    print(f"{count:,} flows routed                            {1e3 * routed:8.1f} ms")
    print(f"{count:,} rates worked out                        {1e3 * solved:8.1f} ms   (aim: 20)")
    big = replace(flows, num_bytes=np.full(count, 1e9))
    done = finish_seconds(fabric, big, paths)
    drained = best(lambda: finish_seconds(fabric, big, paths), 3)
    print(f"drained, {len(np.unique(done.round(9))):,} moments of arrival                {drained:8.2f} s")
    print(f"slowest flow: {rates.min() / fabric.bytes_per_second[0]:.2f} of its rate")


def timed(do: Callable[[], Any]) -> tuple[Any, float]:
    """Its result, and seconds."""
    start = time.perf_counter()
    found = do()
    return found, time.perf_counter() - start


def best(do: Callable[[], object], times: int = 20) -> float:
    """Seconds of the quickest."""
    return min(timed(do)[1] for _ in range(times))


if __name__ == "__main__":
    main()
