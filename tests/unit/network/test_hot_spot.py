"""If these fail, the piece of a fabric that a report shows congestion on is not where flows meet."""

import numpy as np
import pytest

from myriad.network.config import FabricShape
from myriad.network.congestion_scenarios import extract_subfabric, find_hot_spot
from myriad.network.fabric import Fabric, Flows
from myriad.network.fabric_builder import build
from myriad.network.hash_conflicts import node_order, port_limited_rates, ring_flows, sample_conflicts
from myriad.network.max_min import max_min
from myriad.network.routing import Routes, ecmp


def _fabric() -> Fabric:
    shape = FabricShape(kind="clos2", nodes_per_switch=8)
    return build(shape, name="one", num_nodes=64, ports_per_node=1, nic_bytes_per_second=25e9)


def test_rates_on_the_piece_are_those_on_the_whole_fabric() -> None:
    fabric = _fabric()
    routes = Routes(fabric)
    flows = ring_flows(fabric, node_order(routes, "spread"), 64)
    paths = ecmp(routes, flows, 1)
    whole = max_min(fabric.bytes_per_second, paths)
    chosen = find_hot_spot(fabric, flows, paths, 1000)
    assert whole[chosen].min() == whole.min() < 24e9
    piece, few, ways = extract_subfabric(fabric, flows, paths, chosen)
    assert max_min(piece.bytes_per_second, ways) == pytest.approx(whole[chosen])
    assert piece.num_links < fabric.num_links and piece.num_ports == len({*few.source, *few.target})
    worst = find_hot_spot(fabric, flows, paths, 2)
    assert len(worst) == 2 and set(worst) <= set(chosen)


def test_what_ports_hold_up_is_no_conflict() -> None:
    """Messages to both neighbours leave by one port: each has half of it, which no switch is to blame for."""
    fabric = _fabric()
    ring = ring_flows(fabric, np.arange(64), 8)
    both = Flows(
        source=np.concatenate([ring.source, ring.target]),
        target=np.concatenate([ring.target, ring.source]),
        num_bytes=np.ones(128),
        start_seconds=np.zeros(128),
        entropy=np.zeros(128, dtype=np.uint16),
    )
    assert port_limited_rates(fabric, both) == pytest.approx(12.5e9)
    routes = Routes(fabric)
    assert sample_conflicts(routes, both).slowest_ratio == pytest.approx(1)
    assert len(find_hot_spot(fabric, both, ecmp(routes, both), 10)) == 0
