"""How good the order of nodes is that `myriad plan` finds, and how long that takes.

    python benchmarks/planner/placement.py            some 30 s on one core

Few nodes: random traffic, link rates of nodes, switches; the search that is used from 9 nodes on beside the
best of all orders. Many: 1,536 nodes of which 48 random ones have half the rate, in several layouts' shapes.
"""

import argparse
import time

import numpy as np

from myriad.planner.cluster_config import Cluster, NodeLinks
from myriad.planner.fabric.placement_cost import PlacementCost, SlotMessage, SlotTraffic
from myriad.planner.fabric.placement_search import place_nodes, search_orders, try_every_order
from myriad.recipes.cluster import load_cluster

__all__: list[str] = []

FEW = ((1, 8, 1), (8, 1, 1), (2, 4, 1), (4, 2, 1), (2, 2, 2), (1, 7, 1), (3, 2, 1), (2, 3, 1), (1, 4, 2))
MANY = ((1536, 1, 1), (192, 8, 1), (48, 32, 1), (24, 64, 1), (48, 8, 4))
SWITCHES = ((0, 0.0), (64, 12.5e9), (2, 12.5e9))
"""Nodes below each, and bytes per second above it for each accelerator; 0: no switches."""


def random_traffic(shape: tuple[int, int, int], draw: np.random.Generator) -> SlotTraffic:
    """Return random traffic for a shape of replicas, parts and width."""
    replicas, parts, width = shape
    messages = [SlotMessage(part, part + 1, float(draw.choice([1e6, 1e8, 1e9]))) for part in range(parts - 1)]
    if parts > 2 and draw.random() < 0.3:
        messages.append(SlotMessage(0, parts - 1, 1e8))
    return SlotTraffic(
        replicas=replicas,
        parts=parts,
        compute_seconds=tuple(draw.uniform(0.05, 0.2, parts)),
        ring_bytes=tuple(draw.uniform(1e9, 8e9, parts)),
        messages=tuple(messages),
        num_micro_batches=8,
        exposed_ratio=float(draw.choice([0.1, 1.0])),
        hides_messages=bool(draw.random() < 0.5),
        width=width,
        tensor_seconds=tuple(draw.uniform(0.01, 0.05, parts)) if width > 1 else (),
    )


def cluster_of(nodes: int, rates: dict[int, float], per_switch: int, up: float) -> Cluster:
    """A100 nodes, some with other links, under switches."""
    changes = [f"nodes={nodes}"]
    if up:
        changes.append(f"nodes_per_switch={per_switch}")
        changes.append(f"links.spine={{bytes_per_second={up}, latency_seconds=1e-5}}")
    unequal = tuple(NodeLinks(nodes=(node,), bytes_per_second=rate) for node, rate in rates.items())
    return load_cluster("megascale-256xa100", changes).model_copy(update={"unequal": unequal})


def compare_few(count: int) -> None:
    """With the best of all orders."""
    draw, found, plain = np.random.default_rng(0), [], []
    while len(found) < count:
        traffic = random_traffic(FEW[draw.integers(len(FEW))], draw)
        nodes = traffic.num_slots
        odd = draw.permutation(nodes)[: draw.choice([1, 3, nodes])]
        rates = {int(node): float(draw.uniform(5e9, 25e9)) for node in odd}
        up = float(draw.choice([0.0, 25e9, 12.5e9, 5e9]))
        fabric = PlacementCost(cluster_of(nodes, rates, int(draw.integers(1, 5)), up), traffic, {})
        orders = np.array([try_every_order(fabric), search_orders(fabric), np.arange(nodes)])
        best, own, given = fabric.score(orders).seconds
        found.append(own / best - 1)
        plain.append(given / best - 1)
    same = np.mean(np.array(found) < 1e-9)
    print(
        f"{count} cases of 6 to 8 nodes: as good as the best of all orders in {same:.0%}, "
        f"at worst {max(found):.1%} slower;\nthe given order is {np.mean(plain):.1%} slower in the mean, "
        f"at worst {max(plain):.0%}"
    )


def measure_many() -> None:
    """Time the search on 1,536 nodes."""
    print(
        f"{'replicas':>8} {'parts':>5} {'width':>5} {'switches':>20} {'given':>8} {'placed':>8} {'took':>7}"
    )
    for shape in MANY:
        for per_switch, up in SWITCHES:
            draw = np.random.default_rng(1)
            traffic = random_traffic(shape, draw)
            rates = {int(node): 12.5e9 for node in draw.permutation(1536)[:48]}
            cluster = cluster_of(1536, rates, per_switch, up)
            start = time.perf_counter()
            placed = place_nodes(cluster, traffic)
            took = time.perf_counter() - start
            kind = f"{per_switch} nodes, 1:2" if per_switch else "one"
            columns = "".join(f"{number:>{size}} " for number, size in zip(shape, (8, 5, 5), strict=True))
            print(
                f"{columns}{kind:>20} {placed.plain_seconds:>6.3f} s {placed.seconds:>6.3f} s {took:>5.2f} s"
            )


def main() -> None:
    """Prints both."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200, help="with few nodes (default: 200)")
    compare_few(parser.parse_args().cases)
    measure_many()


if __name__ == "__main__":
    main()
