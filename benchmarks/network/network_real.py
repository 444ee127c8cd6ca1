"""Flows that a kernel hashes onto equal paths: what each really gets, beside what the flow level predicts.

    python benchmarks/network/network_real.py --paths 4 --flows 16 --draws 4 [--queue-pairs 4]

Real TCP over shaped links between network namespaces (`hashed_paths.py`). In each draw flows have new source
ports, so the kernel's hash lays them anew. Three columns beside what was measured:

    these paths   max-min rates (`network.max_min`) on the very paths that the kernel took
    any hash      what the slowest flow has on average over all hashes (`network.conflicts`)
    even          all paths shared evenly: what packet spraying would give

A flow of several queue pairs is so many connections, and as quick as the slowest of them is x their number.
Rates are shares of one flow's that has a path for itself, measured first. TCP does not share a path as evenly
as max-min rates say: that is in "measured", and not in "these paths".

On slow paths many connections starve each other: a queue of 50 ms holds few packets of each.

What could not be measured: DCTCP's marking against the fluid level, as long as a kernel lacks it or a queue
that marks (the last line says which), and anything of RDMA.
"""

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hashed_paths import lay_paths, measure_rates, path_of
from myriad.network.fabric import Fabric, Paths
from myriad.network.hash_conflicts import conflicts
from myriad.network.max_min import max_min

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))

from hosts import Hosts, missing

__all__ = ["Draw", "measure", "predicted", "without_dctcp"]

_FIRST_PORT = 40_000
_RED = (
    "limit",
    "400000",
    "min",
    "30000",
    "max",
    "90000",
    "avpkt",
    "1500",
    "burst",
    "21",
    "bandwidth",
    "10mbit",
    "ecn",
)
_MARKING = {"red": _RED, "fq_codel": (), "codel": ("ecn",), "pie": ("ecn",), "dualpi2": ()}
"""Queues of tc that mark, and what they are to be told."""
_PLENTY = 1e3


@dataclass(frozen=True)
class Draw:
    """Flows with one set of source ports."""

    paths: tuple[int, ...]
    """That the kernel took, by connection."""
    measured: tuple[float, ...]
    """Share of the rate of a flow that is alone."""
    predicted: tuple[float, ...]


def predicted(paths: Sequence[int], num_paths: int) -> tuple[float, ...]:
    """Max-min shares of flows on given paths between two switches: a way is a flow's port, a path, a port."""
    num_flows = len(paths)
    ends = [(f, 2 * num_flows) for f in range(num_flows)] + [(2 * num_flows, 2 * num_flows + 1)] * num_paths
    ends += [(2 * num_flows + 1, num_flows + f) for f in range(num_flows)]
    fabric = Fabric(
        name="two switches",
        num_nodes=2 * num_flows,
        ports_per_node=1,
        tier=np.array([0] * 2 * num_flows + [1, 1], dtype=np.int8),
        source=np.array([a for a, _ in ends], dtype=np.int32),
        target=np.array([b for _, b in ends], dtype=np.int32),
        bytes_per_second=np.array([_PLENTY] * num_flows + [1.0] * num_paths + [_PLENTY] * num_flows),
        latency_seconds=np.full(len(ends), 1e-6),
    )
    ways = [(f, num_flows + path, num_flows + num_paths + f) for f, path in enumerate(paths)]
    link = np.array(ways, dtype=np.int32).reshape(-1)
    rates = max_min(fabric.bytes_per_second, Paths(np.arange(num_flows + 1, dtype=np.int64) * 3, link))
    return tuple(map(float, rates))


