"""The network's flow level, timed: all that 12,288 ranks send in an iteration.

    python benchmarks/network/network_iteration.py [--cluster megascale-12288xa100] [--job JOB]

All messages that the job's program sends between nodes, from when the simulated iteration posts them; each is
a flow with its own max-min rate at every moment, and rates are worked out anew whenever one begins or ends.
With compilation, on one core.
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np

from myriad.forecasts.iteration_forecast import costs_of
from myriad.job import load_job
from myriad.network.fabric import Flows
from myriad.network.max_min import finish_seconds
from myriad.network.rank_transfers import RankMapping, inter_node_flows
from myriad.network.routing import Routes, ecmp
from myriad.planner.fabric.cluster_fabric import fabric_of
from myriad.planner.fabric.job_flows import transfer_phases
from myriad.recipes.cluster import load_cluster

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from quiet import others_at_work


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cluster", default="megascale-12288xa100")
    parser.add_argument("--job", default="megascale-175b-12288")
    given = parser.parse_args()
    with others_at_work() as others:
        time_iteration(given.cluster, given.job)
    print(f"others took {others():.0%} of the machine's cores meanwhile")


def time_iteration(cluster: str, job: str) -> None:
    """All of its messages."""
    found, start = load_cluster(cluster), time.perf_counter()
    phases = transfer_phases(costs_of(load_job(job), found))
    fabric = fabric_of(found)
    routes = Routes(fabric)
    seats = RankMapping(np.arange(found.nodes), found.accelerators_per_node, fabric.ports_per_node)
    made: list[Flows] = []
    for phase in phases:
        flows, _ = inter_node_flows(phase.exchange, seats)
        if len(flows):
            made.extend(at(flows, begin) for begin in phase.start_seconds)
    every = joined(made)
    ready = time.perf_counter()
    paths = ecmp(routes, every)
    routed = time.perf_counter()
    done = finish_seconds(fabric, every, paths)
    solved = time.perf_counter() - routed
    print(f"{job}: {len(phases)} phases, {len(every):,} flows of {every.num_bytes.sum() / 1e12:.2f} TB")
    print(f"program simulated, flows written down          {ready - start:8.2f} s")
    print(f"routed                                         {routed - ready:8.2f} s")
    print(f"arrivals worked out                            {solved:8.2f} s")
    print(f"in all                                         {solved + routed - start:8.2f} s    (aim: 30)")
    late = done - every.start_seconds - every.num_bytes / fabric.bytes_per_second[0]
    print(f"last arrival {done.max():.3f} s; a flow is held up by {1e3 * late.mean():.2f} ms on average")


def at(flows: Flows, begin: float) -> Flows:
    """The same at another time."""
    start = np.full(len(flows), begin)
    return Flows(flows.source, flows.target, flows.num_bytes, start, flows.entropy)


def joined(every: list[Flows]) -> Flows:
    """All of them."""
    names = ("source", "target", "num_bytes", "start_seconds", "entropy")
    return Flows(**{name: np.concatenate([getattr(one, name) for one in every]) for name in names})


if __name__ == "__main__":
    main()