def measure(
    num_paths: int, num_flows: int, rate: str, num_draws: int, seconds: float, queue_pairs: int = 1
) -> list[Draw]:
    """Draws, on paths of a rate as tc writes it. Raises ``OSError`` where such paths cannot be made."""
    num_connections = num_flows * queue_pairs
    draws = []
    with Hosts(2) as hosts:
        lay_paths(hosts, num_paths, rate)
        alone = measure_rates(hosts, [_FIRST_PORT - 1], seconds)[_FIRST_PORT - 1]
        for draw in range(num_draws):
            first = _FIRST_PORT + draw * num_connections
            ports = range(first, first + num_connections)
            paths = tuple(path_of(hosts, port) for port in ports)
            rates = measure_rates(hosts, ports, seconds)
            shares = [rates.get(port, 0.0) / alone for port in ports]
            whole = _whole(shares, queue_pairs), _whole(predicted(paths, num_paths), queue_pairs)
            draws.append(Draw(paths, *whole))
    return draws


def _whole(shares: Sequence[float], queue_pairs: int) -> tuple[float, ...]:
    """Return the shares of flows, summed over their connections."""
    return tuple((queue_pairs * np.array(shares).reshape(-1, queue_pairs).min(1)).tolist())


def without_dctcp() -> list[str]:
    """What is missing here to measure DCTCP; empty: nothing."""
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    lacks = [] if "dctcp" in known else [f"DCTCP among {', '.join(known)}"]
    with Hosts(1) as hosts:
        add = ("tc", "-n", hosts.namespace(0), "qdisc", "replace", "dev", "eth0", "root")
        made = (subprocess.run([*add, kind, *words], capture_output=True) for kind, words in _MARKING.items())
        if all(one.returncode for one in made):
            lacks.append(f"a queue that marks ({', '.join(_MARKING)})")
    return lacks


def _show(draws: Sequence[Draw], num_paths: int, queue_pairs: int) -> None:
    num_flows = len(draws[0].measured)
    exact = conflicts(num_flows, num_paths, queue_pairs=queue_pairs)
    print(f"{'draw':>4}  {'on each path':<20}{'slowest flow':>26}{'mean of all flows':>28}")
    print(f"{'':>4}  {'':<20}{'measured':>14}{'these paths':>12}{'measured':>16}{'these paths':>12}")
    for number, one in enumerate(draws):
        counts = " ".join(map(str, np.bincount(one.paths, minlength=num_paths)))
        slowest = f"{min(one.measured):>14.3f}{min(one.predicted):>12.3f}"
        print(
            f"{number:>4}  {counts:<20}{slowest}{np.mean(one.measured):>16.3f}{np.mean(one.predicted):>12.3f}"
        )
    measured = np.array([min(one.measured) for one in draws])
    print(f"slowest flow: measured {measured.mean():.3f}, these paths {_mean_slowest(draws):.3f}, ", end="")
    print(f"any hash {exact.slowest_ratio:.3f}, even {min(1.0, num_paths / num_flows):.3f} of a path's rate")
    both = np.array([(m, p) for one in draws for m, p in zip(one.measured, one.predicted, strict=True)])
    print(f"flow by flow: correlation {np.corrcoef(both.T)[0, 1]:.3f}, ", end="")
    print(f"mean |measured / these paths - 1| {np.abs(both[:, 0] / both[:, 1] - 1).mean():.1%}")


def _mean_slowest(draws: Sequence[Draw]) -> float:
    return float(np.mean([min(one.predicted) for one in draws]))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description="Real flows on hashed paths, beside the flow level's prediction."
    )
    parser.add_argument("--paths", type=int, default=4)
    parser.add_argument("--flows", type=int, default=16)
    parser.add_argument("--queue-pairs", type=int, default=1, help="connections of a flow")
    parser.add_argument("--rate", default="200mbit", help="of each path, as tc writes it")
    parser.add_argument("--draws", type=int, default=4, help="sets of source ports")
    parser.add_argument("--seconds", type=float, default=9.0, help="of sending, each draw")
    settings = parser.parse_args()
    if problem := missing():
        sys.exit(f"no hosts can be made: {problem}")
    shape = (settings.paths, settings.flows, settings.rate, settings.draws, settings.seconds)
    draws = measure(*shape, settings.queue_pairs)
    _show(draws, settings.paths, settings.queue_pairs)
    if lacks := without_dctcp():
        print(f"DCTCP against the fluid level: not possible, this kernel lacks {' and '.join(lacks)}")


if __name__ == "__main__":
    main()
